"""Clip norms by a private quantile: counts of norms on a public grid, and what is made of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.mechanisms import GaussianMechanism
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.clip_norms import (
    NUM_BINS,
    bounded_counts,
    noise_of_share,
    norm_grid,
    norm_per_visit,
    quantile_norm,
)
from silobayes.testing import FreeAccount

GRIDS = [norm_grid(3.0), norm_grid(0.2)]
STEP = np.sqrt(2.0)


def parts_of(seed: int, num_shards: int, dim: int = 3) -> list[np.ndarray]:
    """Norms over three orders of magnitude, well within the grids."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-1.5, 1.5, size=(2, num_shards, 1))
    return [
        middle * size * unit / np.linalg.norm(unit, axis=1, keepdims=True)
        for middle, size, unit in zip((3.0, 0.2), sizes, rng.normal(size=(2, num_shards, dim)), strict=True)
    ]


def counts_of(bounded: Bounded) -> tuple[np.ndarray, ...]:
    return bounded.decode(bounded.total)


def test_the_grid_is_two_orders_of_magnitude_to_each_side_in_equal_steps():
    grid = norm_grid(3.0)
    np.testing.assert_allclose(grid[1:] / grid[:-1], STEP)
    assert grid[NUM_BINS // 2] == 3.0
    assert grid[-1] / 3.0 == 3.0 / grid[0] == 128.0


@given(seed=st.integers(0, 10_000), num_shards=st.integers(1, 200), quantile=st.floats(0.01, 0.99))
def test_without_noise_it_is_the_quantile_of_the_norms_rounded_up_to_the_grid(seed, num_shards, quantile):
    parts = parts_of(seed, num_shards)
    for part, grid, counts in zip(parts, GRIDS, counts_of(bounded_counts(parts, GRIDS, Unit.ROW)), strict=True):
        exact = np.quantile(np.linalg.norm(part, axis=1), quantile, method="inverted_cdf")
        chosen = quantile_norm(counts, grid, quantile)
        assert exact <= chosen * (1 + 1e-12)
        assert chosen <= STEP * exact * (1 + 1e-12)


@given(seed=st.integers(0, 10_000), noise=st.sampled_from([0.0, 1.0, 30.0, 1e4]))
def test_a_larger_quantile_never_gives_a_smaller_norm_whatever_the_noise(seed, noise):
    rng = np.random.default_rng(seed)
    counts = rng.integers(20, size=NUM_BINS) + noise * rng.normal(size=NUM_BINS)
    chosen = [quantile_norm(counts, GRIDS[0], quantile) for quantile in np.linspace(0.01, 0.99, 40)]
    assert np.all(np.diff(chosen) >= 0.0)
    assert set(chosen) <= set(GRIDS[0].tolist())


@given(seed=st.integers(0, 10_000))
def test_the_order_of_the_shards_does_not_matter(seed):
    parts = parts_of(seed, 30)
    order = np.random.default_rng(seed).permutation(30)
    first, second = (bounded_counts(some, GRIDS, Unit.ROW) for some in (parts, [part[order] for part in parts]))
    assert np.array_equal(first.total, second.total)


hostile = st.sampled_from([0.0, 5e-324, 1e-200, 0.1, 3.0, 1e20, 1e200, 1.7e308, np.inf, -np.inf, np.nan])


@given(seed=st.integers(0, 1000), rows=st.lists(hostile, min_size=12, max_size=12))
@pytest.mark.parametrize("unit", [Unit.ROW, Unit.PERSON])
def test_one_changed_shard_moves_two_counts_of_each_part_by_one_at_most_whatever_it_holds(unit, seed, rows):
    parts = parts_of(seed, 5)
    before, after = ([part.copy() for part in parts] for _ in range(2))
    for k in range(2):
        before[k][2], after[k][2] = rows[3 * k : 3 * k + 3], rows[6 + 3 * k : 9 + 3 * k]
    first, second = (bounded_counts(some, GRIDS, unit) for some in (before, after))
    for left, right in zip(counts_of(first), counts_of(second), strict=True):
        moved = left - right
        assert np.sum(np.abs(moved)) <= 2.0
        assert np.max(np.abs(moved)) <= 1.0
    shards = 2.0 if unit is Unit.PERSON else 1.0  # two persons may be in two shards
    for relation in Relation:
        allowed = first.sensitivity(relation)
        moved = np.linalg.norm((first.total - second.total) * first.grid)
        assert moved <= allowed
        # Two histograms, each by sqrt(2): non-negative terms never move as far as opposite ones, 2 sqrt(2).
        assert allowed == pytest.approx((shards if relation is Relation.SUBSTITUTE else 1.0) * 2.0, rel=1e-3)


def test_a_shard_that_asks_for_nothing_or_for_what_is_not_a_number_is_not_counted():
    linear = np.array([[0.0, 0.0], [3.0, 0.0], [np.nan, 1.0], [1e200, 1e200], [1e-30, 0.0]])
    counts = counts_of(bounded_counts([linear, linear], GRIDS, Unit.ROW))
    for part, grid in zip(counts, GRIDS, strict=True):
        assert part.sum() == 3.0  # an ordinary one, and one beyond each end
        assert part[np.searchsorted(grid, 3.0)] == 1.0
        assert (part[0], part[-1]) == (1.0, 1.0)


def test_half_of_the_visits_make_a_path_of_the_norm_and_no_visit_is_clipped_to_more():
    assert norm_per_visit(3.0, damping=0.4, num_visits=10) * 0.4 * 10 / 2 == pytest.approx(3.0)
    assert norm_per_visit(3.0, damping=0.4, num_visits=3) == 3.0
    assert norm_per_visit(3.0, damping=1.0, num_visits=1) == 3.0


def test_the_noise_of_a_share_is_what_it_says():
    """Statistical: 4,000 draws, standard error 1.1 %; 8 % is seven of them, false alarm 1e-12."""
    noise = 5.0 * np.random.default_rng(0).normal(size=(4000, NUM_BINS))
    below = noise[:, : NUM_BINS // 2].sum(axis=1)
    seen = np.std((below - noise.sum(axis=1) / 2) / 100)
    expected = noise_of_share(5.0, 100)
    assert seen == pytest.approx(expected, rel=0.08)
    for wrong in (2 / 3, 3 / 2):
        assert seen != pytest.approx(wrong * expected, rel=0.08)


def test_through_the_door_the_norm_is_within_a_step_while_the_noise_of_the_share_is_small():
    """Statistical, fixed keys: norms fill three decades evenly, so one step of the grid is 5 % of the shards; the
    noise of the share is .5 %, a step is ten of them. At a hundred times that noise the norm is anywhere."""
    num_shards = 4000
    parts = parts_of(3, num_shards)
    bounded = bounded_counts(parts, GRIDS, Unit.ROW)
    exact = [np.quantile(np.linalg.norm(part, axis=1), 0.5) for part in parts]

    def worst(stddev: float) -> float:
        """Steps of the grid between the exact and the chosen norms, at most, in 40 draws."""
        steps = []
        for key in range(40):
            door = Door(FreeAccount(Relation.SUBSTITUTE, Unit.ROW), FreshDraws(Entropy.not_private(key)))
            released = door.release(GaussianMechanism(noise_multiplier=stddev), bounded)
            for counts, grid, truth in zip(released.blocks, GRIDS, exact, strict=True):
                steps.append(abs(np.log2(quantile_norm(counts, grid, 0.5) / truth)) * 2)
        return max(steps)

    small = 0.005 / noise_of_share(1.0, num_shards)
    assert worst(small) <= 2.0  # rounding up to the grid, and a step of noise
    assert worst(100 * small) > 5.0
