"""Composition against exact sums, an independent implementation and its own bracket."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from silobayes.privacy.accounting import gaussian
from silobayes.privacy.accounting.pld import Losses, Pair, Rule, Total, connect_dots, directions


def two_point(loss: float) -> Pair:
    """Randomised response of one bit: P gives the true answer with probability e^loss / (1 + e^loss)."""
    keep = 1.0 / (1.0 + math.exp(-loss))

    def forward(epsilon):
        return np.maximum(0.0, keep - np.exp(np.minimum(epsilon, 2 * loss)) * (1.0 - keep))

    return Pair(forward=forward, atom=loss, exact=True)


def exact_two_point_delta(loss: float, count: int, epsilon: float) -> float:
    keep = 1.0 / (1.0 + math.exp(-loss))
    trues = np.arange(count + 1)
    losses = (2 * trues - count) * loss
    return float(np.dot(stats.binom.pmf(trues, count, keep), np.maximum(0.0, -np.expm1(epsilon - losses))))


@pytest.mark.parametrize(("loss", "count"), [(0.1, 50), (1.0, 7), (0.01, 2000)])
def test_composition_of_pairs_with_all_losses_on_one_grid_is_exact_to_the_margin(loss, count):
    total = Total([(Rule(pair=two_point(loss)), count)])
    for share in (0.0, 1.0, 3.0, 5.0):
        epsilon = share * loss * math.sqrt(count)
        exact = exact_two_point_delta(loss, count, epsilon)
        if exact > 1e-14:
            assert exact <= total.delta(epsilon) <= exact * (1 + 1e-5)


@pytest.mark.parametrize("mu", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("count", [2, 30, 1000])
def test_delta_is_never_below_the_delta_of_the_composed_pairs(mu, count):
    """Gaussians are composed here by FFT; the closed form is the truth."""
    (way,) = directions([(Pair(forward=lambda epsilon: gaussian.delta(mu, epsilon)), count)])
    shift = mu * math.sqrt(count)
    for delta in (1e-2, 1e-6, 1e-13):
        epsilon = gaussian.epsilon(shift, delta)
        exact = float(gaussian.delta(shift, np.asarray(epsilon)))
        assert exact <= way.delta(epsilon) <= 1.02 * exact


@pytest.mark.parametrize("mu", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("count", [2, 30, 1000])
def test_delta_lower_is_never_above_it(mu, count):
    total = Total([(Rule(pair=Pair(forward=lambda epsilon: gaussian.delta(mu, epsilon))), count)])
    exact = gaussian.epsilon(mu * math.sqrt(count), 1e-6)
    assert 0.98 * exact < total.epsilon_lower(1e-6) <= exact <= total.epsilon(1e-6) < 1.001 * exact


def test_agrees_with_an_independent_implementation_on_sampled_gaussians():
    """dp_accounting on a grid of 1e-4 is an upper bound; ours is finer, so below, and not by much."""
    oracle = privacy_loss_distribution.from_gaussian_mechanism(1.5, sampling_prob=0.05, pessimistic_estimate=True)
    theirs = oracle.self_compose(50).get_epsilon_for_delta(1e-6)
    forward = lambda e: 0.05 * gaussian.delta(1 / 1.5, np.log1p(np.expm1(np.minimum(e, 500.0)) / 0.05))  # noqa: E731

    def backward(epsilon):
        weight = np.maximum(0.05 - 0.95 * np.expm1(np.minimum(epsilon, 1.0)), 0.0)
        inner = np.log(0.05 * np.exp(np.minimum(epsilon, 1.0)) / np.maximum(weight, 1e-300))
        return np.where(weight > 0, weight * gaussian.delta(1 / 1.5, np.minimum(inner, 1e4)), 0.0)

    ours = Total([(Rule(pair=Pair(forward=forward, backward=backward)), 50)]).epsilon(1e-6)
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_both_directions_are_composed_before_the_maximum():
    """Swapping P and Q of every pair must not change the price."""
    low = Pair(forward=lambda e: 0.3 * gaussian.delta(1.0, np.log1p(np.expm1(np.minimum(e, 500)) / 0.3)))
    pair = Pair(forward=low.forward, backward=lambda e: np.maximum(0.0, 0.1 - 0.2 * np.expm1(np.minimum(e, 5.0))))
    one, two = (Total([(Rule(pair=p), 5)]).epsilon(1e-6) for p in (pair, pair.swapped()))
    assert one == two


def test_connect_dots_touches_the_profile_on_the_grid_and_lies_above_between():
    pair = Pair(forward=lambda epsilon: gaussian.delta(1.0, epsilon))
    losses = connect_dots(pair, np.arange(0.0, 12.0, 0.25))
    on, between = np.arange(0.0, 6.0, 0.25), np.arange(0.1, 6.0, 0.25)
    assert losses.probs.sum() + losses.infinite == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(losses.profile(on), gaussian.delta(1.0, on), rtol=1e-9)
    assert np.all(losses.profile(between) > gaussian.delta(1.0, between))


def test_overflow_is_charged_once_per_draw():
    plain = Total([(Rule(mu=0.1), 10)])
    cut = Total([(Rule(mu=0.1, overflow=1e-7), 10)])
    assert cut.delta(0.5) == pytest.approx(plain.delta(0.5) + 10e-7 * (1 + math.exp(0.5)), rel=1e-9)
    assert Total([(Rule(mu=0.1, overflow=1e-5), 10)]).epsilon(1e-5) == math.inf


def test_a_generous_epsilon_does_not_blow_up_the_overflow():
    cut = Total([(Rule(mu=0.1, overflow=1e-12), 10)])
    deltas = [cut.delta(epsilon) for epsilon in (0.5, 2.0, 10.0, 40.0)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(deltas))


def test_an_infinite_loss_above_delta_has_no_finite_price():
    atom = Pair(forward=lambda epsilon: np.full_like(epsilon, 1e-4), exact=True)
    assert Total([(Rule(pair=atom), 3)]).epsilon(1e-4) == math.inf
    assert Total([(Rule(pair=atom), 3)]).epsilon(4e-4) == 0.0


def test_losses_profile_equals_its_sum():
    rng = np.random.default_rng(0)
    losses = Losses(losses=np.sort(rng.normal(size=20)), probs=rng.dirichlet(np.ones(20)) * 0.9, infinite=0.1)
    for epsilon in (0.0, 0.3, 1.0, 5.0):
        direct = 0.1 + np.dot(losses.probs, np.maximum(0.0, -np.expm1(epsilon - losses.losses)))
        assert losses.profile(np.array([epsilon]))[0] == pytest.approx(direct, rel=1e-12)
