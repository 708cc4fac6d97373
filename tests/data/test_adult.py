"""The encoding and splits of the papers' main data set, with public ranges and categories instead of learned ones."""

from pathlib import Path

import numpy as np
import pytest

from silobayes.study import Study, load_silos

ADULT = Path(__file__).resolve().parents[3] / "shared" / "data" / "adult"
pytestmark = pytest.mark.skipif(not (ADULT / "adult.csv.gz").is_file(), reason="shared/data/adult is not here")

# adult.names lists the categories; "?" is a missing entry and has its own.
RANGES = {
    "age": [17, 90], "fnlwgt": [0, 1_500_000], "education-num": [1, 16],
    "capital-gain": [0, 100_000], "capital-loss": [0, 5_000], "hours-per-week": [1, 99],
}  # fmt: skip


def categories() -> dict[str, list[str]]:
    listed = {}
    for line in (ADULT / "adult.names").read_text().splitlines():
        name, colon, values = line.partition(":")
        if colon and not line.startswith("|") and "continuous" not in values:
            listed[name.strip()] = [value.strip() for value in values.strip().rstrip(".").split(",")]
    for column in ("workclass", "occupation", "native-country"):
        listed[column].append("?")
    return listed


def adult(**silos) -> Study:
    return Study.from_dict(
        {
            "study": {"name": "adult", "seed": 1},
            "data": {
                "source": "adult.csv.gz",
                "target": "income",
                "classes": ["<=50K", ">50K"],
                "bounds": RANGES | categories(),
                "coding": "one_hot",
                "ignore": ["split"],
                "public": ["rows", "test"],
                "test": 0.5,
            },
            "silos": silos,
            "model": {"kind": "logistic_regression"},
            "privacy": {"epsilon": 1.0, "delta": 1e-5, "relation": "substitute", "unit": "row"},
        }
    )


@pytest.mark.parametrize(
    ("rho", "kappa", "small", "large", "small_share", "large_share"),
    [(0.0, 0.0, 2442, 2442, 0.76, 0.76), (0.75, 0.95, 610, 4273, 0.99, 0.73), (0.7, -3.0, 732, 4151, 0.03, 0.89)],
)
def test_adult_has_the_features_and_splits_of_the_paper(rho, kappa, small, large, small_share, large_share):
    silos, test, encoding = load_silos(adult(count=10, scheme="rho_kappa", rho=rho, kappa=kappa), ADULT)
    assert test is not None
    assert len(encoding.feature_names) == 108 + 1
    assert encoding.feature_names[-1] == "intercept"
    assert test.x.shape == (24421, 109)
    assert [silo.num_rows for silo in silos] == [small] * 5 + [large] * 5
    shares = [float(np.mean(silo.y == 0)) for silo in silos]
    lam = float(np.mean(np.concatenate([silo.y for silo in silos]) == 0))
    # Half a row, and the few rows that were dropped.
    assert shares[:5] == pytest.approx([lam + (1 - lam) * kappa] * 5, abs=0.5 / small + 1e-3)
    # The paper drew another half: lam has a standard error of .002, the small share 1 - kappa times as much. Large
    # silos are random: 4 standard errors of 2442 rows are .035. The tables print two digits.
    assert shares[:5] == pytest.approx([small_share] * 5, abs=0.008 * (1 - kappa) + 0.005)
    assert shares[5:] == pytest.approx([large_share] * 5, abs=0.035 + 0.005)
    numbers = test.x[:, :6]
    assert np.all(numbers.max(axis=0) > 0.6)  # the ranges are the columns' own
    assert np.all(test.x[:, 6:-1].sum(axis=1) == 8.0)  # one category of each of eight columns
