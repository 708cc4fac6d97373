"""Renyi divergences of single mechanisms and what sampling does to them; every number is an upper bound.

All functions take `orders` (an array of numbers > 1) and return the divergence at each. Sums and integrals are taken
of `A - 1`, where `A = E_Q[(P/Q)^order]`: its terms are non-negative, so nothing cancels, however small the sampling
rate or high the order. `_MARGIN` covers their rounding.

Sources: Mironov, Talwar, Zhang 2019 (Poisson, add/remove); Wang, Balle, Kasiviswanathan 2019 ("WBK19", without
replacement); Agarwal, Kairouz, Liu 2021 (Skellam); Canonne, Kamath, Steinke 2020 (discrete Gaussian).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

Floats: TypeAlias = NDArray[np.float64]
IntegerCurve: TypeAlias = Callable[[Floats], Floats]

MAX_ORDER = 2**14
_MARGIN = 1e-9
"""Relative safety on `A - 1`: 20 times the worst rounding of a sum of log-gamma terms at order 2^14."""
_EXPONENT = 60.0
"""Trapezoid sums are refined until their relative error is below exp(-_EXPONENT)."""
_TAIL = 12.0
"""Integrals are cut this many standard deviations after the last bump; what is cut is added back."""
_MAX_POINTS = 4_000
"""Orders that would need more are far above any optimum: their divergence is in the hundreds."""


def gaussian(orders: Floats, shift: float) -> Floats:
    """Gaussians of std 1 whose means are `shift` apart; also discrete ones (CKS20 Prop. 5), in any dimension."""
    return orders * (shift * shift / 2.0)


def laplace(orders: Floats, ratio: float) -> Floats:
    """Laplace noise, `ratio` = L1 sensitivity / scale (Mironov 2017 Prop. 6).

    The divergence is convex in the shift and 0 at 0, so among shifts of one L1 norm a single coordinate is worst.
    """
    up, down = orders / (2.0 * orders - 1.0), (orders - 1.0) / (2.0 * orders - 1.0)
    rise, fall = (orders - 1.0) * ratio, -orders * ratio
    small = np.minimum(rise, 30.0)
    excess = up * np.expm1(small) + down * np.expm1(fall) + 1e-15 * np.abs(fall)
    log_moment = np.where(rise > 30.0, rise + np.log(up + down * np.exp(fall - rise)), np.log1p(excess))
    return np.minimum(log_moment * (1.0 + _MARGIN) / (orders - 1.0), ratio)


def pure(orders: Floats, epsilon: float) -> Floats:
    """Any `epsilon`-DP mechanism: none is worse than binary randomised response."""
    keep = 1.0 / (1.0 + math.exp(-epsilon)) if epsilon < 700.0 else 1.0
    rise = (orders - 1.0) * epsilon
    excess = keep * np.expm1(np.minimum(rise, 30.0)) + (1.0 - keep) * np.expm1(-rise)
    excess = np.maximum(excess, 0.0) + 1e-15 * np.minimum(rise, 30.0)
    large = rise + math.log(keep) + np.log1p(np.exp(-2.0 * rise - epsilon))
    log_moment = np.where(rise > 30.0, large, np.log1p(excess))
    return np.minimum(log_moment * (1.0 + _MARGIN) / (orders - 1.0), epsilon)


def randomised_response(orders: Floats, keep: float, other: float) -> Floats:
    """k-ary response: the true answer has probability `keep`, each other one `other`; substitution swaps two."""
    epsilon = math.log(keep / other)
    share = keep + other  # the two answers that tell the neighbours apart; the rest cancels
    inner = pure(orders, epsilon) * (orders - 1.0)
    excess = np.log(share) + np.log(np.maximum(np.expm1(np.minimum(inner, 700.0)), 1e-300))
    log_moment = np.where(inner > 30.0, np.logaddexp(math.log(share) + inner, _log(1.0 - share)), _log1pexp(excess))
    return np.minimum(log_moment * (1.0 + _MARGIN) / (orders - 1.0), epsilon)


def skellam(orders: Floats, l1: float, l2: float, variance: float) -> Floats:
    """Skellam noise of the given variance on integer vectors (Agarwal et al. 2021, Cor. 4.1; stated for integers)."""

    def at_integers(order: Floats) -> Floats:
        extra = np.minimum(((2.0 * order - 1.0) * l2**2 + 6.0 * l1) / (4.0 * variance**2), 1.5 * l1 / variance)
        return order * (l2**2 / (2.0 * variance)) + extra

    return interpolate(orders, at_integers)


def interpolate(orders: Floats, curve: IntegerCurve) -> Floats:
    """From integers to all orders: (order - 1) * divergence is convex in the order and 0 at 1 (WBK19 Cor. 10)."""
    low = np.floor(orders)
    needed = np.unique(np.concatenate([low, low + 1.0]))
    needed = needed[needed >= 2.0]
    log_moment = dict(zip(needed.tolist(), (curve(needed) * (needed - 1.0)).tolist(), strict=True))
    log_moment[1.0] = 0.0
    left = np.array([log_moment[order] for order in low.tolist()])
    right = np.array([log_moment.get(order, math.inf) for order in (low + 1.0).tolist()])
    weight = orders - low
    return np.where(weight == 0.0, left, (1.0 - weight) * left + weight * right) / (orders - 1.0)


def poisson(orders: Floats, rate: float, curve: IntegerCurve) -> Floats:
    """Poisson sampling, add/remove, of any mechanism that adds noise symmetric about 0.

    At integer orders `A` is a binomial mean of the unsampled moments. That is the direction "with the unit against
    without"; it is the worse one whenever some involution swaps the two unsampled laws (Mironov et al. 2019, Thm. 5),
    here the reflection at half the shift.
    """
    tables = _log_moments(orders, curve)

    def at_integers(integers: Floats) -> Floats:
        out = np.empty_like(integers)
        for index, order in enumerate(integers):
            ell = np.arange(2.0, order + 1.0)
            log_weight = _log_choose(order, ell) + ell * math.log(rate) + (order - ell) * math.log1p(-rate)
            out[index] = _log_sum(log_weight + _log_expm1(tables[: len(ell)])) / (order - 1.0)
        return out

    return np.minimum(interpolate(orders, at_integers), interpolate(orders, curve))


def poisson_gaussian(orders: Floats, rate: float, shift: float) -> Floats:
    """Poisson-sampled Gaussian, add/remove: exact up to rounding at integers, by quadrature between them."""
    out = poisson(orders, rate, lambda order: gaussian(order, shift))
    for index, order in enumerate(orders):
        if not order.is_integer():
            out[index] = min(out[index], _quadrature(float(order), rate, shift, opposite=False))
    return out


def poisson_gaussian_opposite(orders: Floats, rate: float, shift: float) -> Floats:
    """Poisson-sampled Gaussian, substitute: (1-w) N(0) + w N(shift) against (1-w) N(0) + w N(-shift), w = `rate`.

    That opposite rows are the worst case was checked numerically, not proved (SPEC 8). By quadrature; where that would
    need too many points, Q >= (1-w) N(0) gives the add/remove divergence plus log(1/(1-w)).
    """
    ceiling = np.minimum(poisson_gaussian(orders, rate, shift) - math.log1p(-rate), gaussian(orders, 2.0 * shift))
    points = [_quadrature(float(order), rate, shift, opposite=True) for order in orders]
    return np.minimum(np.array(points), ceiling)


def mixture(orders: Floats, rate: float, log_second: float, log_higher: IntegerCurve) -> Floats:
    """Divergence of (1-w) R + w P from (1-w) R + w Q: WBK19 Thm. 9 and 27, w = `rate`.

    `log_second` and `log_higher(j)` bound the log of E[|(P - Q) / .|^j], the mean being under R or under Q. Both
    sampling without replacement (R, P, Q are substitute-neighbours of each other) and Poisson sampling under
    substitution (R lacks the unit) have this shape, by joint convexity of |x|^j / y^(j-1).
    """
    top = max(math.floor(np.max(orders)) + 1, 3)
    log_terms = np.concatenate([[log_second], log_higher(np.arange(3.0, top + 1.0))])

    def at_integers(integers: Floats) -> Floats:
        out = np.empty_like(integers)
        for index, order in enumerate(integers):
            ell = np.arange(2.0, order + 1.0)
            log_weight = _log_choose(order, ell) + ell * math.log(rate)
            out[index] = _log_sum(log_weight + log_terms[: len(ell)]) / (order - 1.0)
        return out

    return interpolate(orders, at_integers)


def mixture_from_curve(orders: Floats, rate: float, curve: IntegerCurve, pure_epsilon: float = math.inf) -> Floats:
    """`mixture` when only the divergences `curve` of any two of R, P, Q are known (WBK19 Thm. 9)."""
    ratio = math.expm1(min(pure_epsilon, 30.0))  # |P/Q - 1| <= e^eps - 1

    def log_higher(ell: Floats) -> Floats:
        return (ell - 1.0) * curve(ell) + np.minimum(math.log(2.0), ell * math.log(ratio))

    second = float(curve(np.array([2.0]))[0])
    log_second = min(math.log(4.0) + float(_log_expm1(np.array([second]))[0]), float(log_higher(np.array([2.0]))[0]))
    return np.minimum(mixture(orders, rate, log_second, log_higher), interpolate(orders, curve))


def without_replacement_gaussian(orders: Floats, rate: float, shift: float) -> Floats:
    """`mixture` for Gaussian noise, with the central moments of the likelihood ratio (WBK19 Thm. 27).

    The even moments E_Q[(P/Q - 1)^j] are integrated, not taken as alternating forward differences, which lose all
    digits beyond order 256.
    """

    def log_higher(ell: Floats) -> Floats:
        bound = math.log(2.0) + (ell - 1.0) * gaussian(ell, shift)
        even = _log_even_moments(shift, int(ell[-1]) + 1)
        known = 2 * np.ceil(ell / 2.0).astype(int) <= 2 * len(even)
        low, high = np.floor(ell[known] / 2.0).astype(int), np.ceil(ell[known] / 2.0).astype(int)
        bound[known] = np.minimum(bound[known], math.log(4.0) + (even[low - 1] + even[high - 1]) / 2.0)
        return bound

    second = shift * shift
    log_second = min(math.log(4.0) + float(_log_expm1(np.array([second]))[0]), math.log(2.0) + second)
    return np.minimum(mixture(orders, rate, log_second, log_higher), gaussian(orders, shift))


@lru_cache(maxsize=16)
def _log_even_moments(shift: float, top: int) -> Floats:
    """The log of E_Q[(P/Q - 1)^j] for j = 2, 4, ... <= `top`, as far as it can beat the bound 2 E_Q[(P/Q)^j].

    The integrand is entire and, on either side of P = Q, log-concave with curvature >= 1, so a trapezoid sum with step
    1/5 over the bumps +- 12 is exact far below `_MARGIN`.
    """
    top = min(top, math.ceil(8.0 / shift**2 * math.log(3.0 + 1.0 / shift**2)) + 8)
    ells = np.arange(2.0, top + 2.0, 2.0)
    reach = math.sqrt(ells[-1]) + _TAIL
    points = np.arange(-reach, ells[-1] * shift + shift + reach, 0.2)
    log_ratio = shift * points - shift**2 / 2.0
    with np.errstate(divide="ignore"):
        log_gap = np.maximum(log_ratio, 0.0) + np.log(-np.expm1(-np.abs(log_ratio)))
    log_gap = np.maximum(log_gap, -1e300)  # a point that hits P = Q contributes nothing
    log_density = -(points**2) / 2.0 - 0.5 * math.log(2.0 * math.pi) + math.log(0.2)
    blocks = [_log_sum_exp(log_density + block[:, None] * log_gap) for block in np.array_split(ells, 32) if len(block)]
    return np.concatenate(blocks) + _MARGIN


def _quadrature(order: float, rate: float, shift: float, *, opposite: bool) -> float:
    """D(P || Q) with P = (1-w) N(0) + w N(shift) and Q = (1-w) N(0) + w N(-shift) if `opposite`, else N(0).

    A trapezoid sum of step h errs by at most 2 M / (exp(2 pi d / h) - 1) relative to `A`, if the integrand is analytic
    for |Im x| <= d and grows there by at most the factor M. Here |(1-w) + w e^(t + is)| lies between cos(s/2) and 1
    times its value at s = 0, so M <= exp(d^2/2) cos(d shift / 2)^-(order-1) for d < pi / shift, and
    -log cos(s) <= .62 s^2 for s <= 1. Outside the points the integrand falls faster than exp(-_TAIL |x|).
    """
    growth = 0.5 + 0.155 * (order - 1.0) * shift**2
    strip = min(2.0 / shift, math.sqrt(_EXPONENT / growth))
    step = 2.0 * math.pi * strip / (_EXPONENT + growth * strip**2)
    left, right = -shift - _TAIL, order * shift + _TAIL
    if not (right - left) / step <= _MAX_POINTS:
        return math.inf
    points = np.arange(left, right + step, step)
    log_density = -(points**2) / 2.0 - 0.5 * math.log(2.0 * math.pi)
    log_p = _log_mixture(rate, shift * points - shift**2 / 2.0)
    log_q = _log_mixture(rate, -shift * points - shift**2 / 2.0) if opposite else np.zeros_like(points)
    loss, log_base = log_p - log_q, log_density + log_q
    # L^order - 1 - order (L - 1) >= 0 integrates to A - 1, because L integrates to 1.
    high = order * loss > 20.0
    low_loss = np.where(high, 0.0, loss)
    excess = np.expm1(order * low_loss) - order * np.expm1(low_loss)
    excess = np.maximum(excess, 0.0) + 1e-15 * order * np.abs(low_loss)
    log_excess = np.where(high, order * loss, np.log(np.maximum(excess, 1e-300)))
    total = float(_log_sum_exp(log_base + log_excess)) + math.log(step)
    ends = float(np.logaddexp(*(log_base + order * loss)[[0, -1]])) - math.log(_TAIL)
    error = np.logaddexp(max(total, 0.0), math.log(1.0 + 2.0 * order)) + math.log(4.0) - _EXPONENT
    return float(_log1pexp(np.logaddexp(np.logaddexp(total, ends), error) + _MARGIN)) / (order - 1.0)


def _log_mixture(rate: float, log_ratio: Floats) -> Floats:
    """log((1-w) + w e^t), to full relative precision also where it is near 0."""
    near = np.log1p(rate * np.expm1(np.minimum(log_ratio, 30.0)))
    return np.where(log_ratio > 30.0, np.logaddexp(math.log1p(-rate), math.log(rate) + log_ratio), near)


def _log_moments(orders: Floats, curve: IntegerCurve) -> Floats:
    """(j - 1) * divergence for j = 2, 3, ... up to the integer above the largest order."""
    ell = np.arange(2.0, math.floor(np.max(orders)) + 2.0)
    return (ell - 1.0) * curve(ell)


def _log_sum(log_terms: Floats) -> float:
    """The log of A from the logs of the non-negative terms of A - 1, rounded up."""
    return float(_log1pexp(_log_sum_exp(log_terms) + _MARGIN))


def _log_sum_exp(x: Floats) -> Floats:
    """Along the last axis; SciPy's is slower by the dispatch it does on every call."""
    top = np.max(x, axis=-1, keepdims=True)
    return top[..., 0] + np.log(np.sum(np.exp(x - top), axis=-1))


def _log_choose(order: float, ell: Floats) -> Floats:
    """Log binomial coefficients of an integer order and consecutive integers `ell`."""
    log_factorial, top, first, last = _log_factorials(), int(order), int(ell[0]), int(ell[-1])
    chosen, rest = log_factorial[first : last + 1], log_factorial[top - last : top - first + 1][::-1]
    return log_factorial[top] - chosen - rest


@lru_cache(maxsize=1)
def _log_factorials() -> Floats:
    return gammaln(np.arange(MAX_ORDER + 2) + 1.0)


def _log_expm1(x: Floats) -> Floats:
    """log(e^x - 1) for x > 0 of any size."""
    return np.where(x > 1.0, x + np.log1p(-np.exp(-np.maximum(x, 1.0))), np.log(np.expm1(np.minimum(x, 1.0))))


def _log1pexp(x: Floats | float) -> Floats:
    return np.logaddexp(0.0, x)


def _log(x: float) -> float:
    return math.log(x) if x > 0.0 else -math.inf
