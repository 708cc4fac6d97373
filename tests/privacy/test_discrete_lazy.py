from fractions import Fraction

import mpmath
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.privacy.discrete_lazy import (
    GAMMA_BITS,
    FixedRatio,
    SurvivalTable,
    accept_exp,
    exp_bounds,
    fast_exp_bounds,
    settle,
)
from silobayes.privacy.entropy import Entropy
from tests.privacy.goodness import ScriptedEntropy

LAST = (1 << 64) - 1


def _exp_scaled(x: Fraction, bits: int) -> mpmath.mpf:
    return mpmath.ldexp(mpmath.exp(-mpmath.mpf(x.numerator) / x.denominator), bits)


@given(
    st.fractions(0, 5) | st.fractions(0, 300) | st.integers(0, 200).map(Fraction) | st.floats(0, 1e6).map(Fraction),
    st.integers(8, 300),
)
def test_exp_bounds_enclose_exp(x, bits):
    with mpmath.workprec(800):
        lo, hi = exp_bounds(x, bits)
        assert lo <= _exp_scaled(x, bits) <= hi
        assert hi - lo <= 2


def test_fast_exp_bounds_enclose_exp():
    words = Entropy.not_private(1).uint64(3000)
    # Exponents of every size up to twice the cap, and the edges of the three tables.
    gamma = (words >> np.uint64(27)).astype(np.int64) >> np.arange(3000) % 37
    gamma = np.concatenate(
        [gamma, [0, 1, 4095, 4096, (1 << 24) - 1, 1 << 24, (64 << GAMMA_BITS) - 1, 64 << GAMMA_BITS]]
    )
    for width in (0, 4, 1000):
        lo, hi = fast_exp_bounds(gamma, gamma + width)
        for g, low, high in zip(gamma.tolist(), lo.tolist(), hi.tolist(), strict=True):
            assert low <= _exp_scaled(Fraction(g + width, 1 << GAMMA_BITS), 31)
            assert _exp_scaled(Fraction(g, 1 << GAMMA_BITS), 31) <= high
        assert (hi - lo <= 6 + 2 * width).all()


@given(
    st.fractions(Fraction(1, 10**6), 2**50)
    | st.floats(1e-9, 2.0**50).map(Fraction)
    | st.integers(1, 2**55).map(Fraction),
    st.sampled_from([(4, 27), (0, 30)]),
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
)
@settings(max_examples=300)
def test_fixed_ratio_encloses_the_quotient(denominator, widths, places):
    whole_bits, fraction_bits = widths
    ratio = FixedRatio(denominator, whole_bits=whole_bits, fraction_bits=fraction_bits)
    values = [int(place * ratio.limit) for place in places] + [ratio.limit]
    for value, quotient in zip(values, ratio(np.array(values, dtype=np.int64)).tolist(), strict=True):
        exact = Fraction(value) / denominator * 2**fraction_bits
        assert quotient <= exact <= quotient + FixedRatio.SLACK


@given(st.fractions(0, 1), st.lists(st.integers(0, LAST), min_size=4, max_size=4), st.integers(0, 3))
def test_settling_is_exact_when_bounds_are_useless(probability, words, useless):
    def bounds(bits: int) -> tuple[int, int]:
        if bits <= 64 * useless:
            return 0, 1 << bits
        scaled = probability * (1 << bits)
        return int(scaled), -int(-scaled // 1)

    head, *rest = words
    answer = settle(ScriptedEntropy(rest), head, bounds)
    uniform = sum(Fraction(word, 1 << 64 * (i + 1)) for i, word in enumerate(words))
    assert answer == (uniform < probability) or abs(uniform - probability) < Fraction(1, 1 << 200)


def test_settling_reads_on_while_the_bits_agree():
    third = (1 << 64) // 3

    def bounds(bits: int) -> tuple[int, int]:
        return (1 << bits) // 3, (1 << bits) // 3 + 1

    assert settle(ScriptedEntropy([third, third - 1]), third, bounds)
    assert not settle(ScriptedEntropy([third, third + 1]), third, bounds)


def test_accept_exp_does_not_depend_on_the_width_of_its_bounds():
    count = 400
    exact = [Fraction(i * i, 3001) for i in range(count)]
    floor = np.array([int(x * (1 << GAMMA_BITS)) for x in exact])
    uniform = Entropy.not_private(2).uint64(count).tolist()
    wanted = [u < _exp_scaled(x, 64) for u, x in zip(uniform, exact, strict=True)]
    assert 20 < sum(wanted) < 380
    for slack in (1, 1 << 20, 1 << 29):
        lo, hi = np.maximum(floor - slack, 0), floor + slack
        assert accept_exp(Entropy.not_private(2), lo, hi, exact.__getitem__).tolist() == wanted


def _halves(bits: int, useless_below: int = 0) -> tuple[list[int], list[int]]:
    """P(X >= k) = 2^-k - 2^-200, so that no threshold is a binary fraction of few bits."""
    values = [Fraction(1, 1 << k) - Fraction(1, 1 << 200) for k in range(1, bits)]
    if bits < useless_below:
        return [0] * len(values), [1 << bits] * len(values)
    return [int(v * (1 << bits)) for v in values], [int(v * (1 << bits)) + 1 for v in values]


def test_survival_table_counts_thresholds_above_the_uniform():
    uniform = Entropy.not_private(3).uint64(2000).tolist()
    wanted = [64 - u.bit_length() for u in uniform]
    assert SurvivalTable(_halves, closed=False).draw(Entropy.not_private(3), 2000).tolist() == wanted
    coarse = SurvivalTable(lambda bits: _halves(bits, useless_below=64), closed=False)
    assert coarse.draw(Entropy.not_private(3), 300).tolist() == wanted[:300]


def test_survival_table_is_right_on_both_sides_of_every_threshold():
    # Thresholds so dense that the first bits of U decide some draws and leave others open.
    survival = [Fraction(99, 100) ** k for k in range(1, 700)]

    def bounds(bits: int) -> tuple[list[int], list[int]]:
        return [int(s * (1 << bits)) for s in survival], [int(s * (1 << bits)) + 1 for s in survival]

    thresholds = bounds(64)[0]
    uniform = [t + shift for t in thresholds for shift in (-(1 << 50), -2, 2, 1 << 50)]
    uniform = [u for u in uniform if 0 <= u <= LAST] + Entropy.not_private(4).uint64(3000).tolist()
    wanted = [sum(u < t for t in thresholds) for u in uniform]
    table = SurvivalTable(bounds, closed=True)
    assert table.draw(ScriptedEntropy(uniform), len(uniform)).tolist() == wanted


def test_survival_table_reads_on_in_the_tail_and_at_thresholds():
    table = SurvivalTable(_halves, closed=False)
    assert table.draw(ScriptedEntropy([0, 1 << 60]), 1).tolist() == [64 + 3]
    assert table.draw(ScriptedEntropy([0, 0, 1]), 1).tolist() == [64 + 64 + 63]
    # U starts like 1/2 - 2^-200 up to bit 192: just below and just above it.
    assert table.draw(ScriptedEntropy([LAST >> 1, LAST, LAST, 0]), 1).tolist() == [1]
    assert table.draw(ScriptedEntropy([LAST >> 1, LAST, LAST, LAST]), 1).tolist() == [0]


def test_closed_survival_table_ends_at_its_last_entry():
    def survival(bits: int) -> tuple[list[int], list[int]]:
        return [1 << bits, 1 << bits - 1], [1 << bits, 1 << bits - 1]

    draws = SurvivalTable(survival, closed=True).draw(ScriptedEntropy([0, LAST, 1 << 63, (1 << 63) - 1]), 4)
    assert draws.tolist() == [2, 1, 1, 2]
