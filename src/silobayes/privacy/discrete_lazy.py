"""Exact decisions from integers: a uniform real number against a probability that is known between two integers.

Every sampler of `discrete` and `skellam` asks one question: is U < p, for a uniform U and a real number p? It reads 64
bits of U, so that u <= 2^64 U < u + 1, and has integers lo <= 2^64 p <= hi. If u + 1 <= lo the answer is yes, if
u >= hi it is no. Otherwise (once in millions or far less) more bits of U and tighter bounds of p are computed until one
of the two holds. The answer is therefore exact whatever the width of the bounds; a narrow width only buys speed.

The idea is von Neumann's lazy comparison as used by Karney, "Sampling exactly from the normal distribution" (2016).

Guarantees:
    - No floating-point number exists here (`test_decisions_use_no_floats`, on the source and on a traced run).
    - lo <= 2^bits exp(-x) <= hi for every rational x >= 0 (`test_exp_bounds_enclose_exp`).
    - The vectorised bounds enclose the exact ones (`test_fast_exp_bounds_enclose_exp`,
      `test_fixed_ratio_encloses_the_quotient`).
    - The answer does not depend on the width of the bounds (`test_settling_is_exact_when_bounds_are_useless`).
"""

from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

from silobayes.core.errors import InvalidInput
from silobayes.privacy.entropy import Entropy, Size

Ints = NDArray[np.int64]
Bounds = Callable[[int], tuple[int, int]]
"""bits -> (lo, hi) with lo <= 2^bits p <= hi, and hi - lo small compared with 2^bits as bits grows."""

GAMMA_BITS = 30
"""Exponents of `accept_exp` are counted in units of 2^-30."""

_GAMMA_CAP = (64 << GAMMA_BITS) - 1  # beyond: exp(-64) is far below the 31 bits of the tables
_FRACTION = 31  # bits of the tables' entries; a product of two stays below 2^63
_TABLE_SLACK = 6  # three tables and two products, each less than one unit (and 2^-40) too low


def positive_rational(key: str, value: Fraction | float, *, at_most: int, fix: str) -> Fraction:
    """`value` as the exact rational it is, if it is in (0, at_most]; otherwise `InvalidInput` naming `key`."""
    expected = f"a number in (0, {at_most if at_most < 1000 else f'2^{at_most.bit_length() - 1}'}]"
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction)):
        raise InvalidInput(key, expected, value, fix)
    if not (0 < value <= at_most):
        raise InvalidInput(key, expected, value, fix)
    return Fraction(value)


def settle(entropy: Entropy, head: int, bounds: Bounds) -> bool:
    """Whether U < p, for the U whose first 64 bits are `head`."""
    bits = 64
    while True:
        lo, hi = bounds(bits)
        if head + 1 <= lo:
            return True
        if head >= hi:
            return False
        head = head << 64 | int(entropy.uint64(1)[0])
        bits += 64


def exp_bounds(x: Fraction, bits: int) -> tuple[int, int]:
    """Integers lo <= 2^bits exp(-x) <= hi for x >= 0, by the alternating series with floored terms."""
    whole, part = divmod(x, 1)
    if whole > bits:
        return 0, 1
    guard = 64
    width = bits + guard
    lo, hi = _exp_series((part.numerator << width) // part.denominator, width)
    if whole:
        base_lo, base_hi = _exp_series(1 << width, width)
        for _ in range(int(whole)):
            lo = lo * base_lo >> width
            hi = (hi * base_hi >> width) + 1
    return max(lo, 0) >> guard, min(-(-hi >> guard), 1 << bits)


def _exp_series(numerator: int, width: int) -> tuple[int, int]:
    """Bounds of 2^width exp(-f) for numerator <= 2^width f <= numerator + 1, f <= 1.

    Each floored term is at most 2 below the true one (its error e_j <= (e_{j-1} + 1) / j + 1), the first neglected
    term is below 2, and the unit by which f may exceed its numerator moves the result by at most one unit.
    """
    total, term, index = 1 << width, 1 << width, 0
    while term:
        index += 1
        term = (term * numerator >> width) // index
        total += -term if index % 2 else term
    slack = 2 * index + 4
    return total - slack, total + slack


@cache
def _exp_tables() -> tuple[Ints, Ints, Ints]:
    """2^31 exp(-i 2^-6), the same for i 2^-18 and for i 2^-30, i < 4096, rounded down: three digits of an exponent."""

    def table(step_bits: int) -> Ints:
        width = 128
        base = exp_bounds(Fraction(1, 1 << step_bits), width)[0]
        powers = accumulate(repeat(base, 4095), lambda power, base: power * base >> width, initial=1 << width)
        return np.array([power >> width - _FRACTION for power in powers], dtype=np.int64)

    return table(6), table(18), table(GAMMA_BITS)


def fast_exp_bounds(gamma_lo: Ints, gamma_hi: Ints) -> tuple[Ints, Ints]:
    """Bounds of 2^31 exp(-gamma) from bounds of gamma in units of 2^-30; since exp(-a) <= exp(-b) + b - a for a < b."""
    coarse, middle, fine = _exp_tables()
    top = np.minimum(gamma_hi, _GAMMA_CAP)
    width = top - np.minimum(gamma_lo, _GAMMA_CAP)
    lo = coarse[top >> 24] * middle[top >> 12 & 4095] >> _FRACTION
    lo *= fine[top & 4095]
    lo >>= _FRACTION
    return lo, lo + 2 * width + _TABLE_SLACK


def accept_exp(
    entropy: Entropy, gamma_lo: Ints, gamma_hi: Ints, exact_gamma: Callable[[int], Fraction]
) -> NDArray[np.bool_]:
    """True with probability exactly exp(-gamma) for each gamma.

    Args:
        entropy: the stream.
        gamma_lo: lower bounds of gamma >= 0 in units of 2^-30.
        gamma_hi: upper bounds, at most 2^62.
        exact_gamma: index -> gamma, asked only where the bounds do not decide.
    """
    uniform = entropy.uint64(gamma_lo.size)
    head = (uniform >> np.uint64(64 - _FRACTION)).astype(np.int64)
    lo, hi = fast_exp_bounds(gamma_lo, gamma_hi)
    accept = head < lo
    for index in np.flatnonzero(~accept & (head < hi)).tolist():
        gamma = exact_gamma(index)
        accept[index] = settle(entropy, int(uniform[index]), lambda bits, gamma=gamma: exp_bounds(gamma, bits))
    return accept


class FixedRatio:
    """value / denominator in fixed point for 0 <= value <= limit = floor(2^whole_bits * denominator).

    `ratio(values)` is in units of 2^-fraction_bits and at most `FixedRatio.SLACK` below the true quotient, never above:
    dropping low bits of the value costs less than 2 units, of the reciprocal at most 1, the last shift less than 1.
    whole_bits + fraction_bits <= 31 keeps every product below 2^62.
    """

    SLACK = 4

    def __init__(self, denominator: Fraction, *, whole_bits: int, fraction_bits: int) -> None:
        assert whole_bits + fraction_bits <= 31
        self.limit = int(denominator * (1 << whole_bits))
        self._drop = max(0, self.limit.bit_length() - 31)
        scaled = (denominator.denominator << fraction_bits + 31 + self._drop) // denominator.numerator
        self._reciprocal = scaled if self.limit else 0  # limit 0 leaves only the value 0, and a huge reciprocal

    def __call__(self, values: Ints) -> Ints:
        """The quotients, at most `SLACK` units too low."""
        return (values >> self._drop) * self._reciprocal >> 31


class SurvivalTable:
    """Draws X in {0, 1, ...} with P(X >= k) = S_k: the number of k >= 1 with U < S_k.

    Args:
        survival: bits -> (lo, hi), lists with lo[k-1] <= 2^bits S_k <= hi[k-1], not increasing in k. If not `closed` it
            ends at an entry so small that it is hardly ever reached; where it is, more bits make it longer.
        closed: the list is complete, X <= len(lo).
    """

    _BITS = 63  # 2^63, an upper bound of S_k near 1, fits the arrays
    _CELL_BITS = 14  # the first bits of U, which alone decide nearly every draw

    def __init__(self, survival: Callable[[int], tuple[list[int], list[int]]], *, closed: bool) -> None:
        self._survival = survival
        self._closed = closed
        lo, hi = survival(self._BITS)
        self._hi_ascending = np.array(hi[::-1], dtype=np.uint64)
        # Entry k decides for X = k; X = 0 is never in doubt from below, X = K is in doubt if the list may go on.
        self._lo = np.array([1 << 63, *lo], dtype=np.uint64)
        if not closed:
            self._lo[-1] = 0
        self._decided = self._decide_cells()

    def draw(self, entropy: Entropy, count: int) -> Ints:
        """`count` independent draws."""
        uniform = entropy.uint64(count)
        out = self._decided[uniform >> np.uint64(64 - self._CELL_BITS)]
        open_draws = np.flatnonzero(out < 0)
        head = uniform[open_draws] >> np.uint64(64 - self._BITS)
        found = self._search(head)
        for index in np.flatnonzero(self._lo[found] <= head).tolist():
            found[index] = self._settle(entropy, int(uniform[open_draws[index]]))
        out[open_draws] = found
        return out

    def _search(self, head: NDArray[np.uint64]) -> Ints:
        """The largest X that the upper bounds allow; where the lower bound of the same entry is above, X is it."""
        return self._hi_ascending.size - np.searchsorted(self._hi_ascending, head, side="right")

    def _decide_cells(self) -> Ints:
        """X for each value of the first bits of U that leaves no doubt, -1 for the others."""
        width = self._BITS - self._CELL_BITS
        lowest = np.arange(1 << self._CELL_BITS, dtype=np.uint64) << np.uint64(width)
        highest = lowest + np.uint64((1 << width) - 1)
        out = self._search(lowest)
        return np.where((out == self._search(highest)) & (self._lo[out] > highest), out, -1)

    def _settle(self, entropy: Entropy, head: int) -> int:
        bits = 64
        while True:
            lo, hi = self._survival(bits)
            at_least = len(lo) - bisect_right(lo[::-1], head)
            at_most = len(hi) - bisect_right(hi[::-1], head)
            if at_least == at_most and (self._closed or at_most < len(hi)):
                return at_most
            head = head << 64 | int(entropy.uint64(1)[0])
            bits += 64


def collect(size: Size, propose: Callable[[int], Ints], *, accepted_percent: int) -> Ints:
    """The first prod(size) values of a stream of accepted proposals, asked for in pieces that fit the cache."""
    out = np.empty(size, dtype=np.int64)
    flat = out.reshape(-1)
    filled = 0
    while filled < flat.size:
        wanted = (flat.size - filled) * 100 // accepted_percent + 16
        values = propose(min(wanted, 1 << 15))[: flat.size - filled]
        flat[filled : filled + values.size] = values
        filled += values.size
    return out
