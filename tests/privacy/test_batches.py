import numpy as np
import pytest
from scipy import stats

from silobayes.core.errors import InvalidInput
from silobayes.privacy.batches import poisson_batches, subsets_without_replacement
from silobayes.privacy.entropy import Entropy
from tests.privacy.goodness import FALSE_ALARM, ScriptedEntropy, chi_square, fits_uniform

FACTORS = [(1.0, True), (2 / 3, False), (3 / 2, False)]


def _matrix(indices, offsets, num_rows: int):
    """Draws x rows, one where the row was taken."""
    taken = np.zeros((len(offsets) - 1, num_rows), dtype=np.int64)
    taken[np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), indices] += 1
    return taken


@pytest.mark.parametrize(("num_rows", "rate"), [(50, 0.1), (2000, 0.01), (7, 0.5), (100_000, 2e-5)])
def test_poisson_batch_sizes_are_binomial(num_rows, rate):
    num_draws = 20_000
    indices, offsets = poisson_batches(Entropy.not_private(1), num_rows, rate, num_draws)
    sizes = np.diff(offsets)
    assert offsets[0] == 0
    assert offsets[-1] == indices.size
    k = np.arange(0, min(num_rows, int(num_rows * rate * 4) + 30) + 1)
    for factor, right in FACTORS:
        pmf = stats.binom(num_rows, factor * rate).pmf(k)
        expected = num_draws * pmf / pmf.sum()
        assert (chi_square(np.bincount(sizes, minlength=k.size), expected) > FALSE_ALARM) is right


def test_poisson_rows_are_independent():
    num_rows, rate, num_draws = 12, 0.3, 60_000
    taken = _matrix(*poisson_batches(Entropy.not_private(2), num_rows, rate, num_draws), num_rows)
    assert taken.max() == 1
    per_row = taken.sum(axis=0)
    assert stats.chi2.sf(((per_row - rate * num_draws) ** 2 / (rate * (1 - rate) * num_draws)).sum(), 12) > FALSE_ALARM
    # All pairs of rows in a draw, and a row with itself and others one draw later: 12 * 11 / 2 + 144 tests.
    standard = (taken - rate) / np.sqrt(rate * (1 - rate))
    within = (standard.T @ standard / np.sqrt(num_draws))[np.triu_indices(12, 1)]
    across = (standard[1:].T @ standard[:-1] / np.sqrt(num_draws - 1)).ravel()
    limit = stats.norm.isf(FALSE_ALARM / 2 / (within.size + across.size))
    assert max(np.abs(within).max(), np.abs(across).max()) < limit


@pytest.mark.parametrize("rate", [0.2, 0.001, 1e-5])
def test_poisson_gaps_are_geometric(rate):
    # At 1e-5 most gaps are longer than the table and are pieced together.
    num_flips = int(50_000 / rate)
    indices, _ = poisson_batches(Entropy.not_private(3), num_flips, rate, 1)
    gaps = np.diff(indices) - 1
    for factor, right in FACTORS:
        law = stats.geom(factor * rate, loc=-1)
        edges = np.unique(law.ppf(np.linspace(0, 1, 41)[1:-1]))
        expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * gaps.size
        observed = np.bincount(np.searchsorted(edges, gaps), minlength=expected.size)
        assert (chi_square(observed, expected) > FALSE_ALARM) is right


def test_long_gaps_are_pieced_together():
    # Two words that say "at least 16384 rows passed over", then one that says "none": row 2 * 16384 is the first taken.
    indices, _ = poisson_batches(ScriptedEntropy([0, 0, (1 << 64) - 1]), 40_000, 1e-5, 1)
    assert indices[0] == 2 * 16384


def test_poisson_rate_one_takes_everything():
    indices, offsets = poisson_batches(Entropy.not_private(4), 5, 1.0, 3)
    assert indices.tolist() == [0, 1, 2, 3, 4] * 3
    assert offsets.tolist() == [0, 5, 10, 15]


def test_poisson_tiny_rate_takes_nothing():
    indices, offsets = poisson_batches(Entropy.not_private(5), 10, 1e-300, 3)
    assert indices.size == 0
    assert offsets.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("num_rows", "batch_size"), [(6, 2), (6, 3), (7, 5), (5, 1), (4, 4)])
def test_subsets_are_uniform(num_rows, batch_size):
    batches = subsets_without_replacement(Entropy.not_private(6), num_rows, batch_size, 50_000)
    assert batches.shape == (50_000, batch_size)
    assert (np.diff(batches, axis=1) > 0).all()
    codes = np.sort((1 << batches).sum(axis=1))
    kinds, names = np.unique(codes, return_inverse=True)
    expected = stats.binom(num_rows, 0.5).pmf(batch_size) * 2**num_rows
    assert kinds.size == round(expected)
    if kinds.size > 1:
        assert fits_uniform(names, kinds.size)


@pytest.mark.parametrize(("num_rows", "batch_size"), [(1000, 30), (1000, 400), (1000, 900)])
def test_subsets_have_uniform_marginals(num_rows, batch_size):
    num_draws = 2000
    batches = subsets_without_replacement(Entropy.not_private(7), num_rows, batch_size, num_draws)
    assert (np.diff(batches, axis=1) > 0).all()
    assert batches.min() >= 0
    assert batches.max() < num_rows
    counts = np.bincount(batches.ravel(), minlength=num_rows)
    rate = batch_size / num_rows
    # Fixed sizes tie the counts together: the statistic has num_rows - 1 degrees of freedom.
    spread = rate * (1 - rate) * num_draws * num_rows / (num_rows - 1)
    statistic = ((counts - rate * num_draws) ** 2).sum() / spread
    assert stats.chi2.sf(statistic, num_rows - 1) > FALSE_ALARM
    assert stats.chi2.cdf(statistic, num_rows - 1) > FALSE_ALARM  # epochs without repetition would be too even


def test_subsets_are_independent_across_draws():
    # The overlap of two consecutive draws is hypergeometric; shuffled epochs would make it zero or all.
    num_rows, batch_size = 20, 5
    taken = np.zeros((40_001, num_rows), dtype=np.int64)
    batches = subsets_without_replacement(Entropy.not_private(8), num_rows, batch_size, 40_001)
    np.put_along_axis(taken, batches, 1, axis=1)
    overlap = (taken[1:] * taken[:-1]).sum(axis=1)
    law = stats.hypergeom(num_rows, batch_size, batch_size).pmf(np.arange(batch_size + 1))
    assert chi_square(np.bincount(overlap, minlength=batch_size + 1), law * overlap.size) > FALSE_ALARM
    shifted = stats.hypergeom(num_rows, batch_size, batch_size + 2).pmf(np.arange(batch_size + 1))
    assert chi_square(np.bincount(overlap, minlength=batch_size + 1), shifted * overlap.size) < FALSE_ALARM


def test_frozen_batches():
    indices, offsets = poisson_batches(Entropy.not_private(9), 10, 0.3, 3)
    assert indices.tolist() == [2, 3, 6, 9, 1, 2, 3, 4, 6, 1, 2, 3, 8]
    assert offsets.tolist() == [0, 4, 9, 13]
    assert subsets_without_replacement(Entropy.not_private(9), 10, 3, 2).tolist() == [[6, 7, 9], [2, 3, 8]]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ((0, 0.1, 1), "num_rows"),
        ((5, 0.0, 1), "sample_rate"),
        ((5, 1.1, 1), "sample_rate"),
        ((5, 0.1, 0), "num_draws"),
        ((5, float("nan"), 1), "sample_rate"),
        ((1 << 40, 0.1, 1 << 40), "num_draws"),
    ],
)
def test_poisson_refuses_bad_input(arguments, key):
    with pytest.raises(InvalidInput, match=f"^{key}: expected"):
        poisson_batches(Entropy.not_private(0), *arguments)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [((0, 1, 1), "num_rows"), ((5, 6, 1), "batch_size"), ((5, 0, 1), "batch_size"), ((5, 2, 0), "num_draws")],
)
def test_subsets_refuse_bad_input(arguments, key):
    with pytest.raises(InvalidInput, match=f"^{key}: expected"):
        subsets_without_replacement(Entropy.not_private(0), *arguments)
