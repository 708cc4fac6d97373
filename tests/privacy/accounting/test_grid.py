"""Grid noise against the laws themselves: brute force in one and two dimensions, and pointwise ratios."""

import math

import mpmath
import numpy as np
import pytest
from scipy.special import ive

from silobayes.core.errors import InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.accounting import gaussian, grid
from silobayes.privacy.events import DiscreteGaussianEvent, Relation, Sampling, Scheme, SkellamEvent

SUBSTITUTE, ADD_REMOVE = Relation.SUBSTITUTE, Relation.ADD_REMOVE
MECHANISMS = [DiscreteGaussianEvent, SkellamEvent]


def masses(mechanism, std: float, reach: int) -> np.ndarray:
    z = np.arange(-reach, reach + 1.0)
    if mechanism is SkellamEvent:
        return ive(np.abs(z), std**2)
    weights = np.exp(-0.5 * (z / std) ** 2)
    return weights / weights.sum()


def brute_force(mechanism, std: float, vector: tuple[int, ...], epsilon: float) -> float:
    """sum_z (p(z) - e^eps p(z - v))+ over one or two coordinates."""
    reach = math.ceil(14 * std) + 12
    p, q = np.ones(1), np.ones(1)
    mass = masses(mechanism, std, reach)
    for shift in vector:
        p, q = np.multiply.outer(p, mass).ravel(), np.multiply.outer(q, np.roll(mass, shift)).ravel()
    return float(np.maximum(0.0, p - math.exp(epsilon) * q).sum())


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("std", "norm"), [(0.6, 1.0), (1.0, 2.0), (3.0, 2.0), (7.0, 5.0)])
def test_small_cases_equal_brute_force_over_the_laws_themselves(mechanism, std, norm):
    event = mechanism(sensitivity=norm, std=std, dimension=1)
    for epsilon in (0.0, 0.3, 1.0, 2.5):
        exact = max(brute_force(mechanism, std, (v,), epsilon) for v in range(1, int(norm) + 1))
        ours = accounting.delta_at([event], relation=SUBSTITUTE, epsilon=epsilon)
        assert exact * (1 - 1e-9) <= ours <= exact * (1 + 1e-3) + 1e-25


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("std", "norm"), [(1.0, math.sqrt(2)), (2.0, math.sqrt(8)), (3.0, math.sqrt(5))])
def test_two_coordinates_equal_brute_force_over_all_vectors(mechanism, std, norm):
    event = mechanism(sensitivity=norm, std=std, dimension=2)
    vectors = [(a, b) for a in range(4) for b in range(4) if 0 < a * a + b * b <= norm**2 * (1 + 1e-12)]
    for epsilon in (0.0, 0.5, 1.5):
        exact = max(brute_force(mechanism, std, vector, epsilon) for vector in vectors)
        ours = accounting.delta_at([event], relation=SUBSTITUTE, epsilon=epsilon)
        assert exact * (1 - 1e-9) <= ours <= exact * (1 + 2e-3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_two_runs_equal_two_coordinates(mechanism):
    """Composition on the grid: two runs that each move by 1 are one run that moves by (1, 1)."""
    event = mechanism(sensitivity=1.0, std=1.5, dimension=1, count=2)
    for epsilon in (0.2, 1.0, 2.0):
        exact = brute_force(mechanism, 1.5, (1, 1), epsilon)
        assert exact <= accounting.delta_at([event], relation=SUBSTITUTE, epsilon=epsilon) <= 1.01 * exact


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_sampled_grid_noise_bounds_brute_force(mechanism):
    rate, std, reach = 0.2, 1.2, 40
    mass = masses(mechanism, std, reach)
    mixed = (1 - rate) * mass + rate * np.roll(mass, 1)
    event = mechanism(clip_norm=1.0, std=std, dimension=1, sampling=Sampling(scheme=Scheme.POISSON, rate=rate))
    for epsilon in (0.0, 0.1, 0.5):
        e = math.exp(epsilon)
        exact = max(np.maximum(0, mixed - e * mass).sum(), np.maximum(0, mass - e * mixed).sum())
        assert exact <= accounting.delta_at([event], relation=ADD_REMOVE, epsilon=epsilon) * (1 + 1e-9) <= 1.001 * exact
        opposite = (1 - rate) * mass + rate * np.roll(mass, -1)
        assert np.maximum(0, mixed - e * opposite).sum() <= accounting.delta_at(
            [event], relation=SUBSTITUTE, epsilon=epsilon
        )


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("std", [25.0, 60.0])
def test_replaced_noise_bounds_the_exact_price(mechanism, std):
    """Past the small cases noise is replaced: D^2 = 25 in one coordinate of many is a vector that must be covered."""
    event = mechanism(sensitivity=5.0, std=std)
    price = accounting.price([event], relation=SUBSTITUTE, delta=1e-6)
    reach = math.ceil(14 * std)
    mass = masses(mechanism, std, reach)
    for shift in (5, 4):
        exact = np.maximum(0.0, mass - math.exp(price.epsilon) * np.roll(mass, shift)).sum()
        assert exact <= 1e-6
    assert price.epsilon_lower <= gaussian.epsilon(5.0 / std, 1e-6) * 1.01


@pytest.mark.parametrize("std", [3.0, 12.0, 19.0, 21.0, 50.0])
def test_skellam_ratio_equals_60_digits(std):
    x = std**2
    with mpmath.workdps(60):
        theta = mpmath.sqrt(2 * mpmath.pi * x)
        for z in (0, 1, round(std), round(3 * std), round(9 * std)):
            exact = mpmath.log(mpmath.besseli(z, x) * mpmath.exp(-x)) + mpmath.mpf(z * z) / (2 * x) + mpmath.log(theta)
            ours = float(grid.skellam_log_ratio(np.array([float(z)]), x)[0])
            assert ours == pytest.approx(float(exact), rel=1e-8, abs=2e-12)


@pytest.mark.parametrize("forward", [True, False])
def test_skellam_factor_bounds_the_exact_exceptional_set_of_one_coordinate(forward):
    std, log_beta = 12.0, math.log(1e-8)
    a = grid.skellam_log_factor(std, 1, log_beta, forward=forward)
    s, g = (masses(mechanism, std, 300) for mechanism in (SkellamEvent, DiscreteGaussianEvent))
    one, two = (s, g) if forward else (g, s)
    assert np.maximum(0.0, one - math.exp(a) * two).sum() <= 1e-8


def test_skellam_factor_has_the_size_that_the_fourth_cumulant_predicts():
    """Lambda has variance m / (24 s^4); for many coordinates Chernoff is Gaussian: a about sqrt(2 m v ln(1/beta))."""
    std, m, log_beta = 2.0**20, 10**9, math.log(1e-9)
    v = m / (24.0 * std**4)
    predicted = v / 2 + math.sqrt(2 * v * (math.log(2) - log_beta))
    assert grid.skellam_log_factor(std, m, log_beta, forward=True) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("scheme", [None, Scheme.POISSON])
def test_a_fine_grid_costs_what_gaussian_noise_costs(mechanism, relation, scheme):
    from silobayes.privacy.events import GaussianEvent

    sampling = None if scheme is None else Sampling(scheme=scheme, rate=0.1)
    smooth = GaussianEvent(clip_norm=1.0, std=2.0, sampling=sampling, count=20)
    fine = mechanism(clip_norm=1.0, std=2.0, sampling=sampling, count=20, grid=2.0**-24)
    prices = [accounting.price([event], relation=relation, delta=1e-6).epsilon for event in (smooth, fine)]
    assert prices[0] * (1 - 1e-9) <= prices[1] <= prices[0] * (1 + 1e-4)


def test_largest_vectors_cover_every_vector():
    for squares in (1, 3, 7, 12, 16):
        for dimension in (1, 2, 3):
            largest = grid.largest_vectors(squares, dimension)
            for point in np.ndindex(*[math.isqrt(squares) + 1] * dimension):
                if 0 < sum(v * v for v in point) <= squares:
                    point = sorted(point, reverse=True)
                    padded = [(*v, *[0] * (dimension - len(v))) for v in largest]
                    assert any(all(p <= w for p, w in zip(point, v, strict=True)) for v in padded)


@pytest.mark.parametrize(
    ("event", "key"),
    [
        (SkellamEvent(sensitivity=10.0, std=1.0), "std"),
        (DiscreteGaussianEvent(sensitivity=10.0, std=1.0), "std"),
        (DiscreteGaussianEvent(sensitivity=0.5, std=1.0), "grid"),
    ],
)
def test_a_coarse_grid_is_refused_with_a_clear_error(event, key):
    with pytest.raises(InvalidInput, match="finer grid") as caught:
        accounting.price([event], relation=SUBSTITUTE, delta=1e-6)
    assert caught.value.key == key


def test_only_ratios_matter():
    one = DiscreteGaussianEvent(sensitivity=2.0, std=3.0, dimension=2)
    two = DiscreteGaussianEvent(sensitivity=0.5, std=0.75, grid=0.25, dimension=2)
    prices = [accounting.price([event], relation=ADD_REMOVE, delta=1e-6).epsilon for event in (one, two)]
    assert prices[0] == prices[1]
