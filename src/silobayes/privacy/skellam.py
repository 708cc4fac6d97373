"""Exact Skellam noise: the difference of two Poisson draws, closed under sums over silos (SPEC 4).

Agarwal, Kairouz, Liu, "The Skellam Mechanism for Differentially Private Federated Learning" (2021), where it is drawn
with floats. Here the law is exact, by two routes that meet at variance 2^18:

Below, inversion of P(|X| >= k) from a table of integer bounds. The pmf is e^-v I_k(v); ratios of Bessel functions obey
I_k / I_{k-1} = 1 / (2k/v + I_{k+1} / I_k), run downwards in integer intervals (the map contracts); the pmf sums to 1.

Above, two Poisson draws of mean mu = v/2, each a discrete Laplace deviation y around m = floor(mu), of scale
t = floor(sqrt(mu)) + 1, kept with probability exp(g(y) - C), where g(y) = log p(m + y) / p(m) + |y| / t and
C = 1/t + mu (1/(2t^2) + 1/(6t^3) + 1/(12t^4)). This is at most 1: with phi(x) = (1 + x) log(1 + x) - x,
    y > 0: log p(m+y)/p(m) <= -sum_{j<y} log(1 + j/mu) <= -mu phi((y-1)/mu), so g <= 1/t + mu (e^(1/t) - 1 - 1/t) <= C
    because the conjugate of phi is e^s - 1 - s;
    y = -w: log p(m-w)/p(m) <= -w(w-1)/(2mu), so g <= mu/(2t^2) + 1/(2t) + 1/(8mu) <= C because t <= 4mu.
The probability is evaluated in float64 by Loader's saddle-point form with a proven error bound; where a uniform number
falls inside the bound, Stirling's series in decimal arithmetic of growing precision decides. No float error ever does.

Guarantees:
    - The law is Skellam(variance) at every variance in (0, 2^60] (`test_skellam_matches_its_pmf`,
      `test_skellam_at_large_variance_matches_its_pmf`, `test_skellam_at_huge_variance`).
    - The integer bounds enclose the true survival function (`test_skellam_survival_bounds_enclose_mpmath`).
    - The float evaluation errs by less than its bound (`test_poisson_float_error_is_within_its_bound`).
    - The decimal evaluation encloses the true value (`test_poisson_decimal_bounds_enclose_mpmath`).
    - The acceptance probability is at most 1 (`test_poisson_envelope_holds`).
    - Sums of draws are Skellam with the summed variance (`test_skellam_is_closed_under_sums`).
"""

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, getcontext, localcontext
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from silobayes.privacy.discrete import LaplaceProposal
from silobayes.privacy.discrete_lazy import Ints, SurvivalTable, collect, positive_rational, settle
from silobayes.privacy.entropy import Entropy, Size

MAX_VARIANCE = 1 << 60
"""The largest variance accepted: draws stay far inside 64-bit integers."""

_TABLE_BELOW = 1 << 18
_FLOAT_ERROR = 2.0**-32  # relative, of the acceptance probability; the analysis in `log_acceptance` gives 2^-39
_REACH = 32  # deviations beyond 32 scales or a sixteenth of the mean go to the decimal route


def skellam(entropy: Entropy, variance: Fraction | float, size: Size) -> Ints:
    """Integers X - Y for independent X, Y ~ Poisson(variance / 2), 0 < variance <= 2^60; a float is read exactly."""
    fix = "Pass the noise's variance in squared grid units."
    exact = positive_rational("variance", variance, at_most=MAX_VARIANCE, fix=fix)
    if exact >= _TABLE_BELOW:
        deviation = _poisson_deviation(exact / 2)
        return deviation.draw(entropy, size) - deviation.draw(entropy, size)
    out = _magnitude_table(exact).draw(entropy, size if isinstance(size, int) else math.prod(size))
    out *= 1 - 2 * entropy.bits(out.size).astype(np.int64)
    return out.reshape(size)


@lru_cache(maxsize=64)
def _magnitude_table(variance: Fraction) -> SurvivalTable:
    return SurvivalTable(lambda bits: skellam_survival(variance, bits), closed=False)


def skellam_survival(variance: Fraction, bits: int) -> tuple[list[int], list[int]]:
    """Lists of lo <= 2^bits P(|X| >= k) <= hi for k = 1, 2, ... until hi is 1."""
    guard = 64
    width = bits + guard
    one = 1 << width
    last = math.isqrt(int(2 * variance * width)) + width + 16  # P(|X| >= last) is far below 2^-bits
    ratios = _bessel_ratios(variance, last, width)
    lows, highs = [one], [one]  # P(X = k) / P(X = 0)
    for low, high in ratios:
        lows.append(lows[-1] * low >> width)
        highs.append((highs[-1] * high >> width) + 1)
    # Ratios fall with k (log-concavity), so the terms beyond the last are below a geometric series.
    steep = ratios[3 * last // 4][1]
    tail = highs[-1] * steep // (one - steep) + 1
    upper, lower = 2 * tail, 0
    above, below = [], []
    for k in range(last, 0, -1):
        upper += 2 * highs[k]
        lower += 2 * lows[k]
        above.append(upper)
        below.append(lower)
    total_lo, total_hi = lower + one, upper + one
    lo = [(value << bits) // total_hi for value in reversed(below)]
    hi = [min(-(-(value << bits) // total_lo), 1 << bits) for value in reversed(above)]
    end = hi.index(1) + 1
    return lo[:end], hi[:end]


def _bessel_ratios(variance: Fraction, last: int, width: int) -> list[tuple[int, int]]:
    """Bounds of 2^width I_k(v) / I_{k-1}(v) for k = 1..last, from 0 <= I_{last+1} / I_last <= 1 downwards."""
    one = 1 << width
    low, high = 0, one
    out = []
    for k in range(last, 0, -1):
        slope = (2 * k * variance.denominator << width) // variance.numerator
        low, high = (one << width) // (slope + 1 + high), min((one << width) // (slope + low) + 1, one)
        out.append((low, high))
    return out[::-1]


class PoissonDeviation:
    """Y - floor(mu) for Y ~ Poisson(mu), mu >= 2^17 (the second route of the module's docstring)."""

    def __init__(self, mean: Fraction) -> None:
        assert mean >= _TABLE_BELOW // 2
        self._mean = mean
        self._mode = int(mean)
        self._scale = math.isqrt(self._mode) + 1
        self._proposal = LaplaceProposal(self._scale)
        step = Fraction(1, self._scale)
        self._log_cover = step + mean * (step**2 / 2 + step**3 / 6 + step**4 / 12)
        self._reach = min(_REACH * self._scale, self._mode // 16)

    def draw(self, entropy: Entropy, size: Size) -> Ints:
        """Independent deviations, around 0."""
        return collect(size, lambda count: self._propose(entropy, count), accepted_percent=30)

    def _propose(self, entropy: Entropy, count: int) -> Ints:
        y = self._proposal(entropy, count)
        far = np.abs(y) > self._reach
        probability = np.exp(self.log_acceptance(np.where(far, 0, y))) * 2.0**53
        lo = np.where(far, 0, np.floor(probability * (1.0 - _FLOAT_ERROR))).astype(np.int64)
        hi = np.where(far, 2.0**53, np.ceil(probability * (1.0 + _FLOAT_ERROR))).astype(np.int64)
        uniform = entropy.uint64(y.size)
        head = (uniform >> np.uint64(11)).astype(np.int64)
        accept = head < lo
        for index in np.flatnonzero(~accept & (head < hi)).tolist():
            value = int(y[index])
            accept[index] = settle(entropy, int(uniform[index]), lambda bits, value=value: self.bounds(value, bits))
        return y[accept]

    def log_acceptance(self, y: Ints) -> NDArray[np.float64]:
        """g(y) - C for |y| <= reach, in float64.

        With x = y/m: log p(m+y)/p(m) = y log(mu/m) - m phi(x) - log(1+x)/2 + x / (12 (m+y)) up to 1/(360 m^3) < 2^-53.
        m phi(x) = y^2/m sum_j (-x)^j / ((j+1)(j+2)) has no cancellation; |x| <= 1/16 makes the terms from j = 16 on
        less than 2^-70 of the sum. It is below 2^9.1 for |y| <= 32 t and evaluated within 16 units in the last place,
        that is 2^-40; the other terms are below 2^6 and add less than 2^-44.
        """
        value = y.astype(np.float64)
        mode = float(self._mode)
        x = value / mode
        series = np.zeros_like(x)
        for j in range(15, -1, -1):
            series = series * -x + 1.0 / ((j + 1) * (j + 2))
        drift = math.log1p(float((self._mean - self._mode) / self._mode))
        log_ratio = value * drift - value * x * series - 0.5 * np.log1p(x) + x / (12.0 * (mode + value))
        return log_ratio + np.abs(value) / self._scale - float(self._log_cover)

    def bounds(self, y: int, bits: int) -> tuple[int, int]:
        """Integers lo <= 2^bits exp(g(y) - C) <= hi."""
        if self._mode + y < 0:
            return 0, 0
        digits = bits // 3 + 10
        # 50 more digits: terms stay below 10^20 and a few dozen roundings are made, each of half a unit.
        with localcontext(Context(prec=digits + 50, Emax=MAX_EMAX, Emin=MIN_EMIN)):
            rest = abs(y) * Fraction(1, self._scale) - self._log_cover
            log_ratio = y * _decimal(self._mean).ln() - _log_factorial(self._mode + y) + _log_factorial(self._mode)
            exponent = log_ratio + _decimal(rest)
            if exponent < -bits:
                return 0, 1
            probability = exponent.exp() * (1 << bits)
            margin = probability.scaleb(-digits)
            return int(probability - margin), int(probability + margin) + 1


@lru_cache(maxsize=64)
def _poisson_deviation(mean: Fraction) -> PoissonDeviation:
    return PoissonDeviation(mean)


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def _log_factorial(n: int) -> Decimal:
    """Log n! - log(2 pi)/2 to the digits of the context, up to its guard digits.

    Stirling's series, whose error is below the first term left out; small n are shifted up so that the terms get small.
    """
    shift = max(0, 1024 - n)
    product = math.prod(range(n + 1, n + shift + 1))
    n += shift
    out = (n + Decimal("0.5")) * Decimal(n).ln() - n - Decimal(product).ln()
    tiny = Decimal(1).scaleb(-getcontext().prec)
    term, j = Decimal(1), 1
    while abs(term) >= tiny:  # reached: for n >= 1024 the terms fall below 10^-2700 before they grow again
        term = _decimal(_bernoulli_number(2 * j) / (2 * j * (2 * j - 1))) / Decimal(n) ** (2 * j - 1)
        out += term
        j += 1
    return out


@cache
def _bernoulli_number(index: int) -> Fraction:
    """B_index from sum_k binomial(index + 1, k) B_k = 0."""
    if index == 0:
        return Fraction(1)
    if index % 2 and index > 1:
        return Fraction(0)
    return -sum((math.comb(index + 1, k) * _bernoulli_number(k) for k in range(index)), Fraction(0)) / (index + 1)
