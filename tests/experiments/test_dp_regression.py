"""The regression experiment: its documents say what its results say, and a small run of it works."""

import json

import numpy as np
import pytest
from experiments.data import folder
from experiments.dp_regression import report, run
from experiments.dp_regression.studies import DATA_SETS, NON_PRIVATE, VARIANTS, split

RESULTS = json.loads((report.HERE / "results.json").read_text())
needs_data = pytest.mark.skipif(
    not (folder() / DATA_SETS[1].file).exists(), reason="the tables of the experiments are not here (SILOBAYES_DATA)"
)


def test_the_tables_are_those_of_the_results():
    text = (report.HERE / "README.md").read_text()
    assert report.filled(text, report.tables(RESULTS)) == text


def test_every_cell_is_there_and_kept_its_budget():
    assert RESULTS["splits"] == run.NUM_SPLITS
    for data in DATA_SETS:
        for variant in VARIANTS:
            for epsilon in report.epsilons_of(RESULTS):
                assert len(report.errors_of(RESULTS, data.name, variant.name, epsilon)) == run.NUM_SPLITS
    for record in RESULTS["records"]:
        assert record["spent"] is None or 0.99 * record["epsilon"] < record["spent"] <= 1.001 * record["epsilon"]


@pytest.mark.parametrize("data", [data.name for data in DATA_SETS])
def test_distributed_is_as_good_as_trusted_and_projection_helps(data):
    """Distributed: within noise, the quartiles of one cell hold the median of the other, at every budget."""
    for epsilon in report.epsilons_of(RESULTS):
        trusted, distributed, plain = (
            report.errors_of(RESULTS, data, name, epsilon)
            for name in ("trusted aggregator, projected", "distributed, projected", "distributed")
        )
        low, high = np.percentile(distributed, [25, 75])
        assert low <= np.median(trusted) <= high
        assert np.median(distributed) < np.median(plain)


def test_published_numbers_are_those_of_the_columns():
    for data in DATA_SETS:
        assert data.target in data.numbers
        assert all(low <= mean <= high for low, high, mean in data.numbers.values())


def test_splits_are_disjoint_and_whole():
    train, test = split(103, 7)
    assert (len(train), len(test)) == (82, 21)
    assert sorted([*train, *test]) == list(range(103))


@needs_data
def test_a_small_run_of_all_variants():
    results = run.run(DATA_SETS[1:2], (3.0,), 1)
    names = [record["variant"] for record in results["records"]]
    assert names == [variant.name for variant in (NON_PRIVATE, *VARIANTS)] + ["no features"]
    assert results["rows"] == {"red wine": 1599}
    best = results["records"][0]["errors"][0]
    assert all(np.isfinite(record["errors"]).all() for record in results["records"])
    assert 0.3 < best < results["records"][-1]["errors"][0]


@needs_data
def test_tables_are_read_whole():
    assert [len(data.load()) for data in DATA_SETS] == [4177, 1599, 4898]
    assert set(DATA_SETS[0].load()["Sex"]) == {"F", "I", "M"}
