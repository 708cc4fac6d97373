"""The least noise within a budget, for every mechanism that has a knob."""

import pytest

from silobayes.core.errors import InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.events import (
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Relation,
    Sampling,
    Scheme,
    SkellamEvent,
)

SUBSTITUTE, ADD_REMOVE = Relation.SUBSTITUTE, Relation.ADD_REMOVE
POISSON = Sampling(scheme=Scheme.POISSON, rate=0.02)
FIXED = Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=0.02)
FACTORIES = {
    "gaussian": (lambda v: GaussianEvent(clip_norm=1.0, std=v, count=7), "std", SUBSTITUTE),
    "poisson": (lambda v: GaussianEvent(clip_norm=1.0, std=v, count=200, sampling=POISSON), "std", ADD_REMOVE),
    "poisson_pair": (lambda v: GaussianEvent(clip_norm=1.0, std=v, count=200, sampling=POISSON), "std", SUBSTITUTE),
    "fixed": (lambda v: GaussianEvent(clip_norm=1.0, std=v, count=200, sampling=FIXED), "std", SUBSTITUTE),
    "laplace": (lambda v: LaplaceEvent(clip_norm=1.0, scale=v, count=3), "scale", SUBSTITUTE),
    "one_laplace": (lambda v: LaplaceEvent(clip_norm=1.0, scale=v), "scale", ADD_REMOVE),
    "response": (lambda v: RandomisedResponseEvent(categories=5, gamma=v, count=2), "gamma", SUBSTITUTE),
    "discrete": (lambda v: DiscreteGaussianEvent(clip_norm=1.0, std=v, count=2, grid=2.0**-20), "std", ADD_REMOVE),
    "skellam": (lambda v: SkellamEvent(clip_norm=1.0, std=v, count=2, grid=2.0**-20), "std", ADD_REMOVE),
}


@pytest.mark.parametrize("name", list(FACTORIES))
@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 1e-6), (4.0, 1e-9)])
def test_the_calibrated_event_costs_at_most_epsilon_and_at_most_delta(name, epsilon, delta):
    factory, _, relation = FACTORIES[name]
    event = accounting.calibrate(factory, relation=relation, epsilon=epsilon, delta=delta)
    assert accounting.price([event], relation=relation, delta=delta).epsilon <= epsilon
    assert accounting.delta_at([event], relation=relation, epsilon=epsilon) <= delta


@pytest.mark.parametrize("name", list(FACTORIES))
def test_noise_smaller_by_one_in_ten_thousand_costs_more_than_the_budget(name):
    factory, knob, relation = FACTORIES[name]
    event = accounting.calibrate(factory, relation=relation, epsilon=1.0, delta=1e-6)
    less = factory(getattr(event, knob) * (1.0 - 1e-4))
    assert accounting.price([less], relation=relation, delta=1e-6).epsilon > 1.0


def test_a_coarse_grid_is_searched_past_the_noise_it_refuses():
    event = accounting.calibrate(
        lambda v: DiscreteGaussianEvent(clip_norm=10.0, std=v), relation=SUBSTITUTE, epsilon=3.0, delta=1e-6
    )
    assert accounting.price([event], relation=SUBSTITUTE, delta=1e-6).epsilon <= 3.0


def test_a_budget_that_no_noise_keeps_is_refused():
    cut = Sampling(scheme=Scheme.POISSON, rate=0.1, overflow=1e-4)
    with pytest.raises(InvalidInput, match="epsilon"):
        accounting.calibrate(
            lambda v: GaussianEvent(clip_norm=1.0, std=v, sampling=cut), relation=ADD_REMOVE, epsilon=1.0, delta=1e-5
        )


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_epsilon_is_refused(epsilon):
    with pytest.raises(InvalidInput, match="epsilon"):
        accounting.calibrate(
            lambda v: GaussianEvent(clip_norm=1.0, std=v), relation=ADD_REMOVE, epsilon=epsilon, delta=1e-5
        )


@pytest.mark.parametrize("epsilon", [1.0, 20.0, 200.0, 1000.0])
def test_a_large_budget_is_kept_in_spite_of_cut_batches(epsilon):
    """The charge for cut batches grows with e^epsilon, so a smaller epsilon is the better bound for a large budget."""
    sampling = Sampling(scheme=Scheme.POISSON, rate=0.3, overflow=1e-12)
    event = accounting.calibrate(
        lambda std: GaussianEvent(clip_norm=1.0, std=std, sampling=sampling, count=100),
        relation=Relation.SUBSTITUTE,
        epsilon=epsilon,
        delta=1e-5,
    )
    assert accounting.price([event], relation=Relation.SUBSTITUTE, delta=1e-5).epsilon <= epsilon


def test_what_is_paid_besides_leaves_less_for_the_calibrated_event():
    besides = [GaussianEvent(clip_norm=1.0, std=20.0), LaplaceEvent(clip_norm=1.0, scale=100.0)]
    budget = {"relation": SUBSTITUTE, "epsilon": 1.0, "delta": 1e-5}
    alone = accounting.calibrate(lambda std: GaussianEvent(clip_norm=1.0, std=std), **budget)
    event = accounting.calibrate(lambda std: GaussianEvent(clip_norm=1.0, std=std), **budget, besides=besides)
    assert event.std > 1.05 * alone.std
    together = accounting.price([*besides, event], relation=Relation.SUBSTITUTE, delta=1e-5).epsilon
    assert 0.999 < together <= 1.0
