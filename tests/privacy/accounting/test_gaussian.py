"""The closed form against 60-digit arithmetic."""

import mpmath
import numpy as np
import pytest

from silobayes.privacy.accounting import gaussian

SHIFTS = [1e-6, 1e-3, 0.01, 0.1, 0.499, 0.5, 1.0, 2.0, 5.0, 10.5, 31.6, 100.0]


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return +(mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2))


@pytest.mark.parametrize("mu", SHIFTS)
def test_delta_is_the_exact_profile_to_a_relative_error_of_1e_11(mu):
    for steps in [0.0, 0.01, 0.3, 1.0, 2.0, 4.0, 8.0, 12.0]:
        epsilon = steps * mu + (mu * mu / 2 if steps > 1 else 0.0)
        exact = exact_delta(mu, epsilon)
        assert abs(float(gaussian.delta(mu, np.asarray(epsilon))) / exact - 1) < 1e-11


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 5.0, 31.6])
@pytest.mark.parametrize("delta", [1e-14, 1e-5, 0.1])
def test_epsilon_is_never_below_the_exact_value_and_at_most_1e_9_above(mu, delta):
    epsilon = gaussian.epsilon(mu, delta)
    assert exact_delta(mu, epsilon) <= delta
    if epsilon > 0.0:
        assert exact_delta(mu, epsilon - 1e-9 * (1 + epsilon)) > delta


def test_no_shift_costs_nothing():
    assert gaussian.epsilon(0.0, 1e-10) == 0.0


def test_solve_returns_two_sides_of_the_crossing():
    low, high = gaussian.solve(lambda eps: 2.0 ** (-eps), 0.25, start=10.0)
    assert low < 2.0 <= high < low + 1e-12
    low, high = gaussian.solve(lambda eps: 1.0, 0.5, start=1.0)
    assert 1e6 < low < high == float("inf")


def test_epsilon_is_rounded_up_to_where_delta_was_evaluated():
    """The lower end of the search's bracket would be a hair too small."""
    for mu in (0.01, 0.3, 1.0, 7.0):
        for target in (1e-3, 1e-6, 1e-12):
            found = gaussian.epsilon(mu, target)
            if found > 0.0:
                assert float(gaussian.delta(mu, np.asarray(found))) * (1.0 + gaussian.MARGIN) <= target
