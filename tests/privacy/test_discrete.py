import ast
import inspect
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from silobayes.core.errors import InvalidInput
from silobayes.privacy import discrete, discrete_lazy
from silobayes.privacy.discrete import (
    MAX_SCALE,
    LaplaceProposal,
    discrete_gaussian,
    laplace_fraction,
    randomised_response,
    rounded_laplace,
)
from silobayes.privacy.entropy import Entropy
from tests.privacy.goodness import FALSE_ALARM, ScriptedEntropy, chi_square, fits_cdf, fits_pmf, fits_uniform

FACTORS = [(1.0, True), (2 / 3, False), (3 / 2, False)]


def _gaussian_pmf(stddev: float):
    k = np.arange(-int(12 * stddev) - 3, int(12 * stddev) + 4)
    return np.exp(-0.5 * (k / stddev) ** 2)


def _laplace_pmf(scale: float):
    k = np.arange(-int(30 * scale) - 3, int(30 * scale) + 4)
    return np.where(k == 0, -np.expm1(-1 / (2 * scale)), np.sinh(1 / (2 * scale)) * np.exp(-np.abs(k) / scale))


@pytest.mark.parametrize("stddev", [0.3, 0.7, 1, 1.0000001, Fraction(7, 3), 5.5, 40.0])
def test_discrete_gaussian_matches_its_pmf(stddev):
    draws = discrete_gaussian(Entropy.not_private(1), stddev, 300_000)
    assert draws.dtype == np.int64
    for factor, right in FACTORS:
        assert fits_pmf(draws, _gaussian_pmf(factor * float(stddev))) is right


@pytest.mark.parametrize("stddev", [1e4, 2.0**27, 2.0**30 + 0.5, Fraction(2**42 + 1, 3), 2.0**50])
def test_discrete_gaussian_at_huge_scales(stddev):
    draws = discrete_gaussian(Entropy.not_private(2), stddev, 200_000)
    for factor, right in FACTORS:
        assert fits_cdf(draws, stats.norm(scale=factor * float(stddev)).cdf) is right
    # Low digits are uniform at this scale; dropped bits in the proposal would show here.
    for base in (2, 7, 16):
        assert fits_uniform(draws % base, base)


@pytest.mark.parametrize("scale", [0.1, 0.75, 1, Fraction(27, 10), 15.3])
def test_rounded_laplace_matches_its_pmf(scale):
    draws = rounded_laplace(Entropy.not_private(3), scale, 300_000)
    for factor, right in FACTORS:
        assert fits_pmf(draws, _laplace_pmf(factor * float(scale))) is right


@pytest.mark.parametrize("scale", [1e5, 2.0**40 + 0.25, 2.0**50])
def test_rounded_laplace_at_huge_scales(scale):
    draws = rounded_laplace(Entropy.not_private(4), scale, 200_000)
    for factor, right in FACTORS:
        assert fits_cdf(draws, stats.laplace(scale=factor * scale).cdf) is right
    assert fits_uniform(draws % 7, 7)


def _slow_gaussian(entropy: Entropy, stddev: Fraction, count: int) -> list[int]:
    """Algorithms 2 and 3 of the paper with 60-digit arithmetic, reading the stream in the sampler's order."""

    def below_exp(words, exponents) -> list[bool]:
        return [
            word < mpmath.ldexp(mpmath.exp(-mpmath.mpf(x.numerator) / x.denominator), 64)
            for word, x in zip(words, exponents, strict=True)
        ]

    scale = int(stddev) + 1
    remainder = entropy.uniform_below(scale, count).tolist()
    keep = below_exp(entropy.uint64(count).tolist(), [Fraction(r, scale) for r in remainder])
    remainder = [r for r, kept in zip(remainder, keep, strict=True) if kept]
    turns = [int(-mpmath.log(mpmath.ldexp(w, -64))) for w in entropy.uint64(len(remainder)).tolist()]
    magnitude = [t * scale + r for t, r in zip(turns, remainder, strict=True)]
    negative = entropy.bits(len(magnitude)).tolist()
    y = [-m if s else m for m, s in zip(magnitude, negative, strict=True) if m or not s]
    gamma = [(abs(v) - stddev**2 / scale) ** 2 / (2 * stddev**2) for v in y]
    keep = below_exp(entropy.uint64(len(y)).tolist(), gamma)
    return [v for v, kept in zip(y, keep, strict=True) if kept]


@pytest.mark.parametrize(
    "stddev", [Fraction(1, 50), Fraction(1), Fraction(0.1), Fraction(31, 7), Fraction(1e4), Fraction(2**40 + 0.5)]
)
def test_discrete_gaussian_equals_the_papers_algorithm_word_for_word(stddev):
    with mpmath.workdps(60):
        slow = _slow_gaussian(Entropy.not_private(5), stddev, 3000)
    assert discrete._GaussianProposal(stddev)(Entropy.not_private(5), 3000).tolist() == slow


@pytest.mark.parametrize("draw", [discrete_gaussian, rounded_laplace])
def test_noise_is_symmetric(draw):
    for scale in (0.8, 3.0, 1e6):
        draws = draw(Entropy.not_private(6), scale, 200_000)
        positive, negative = int((draws > 0).sum()), int((draws < 0).sum())
        assert stats.binomtest(positive, positive + negative).pvalue > FALSE_ALARM


def test_tails_have_their_probability():
    stddev, count = 10.0, 2_000_000
    draws = np.abs(discrete_gaussian(Entropy.not_private(7), stddev, count))
    pmf = _gaussian_pmf(stddev) / _gaussian_pmf(stddev).sum()
    support = np.abs(np.arange(len(pmf)) - len(pmf) // 2)
    for bound in (30, 40, 45):
        probability = pmf[support > bound].sum()
        assert stats.binomtest(int((draws > bound).sum()), count, probability).pvalue > FALSE_ALARM


@pytest.mark.parametrize("stddev", [5e-324, 1e-300, 1e-3, 0.05, Fraction(1, 10**40)])
def test_tiny_scales_give_zeros(stddev):
    assert not discrete_gaussian(Entropy.not_private(8), stddev, 1000).any()
    if stddev < 0.04:  # at 0.05, P(X != 0) = 4e-9
        assert not rounded_laplace(Entropy.not_private(8), stddev, 1000).any()


def test_neighbours_share_their_support():
    # Float noise can be told apart by outputs that only one neighbour can produce. Here 0 and 1 plus noise occupy the
    # same integers, and their low digits have one law (two-sample chi-square).
    near = discrete_gaussian(Entropy.not_private(9), 2.0, 200_000)
    far = discrete_gaussian(Entropy.not_private(10), 2.0, 200_000) + 1
    common = set(range(-5, 7))
    assert common <= set(near.tolist())
    assert common <= set(far.tolist())
    zero = discrete_gaussian(Entropy.not_private(11), 2.0**30, 200_000)
    one = discrete_gaussian(Entropy.not_private(12), 2.0**30, 200_000) + 1
    table = [np.bincount(draws & 15, minlength=16) for draws in (zero, one)]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_frozen_vectors():
    assert discrete_gaussian(Entropy.not_private(13), 3.0, 10).tolist() == [2, 0, -8, -3, 0, -3, 0, -1, -3, -1]
    assert discrete_gaussian(Entropy.not_private(13), 2.0**40, 3).tolist() == [
        1613776127430,
        -308161665163,
        -2540485289637,
    ]
    assert rounded_laplace(Entropy.not_private(13), 2.5, 10).tolist() == [0, -7, 0, 1, 0, -14, 5, -2, -6, 3]
    assert randomised_response(Entropy.not_private(13), np.arange(10) % 4, 4, 0.5).tolist() == [
        0,
        1,
        2,
        3,
        0,
        0,
        0,
        3,
        3,
        1,
    ]


@pytest.mark.parametrize("size", [0, 1, (3, 4), ()])
def test_draws_have_any_shape(size):
    for draw in (discrete_gaussian, rounded_laplace):
        assert draw(Entropy.not_private(14), 100.0, size).shape == np.empty(size).shape


@given(st.fractions(Fraction(1, 10**30), MAX_SCALE) | st.floats(1e-300, 2.0**50).map(Fraction))
def test_laplace_scale_is_never_rounded_down(scale):
    numerator, denominator = laplace_fraction(scale)
    assert 1 <= numerator <= 1 << 55
    assert 1 <= denominator <= 1 << 62
    excess = Fraction(numerator, denominator) - scale
    assert 0 <= excess <= max(scale * Fraction(1, 1 << 51), Fraction(1, 1 << 62))


def test_laplace_scale_is_kept_where_it_fits():
    for scale in (0.1, 0.01, 1 / 3, 12345.678, 2.0**50, 1e10 + 0.5):
        assert Fraction(*laplace_fraction(Fraction(scale))) == Fraction(scale)


def test_largest_scales_do_not_overflow():
    # remainder 0, kept, then a uniform below 2^-256 for the number of turns: beyond 120 scales, put there.
    largest = laplace_fraction(Fraction(2**55 - 1, 2**5))[0]
    assert largest == 2**55 - 1
    draws = LaplaceProposal(largest)(ScriptedEntropy([largest - 1, 0, 0, 0, 0, 0, 7]), 1)
    assert np.abs(draws).tolist() == [120 * largest + largest - 1]
    for draw in (discrete_gaussian, rounded_laplace):
        draws = draw(Entropy.not_private(15), MAX_SCALE, 100_000)
        assert np.abs(draws).max() < 40 * MAX_SCALE


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 2.0**51, True, "1", None])
def test_bad_scales_are_refused(value):
    for draw, key in ((discrete_gaussian, "stddev"), (rounded_laplace, "scale")):
        with pytest.raises(InvalidInput, match=f"^{key}: expected"):
            draw(Entropy.not_private(0), value, 1)


@pytest.mark.parametrize(("categories", "gamma"), [(2, 0.25), (5, 0.6), (3, 1.0), (4, Fraction(1, 3))])
def test_randomised_response_matches_its_law(categories, gamma):
    each = 60_000
    answers = np.repeat(np.arange(categories), each)
    out = randomised_response(Entropy.not_private(16), answers, categories, gamma)
    counts = np.array([np.bincount(out[answers == c], minlength=categories) for c in range(categories)])

    def p_value(rate: float) -> float:
        law = np.full((categories, categories), rate / categories) + np.eye(categories) * (1 - rate)
        return chi_square(counts.ravel(), (law * each).ravel())

    assert p_value(float(gamma)) > FALSE_ALARM
    for factor in (2 / 3, 3 / 2):
        if factor * gamma <= 1:
            assert p_value(factor * float(gamma)) < FALSE_ALARM


def test_randomised_response_refuses_bad_input_without_quoting_an_answer():
    entropy = Entropy.not_private(0)
    with pytest.raises(InvalidInput, match="answers") as caught:
        randomised_response(entropy, np.array([0, 987654]), 3, 0.5)
    assert "987654" not in str(caught.value)
    for answers in (np.array([-1]), np.array([0.0, 1.0])):
        with pytest.raises(InvalidInput, match="answers"):
            randomised_response(entropy, answers, 3, 0.5)
    for gamma in (0.0, 1.5, float("nan")):
        with pytest.raises(InvalidInput, match="gamma"):
            randomised_response(entropy, np.array([0]), 3, gamma)
    with pytest.raises(InvalidInput, match="categories"):
        randomised_response(entropy, np.array([0]), 1, 0.5)


def _floats_in(source: str) -> list[str]:
    """What in a module could make a float: literals, `/` outside exact fractions, `math`, NumPy's float functions."""
    found = []
    exact = {"_exact_gamma", "__init__"}  # these divide Fractions, see the traced run below
    functions = {"float64", "float32", "exp", "log", "sqrt", "divide", "rint", "floor"}

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            found.append(f"{node.lineno}: literal")
        if isinstance(node, ast.Div) and function not in exact:
            found.append(f"{function}: division")
        if isinstance(node, ast.Import) and any(alias.name in ("math", "scipy", "random") for alias in node.names):
            found.append(f"{node.lineno}: import")
        if isinstance(node, ast.Attribute) and node.attr in functions:
            found.append(f"{node.lineno}: {node.attr}")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "float":
            found.append(f"{node.lineno}: float()")
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def _has_float(value: object) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind not in "iub"
    return isinstance(value, float)


def test_decisions_use_no_floats():
    for module in (discrete, discrete_lazy):
        assert _floats_in(inspect.getsource(module)) == []
    assert len(_floats_in("import math\ndef f(x):\n    return np.exp(x / 2.0)")) == 4  # the check can fail
    files = {discrete.__file__, discrete_lazy.__file__}
    found, lines = [], set()

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in files:
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        values = {**frame.f_locals, "returned": arg} if event == "return" else frame.f_locals
        found.extend((frame.f_code.co_name, name) for name, value in values.items() if _has_float(value))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # sees silent promotions, such as uint64 + int64 = float64
    try:
        entropy = Entropy.not_private(17)
        discrete_gaussian(entropy, Fraction(7, 2), 500)
        discrete_gaussian(entropy, Fraction(2**45, 3), 500)
        rounded_laplace(entropy, Fraction(5, 3), 500)
        wide = np.zeros(20, dtype=np.int64)
        discrete_lazy.accept_exp(entropy, wide, wide + (1 << 30), lambda i: Fraction(i, 20))
        randomised_response(entropy, np.arange(500) % 3, 3, Fraction(1, 3))
    finally:
        sys.settrace(before)
    assert found == []
    assert len(lines) > 80
