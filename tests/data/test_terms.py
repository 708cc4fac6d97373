import numpy as np
import pandas as pd
import pytest

import silobayes
from silobayes.core.errors import InvalidInput
from silobayes.plans.rules import Limits, num_uncentred
from silobayes.report.planning import made_up_rows
from silobayes.study import Study, encode_silos
from tests.data.studies import changed, rows


def study(*terms, **changes) -> Study:
    return Study.from_dict(changed(data__terms=list(terms), **changes))


def test_terms_follow_the_columns_as_features():
    given = study("age:ward", "age^2").encoding
    assert given.feature_names == (
        "age", "ward=b", "ward=c", "age:ward=b", "age:ward=c", "age^2", "intercept",
    )  # fmt: skip
    x = given.encode_features(pd.DataFrame({"age": [100, 25], "ward": ["b", "c"]}))
    np.testing.assert_allclose(x, [[1, 1, 0, 1, 0, 1, 1], [-0.5, 0, 1, 0, -0.5, 0.25, 1]], rtol=1e-6)
    np.testing.assert_array_equal(x, encode_silos(study("age:ward", "age^2"), {"s": rows()})[2].encode_features(
        pd.DataFrame({"age": [100, 25], "ward": ["b", "c"]})
    ))  # fmt: skip


def test_a_term_has_one_spelling_and_none_is_nothing():
    assert study("age ^ 2", " age : ward").hash == study("age^2", "age:ward").hash
    assert study("age^2").hash != study("age^3").hash
    assert study().hash == Study.from_dict(changed()).hash
    again = study("age^2", "age:ward")
    assert Study.from_dict(again.to_dict()) == again


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (["height^2"], "height"),
        (["age:height"], "height"),
        (["age*ward"], "age*ward"),
        (["C(ward)"], "C(ward)"),
        (["age^5"], "from 2 to 4"),
        (["age^1"], "from 2 to 4"),
        (["age^-2"], "from 2 to 4"),
        (["age^two"], "from 2 to 4"),
        (["age**2"], "a power as age^2"),
        (["age"], "already"),
        (["age:age"], "age^2"),
        (["age:age^2"], "age^2"),
        (["ward^2"], "powers of numbers"),
        (["age:ward", "ward:age"], "each product once"),
        (["age^2", "age ^ 2"], "each product once"),
        (["age:"], "''"),
        ("age^2", "a list"),
        ([2], "a text"),
        ([""], "a text"),
        (["died:age"], "died"),
    ],
)
def test_terms_that_cannot_be_are_refused_before_a_row_is_read(terms, words):
    with pytest.raises(InvalidInput) as caught:
        Study.from_dict(changed(data__terms=terms))
    assert caught.value.key == "data.terms"
    assert words in str(caught.value)


def test_terms_of_too_many_or_too_large_features_are_refused():
    many = {"age": [0, 100], "ward": [f"w{k}" for k in range(60)], "nurse": [f"n{k}" for k in range(60)]}
    with pytest.raises(InvalidInput, match=r"at most 1000 features.*ward:nurse: 3600"):
        study("ward:nurse", data__features=["age", "ward", "nurse"], data__bounds=many)
    with pytest.raises(InvalidInput, match="at most 1e"):
        study("age^4", data__spread={"age": 0.001})


def test_a_row_of_linear_regression_with_terms_stays_within_its_bounds():
    given = study("age^2", "age:ward", data__typical={"age": 60}, data__shares={"ward": [0.5, 0.3, 0.2]})
    bounds = Limits.of(given).bounds
    assert bounds is not None
    frame = pd.DataFrame({"age": np.tile([0, 60, 100], 3), "ward": np.repeat(list("abc"), 3)})
    z = given.encoding.encode_features(frame) / np.array(bounds.features)
    assert bounds.projected == (True, False, False, True, False, False, False)
    np.testing.assert_allclose(np.abs(z).max(axis=0), 1.0)
    assert (z**2).sum(axis=1).max() == pytest.approx(bounds.largest_square, rel=1e-6)


def test_a_product_is_centred_if_one_of_its_factors_is():
    typical, shares = {"data__typical": {"age": 60}}, {"data__shares": {"ward": [0.5, 0.3, 0.2]}}
    assert num_uncentred(study("age:ward", "age^2")) == 4
    assert num_uncentred(study("age:ward", "age^2", **typical)) == 2  # the ward, and a square
    assert num_uncentred(study("age^2:ward", "age^3", **typical, **shares)) == 0


def test_made_up_rows_have_the_terms():
    made = made_up_rows(study("age:ward", "age^2").encoding)
    np.testing.assert_allclose(made[:, 5], made[:, 0] ** 2, rtol=1e-6)
    np.testing.assert_allclose(made[:, 3], made[:, 0] * made[:, 1], rtol=1e-6)


def test_a_study_with_terms_finds_what_rows_have(tmp_path):
    """y = 1 + a^2 - 2 a w + noise of .1, 4000 rows: standard errors are below .02."""
    rng = np.random.default_rng(0)
    a, w = rng.uniform(-1, 1, 4000), rng.choice(["u", "v"], 4000)
    y = 1 + a**2 - 2 * a * (w == "v") + 0.1 * rng.normal(size=4000)
    tables = {
        "study": {"name": "terms"},
        "data": {
            "target": "y",
            "target_bounds": [-5, 5],
            "bounds": {"a": [-1, 1], "w": ["u", "v"]},
            "terms": ["a^2", "a:w"],
            "outside": "clip",
        },
        "model": {"kind": "linear_regression", "options": {"noise_stddev": 0.1}},
        "privacy": {"mode": "none"},
    }
    frame = pd.DataFrame({"a": a, "w": w, "y": y})
    posterior = silobayes.fit(Study.from_dict(tables), {"all": frame}, out=tmp_path / "run")
    found = dict(zip(posterior.names, posterior.mean, strict=True))
    expected = {"a": 0.0, "w=v": 0.0, "a^2": 1.0, "a:w=v": -2.0, "intercept": 1.0}
    assert found == pytest.approx(expected, abs=0.05)
