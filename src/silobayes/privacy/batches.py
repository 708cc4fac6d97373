"""Which rows enter which batch: Poisson samples and fixed-size subsets, exact in law, fresh at every draw.

A price that relies on sampling is true only if the sampler is the one that was priced and its randomness is secret
(PITFALLS: shuffled batches priced as Poisson). Both laws here are exact: no rate is rounded, no index is biased.

Guarantees:
    - Each row enters each Poisson batch with probability exactly `sample_rate`, independently of all others
      (`test_poisson_batch_sizes_are_binomial`, `test_poisson_rows_are_independent`, `test_poisson_gaps_are_geometric`).
    - Each fixed-size batch is a uniform subset, independent of the other draws
      (`test_subsets_are_uniform`, `test_subsets_are_independent_across_draws`).
"""

import math
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, repeat

import numpy as np

from silobayes.core.errors import InvalidInput, require_count, require_number
from silobayes.privacy.discrete_lazy import Ints, SurvivalTable
from silobayes.privacy.entropy import Entropy

_MAX_GAP = 1 << 14


@lru_cache(maxsize=16)
def _gap_table(rate: Fraction, longest: int) -> SurvivalTable:
    """min(G, longest) for the number G of rows passed over before the next one taken: P(G >= k) = (1 - rate)^k."""

    def survival(bits: int) -> tuple[list[int], list[int]]:
        width = bits + 64
        keep = ((rate.denominator - rate.numerator) << width) // rate.denominator  # 2^width (1 - rate), rounded down
        low = list(accumulate(repeat(keep, longest), lambda power, base: power * base >> width))
        high = list(accumulate(repeat(keep + 1, longest), lambda power, base: (power * base >> width) + 1))
        return [value >> 64 for value in low], [min(-(-value >> 64), 1 << bits) for value in high]

    return SurvivalTable(survival, closed=True)


def poisson_batches(entropy: Entropy, num_rows: int, sample_rate: float, num_draws: int) -> tuple[Ints, Ints]:
    """Batches in which each row appears with probability exactly `sample_rate`, independently across rows and draws.

    The (draws x rows) coin flips are laid end to end and only the gaps between heads are drawn, so the cost is
    proportional to the number of rows taken (plus one draw per 16384 flips).

    Returns:
        (indices, offsets): draw i is `indices[offsets[i] : offsets[i + 1]]`, ascending; `offsets` has num_draws + 1
        entries.
    """
    require_count("num_rows", num_rows, at_least=1, fix="Pass the number of rows.")
    require_count("num_draws", num_draws, at_least=1, fix="Pass the number of batches.")
    rate = Fraction(
        require_number("sample_rate", sample_rate, above=0.0, at_most=1.0, fix="Pass the probability of a row.")
    )
    num_flips = num_rows * num_draws
    if num_flips >= 1 << 62:
        raise InvalidInput("num_draws", "num_rows * num_draws < 2^62", num_draws, "Draw in several calls.")
    longest = min(_MAX_GAP, 45 * rate.denominator // rate.numerator + 1)
    table = _gap_table(rate, longest)
    heads: list[Ints] = []
    position = 0  # flips already decided
    while position < num_flips:
        expected = int((num_flips - position) * rate)
        count = expected + 5 * math.isqrt(expected) + (num_flips - position) // longest + 16
        gaps = table.draw(entropy, min(count, 1 << 16))
        ended = gaps < longest  # otherwise the gap goes on: geometric laws have no memory
        ends = np.cumsum(gaps + ended) + position
        position = int(ends[-1])
        heads.append((ends if ended.all() else ends[ended]) - 1)
    flips = np.concatenate(heads)
    flips = flips[: np.searchsorted(flips, num_flips)]
    starts = np.arange(num_draws + 1, dtype=np.int64) * num_rows
    offsets = np.searchsorted(flips, starts)
    return flips - np.repeat(starts[:-1], np.diff(offsets)), offsets


def subsets_without_replacement(entropy: Entropy, num_rows: int, batch_size: int, num_draws: int) -> Ints:
    """Uniform subsets of `batch_size` of the rows, one per draw, independent: shape (num_draws, batch_size), ascending.

    A batch is the first `batch_size` distinct values of a sequence of uniform rows, which is a uniform subset by
    symmetry; of more than half the rows, it is the complement of one.
    """
    require_count("num_rows", num_rows, at_least=1, fix="Pass the number of rows.")
    require_count("num_draws", num_draws, at_least=1, fix="Pass the number of batches.")
    require_count("batch_size", batch_size, at_least=1, fix="Pass the number of rows of a batch.")
    if batch_size > num_rows:
        raise InvalidInput("batch_size", f"at most num_rows = {num_rows}", batch_size, "Pass a smaller batch.")
    if 2 * batch_size <= num_rows:
        return _distinct(entropy, num_rows, batch_size, num_draws)
    taken = np.ones((num_draws, num_rows), dtype=np.bool_)
    np.put_along_axis(taken, _distinct(entropy, num_rows, num_rows - batch_size, num_draws), False, axis=1)
    return np.nonzero(taken)[1].reshape(num_draws, batch_size)


def _distinct(entropy: Entropy, num_rows: int, batch_size: int, num_draws: int) -> Ints:
    out = entropy.uniform_below(num_rows, (num_draws, batch_size)).view(np.int64)
    out.sort(axis=1)
    pending = np.arange(num_draws)
    while pending.size:
        batches = out[pending]
        repeated = np.zeros(batches.shape, dtype=np.bool_)
        np.equal(batches[:, 1:], batches[:, :-1], out=repeated[:, 1:])
        # One copy of each value stays; exactly the missing number of values is drawn anew, so no value is preferred.
        num_missing = int(repeated.sum())
        batches[repeated] = entropy.uniform_below(num_rows, num_missing).view(np.int64)
        touched = np.flatnonzero(repeated.any(axis=1))
        pending = pending[touched]
        batches = batches[touched]
        batches.sort(axis=1)
        out[pending] = batches
    return out
