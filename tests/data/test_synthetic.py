"""Made-up tables: as declared, and nothing else decides them. Fixed keys; limits are five standard errors and more."""

import numpy as np
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.data.synthetic import person_of_rows, synthetic_table
from silobayes.study import Study
from tests.data import studies

NUM_ROWS = 5000


def encoding(**changes):
    keys = {
        "data__bounds": {"age": [0, 100], "weight": [40, 200], "ward": ["a", "b", "c"], "stage": [1, 2, 3]},
        "data__features": ["age", "weight", "ward", "stage"],
        "data__coding": "one_hot",
        "data__typical": {"age": 60},
        "data__spread": {"weight": 10},
        "data__shares": {"ward": [0.7, 0.2, 0.1]},
    }
    return Study.from_dict(studies.changed(**(keys | changes))).encoding


def test_made_up_rows_are_as_the_study_describes_them():
    table = synthetic_table(encoding(), NUM_ROWS, np.random.default_rng(0))
    assert table["age"].between(0, 100).all()
    assert abs(table["age"].median() - 60) < 2
    assert abs(table["age"].std() - 19) < 2  # a third of 60, less what is clipped at 100
    assert abs(table["weight"].mean() - 120) < 1
    assert abs(table["weight"].std() - 10) < 1
    np.testing.assert_allclose(table["ward"].value_counts(normalize=True)[list("abc")], [0.7, 0.2, 0.1], atol=0.04)
    np.testing.assert_allclose(table["stage"].value_counts(normalize=True)[[1, 2, 3]], 1 / 3, atol=0.04)
    assert abs(np.corrcoef(table["age"], table["weight"])[0, 1]) < 0.08
    x = encoding().encode_features(table)
    assert x.shape == (NUM_ROWS, 9)
    assert np.isfinite(x).all()


def test_numbers_may_share_a_correlation():
    table = synthetic_table(encoding(), NUM_ROWS, np.random.default_rng(0), correlation=0.9)
    assert abs(np.corrcoef(table["age"], table["weight"])[0, 1] - 0.9) < 0.04
    for correlation in (-0.1, 1.0):
        with pytest.raises(InvalidInput, match="correlation"):
            synthetic_table(encoding(), 3, np.random.default_rng(0), correlation=correlation)


def test_rows_are_dealt_evenly_to_persons():
    assert person_of_rows(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    for rows, persons, most in ((100, 25, 4), (101, 26, 4), (7, 7, 1), (10, 4, 3)):
        counts = np.bincount(person_of_rows(rows, persons), minlength=persons)
        assert counts.sum() == rows
        assert counts.min() >= 1
        assert counts.max() <= most
