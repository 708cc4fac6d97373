"""The Adult experiment: its documents say what its results say, every run kept its budget, and a small run works."""

import dataclasses
import json

import pytest
from experiments.adult import methods, report, run, studies, tune
from experiments.data import folder

needs_data = pytest.mark.skipif(
    not (folder() / studies.FILE).exists(), reason="the tables of the experiments are not here (SILOBAYES_DATA)"
)


def test_the_tables_are_those_of_the_results():
    text = (report.HERE / "README.md").read_text()
    assert report.filled(text, report.tables(report.load(report.HERE))) == text


def test_every_private_run_kept_its_budget():
    records = [record for record in report.load(report.HERE) if "accuracy" in record]
    assert records
    for record in records:
        scenario = methods.SCENARIOS[record["scenario"]]
        if methods.METHODS[record["method"]].is_private:
            assert 0.9 * scenario.epsilon < record["epsilon"] <= scenario.epsilon
        else:
            assert record["epsilon"] is None


def test_tuned_settings_are_candidates():
    for scenario, best in methods.tuned().items():
        for name, settings in best.items():
            assert settings in [{}, *methods.CANDIDATES[scenario][name]]


@needs_data
def test_a_small_run_adds_a_record(monkeypatch, tmp_path):
    small = dataclasses.replace(methods.SCENARIOS["10 silos"], num_clients=3)
    monkeypatch.setitem(methods.SCENARIOS, "10 silos", small)
    monkeypatch.setattr(run, "HERE", tmp_path)
    settings = {"rounds": 1, "steps": 2}
    monkeypatch.setattr(run, "tuned", lambda: {"10 silos": {"DP optimisation": settings}})
    for _ in range(2):  # the second time there is nothing to do
        run._run_if_missing("10 silos", "DP optimisation", "balanced", 0, "tuned")
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert 0.4 < json.loads(line)["accuracy"] < 0.9


@needs_data
def test_tuning_never_sees_test_rows():
    scenario = methods.SCENARIOS["10 silos"]
    plan = studies.study(
        seed=0,
        num_clients=scenario.num_clients,
        split="balanced",
        privacy={"mode": "none"},
        protocol={},
        aggregation={},
        model=scenario.model,
    )
    kept, held_out = tune.split_silos(plan)
    assert sum(silo.num_rows for silo in kept) + held_out.num_rows == 24_421
