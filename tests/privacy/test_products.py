"""Clipped sums of products: each guarantee of `clip_products`, in exact arithmetic, whatever rows hold."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from silobayes.privacy.clipping import Bounded, unpack_symmetric
from silobayes.privacy.products import AbstractProducts, Matrices, Numbers, Vectors, clip_products
from silobayes.privacy.relation import Relation, Terms, Unit, l2_sensitivity

CAPACITY = 8
HOSTILE = (0.0, -0.0, 5e-324, 2.3e-308, 1e-200, -1e-160, 1e-7, 1.0, -3.0, 1e8, 1e153, -1e160, 1e200, 1.7e308)
# Mostly what breaks sums, now and then anything.
any_float = st.one_of(st.sampled_from((*HOSTILE, math.inf, -math.inf, math.nan)), st.floats(-4, 4), st.floats(width=64))
ANY_NUMBER = st.integers(0, CAPACITY)


@st.composite
def tables(draw, num_rows=ANY_NUMBER):
    """x, the factors of vectors, roots of the factors of matrices, numbers."""
    n, d, k = draw(num_rows), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return {
        "x": draw(arrays(np.float64, (n, d), elements=any_float)),
        "factors": draw(arrays(np.float64, (n, k), elements=any_float)),
        "roots": draw(arrays(np.float64, (n, k), elements=any_float)),
        "numbers": draw(arrays(np.float64, (n,), elements=any_float)),
    }


@st.composite
def two_tables(draw):
    """The same table twice, but for one row (or all rows of one person, who are the rows before a place)."""
    table = draw(tables(num_rows=st.just(CAPACITY)))
    other = {name: column.copy() for name, column in table.items()}
    place = draw(st.integers(0, CAPACITY - 1))
    for name, column in other.items():
        column[place] = draw(arrays(np.float64, column.shape[1:], elements=any_float))
        if draw(st.booleans()):  # the opposite row is the worst of those of finite norm
            column[place] = -table[name][place]
    return table, other, place


def statistics_of(table, clip_norms=(1.0, 1.0, 1.0), scales=(1.0, 1.0, 1.0)) -> list[AbstractProducts]:
    with np.errstate(all="ignore"):
        squares = table["roots"][:, :, None] * table["roots"][:, None, :]
    return [
        Vectors(x=table["x"], factors=table["factors"], clip_norm=clip_norms[0], scale=scales[0]),
        Matrices(x=table["x"], factors=squares, clip_norm=clip_norms[1], scale=scales[1]),
        Numbers(values=table["numbers"], clip_norm=clip_norms[2], scale=scales[2]),
    ]


def distance(one: Bounded, other: Bounded) -> Fraction:
    """Squared, of two sums, in units of their scales: exact."""
    counts = one.total.astype(object) - other.total.astype(object)
    return sum((int(count) ** 2 for count in counts), 0) * Fraction(one.grid) ** 2


norms = st.floats(1e-3, 1e3)


@pytest.mark.parametrize("relation", list(Relation))
@given(two_tables(), st.tuples(norms, norms, norms), st.tuples(norms, norms, norms))
@settings(max_examples=80)
def test_one_changed_unit_moves_the_products_by_at_most_their_sensitivity(relation, pair, clip_norms, scales):
    table, other, place = pair
    if relation is Relation.ADD_REMOVE:
        other = {name: np.delete(column, place, axis=0) for name, column in table.items()}
    one, two = (clip_products(statistics_of(own, clip_norms, scales), capacity=CAPACITY) for own in (table, other))
    assert one.sensitivity(relation) == two.sensitivity(relation)
    assert distance(one, two) <= Fraction(one.sensitivity(relation)) ** 2


@pytest.mark.parametrize("relation", list(Relation))
@given(two_tables(), tables(num_rows=st.just(CAPACITY)), st.integers(1, CAPACITY), st.tuples(norms, norms, norms))
@settings(max_examples=60)
def test_all_rows_of_one_person_move_the_products_by_at_most_their_sensitivity(relation, pair, fresh, count, norms):
    """The first rows are one person's, all of which change; another has the rest."""
    table, (_, d), (_, k) = pair[0], pair[0]["x"].shape, pair[0]["roots"].shape
    persons = np.where(np.arange(CAPACITY) < count, 3, np.arange(CAPACITY) % 2)
    columns = {"x": d, "factors": k, "roots": k}
    other = {}
    for name, column in table.items():
        new = np.resize(fresh[name], (CAPACITY, columns[name])) if name in columns else fresh[name]
        other[name] = np.where((persons == 3).reshape(-1, *[1] * (column.ndim - 1)), new, column)
    kept = np.ones(CAPACITY, bool) if relation is Relation.SUBSTITUTE else persons != 3
    other = {name: column[kept] for name, column in other.items()}
    one, two = (
        clip_products(statistics_of(own, norms), capacity=CAPACITY, unit=Unit.PERSON, units=units)
        for own, units in ((table, persons), (other, persons[kept]))
    )
    assert distance(one, two) <= Fraction(one.sensitivity(relation)) ** 2


def exact_terms(statistic: AbstractProducts) -> list[list[Decimal]]:
    """Of each row that has a finite norm, in decimals of as many digits as it takes."""
    with np.errstate(all="ignore"):
        norms = statistic.norms()
    rows = [i for i in range(len(norms)) if np.isfinite(norms[i])]

    def exact(value: float) -> Decimal:
        return Decimal(float(value))

    if isinstance(statistic, Numbers):
        return [[max(exact(statistic.values[i]), Decimal(0))] for i in rows]
    if isinstance(statistic, Vectors):
        return [[exact(b) * exact(a) for b in statistic.x[i] for a in statistic.factors[i]] for i in rows]
    assert isinstance(statistic, Matrices)
    size = range(statistic.x.shape[1] * statistic.factors.shape[1])
    found = []
    for i in rows:
        x, a = statistic.x[i], statistic.factors[i]
        k, root = len(a), Decimal(2).sqrt()

        def entry(r, c, x=x, a=a, k=k):
            return exact(x[r // k]) * exact(x[c // k]) * exact(a[r % k, c % k])

        found.append([entry(r, c) * (1 if r == c else root) for r in size for c in size if r <= c])
    return found


@given(tables(), st.tuples(norms, norms, norms), st.one_of(st.none(), st.integers(1, 3)))
@settings(max_examples=40)
def test_products_are_the_exact_sum_of_clipped_terms_but_for_what_the_norm_has_room_for(table, clip_norms, num_persons):
    """Row by row in exact arithmetic, each term (of a person: all of them) pulled back to the clip norm."""
    statistics = statistics_of(table, clip_norms)
    num_rows = len(table["numbers"])
    units = None if num_persons is None else np.arange(num_rows) % num_persons
    bounded = clip_products(statistics, capacity=CAPACITY, unit=Unit.ROW if units is None else Unit.PERSON, units=units)
    ends = np.cumsum([own.size for own in statistics])[:-1]
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, -(10**6), 10**6
        for own, counts, block in zip(statistics, np.split(bounded.total, ends), bounded.blocks, strict=True):
            terms = exact_terms(own)
            lengths = [sum((part**2 for part in term), Decimal(0)).sqrt() for term in terms]
            if isinstance(own, Numbers):
                lengths = [Decimal(float(abs(value))) for value in own.values[np.isfinite(own.values)]]
            with np.errstate(all="ignore"):
                owners = np.flatnonzero(np.isfinite(own.norms())) % (num_persons or CAPACITY)
            total = [Decimal(0)] * own.size
            for owner, term in zip(owners, terms, strict=True):
                whole = sum((lengths[j] for j in range(len(terms)) if owners[j] == owner), Decimal(0))
                weight = Decimal(own.clip_norm) / max(whole, Decimal(own.clip_norm))
                total = [have + weight * part for have, part in zip(total, term, strict=True)]
            grid = Decimal(bounded.grid) * Decimal(own.scale)
            error = sum(((int(c) * grid - t) ** 2 for c, t in zip(counts, total, strict=True)), Decimal(0)).sqrt()
            room = (Decimal(block.norm) * Decimal(own.scale) - Decimal(own.clip_norm)) / 2
            assert error <= room


@pytest.mark.parametrize("num_rows", [2000, 20_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_float64_sums_of_products_err_by_less_than_the_room_of_their_norm(num_rows, seed):
    """One large term first and many small ones after it, which is where sums lose most; and rows of both signs."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((num_rows, 1)) < 0.5, 1.0, -1.0) * np.array([[1.0, 1 / 3]])
    if seed:
        x = np.abs(x)
    factors = rng.uniform(0.1, 0.9, (num_rows, 1))
    own = Vectors(x=x, factors=factors, clip_norm=1.0, scale=1.0)
    total = own.total(1.0 / np.maximum(own.norms(), 1.0))
    weights = 1.0 / np.maximum(own.norms(), 1.0)
    exact = [math.fsum(x[:, j] * (factors[:, 0] * weights)) for j in range(2)]
    bounded = clip_products([own], capacity=num_rows)
    room = num_rows * (num_rows + 16) * 2.0**-53
    assert np.linalg.norm(total - exact) <= room
    assert bounded.blocks[0].norm >= 1.0 + 2 * room + bounded.grid * math.sqrt(2)
    assert bounded.blocks[0].norm <= 1.0 + 2 * room + 2.0**-15  # and no dearer than it says


@given(tables(), st.randoms(), st.tuples(norms, norms, norms))
@settings(max_examples=60)
def test_the_order_of_rows_moves_products_by_no_more_than_the_room_of_their_norm(table, random, clip_norms):
    order = list(range(len(table["numbers"])))
    random.shuffle(order)
    shuffled = {name: column[order] for name, column in table.items()}
    one, two = (clip_products(statistics_of(own, clip_norms), capacity=CAPACITY) for own in (table, shuffled))
    assert np.abs(one.total - two.total).max(initial=0) <= 1  # next to a half of a cell, the last bit decides


@pytest.mark.parametrize(
    ("x", "factor"),
    [(1e150, 1e-200), (1e88, 2e-177), (1e153, 1e-300), (1e160, 1e-200), (1e-200, 1e300), (1e-90, 1e250)],
)
def test_small_factors_of_large_rows_are_clipped_like_any_others(x, factor):
    """Squares of small numbers are zero, of large ones infinite: norms must not be made of them."""
    for own in (
        Vectors(x=np.array([[x, x]]), factors=np.array([[factor, factor]]), clip_norm=1e-3, scale=1e-3),
        Matrices(x=np.array([[x, -x]]), factors=np.full((1, 2, 2), factor), clip_norm=1e-3, scale=1e-3),
    ):
        bounded = clip_products([own], capacity=1)
        assert np.linalg.norm(bounded.total * bounded.grid) <= bounded.norm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_a_row_whose_terms_are_not_finite_contributes_nothing(bad):
    """Nor does it take others along; terms of the same row that are finite stay."""
    rng = np.random.default_rng(0)
    table = {name: rng.normal(size=(4, *([2] if name != "numbers" else []))) for name in ("x", "factors", "roots")}
    table["numbers"] = rng.uniform(size=4)
    hostile = {name: column.copy() for name, column in table.items()}
    hostile["x"][1, 0] = bad
    without = {name: np.delete(column, 1, axis=0) for name, column in table.items()}
    one, two = (clip_products(statistics_of(own), capacity=CAPACITY) for own in (hostile, without))
    ends = np.cumsum([block.size for block in one.blocks])[:-1]
    parts = [np.split(bounded.total, ends) for bounded in (one, two)]
    if not abs(bad) < math.inf:  # the vector of 1e200 is finite
        assert np.array_equal(parts[0][0], parts[1][0])
    assert np.array_equal(parts[0][1], parts[1][1])  # the square of 1e200 is not finite either
    assert parts[0][2] > parts[1][2]


def test_sensitivities_of_products_are_reached_and_not_merely_bounded():
    """Opposite vectors; matrices and numbers at right angles or gone."""
    up, down = {"x": np.array([[1.0, 0.0]]), "factors": np.ones((1, 1))}, {"factors": -np.ones((1, 1))}
    vectors = [Vectors(**{**up, **own}, clip_norm=0.5, scale=0.5) for own in ({}, down)]
    matrices = [
        Matrices(x=np.array([x]), factors=np.full((1, 1, 1), 7.0), clip_norm=2.0, scale=2.0)
        for x in ([1.0, 0.0], [0.0, 1.0])
    ]
    for kind, (one, two) in (("vectors", vectors), ("matrices", matrices)):
        first, second, empty = (clip_products([own], capacity=1) for own in (one, two, one.of(np.zeros(1, bool))))
        expected = 2.0 if kind == "vectors" else math.sqrt(2.0)
        assert math.sqrt(distance(first, second)) == pytest.approx(expected, rel=1e-4)
        assert first.sensitivity(Relation.SUBSTITUTE) == pytest.approx(expected, rel=1e-4)
        assert math.sqrt(distance(first, empty)) == pytest.approx(1.0, rel=1e-4)
        assert first.sensitivity(Relation.ADD_REMOVE) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("relation", list(Relation))
def test_scales_share_one_unit_among_blocks(relation):
    """Each block moves by the root of its share; all together by 1."""
    shares, norms = (0.7, 0.2, 0.1), (0.3, 5.0, 0.01)
    kinds = (Terms.GENERAL, Terms.PSD, Terms.NON_NEGATIVE)
    scales = tuple(
        l2_sensitivity(norm, kind, relation) / math.sqrt(share)
        for norm, kind, share in zip(norms, kinds, shares, strict=True)
    )
    empty = {name: np.zeros((0, 2)) for name in ("x", "factors", "roots")} | {"numbers": np.zeros(0)}
    bounded = clip_products(statistics_of(empty, norms, scales), capacity=100)
    assert 1.0 <= bounded.sensitivity(relation) <= 1.0 + 1e-4
    assert [block.terms for block in bounded.blocks] == list(kinds)


def test_of_no_rows_the_sum_is_zero_and_priced_like_any_other():
    table = {name: np.ones((3, 2)) for name in ("x", "factors", "roots")} | {"numbers": np.ones(3)}
    none = {name: column[:0] for name, column in table.items()}
    for persons in (None, np.array([0, 0, 1])):
        unit = Unit.ROW if persons is None else Unit.PERSON
        none_of_them = None if persons is None else persons[:0]
        full = clip_products(statistics_of(table), capacity=CAPACITY, unit=unit, units=persons)
        empty = clip_products(statistics_of(none), capacity=CAPACITY, unit=unit, units=none_of_them)
        assert not empty.total.any()
        assert empty.blocks == full.blocks
        assert (empty.grid, empty.unit, empty.total.shape) == (full.grid, full.unit, full.total.shape)


@pytest.mark.parametrize("size", [1, 7, 300])
def test_rounding_every_number_up_is_within_the_declared_norm(size):
    """All entries but the last just above half a cell, and the last makes the norm 1."""
    grid = clip_products(
        [Vectors(x=np.zeros((0, size)), factors=np.zeros((0, 1)), clip_norm=1.0, scale=1.0)], capacity=1
    ).grid
    row = np.full(size, (math.floor(0.9 / (grid * math.sqrt(size))) + 0.5 + 1e-3) * grid)
    row[-1] = math.sqrt(1.0 - (size - 1) * row[0] ** 2)
    for factor in (1.0, 7.0):
        own = Vectors(x=row[None], factors=np.array([[factor]]), clip_norm=1.0, scale=1.0)
        bounded = clip_products([own], capacity=1)
        squares = sum(int(cells) ** 2 for cells in bounded.total) * Fraction(bounded.grid) ** 2
        assert squares <= Fraction(bounded.norm) ** 2


def test_decoded_products_are_what_they_say():
    rng = np.random.default_rng(3)
    x, a, b = rng.normal(size=(5, 3)), rng.normal(size=(5, 2)), rng.normal(size=(5, 2, 2))
    psd = b @ np.swapaxes(b, 1, 2)
    bounded = clip_products(
        [
            Vectors(x=x, factors=a, clip_norm=100.0, scale=30.0),
            Matrices(x=x, factors=psd, clip_norm=1000.0, scale=10.0),
            Numbers(values=np.array([1.0, -2.0, 3.0, 0.0, 0.5]), clip_norm=50.0, scale=7.0),
        ],
        capacity=5,
    )
    vectors, matrices, numbers = bounded.decode(bounded.total)
    np.testing.assert_allclose(vectors, sum(np.kron(r, s) for r, s in zip(x, a, strict=True)), atol=1e-3)
    whole = sum(np.kron(np.outer(r, r), s) for r, s in zip(x, psd, strict=True))
    np.testing.assert_allclose(unpack_symmetric(matrices), whole, atol=1e-2)
    np.testing.assert_allclose(numbers, 4.5, atol=1e-3)  # numbers below zero are hostile


def test_an_overflow_warns_nobody(recwarn):
    """A warning would tell that somebody's row overflows."""
    table = {name: np.full((2, 2), 1e200) for name in ("x", "factors", "roots")} | {"numbers": np.full(2, math.inf)}
    clip_products(statistics_of(table), capacity=2)
    assert not recwarn.list
