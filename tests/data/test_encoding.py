import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.data.columns import Categorical, Numeric
from silobayes.data.encoding import ClassTarget, CountTarget, Encoding, Outside, RealTarget

CANARY = "canary-7341"
COLUMNS = (Numeric(name="age", low=0.0, high=100.0, typical=0.0), Categorical(name="ward", categories=("a", "b", "c")))


def encoding(**changes) -> Encoding:
    given = {
        "columns": COLUMNS,
        "target": ClassTarget(name="died", classes=("no", "yes")),
        "person": None,
        "unused": (),
        "outside": Outside.REFUSE,
        "intercept": True,
    }
    return Encoding(**(given | changes))


def frame(**changes) -> pd.DataFrame:
    return pd.DataFrame({"age": [25, 100], "ward": ["c", "a"], "died": ["yes", "no"]} | changes)


def refusal(given: Encoding, table: pd.DataFrame) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        given.encode(table, "north")
    assert CANARY not in str(caught.value)
    assert "north" in str(caught.value)
    return caught.value


def test_the_encoding_by_hand():
    x, y, persons = encoding(unused=("note",)).encode(frame(note=[CANARY, ""]), "north")
    assert encoding().feature_names == ("age", "ward=a", "ward=b", "ward=c", "intercept")
    np.testing.assert_array_equal(x, np.array([[0.25, 0, 0, 1, 1], [1, 1, 0, 0, 1]], np.float32))
    np.testing.assert_array_equal(y, [1, 0])
    assert (x.dtype, y.dtype, persons) == (np.float32, np.int32, None)
    without = encoding(intercept=False)
    np.testing.assert_array_equal(without.encode_features(frame()), x[:, :-1])
    assert without.feature_names == encoding().feature_names[:-1]


def test_texts_and_numbers_encode_alike():
    table = frame()
    expected = encoding().encode(table, "north")[0]
    for same in (
        table.astype(str),
        table.astype({"age": "float32"}),
        table.astype({"age": "Int64", "ward": "category"}),
    ):
        np.testing.assert_array_equal(encoding().encode(same, "north")[0], expected)


@pytest.mark.parametrize(
    ("cells", "categories"),
    [
        ([1, 3, 2], (1, 2, 3)),
        (["1", "3.0", " 2"], (1, 2, 3)),
        ([1.0, 3.0, 2.0], (1, 2, 3)),
        ([1, 3, 2], ("1", "2", "3")),
        ([True, False, False], ("true", "maybe", "false")),
    ],
)
def test_categories_are_compared_as_they_are_listed(cells, categories):
    given = encoding(columns=(Categorical(name="c", categories=categories),), target=None)
    expected = np.eye(3)[[0, 2, 2 if categories[0] == "true" else 1]]
    np.testing.assert_array_equal(given.encode(pd.DataFrame({"c": cells}), "north")[0][:, :3], expected)


@pytest.mark.parametrize("cells", [[True, False], [1, 2], [np.int64(1), "no"], ["yes", True, 2]])
def test_whether_a_category_is_accepted_does_not_depend_on_the_other_rows(cells):
    """One text among whole numbers changes the type of the whole column: a refusal of others would tell of it."""
    categories = ("true", "false", "1", "2", "yes", "no")
    given = encoding(columns=(Categorical(name="c", categories=categories),), target=None)
    alone = [given.encode(pd.DataFrame({"c": [cell]}), "north")[0] for cell in cells]
    for other in ([], ["no"], [True], [2]):
        together = given.encode(pd.DataFrame({"c": [*cells, *other]}), "north")[0]
        np.testing.assert_array_equal(together[: len(cells)], np.concatenate(alone))


@pytest.mark.parametrize("cell", [math.nan, math.inf, -math.inf, None, "", "nan", "inf", CANARY, "1,5", pd.NaT, [1]])
def test_cells_that_are_no_finite_numbers_are_refused(cell):
    for outside in Outside:
        error = refusal(encoding(outside=outside), frame(age=pd.Series([3, cell], dtype=object)))
        assert error.key == "data.bounds.age"


def test_dates_and_complex_numbers_are_no_numbers():
    for cells in (pd.to_datetime(["2020-01-01", "2020-01-02"]), np.array([1j, 1.0])):
        assert "finite numbers" in str(refusal(encoding(outside=Outside.CLIP), frame(age=cells)))


@pytest.mark.parametrize("cell", [-0.001, 100.001, 73417341.0, -1e300])
def test_numbers_outside_their_bounds_are_refused_or_clipped(cell):
    error = refusal(encoding(), frame(age=[3, cell]))
    assert error.key == "data.bounds.age"
    assert str(cell) not in str(error)
    assert "73417341" not in str(error)
    x, _, _ = encoding(outside=Outside.CLIP).encode(frame(age=[3, cell]), "north")
    assert x[1, 0] == (1.0 if cell > 0 else 0.0)


@pytest.mark.parametrize("cell", [CANARY, "", "A", "a ", None, math.nan, 1, ["a"]])
def test_categories_that_are_not_listed_are_refused(cell):
    for outside in Outside:
        error = refusal(encoding(outside=outside), frame(ward=pd.Series(["a", cell], dtype=object)))
        assert error.key == "data.bounds.ward"
        is_empty = cell is None or cell == "" or cell is math.nan
        assert ("an empty cell" if is_empty else "List the category") in str(error)


@pytest.mark.parametrize("cell", [CANARY, None, "NO"])
def test_classes_that_are_not_listed_are_refused(cell):
    error = refusal(encoding(), frame(died=["yes", cell]))
    assert error.key == "data.target"
    assert ("an empty cell" if cell is None else "List the class") in str(error)


def test_a_missing_target_column_is_refused():
    error = refusal(encoding(), frame().drop(columns="died"))
    assert error.key == "data.target"
    np.testing.assert_array_equal(encoding().encode_features(frame().drop(columns="died")).shape, (2, 5))


def test_missing_and_extra_columns_are_refused():
    missing = refusal(encoding(), frame().drop(columns="age"))
    assert missing.key == "data.features"
    assert "'age'" in str(missing)
    extra = refusal(encoding(), frame(**{CANARY: [1, 2]}))
    assert extra.key == "data.features"
    assert "1 more columns" in str(extra)
    twice = pd.concat([frame(), frame()[["age"]]], axis=1)
    assert "twice" in str(refusal(encoding(), twice))


def test_an_empty_table_is_refused():
    assert "an empty table" in str(refusal(encoding(), frame().iloc[:0]))


def test_counts_are_whole_numbers_within_bounds():
    given = encoding(target=CountTarget(name="died", low=0.0, high=9.0))
    _, y, _ = given.encode(frame(died=["3", "9.0"]), "north")
    assert y.tolist() == [3.0, 9.0]
    assert y.dtype == np.float32
    assert "whole numbers" in str(refusal(given, frame(died=[3, 2.5])))
    assert "numbers in [" in str(refusal(given, frame(died=[3, 10])))
    assert "finite numbers" in str(refusal(given, frame(died=["3", CANARY])))


def test_without_a_target_y_is_zero():
    _, y, _ = encoding(target=None).encode(frame().drop(columns="died"), "north")
    assert y.tolist() == [0.0, 0.0]


def test_a_persons_number_depends_on_their_id_only():
    given = encoding(person="who")
    _, _, persons = given.encode(frame(who=[CANARY, CANARY]), "north")
    assert persons is not None
    assert len(set(persons.tolist())) == 1
    _, _, others = given.encode(frame(who=["new", CANARY]), "north")  # somebody else appears first
    assert others is not None
    assert others[1] == persons[1] != others[0]
    for cell in ("", None):
        error = refusal(given, frame(who=["p", cell]))
        assert error.key == "data.unit"
    assert refusal(given, frame()).key == "data.features"


def test_nobodys_id_changes_how_others_ids_are_read():
    """One number that is not whole, or a gap, would turn everybody's whole number into a float."""
    given = encoding(person="who")

    def number(who: object, other: object) -> int:
        persons = given.encode(frame(who=pd.Series([who, other])), "north")[2]
        assert persons is not None
        return persons[0]

    assert len({number(7, 8), number(7, "p8"), number(7.0, 8.0), number("7", "p8"), number(7, 2**63)}) == 1
    for cell in (8.5, 2.0**53, math.inf):
        error = refusal(given, frame(who=[7, cell]))
        assert error.key == "data.unit"
        assert "whole numbers" in str(error)


ranges = st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).filter(
    lambda pair: pair[1] - pair[0] > 1e-6 * max(map(abs, pair))
)


@given(ranges, st.floats(0, 1), st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_features_lie_between_minus_one_and_one(bounds, share, cells):
    low, high = bounds
    column = Numeric(name="v", low=low, high=high, typical=min(max(low + share * (high - low), low), high))
    given = encoding(columns=(column,), target=None, outside=Outside.CLIP)
    x, _, _ = given.encode(pd.DataFrame({"v": cells}), "north")
    assert np.all(np.abs(x) <= 1.0)
    assert np.all(np.linalg.norm(x.astype(float), axis=1) <= given.max_row_norm)


@given(ranges, st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_a_target_lies_within_its_bounds(bounds, cells):
    low, high = bounds
    given = encoding(target=RealTarget(name="died", low=low, high=high), outside=Outside.CLIP)
    number = len(cells)
    _, y, _ = given.encode(pd.DataFrame({"age": [1.0] * number, "ward": ["a"] * number, "died": cells}), "north")
    # Compared as float64: 0.1 is a bound that the nearest float32 exceeds.
    assert np.all((y.astype(float) >= low) & (y.astype(float) <= high))
    middle = [(low + high) / 2]
    accepted = encoding(target=RealTarget(name="died", low=low, high=high)).encode(
        pd.DataFrame({"age": [1.0], "ward": ["a"], "died": middle}), "north"
    )[1]
    assert accepted[0] == pytest.approx(middle[0], rel=1e-6, abs=high - low)


@given(st.permutations(range(6)), st.integers(0, 5))
def test_a_row_does_not_see_the_other_rows(order, removed):
    table = pd.DataFrame(
        {"age": [0, 10, 20, 30, 40, 50], "ward": list("abcabc"), "died": ["no", "yes", "no", "no", "no", "yes"]}
    )
    x, y, _ = encoding().encode(table, "north")
    kept = [row for row in order if row != removed]
    x_kept, y_kept, _ = encoding().encode(table.iloc[kept], "north")
    np.testing.assert_array_equal(x_kept, x[kept])
    np.testing.assert_array_equal(y_kept, y[kept])


SCALED = (
    Numeric(name="age", low=0.0, high=100.0, typical=40.0, spread=20.0),
    Categorical(name="ward", categories=("a", "b", "c"), shares=(0.5, 0.3, 0.2)),
)


def test_one_unit_of_a_column_moves_its_feature_by_the_feature_unit():
    encoding = Encoding(
        columns=(*COLUMNS, Numeric(name="pressure", low=40.0, high=200.0, typical=120.0, spread=16.0)),
        target=None,
        person=None,
        unused=(),
        outside=Outside.REFUSE,
        intercept=True,
    )
    frame = pd.DataFrame({"age": [50.0, 51.0], "ward": ["a", "a"], "pressure": [120.0, 121.0]})
    first, second = encoding.encode_features(frame)
    units = dict(zip(encoding.feature_names, encoding.feature_units, strict=True))
    moved = dict(zip(encoding.feature_names, second - first, strict=True))
    assert moved["age"] == pytest.approx(units["age"])
    assert moved["pressure"] == pytest.approx(units["pressure"])
    assert units["ward=b"] == units["intercept"] == 1.0


def test_spreads_and_shares_by_hand():
    x = encoding(columns=SCALED).encode_features(frame(age=[25, 100], ward=["c", "a"]))
    np.testing.assert_allclose(x, [[-0.75, -0.5, -0.3, 0.8, 1.0], [3.0, 0.5, -0.3, -0.2, 1.0]], rtol=1e-6)
    assert x.dtype == np.float32


def test_categories_that_have_their_shares_are_centred():
    """Five a, three b and two c, as declared: mean 0, and the mean squared norm (with the intercept's 1)."""
    given = encoding(columns=SCALED[1:])
    x = given.encode_features(pd.DataFrame({"ward": list("aaaaabbbcc")}))[:, :3].astype(float)
    np.testing.assert_allclose(x.mean(axis=0), 0.0, atol=1e-6)
    assert given.typical_row_norm**2 == pytest.approx((x**2).sum(axis=1).mean() + 1.0)


def test_the_typical_norm_counts_what_is_declared():
    assert encoding().typical_row_norm == encoding().max_row_norm == pytest.approx(math.sqrt(3.0))
    assert encoding(columns=SCALED).typical_row_norm == pytest.approx(math.sqrt(1 + 0.25 + 0.21 + 0.16 + 1))
    assert encoding(columns=SCALED, intercept=False).typical_row_norm == pytest.approx(math.sqrt(1.62))
    by_hand = 3.0**2 + (0.25 + 0.09 + 0.64) + 1.0  # age 100 in ward c, the rarest
    assert encoding(columns=SCALED).max_row_norm == pytest.approx(math.sqrt(by_hand))


@given(
    ranges,
    st.floats(0, 1),
    st.floats(1e-6, 1),
    st.lists(st.floats(1e-3, 1), min_size=2, max_size=6),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
)
def test_no_row_exceeds_the_norm_bound_and_some_row_reaches_it(bounds, share, spread, weights, cells):
    low, high = bounds
    typical = min(max(low + share * (high - low), low), high)
    column = Numeric(name="v", low=low, high=high, typical=typical, spread=spread * max(high - typical, typical - low))
    shares = tuple(weight / sum(weights) for weight in weights)
    ward = Categorical(name="w", categories=tuple(range(len(shares))), shares=shares)
    given = encoding(columns=(column, ward), target=None, outside=Outside.CLIP)
    values = [*cells, low, high]
    pairs = pd.DataFrame(
        {"v": np.repeat(values, len(shares)), "w": np.tile(np.arange(len(shares)), len(values))}, dtype=float
    )
    norms = np.linalg.norm(given.encode(pairs, "north")[0].astype(float), axis=1)
    assert norms.max() == pytest.approx(given.max_row_norm, rel=1e-12)  # float64 rounding, nothing else
    assert given.typical_row_norm <= given.max_row_norm * (1 + 1e-6)


def test_the_largest_row_reaches_the_norm_bound():
    x = encoding().encode_features(frame(age=[100, 100]))
    assert np.linalg.norm(x[0]) == pytest.approx(encoding().max_row_norm)
    assert encoding(intercept=False).max_row_norm == pytest.approx(math.sqrt(2.0))
