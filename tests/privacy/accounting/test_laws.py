"""Laws over every event type: repeats, order, monotonicity, RDP >= PLD >= lower, explicit and refused input."""

import dataclasses
import inspect
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.events import (
    ApproximateDPEvent,
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
POISSON = Sampling(scheme=Scheme.POISSON, rate=0.05)
FIXED = Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=0.05)
CUT = Sampling(scheme=Scheme.POISSON, rate=0.05, overflow=1e-12)
BASES = {
    "gaussian": GaussianEvent(clip_norm=1.0, std=2.0),
    "psd": GaussianEvent(clip_norm=1.0, std=2.0, terms="psd"),
    "discrete_gaussian": DiscreteGaussianEvent(clip_norm=1.0, std=4.0),
    "fine_discrete_gaussian": DiscreteGaussianEvent(clip_norm=1.0, std=2.0, grid=2.0**-16),
    "skellam": SkellamEvent(clip_norm=1.0, std=4.0),
    "fine_skellam": SkellamEvent(clip_norm=1.0, std=2.0, grid=2.0**-16, dimension=100),
    "middle_skellam": SkellamEvent(clip_norm=1.0, std=4.0, grid=0.1),
    "laplace": LaplaceEvent(clip_norm=1.0, scale=2.0),
}
PLAIN = {
    "randomised_response": RandomisedResponseEvent(categories=4, gamma=0.4),
    "pure_dp": ApproximateDPEvent(epsilon=0.2, delta=0.0),
    "approximate_dp": ApproximateDPEvent(epsilon=0.2, delta=1e-9),
}


def cases():
    for (name, event), sampling, relation in itertools.product(BASES.items(), (None, POISSON, CUT, FIXED), Relation):
        if sampling is FIXED and relation is ADD_REMOVE:
            continue
        label = "all" if sampling is None else f"{sampling.scheme.value}{sampling.overflow or ''}"
        yield pytest.param(
            dataclasses.replace(event, sampling=sampling), relation, id=f"{name}-{label}-{relation.value}"
        )
    for name, event in PLAIN.items():
        yield pytest.param(event, SUBSTITUTE, id=name)


def epsilon(events, relation, delta=1e-6, accountant="pld"):
    return accounting.price(events, relation=relation, delta=delta, accountant=accountant).epsilon


@pytest.mark.parametrize(("event", "relation"), list(cases()))
def test_k_repeats_cost_what_a_count_of_k_costs(event, relation):
    assert epsilon([event] * 3, relation) == epsilon([dataclasses.replace(event, count=3)], relation)


@pytest.mark.parametrize(("event", "relation"), list(cases()))
def test_rdp_is_at_least_pld_is_at_least_the_lower_bound(event, relation):
    for count, delta in ((1, 1e-6), (40, 1e-6), (40, 1e-10)):
        repeated = [dataclasses.replace(event, count=count)]
        price = accounting.price(repeated, relation=relation, delta=delta)
        assert 0.0 <= price.epsilon_lower <= price.epsilon
        assert price.epsilon <= epsilon(repeated, relation, delta, "rdp") * (1 + 1e-6)


@pytest.mark.parametrize(("event", "relation"), list(cases()))
def test_delta_at_the_price_is_at_most_delta(event, relation):
    repeated = [dataclasses.replace(event, count=25)]
    price = accounting.price(repeated, relation=relation, delta=1e-7)
    assert accounting.delta_at(repeated, relation=relation, epsilon=price.epsilon) <= 1e-7
    if price.epsilon > 0.0:
        assert accounting.delta_at(repeated, relation=relation, epsilon=price.epsilon * 0.99) > 1e-7


@pytest.mark.parametrize(("event", "relation"), list(cases()))
def test_price_grows_with_count_and_falls_with_delta(event, relation):
    prices = [epsilon([dataclasses.replace(event, count=count)], relation) for count in (1, 2, 5, 40)]
    assert prices == sorted(prices)
    assert prices[0] < prices[-1]
    assert epsilon([event], relation, 1e-4) <= epsilon([event], relation, 1e-6) <= epsilon([event], relation, 1e-8)


@pytest.mark.parametrize(("event", "relation"), [case for case in cases() if hasattr(case.values[0], "sampling")])
def test_price_falls_with_noise(event, relation):
    knob = "scale" if isinstance(event, LaplaceEvent) else "std"
    noise = getattr(event, knob)
    prices = [
        epsilon([dataclasses.replace(event, count=5, **{knob: noise * factor})], relation) for factor in (1, 1.1, 2, 4)
    ]
    assert prices == sorted(prices, reverse=True)
    assert prices[-1] < prices[0]


def test_randomised_response_falls_with_gamma():
    prices = [
        epsilon([RandomisedResponseEvent(categories=4, gamma=g, count=3)], SUBSTITUTE) for g in (0.1, 0.5, 0.9, 1)
    ]
    assert prices == sorted(prices, reverse=True)
    assert prices[-1] == 0.0


@pytest.mark.parametrize("name", list(BASES))
@pytest.mark.parametrize(("scheme", "relation"), [(Scheme.POISSON, r) for r in Relation] + [(FIXED.scheme, SUBSTITUTE)])
def test_price_grows_with_rate(name, scheme, relation):
    prices = [
        epsilon([dataclasses.replace(BASES[name], count=5, sampling=Sampling(scheme=scheme, rate=rate))], relation)
        for rate in (0.01, 0.1, 0.4, 0.9)
    ]
    assert prices == sorted(prices)
    assert prices[0] < prices[-1]


@settings(max_examples=15, deadline=None)
@given(st.permutations([*BASES.values(), *PLAIN.values(), dataclasses.replace(BASES["gaussian"], sampling=FIXED)]))
def test_the_order_of_events_is_irrelevant(events):
    assert epsilon(events, SUBSTITUTE) == epsilon(events[::-1], SUBSTITUTE)
    assert accounting.merge(events) == accounting.merge(events[::-1])


@settings(max_examples=25, deadline=None)
@given(std=st.floats(0.5, 20.0), rate=st.floats(0.001, 0.9), count=st.integers(1, 300), exponent=st.floats(-12.0, -2.0))
def test_sampled_gaussians_keep_the_laws_everywhere(std, rate, count, exponent):
    delta = 10.0**exponent
    sampled = GaussianEvent(clip_norm=1.0, std=std, count=count, sampling=Sampling(scheme=Scheme.POISSON, rate=rate))
    one, both = (accounting.price([sampled], relation=relation, delta=delta) for relation in (ADD_REMOVE, SUBSTITUTE))
    full = epsilon([dataclasses.replace(sampled, sampling=None)], SUBSTITUTE, delta)
    assert one.epsilon_lower <= one.epsilon <= both.epsilon * (1 + 1e-3) + 1e-9
    assert both.epsilon_lower <= both.epsilon <= full * (1 + 1e-3) + 1e-9


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.tuples(st.floats(0.3, 30.0), st.integers(1, 50)), min_size=1, max_size=4))
def test_gaussians_of_all_kinds_compose_in_closed_form(parts):
    from silobayes.privacy.accounting import gaussian

    events = [GaussianEvent(sensitivity=1.0, std=std, count=count) for std, count in parts]
    mu = math.sqrt(sum(count / std**2 for std, count in parts))
    assert epsilon(events, ADD_REMOVE) == pytest.approx(gaussian.epsilon(mu, 1e-6), rel=1e-9, abs=1e-12)


def test_a_closed_form_part_joins_the_rest():
    """A Gaussian beside sampled Gaussians costs more than either and less than their sum."""
    plain, sampled = BASES["gaussian"], dataclasses.replace(BASES["gaussian"], sampling=POISSON, count=100)
    together = epsilon([plain, sampled], SUBSTITUTE)
    alone = epsilon([plain], SUBSTITUTE), epsilon([sampled], SUBSTITUTE)
    assert max(alone) < together < sum(alone)


def test_profile_falls_and_agrees_with_delta_at():
    events, grid = [dataclasses.replace(BASES["gaussian"], sampling=POISSON, count=50)], np.linspace(0.0, 3.0, 7)
    deltas = accounting.profile(events, relation=SUBSTITUTE, epsilons=grid)
    assert np.all(np.diff(deltas) < 0)
    assert deltas[3] == accounting.delta_at(events, relation=SUBSTITUTE, epsilon=grid[3])


def test_no_events_cost_nothing():
    assert epsilon([], SUBSTITUTE) == 0.0


@pytest.mark.parametrize("delta", [0.0, 0, 1.0, 2.0, -1e-5, math.nan, math.inf, 1e-16, 1e-300, None, "1e-5", True])
def test_a_delta_outside_the_floor_and_one_is_refused(delta):
    for accountant in accounting.ACCOUNTANTS:
        with pytest.raises(InvalidInput) as caught:
            accounting.price([BASES["gaussian"]], relation=SUBSTITUTE, delta=delta, accountant=accountant)
        assert caught.value.key == "delta"
    with pytest.raises(InvalidInput, match="delta"):
        accounting.calibrate(
            lambda v: GaussianEvent(clip_norm=1.0, std=v), relation=SUBSTITUTE, epsilon=1.0, delta=delta
        )


def test_the_floor_itself_is_priced():
    sampled = dataclasses.replace(BASES["gaussian"], sampling=POISSON, count=100)
    for event in (BASES["gaussian"], sampled):
        price = accounting.price([event], relation=ADD_REMOVE, delta=accounting.DELTA_FLOOR)
        assert 0.97 * price.epsilon < price.epsilon_lower <= price.epsilon < epsilon([event], ADD_REMOVE, 1e-15, "rdp")


@pytest.mark.parametrize("epsilon_value", [-1.0, math.nan, math.inf, "1"])
def test_a_bad_epsilon_is_refused(epsilon_value):
    with pytest.raises(InvalidInput, match="epsilon"):
        accounting.delta_at([BASES["gaussian"]], relation=SUBSTITUTE, epsilon=epsilon_value)


def test_an_unknown_accountant_or_relation_is_refused():
    with pytest.raises(InvalidInput, match="accountant"):
        accounting.price([BASES["gaussian"]], relation=SUBSTITUTE, delta=1e-6, accountant="guess")
    with pytest.raises(InvalidInput, match="relation"):
        accounting.price([BASES["gaussian"]], relation="both", delta=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [accounting.price, accounting.delta_at, accounting.profile, accounting.calibrate])
def test_the_relation_is_always_explicit(function):
    assert inspect.signature(function).parameters["relation"].default is inspect.Parameter.empty
