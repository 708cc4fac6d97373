"""Exact integer noise: rounded Laplace, discrete Gaussian, and k-ary randomised response.

Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Algorithms 1 to 3, vectorised. Where
we differ: the paper decides Bernoulli(exp(-gamma)) by a race of rational coin flips, which needs integers of 60 bits at
standard deviation 10^4 and overflows soon after; we compare a lazily read uniform number with lazily refined integer
bounds of exp(-gamma) (`discrete_lazy`). The law is the same, exactly, at every scale; only Python integers see numbers
that could exceed 64 bits. Draws take a time that depends on random choices, as with every rejection sampler.

Guarantees:
    - P(x) is proportional to exp(-x^2 / (2 stddev^2)), stddev being the exact rational value of the argument
      (`test_discrete_gaussian_matches_its_pmf`, `test_discrete_gaussian_at_huge_scales`).
    - Rounded Laplace noise has the law of a continuous draw rounded to integers, with a scale never below the argument
      (`test_rounded_laplace_matches_its_pmf`, `test_laplace_scale_is_never_rounded_down`).
    - An answer is replaced with probability exactly gamma (`test_randomised_response_matches_its_law`).
    - No floating-point number takes part in any decision (`test_decisions_use_no_floats`).
    - Nothing overflows up to the largest scale accepted (`test_largest_scales_do_not_overflow`).
"""

from fractions import Fraction
from functools import cache, lru_cache

import numpy as np

from silobayes.core.errors import InvalidInput, require_count
from silobayes.privacy.discrete_lazy import (
    GAMMA_BITS,
    FixedRatio,
    Ints,
    SurvivalTable,
    accept_exp,
    collect,
    exp_bounds,
    positive_rational,
)
from silobayes.privacy.entropy import Entropy, Size

MAX_SCALE = 1 << 50
"""The largest standard deviation or scale accepted."""

_MAX_NUMERATOR = 1 << 55
_MAX_DENOMINATOR = 1 << 62
_MAX_TURNS = 120  # so that int64 holds: a draw beyond 120 scales, of probability exp(-120) < 2^-173, is put there
_Z_BITS = 27  # fraction bits of |y| / stddev; 4 more for its whole part, up to 16


@cache
def _turns() -> SurvivalTable:
    """V with P(V >= k) = exp(-k): Algorithm 2's count of accepted Bernoulli(exp(-1))."""

    def survival(bits: int) -> tuple[list[int], list[int]]:
        bounds = [exp_bounds(Fraction(k), bits) for k in range(1, bits)]
        return [lo for lo, _ in bounds], [hi for _, hi in bounds]

    return SurvivalTable(survival, closed=False)


class LaplaceProposal:
    """Discrete Laplace of scale numerator / denominator (Algorithm 2), in batches of varying length."""

    ACCEPTED_PERCENT = 45

    def __init__(self, numerator: int, denominator: int = 1) -> None:
        self._numerator = numerator
        self._denominator = denominator
        self._ratio = FixedRatio(Fraction(numerator), whole_bits=0, fraction_bits=GAMMA_BITS)

    def magnitudes(self, entropy: Entropy, count: int) -> Ints:
        """Geometric draws, P(m >= k) = exp(-k / scale): what is left of `count` proposals."""
        remainder = entropy.uniform_below(self._numerator, count).view(np.int64)
        gamma = self._ratio(remainder)
        keep = accept_exp(
            entropy, gamma, gamma + FixedRatio.SLACK, lambda i: Fraction(int(remainder[i]), self._numerator)
        )
        remainder = remainder[keep]
        turns = np.minimum(_turns().draw(entropy, remainder.size), _MAX_TURNS)
        magnitude = turns * self._numerator + remainder
        if self._denominator != 1:
            magnitude //= self._denominator
        return magnitude

    def __call__(self, entropy: Entropy, count: int) -> Ints:
        """What is left of `count` proposals: independent draws of the law."""
        magnitude = self.magnitudes(entropy, count)
        sign = 1 - 2 * entropy.bits(magnitude.size).astype(np.int64)
        # Zero has two signs and must not count twice: minus zero is dropped.
        return (magnitude * sign)[(magnitude != 0) | (sign == 1)]


def rounded_laplace(entropy: Entropy, scale: Fraction | float, size: Size) -> Ints:
    """Continuous Laplace noise of the given scale, rounded to the nearest integer; exact.

    A scale whose fraction does not fit 64-bit integers is rounded up, by less than 2^-51 of itself or 2^-62. Draws
    beyond 120 scales, of probability below 2^-170, are put there.

    Its size in half cells, floor(2 |X|), is geometric with scale 2 b, and a number is rounded from its half cells. As
    the law of a rounded continuous draw it costs what continuous Laplace noise costs; the two-sided geometric law puts
    more mass on zero and costs slightly more.
    """
    exact = positive_rational("scale", scale, at_most=MAX_SCALE, fix="Pass sensitivity / epsilon in grid units.")
    proposal = LaplaceProposal(*laplace_fraction(2 * exact))

    def propose(count: int) -> Ints:
        cells = (proposal.magnitudes(entropy, count) + 1) // 2
        return cells * (1 - 2 * entropy.bits(cells.size).astype(np.int64))

    return collect(size, propose, accepted_percent=LaplaceProposal.ACCEPTED_PERCENT)


def laplace_fraction(scale: Fraction) -> tuple[int, int]:
    """The scale as numerator and denominator that fit 64-bit integers; never below it."""
    if scale.numerator <= _MAX_NUMERATOR and scale.denominator <= _MAX_DENOMINATOR:
        return scale.numerator, scale.denominator
    whole_bits = (scale.numerator // scale.denominator).bit_length()
    if whole_bits == 0:  # below 1: as many leading zeros may be added to the denominator
        whole_bits = min(0, scale.numerator.bit_length() - scale.denominator.bit_length() + 1)
    denominator = 1 << min(55 - whole_bits - 1, 62)
    return -(-scale.numerator * denominator // scale.denominator), denominator


class _GaussianProposal:
    """Algorithm 3: a discrete Laplace draw y of scale t = floor(stddev) + 1, kept with probability exp(-gamma).

    gamma = (|y| - stddev^2 / t)^2 / (2 stddev^2) = z^2 / 2 with z = |y| / stddev - stddev / t.
    """

    def __init__(self, stddev: Fraction) -> None:
        self._stddev = stddev
        self._scale = int(stddev) + 1
        self._laplace = LaplaceProposal(self._scale)
        self._ratio = FixedRatio(stddev, whole_bits=4, fraction_bits=_Z_BITS)
        self._shift = int(stddev / self._scale * (1 << _Z_BITS))

    def __call__(self, entropy: Entropy, count: int) -> Ints:
        y = self._laplace(entropy, count)
        magnitude = np.abs(y)
        near = np.minimum(magnitude, self._ratio.limit)
        # The quotient is known to [0, 4] units and the shift to [0, 1], so their difference to 4 on either side.
        z = np.abs(self._ratio(near) - self._shift)
        unit_bits = 2 * _Z_BITS + 1 - GAMMA_BITS
        gamma_lo = np.square(np.maximum(z - FixedRatio.SLACK, 0)) >> unit_bits
        gamma_hi = (np.square(z + FixedRatio.SLACK) >> unit_bits) + 1
        far = magnitude > self._ratio.limit  # |y| > 16 stddev: gamma > 100, all that the bounds below say
        gamma_lo[far] = gamma_hi[far] = 100 << GAMMA_BITS
        return y[accept_exp(entropy, gamma_lo, gamma_hi, lambda i: self._exact_gamma(int(magnitude[i])))]

    def _exact_gamma(self, magnitude: int) -> Fraction:
        return (magnitude / self._stddev - self._stddev / self._scale) ** 2 / 2


@lru_cache(maxsize=64, typed=True)
def _gaussian_proposal(stddev: Fraction | float) -> _GaussianProposal:
    fix = "Pass the noise's standard deviation in grid units."
    return _GaussianProposal(positive_rational("stddev", stddev, at_most=MAX_SCALE, fix=fix))


def discrete_gaussian(entropy: Entropy, stddev: Fraction | float, size: Size) -> Ints:
    """Integers with P(x) proportional to exp(-x^2 / (2 stddev^2)), 0 < stddev <= 2^50; a float is read exactly.

    `stddev` is the scale parameter; the standard deviation of the draws is never above it, and far below it for
    stddev < 0.5, where most draws are zero.
    """
    proposal = _gaussian_proposal(stddev)
    return collect(size, lambda count: proposal(entropy, count), accepted_percent=30)


def randomised_response(entropy: Entropy, answers: Ints, categories: int, gamma: Fraction | float) -> Ints:
    """Each answer, replaced with probability `gamma` by one drawn uniformly from all `categories` (itself included).

    Args:
        entropy: the stream.
        answers: integers in [0, categories).
        categories: their number, at least 2.
        gamma: probability of replacement in (0, 1], read as an exact rational.
    """
    require_count("categories", categories, at_least=2, fix="Pass the number of possible answers.")
    exact = positive_rational("gamma", gamma, at_most=1, fix="Pass the probability of a random answer.")
    answers = np.asarray(answers)
    if answers.dtype.kind not in "iu" or (answers.size and not (answers.min() >= 0 and answers.max() < categories)):
        # The offending answer is somebody's: it must not appear in the message.
        raise InvalidInput("answers", f"integers in [0, {categories})", "others", "Encode answers as 0, 1, ...")
    replace = entropy.bernoulli(exact, answers.shape)
    drawn = entropy.uniform_below(categories, answers.shape).astype(np.int64)
    return np.where(replace, drawn, answers.astype(np.int64))
