"""Clipping: norms, hostile rows, units, blocks; each guarantee of `clip` has its test."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from silobayes.core.errors import InvalidInput
from silobayes.privacy.clipping import (
    Bounded,
    bounded_loop_sum,
    clip,
    clip_blocks,
    clip_places,
    general,
    non_negative,
    pack_symmetric,
    psd,
    unpack_symmetric,
)
from silobayes.privacy.relation import Relation, Terms, Unit
from silobayes.privacy.sampling import Batch, PoissonSampler

any_float = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True, width=64)
matrices = arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=6), elements=any_float)
norms = st.floats(1e-3, 1e3)


def length(bounded: Bounded, order: int = 2) -> float:
    return float(np.linalg.norm(bounded.total * bounded.grid, ord=order))


@given(matrices, norms, st.sampled_from([1, 2]))
def test_clip_never_exceeds_its_norm(values, clip_norm, order):
    for row in values:
        bounded = clip(general(row[None]), clip_norm, order=order)
        assert length(bounded, order) <= bounded.norm


@given(matrices, norms)
def test_a_row_with_nan_or_infinity_contributes_zero(values, clip_norm):
    finite = np.isfinite(values).all(axis=1)
    total = clip(general(values), clip_norm).total
    assert np.array_equal(total, clip(general(values[finite]), clip_norm).total if finite.any() else 0 * total)


@given(matrices, norms, st.randoms())
def test_the_sum_does_not_depend_on_the_order_of_the_rows(values, clip_norm, random):
    order = list(range(len(values)))
    random.shuffle(order)
    assert np.array_equal(clip(general(values), clip_norm).total, clip(general(values[order]), clip_norm).total)


kinds = {
    "general": lambda x: general(x),
    "non_negative": lambda x: non_negative(np.abs(x)),
    "psd": lambda x: psd(x, np.abs(x[:, 0])),
}


@pytest.mark.parametrize("size", [2, 16, 64, 1024])
@pytest.mark.parametrize("kind", [general, non_negative])
def test_a_row_that_rounds_up_everywhere_is_within_the_declared_norm(kind, size):
    """All entries but the last just above half a cell, and the last makes the norm 1: in exact arithmetic."""
    grid = clip(kind(np.zeros((1, size))), 1.0).grid
    row = np.full(size, (math.floor(0.9 / (grid * math.sqrt(size))) + 0.5 + 1e-3) * grid)
    row[-1] = math.sqrt(1.0 - (size - 1) * row[0] ** 2)
    for factor in (1.0, 1.0 + 1e-15, 7.0):
        # A longer row is pulled back to the same place.
        bounded = clip(kind(factor * row[None]), 1.0)
        squares = sum(int(cells) ** 2 for cells in bounded.total) * Fraction(bounded.grid) ** 2
        assert squares <= Fraction(bounded.norm) ** 2
    assert squares > 1 + Fraction(grid) * size // 8  # the room is needed


@pytest.mark.parametrize(("chunk", "capacity"), [(64, 64), (64, 4096), (7, 1000)])
def test_float32_sums_of_a_loop_err_by_less_than_the_room_of_their_norm(chunk, capacity):
    """Terms of one clip norm, all alike, added up one after the other: two neighbours may err to either side."""
    batch = Batch(indices=np.arange(capacity), sampling=PoissonSampler(sample_rate=0.5, max_rows=2 * capacity).sampling)
    for entry in (0.1, 1 / 3, 0.7):
        term = np.array([entry, math.sqrt(0.999999 - entry**2)], dtype=np.float32)
        partial, left = [], capacity
        while left:
            total = np.zeros(2, dtype=np.float32)
            for _ in range(min(chunk, left)):
                total += term
            partial.append(total)
            left -= min(chunk, left)
        bounded = bounded_loop_sum(np.stack(partial), 1.0, chunk=chunk, batch=batch, capacity=capacity)
        error = np.linalg.norm(bounded.total * bounded.grid - capacity * term.astype(np.float64))
        assert 0.0 < 2 * error <= bounded.norm - 1.0
        assert bounded.sampling == batch.sampling
    # By the textbook each of n additions errs by at most 2^-24 of the sum of norms, in both neighbours.
    assert bounded.norm - 1.0 >= 2 * capacity * chunk * 2.0**-24
    assert bounded.norm - 1.0 <= 1e-4 + 2 * capacity * (chunk + 8) * 2.0**-24  # and no dearer than it says


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("relation", list(Relation))
@given(matrices, matrices, norms)
@settings(max_examples=60)
def test_one_changed_unit_moves_the_sum_by_at_most_its_sensitivity(kind, relation, values, others, clip_norm):
    width = min(values.shape[1], others.shape[1])
    values, others = values[:, :width], others[:, :width]
    one = clip(kinds[kind](values[:1]), clip_norm)
    two = clip(kinds[kind](others[:1]), clip_norm)
    gone = two.total if relation is Relation.SUBSTITUTE else 0 * two.total
    assert np.linalg.norm((one.total - gone) * one.grid) <= one.sensitivity(relation)


def test_sensitivities_are_reached_and_not_merely_bounded():
    """Opposite rows for general terms, rows at right angles for non-negative and PSD ones."""
    up, right = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    for terms, first, second, factor in [
        (general, up, -up, 2.0),
        (non_negative, up, right, math.sqrt(2)),
        (psd, up, right, math.sqrt(2)),
    ]:
        one, two = clip(terms(first), 1.0), clip(terms(second), 1.0)
        moved = np.linalg.norm((one.total - two.total) * one.grid)
        assert moved == pytest.approx(factor, rel=1e-4)
        assert one.sensitivity(Relation.SUBSTITUTE) == pytest.approx(factor, rel=1e-4)
        assert one.sensitivity(Relation.ADD_REMOVE) == pytest.approx(1.0, rel=1e-4)


def test_l1_gains_nothing_from_non_negative_terms():
    bounded = clip(non_negative(np.eye(2)), 1.0, order=1)
    assert bounded.sensitivity(Relation.SUBSTITUTE) == pytest.approx(2.0, rel=1e-4)


def test_small_rows_are_not_touched_beyond_the_grid():
    values = np.random.default_rng(0).normal(size=(50, 4)) * 0.1
    (decoded,) = (lambda b: b.decode(b.total))(clip(general(values), 10.0))
    np.testing.assert_allclose(decoded, values.sum(axis=0), atol=50 * 10.0 * 2.0**-16)


def test_blocks_are_one_vector_in_units_of_their_norms():
    x = np.array([[3.0, 4.0]])
    bounded = clip_blocks([general(x), psd(x)], [1.0, 50.0])
    score, curvature = bounded.decode(bounded.total)
    np.testing.assert_allclose(score, [0.6, 0.8], atol=1e-4)
    np.testing.assert_allclose(unpack_symmetric(curvature), np.outer(x[0], x[0]), atol=50 * 1e-4)
    assert bounded.sensitivity(Relation.SUBSTITUTE) == pytest.approx(math.sqrt(4 + 2), rel=1e-4)
    assert bounded.sensitivity(Relation.ADD_REMOVE) == pytest.approx(math.sqrt(2), rel=1e-4)


@given(arrays(np.float64, (3, 3), elements=st.floats(-10, 10)))
def test_packing_keeps_the_frobenius_norm_and_round_trips(matrix):
    matrix = matrix + matrix.T
    packed = pack_symmetric(matrix)
    assert np.linalg.norm(packed) == pytest.approx(np.linalg.norm(matrix))
    np.testing.assert_allclose(unpack_symmetric(packed), matrix, atol=1e-12)


def test_a_person_is_clipped_once_however_many_rows_they_have():
    values = np.ones((1000, 2))
    persons = np.array(["ann", "bob"] * 500)
    bounded = clip(general(values), 1.0, unit=Unit.PERSON, persons=persons)
    assert length(bounded) == pytest.approx(2.0, rel=1e-3)
    assert length(clip(general(values), 1.0)) == pytest.approx(1000.0, rel=1e-3)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 10**6))
def test_person_terms_are_grouped_like_a_loop_would(num_rows, num_persons, seed):
    rng = np.random.default_rng(seed)
    values, persons = rng.normal(size=(num_rows, 3)), rng.integers(num_persons, size=num_rows)
    grouped = clip(general(values), 0.7, unit=Unit.PERSON, persons=persons)
    looped = sum(
        clip(general(values[persons == person].sum(axis=0, keepdims=True)), 0.7).total for person in set(persons)
    )
    assert np.abs(grouped.total - looped).max() <= num_persons  # float sums may round to the next cell


def test_a_client_is_one_term():
    assert length(clip(general(np.ones((1000, 2))), 1.0, unit=Unit.CLIENT)) == pytest.approx(1.0, rel=1e-3)


def test_a_shard_changes_but_never_vanishes():
    """Found by record/replay: a shard that loses a row keeps a term, possibly the opposite one."""
    shards = clip(general(np.array([[1.0]])), 1.0, sharded=True)
    assert shards.sensitivity(Relation.ADD_REMOVE) == pytest.approx(2.0, rel=1e-4)
    without_the_row = clip(general(np.array([[-1.0]])), 1.0, sharded=True)
    assert abs(shards.total - without_the_row.total).max() * shards.grid <= shards.sensitivity(Relation.ADD_REMOVE)
    with pytest.raises(InvalidInput, match="sharded"):
        clip(general(np.ones((2, 1))), 1.0, unit=Unit.PERSON, persons=np.zeros(2), sharded=True)


def test_declared_terms_are_enforced_on_hostile_rows():
    assert (clip(non_negative(np.array([[-5.0, 1.0]])), 1.0).total >= 0).all()
    hostile = clip(psd(np.array([[1.0, 2.0]]), np.array([-1.0])), 1.0)
    assert not hostile.total.any()


def test_many_rows_go_through_in_slices(monkeypatch):
    values = np.random.default_rng(1).normal(size=(97, 5))
    persons = np.random.default_rng(2).integers(20, size=97)
    whole = [clip(psd(values), 1.0), clip(general(values), 1.0, unit=Unit.PERSON, persons=persons)]
    monkeypatch.setattr("silobayes.privacy.clipping._CHUNK", 15)
    sliced = [clip(psd(values), 1.0), clip(general(values), 1.0, unit=Unit.PERSON, persons=persons)]
    for one, two in zip(whole, sliced, strict=True):
        assert np.array_equal(one.total, two.total)


@pytest.mark.parametrize("clip_norm", [-1.0, 0.0, math.nan, math.inf, "1"])
def test_a_bad_clip_norm_is_named(clip_norm):
    with pytest.raises(InvalidInput, match="clip_norm"):
        clip(general(np.ones((2, 2))), clip_norm)


def test_bounded_cannot_be_made_by_hand():
    with pytest.raises(InvalidInput, match="clip"):
        Bounded(
            total=np.zeros(1, dtype=np.int64),
            blocks=(),
            grid=1.0,
            order=2,
            unit=Unit.ROW,
            sharded=False,
            sampling=None,
            proof=None,
        )


def test_wrong_units_are_refused():
    with pytest.raises(InvalidInput, match="persons"):
        clip(general(np.ones((2, 2))), 1.0, unit=Unit.PERSON)
    with pytest.raises(InvalidInput, match="persons"):
        clip(general(np.ones((2, 2))), 1.0, persons=np.zeros(2))
    with pytest.raises(InvalidInput, match="blocks"):
        clip_blocks([general(np.ones((2, 2))), general(np.ones((3, 2)))], [1.0, 1.0])
    assert clip(general(np.ones((2, 2))), 1.0).blocks[0].terms is Terms.GENERAL


def test_another_person_may_go_to_another_shard():
    """Two shards, each with one term: A leaves the first, B joins the second, and both terms flip."""
    before = clip(general(np.array([[1.0], [1.0]])), 1.0, unit=Unit.PERSON, sharded=True)
    after = clip(general(np.array([[-1.0], [-1.0]])), 1.0, unit=Unit.PERSON, sharded=True)
    moved = abs(before.total - after.total).max() * before.grid
    assert moved == pytest.approx(4.0, rel=1e-4)
    assert moved <= before.sensitivity(Relation.SUBSTITUTE)
    assert before.sensitivity(Relation.ADD_REMOVE) == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("relation", list(Relation))
def test_one_changed_row_moves_its_own_place_only_and_no_further_than_declared(relation):
    rng = np.random.default_rng(8)
    for _ in range(200):
        rows = rng.normal(size=(7, 3)) * 10.0 ** rng.uniform(-2, 3)
        other, place = rows.copy(), int(rng.integers(7))
        other[place] = 0.0 if relation is Relation.ADD_REMOVE else -rows[place] * 10.0 ** rng.uniform(-1, 1)
        first, second = clip_places(general(rows), 1.5), clip_places(general(other), 1.5)
        moved = (first.total - second.total).reshape(7, 3) * first.grid
        assert np.linalg.norm(moved[place]) <= first.sensitivity(relation)
        assert not np.delete(moved, place, axis=0).any()


def test_places_of_rows_that_are_not_finite_are_empty():
    rows = np.array([[1.0, 2.0], [np.nan, 1.0], [np.inf, 0.0]])
    (value,) = clip_places(general(rows), 10.0).decode(clip_places(general(rows), 10.0).total)
    np.testing.assert_allclose(value.reshape(3, 2), [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], atol=1e-3)
