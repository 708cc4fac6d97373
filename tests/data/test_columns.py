import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.data.columns import Categorical, Numeric, Term
from silobayes.data.encoding import Encoding, Outside
from silobayes.plans.rules import Limits
from silobayes.study import Study
from tests.data.studies import changed

AGE = Numeric(name="age", low=0.0, high=100.0, typical=40.0, spread=20.0)
DOSE = Numeric(name="dose", low=0.0, high=8.0, typical=4.0)
WARD = Categorical(name="ward", categories=("a", "b", "c"), shares=(0.5, 0.3, 0.2), reference="a")
SEX = Categorical(name="sex", categories=("f", "m"))


def encoding(*columns, terms=(), intercept=True) -> Encoding:
    return Encoding(
        columns=columns,
        target=None,
        person=None,
        unused=(),
        outside=Outside.REFUSE,
        intercept=intercept,
        terms=tuple(Term(factors=factors) for factors in terms),
    )


def test_a_reference_has_no_feature_and_keeps_the_others_as_they_were():
    one_hot, reference = (Categorical(name="w", categories=(1, 2, 3), reference=chosen) for chosen in (None, 2))
    assert reference.feature_names == ("w=1", "w=3")
    assert reference.feature_units == (1.0, 1.0)
    np.testing.assert_array_equal(reference.extremes, one_hot.extremes[:, [0, 2]])
    np.testing.assert_allclose(WARD.extremes, [[-0.3, -0.2], [0.7, -0.2], [-0.3, 0.8]], rtol=1e-6)


def test_the_sizes_of_categories_beside_a_reference_by_hand():
    assert encoding(WARD).max_row_norm ** 2 == pytest.approx(0.3**2 + 0.8**2 + 1.0)
    assert encoding(WARD).typical_row_norm ** 2 == pytest.approx(0.21 + 0.16 + 1.0)
    rows = encoding(WARD).encode_features(pd.DataFrame({"ward": list("aaaaabbbcc")})).astype(float)
    np.testing.assert_allclose(rows.mean(axis=0), [0.0, 0.0, 1.0], atol=1e-6)
    assert (rows**2).sum(axis=1).mean() == pytest.approx(encoding(WARD).typical_row_norm ** 2)


@pytest.mark.parametrize("columns", [(AGE, WARD, SEX), (DOSE, SEX), (WARD,), (AGE, DOSE)])
def test_typical_moments_are_those_of_rows_as_declared(columns):
    """A million draws: five standard errors of the widest product are below .02."""
    rng = np.random.default_rng(0)
    given = encoding(*columns)
    parts = {}
    for column in columns:
        if isinstance(column, Numeric):
            parts[column.name] = rng.normal(scale=1.0 if column.spread else 1 / 3, size=(10**6, 1))
        else:
            parts[column.name] = column.encode(rng.choice(len(column.categories), 10**6, p=column.shares))
    rows = given.assemble(parts).astype(float)
    np.testing.assert_allclose(given.typical_moments, rows.T @ rows / len(rows), atol=0.02)
    assert given.typical_moments.dtype == np.float64
    assert np.trace(given.typical_moments) <= given.typical_row_norm**2 + 1e-9


def test_typical_moments_by_hand():
    np.testing.assert_allclose(encoding(SEX).typical_moments, [[0.5, 0, 0.5], [0, 0.5, 0.5], [0.5, 0.5, 1]])
    shared = Categorical(name="ward", categories=("a", "b", "c"), shares=(0.5, 0.3, 0.2))
    q = np.array([0.5, 0.3, 0.2])
    expected = np.diag(q) - np.outer(q, q)
    np.testing.assert_allclose(encoding(shared, intercept=False).typical_moments, expected, atol=1e-15)
    np.testing.assert_allclose(encoding(WARD, intercept=False).typical_moments, expected[1:, 1:], atol=1e-15)
    np.testing.assert_allclose(encoding(AGE, DOSE).typical_moments, np.diag([1, 1 / 9, 1]), atol=1e-15)
    np.testing.assert_allclose(encoding(AGE, SEX).typical_moments[0], [1, 0, 0, 0], atol=1e-15)


TERMS = [((AGE, 2),), ((AGE, 1), (WARD, 1)), ((DOSE, 3), (SEX, 1)), ((SEX, 1), (WARD, 1))]


@pytest.mark.parametrize("terms", [(), TERMS, TERMS[1:3]])
@pytest.mark.parametrize("sex", [SEX, Categorical(name="sex", categories=("f", "m"), shares=(0.49, 0.505))])
def test_typical_moments_have_the_null_space_of_the_encoding(sex, terms):
    """Shares that add up to .995, too: features of one-hot categories then add up to .005 in every row."""
    replaced = [tuple((sex if column is SEX else column, power) for column, power in term) for term in terms]
    given = encoding(AGE, DOSE, WARD, sex, terms=replaced)
    rng = np.random.default_rng(1)
    parts = {
        "age": rng.normal(size=(500, 1)),
        "dose": rng.normal(size=(500, 1)),
        "ward": WARD.encode(rng.integers(3, size=500)),
        "sex": sex.encode(rng.integers(2, size=500)),
    }
    rows = given.assemble(parts).astype(float)
    values, vectors = np.linalg.eigh(given.typical_moments)
    null = vectors[:, values < 1e-12]
    assert null.shape[1] == rows.shape[1] - np.linalg.matrix_rank(rows, tol=1e-3) > 0
    np.testing.assert_allclose(rows @ null, 0.0, atol=1e-5)


def test_moments_of_products_by_hand():
    """Normal numbers: E f^4 = 3, E f^3 = 0; of a number without a spread, sd 1/3."""
    given = encoding(AGE, WARD, terms=[((AGE, 2),), ((AGE, 1), (WARD, 1))])
    assert given.feature_names == ("age", "ward=b", "ward=c", "age^2", "age:ward=b", "age:ward=c", "intercept")
    moments = pd.DataFrame(given.typical_moments, given.feature_names, given.feature_names)
    assert moments.loc["age^2", "age^2"] == 3.0
    assert moments.loc["age^2", "intercept"] == 1.0
    assert moments.loc["age^2", "age"] == 0.0
    assert moments.loc["age:ward=b", "age:ward=c"] == pytest.approx(-0.06)
    assert moments.loc["age:ward=b", "age^2"] == moments.loc["age:ward=b", "ward=b"] == 0.0
    assert encoding(DOSE, terms=[((DOSE, 2),)]).typical_moments[1, 1] == pytest.approx(3 / 81)


def test_features_of_terms_are_products_of_features():
    given = encoding(AGE, WARD, SEX, terms=[((AGE, 2),), ((AGE, 2), (WARD, 1), (SEX, 1))])
    frame = pd.DataFrame({"age": [80.0, 20.0], "ward": ["b", "a"], "sex": ["m", "f"]})
    x = pd.DataFrame(given.encode_features(frame), columns=given.feature_names).astype(float)
    np.testing.assert_allclose(x["age^2"], [4.0, 1.0])
    np.testing.assert_allclose(x["age^2:ward=b:sex=m"], [4 * 0.7, 0.0], rtol=1e-6)
    np.testing.assert_allclose(x["age^2:ward=c:sex=f"], [0.0, -0.2], rtol=1e-6)
    units = dict(zip(given.feature_names, given.feature_units, strict=True))
    assert units["age^2"] == pytest.approx(1 / 400) == units["age^2:ward=b:sex=m"]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 8), st.sampled_from("abc"), st.sampled_from("fm")), min_size=1)
)
def test_no_row_with_terms_exceeds_the_norm_bound_and_some_row_reaches_it(cells):
    given = encoding(AGE, DOSE, WARD, SEX, terms=TERMS)
    cells += [(age, 8.0, ward, sex) for age in (0.0, 100.0) for ward in "abc" for sex in "fm"]
    x = given.encode_features(pd.DataFrame(cells, columns=["age", "dose", "ward", "sex"])).astype(float)
    largest = np.concatenate([np.abs(term.extremes).max(axis=0) for term in given.all_terms])
    assert np.all(np.abs(x[:, :-1]) <= largest)
    norms = np.linalg.norm(x, axis=1)
    assert norms.max() <= given.max_row_norm * (1 + 1e-12)
    assert norms.max() == pytest.approx(given.max_row_norm, rel=1e-6)
    assert given.typical_row_norm <= given.max_row_norm


def test_what_a_row_of_a_study_with_a_reference_may_hold():
    """Of `linreg`: in units of its bounds, a row without ward b is -.3 / .7 there."""
    shares = {"data__shares": {"ward": [0.5, 0.3, 0.2]}}
    bounds = Limits.of(Study.from_dict(changed(**shares))).bounds
    assert bounds is not None
    np.testing.assert_allclose(bounds.features, [1.0, 0.7, 0.8, 1.0], rtol=1e-6)
    assert bounds.projected == (True, False, False, False)
    rest = [(0.3 / 0.7) ** 2 + (0.2 / 0.8) ** 2, 1 + (0.2 / 0.8) ** 2, (0.3 / 0.7) ** 2 + 1]
    assert bounds.others_square == pytest.approx(max(rest) + 1.0)


def test_regressions_compare_with_the_first_category_unless_told_otherwise():
    study = Study.from_dict(changed())
    assert study.encoding.feature_names == ("age", "ward=b", "ward=c", "intercept")
    assert (study.data.coding, study.data.reference) == ("reference", {"ward": "a"})
    other = Study.from_dict(changed(data__reference={"ward": "c"}))
    assert other.encoding.feature_names == ("age", "ward=a", "ward=b", "intercept")
    assert other.hash != study.hash
    for same in ({"data__coding": "reference"}, {"data__reference": {"ward": "a"}}):
        assert Study.from_dict(changed(**same)).hash == study.hash
    full = Study.from_dict(changed(data__coding="one_hot"))
    assert full.encoding.feature_names == ("age", "ward=a", "ward=b", "ward=c", "intercept")
    assert full.hash != study.hash
    for one in (study, other, full):
        assert Study.from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    "changes",
    [
        {"model__kind": "gaussian", "data__target": None, "data__classes": None},
        {"model__kind": "mlp"},
        {"model__kind": "numpyro"},
        {"data__intercept": False},
    ],
)
def test_without_coefficients_to_compare_every_category_has_a_feature(changes):
    study = Study.from_dict(changed(**changes))
    assert study.data.coding == "one_hot"
    assert "ward=a" in study.encoding.feature_names
    told = Study.from_dict(changed(**changes, data__reference={"ward": "b"}))
    assert "ward=b" not in told.encoding.feature_names


def test_a_study_without_categories_says_nothing_of_coding():
    numbers = {"data__features": ["age"], "data__bounds": {"age": [0, 100]}}
    plain, told = (Study.from_dict(changed(**numbers, **more)) for more in ({}, {"data__coding": "one_hot"}))
    assert "coding" not in plain.to_dict()["data"]
    assert plain.hash == told.hash


def test_numbers_as_categories_may_be_references():
    bounds = {"data__bounds": {"age": [0, 100], "ward": [1, 2, 3]}}
    first, second = (Study.from_dict(changed(**bounds, data__reference={"ward": two})) for two in (2, 2.0))
    assert first.hash == second.hash
    assert first.encoding.feature_names == ("age", "ward=1", "ward=3", "intercept")


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("data.coding", {"data__coding": "effects"}),
        ("data.coding", {"data__coding": 1}),
        ("data.reference", {"data__reference": "b"}),
        ("data.reference", {"data__reference": {"ward": "b"}, "data__coding": "one_hot"}),
        ("data.reference.ward", {"data__reference": {"ward": "d"}}),
        ("data.reference.ward", {"data__reference": {"ward": 1}}),
        ("data.reference.ward", {"data__reference": {"ward": ["a"]}}),
        ("data.reference.age", {"data__reference": {"age": 0}}),
        ("data.reference.sex", {"data__reference": {"sex": "f"}}),
        (
            "data.reference.ward",
            {
                "data__reference": {"ward": "b"},
                "silos": {"scheme": "column", "column": "ward"},
                "data__features": ["age"],
            },
        ),
        (
            "data.reference.ward",
            {"data__reference": {"ward": True}, "data__bounds": {"age": [0, 100], "ward": [1, 2, 3]}},
        ),
    ],
)
def test_references_that_cannot_be_are_refused_by_their_key(key, changes):
    with pytest.raises(InvalidInput) as caught:
        Study.from_dict(changed(**changes))
    assert caught.value.key == key


def test_typical_norms_do_not_exceed_the_largest():
    """A normal number has E f^4 = 3, but one whose spread is its whole range has f^4 <= 1."""
    wide = Numeric(name="v", low=0.0, high=2.0, typical=1.0, spread=1.0)
    assert encoding(wide, terms=[((wide, 2),)]).typical_row_norm == pytest.approx(math.sqrt(3.0))
