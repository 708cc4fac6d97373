"""The Gaussian mechanism in closed form (Balle, Wang 2018, Theorem 8; SPEC 8).

Any number of unsampled Gaussian releases is one Gaussian release with `mu^2 = sum count (D / std)^2` (Dong, Roth, Su
2022, Corollary 3.3), whose profile is

    delta(eps) = Phi(-a) - e^eps Phi(-b),   a = eps / mu - mu / 2,   b = eps / mu + mu / 2.

We differ in the arithmetic only: `phi(a) = e^eps phi(b)`, so `delta = phi(a) (R(a) - R(b))` with Mills' ratio R, which
neither overflows nor loses its relative accuracy far in the tail; for small mu the difference is an integral of
`-R'(x) = 1 - x R(x)`. Both forms agree with 60-digit arithmetic to 1e-11 (tests), and `MARGIN` covers that.

Guarantees:
    - delta is the exact profile to a relative error of 1e-11
    - epsilon is never below the exact value and at most 1e-9 above
"""

import math
from collections.abc import Callable

import numpy as np

MARGIN = 1e-10
"""Relative margin on delta that covers the rounding of every formula in this file."""

_SMALL_MU = 0.5
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)


def _mills(x: np.ndarray) -> np.ndarray:
    """Phi(-x) / phi(x) for x > -26."""
    from scipy.special import erfcx

    return math.sqrt(math.pi / 2.0) * erfcx(x / math.sqrt(2.0))


def delta(mu: float, epsilon: np.ndarray) -> np.ndarray:
    """Hockey-stick divergence of N(mu, 1) from N(0, 1) at every `epsilon` >= 0, to nearest."""
    from scipy.special import ndtr

    epsilon = np.asarray(epsilon, dtype=float)
    if mu == 0.0:
        return np.zeros_like(epsilon)
    a = epsilon / mu - mu / 2.0
    x = np.maximum(a, -5.0)
    density = np.exp(-0.5 * a**2) / math.sqrt(2.0 * math.pi)
    if mu < _SMALL_MU:
        nodes = x[..., None] + 0.5 * mu * (1.0 + _NODES)
        return density * 0.5 * mu * np.sum(_WEIGHTS * _one_minus_x_mills(nodes), axis=-1)
    second = density * _mills(x + mu)
    return np.where(a > -5.0, density * _mills(x) - second, ndtr(-a) - density * _mills(a + mu))


def _one_minus_x_mills(x: np.ndarray) -> np.ndarray:
    """1 - x R(x) without cancellation: the direct form below 10, a continued-fraction tail above."""
    big = x > 10.0
    with np.errstate(over="ignore"):
        direct = 1.0 - x * _mills(x)
    if not np.any(big):
        return direct
    # R(x) = 1 / (x + 1 / (x + 2 / (x + 3 / ...))), so 1 - x R = t / (x + t) with t = 1 / (x + 2 / (x + ...)).
    y = np.where(big, x, 10.0)
    t = y
    for k in range(60, 1, -1):
        t = y + k / t
    t = 1.0 / t
    return np.where(big, t / (y + t), direct)


def epsilon(mu: float, target: float) -> float:
    """Smallest epsilon >= 0 with `delta(mu, epsilon) (1 + MARGIN) <= target`, rounded up."""

    def upper(eps: float) -> float:
        return float(delta(mu, np.asarray(eps))) * (1.0 + MARGIN)

    return solve(upper, target, start=mu * mu / 2.0 + 6.0 * mu)[1]


def solve(
    bound: Callable[[float], float], target: float, *, start: float, tolerance: float = 1e-13
) -> tuple[float, float]:
    """Where `bound`, which falls, crosses `target` on epsilon >= 0: (above or 0, at or below), `tolerance` apart.

    Both ends were evaluated, so each is on its own side whatever the shape of `bound`; the second is inf if it does
    not cross before 1e7.
    """
    log_target = math.log(target)

    def height(epsilon: float) -> float:
        value = bound(epsilon)
        return max(math.log(value) - log_target, -700.0) if value > 0.0 else -700.0

    high = min(max(start, 1e-9), 1e6)
    while not (g_high := height(high)) <= 0.0:
        high *= 1.5
        if high > 1e7:
            return high / 1.5, math.inf
    low = 0.9 * high
    while not (g_low := height(low)) > 0.0:
        if low == 0.0:
            return 0.0, 0.0
        high, g_high, low = low, g_low, (0.7 * low if low > 1e-9 else 0.0)
    for iteration in range(200):
        gap = high - low
        if gap <= tolerance * (1.0 + high):
            break
        middle = 0.5 * (low + high)
        if iteration % 3 < 2:
            # False position, nudged to either side in turn so that both ends close in; every third step bisects.
            guess = low + gap * g_low / (g_low - g_high) + (0.02 if iteration % 3 else -0.02) * gap
            middle = min(max(guess, low + 0.01 * gap), high - 0.01 * gap)
        g = height(middle)
        low, g_low, high, g_high = (low, g_low, middle, g) if g <= 0.0 else (middle, g, high, g_high)
    return low, high
