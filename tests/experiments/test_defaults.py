"""The derivation of the defaults: its document says what its results say, studies are as described, a run works."""

import dataclasses

import numpy as np
import pytest
from experiments.adult.methods import METHODS as REAL_METHODS
from experiments.data import folder
from experiments.defaults import confirm, report, run, scan, studies
from silobayes.defaults import PublicFacts, resolve

from silobayes.study import encode_silos

needs_data = pytest.mark.skipif(
    not all((folder() / real.file).exists() for real in confirm.TABLES.values()),
    reason="the tables of the experiments are not here (SILOBAYES_DATA)",
)


def test_the_tables_are_those_of_the_results():
    text = (report.HERE / "README.md").read_text()
    assert report.filled(text, report.tables(report.load(report.SCAN), report.load(report.CONFIRMATION))) == text


def test_every_confirmation_kept_its_budget():
    records = report.load(report.CONFIRMATION)
    for record in records:
        if record["method"] in REAL_METHODS and REAL_METHODS[record["method"]].is_private:
            assert 0.9 * confirm.BUDGET["epsilon"] < record["epsilon"] <= confirm.BUDGET["epsilon"]
        else:
            assert record["epsilon"] is None


@pytest.mark.parametrize("name", ["few 2,000 / 3 / 1", "ICU 10,000 / 3 / .3", "linear 10,000 / 10 / 1"])
def test_a_simulated_study_has_the_rows_and_silos_of_its_name(name):
    place = studies.STUDIES[name]
    plan = place.study(0, is_private=True, protocol={}, aggregation={})
    silos, test, _ = encode_silos(plan, place.frames(0))
    assert len(silos) == place.silos
    assert sum(silo.num_rows for silo in silos) == pytest.approx(place.rows, rel=0.01)
    assert test is not None
    assert test.num_rows == pytest.approx(8_000, rel=0.01)


@pytest.mark.parametrize("make", [studies.census, studies.few, studies.curved])
def test_both_classes_are_common(make):
    assert 0.15 < np.mean(make(4_000, 0).rows["y"] == "yes") < 0.85


def test_a_changed_path_is_the_only_one_that_is_longer():
    """Rounds, damping and clip norm together are the path of a perturbing method."""
    place = studies.STUDIES["few 2,000 / 3 / 1"]
    method = scan.METHODS["virtual clients"]
    plan = place.study(0, is_private=True, protocol=method.protocol, aggregation={})
    rules = resolve(plan, PublicFacts(silo_rows=(600,) * 3, num_parameters=5))
    for factor in scan.FACTORS:
        for name, change in method.constants.items():
            values = dataclasses.asdict(rules) | change(rules, factor)
            path = values["rounds"] * values["damping"] * values["clip_norm"][0]
            before = rules.rounds * rules.damping * rules.clip_norms[0]
            assert path == pytest.approx(before * (factor if name == "path" else 1.0))


def test_a_difference_is_a_loss_against_the_rule():
    scores: report.Scores = {("a", 0, "m", "", 1.0): -0.5, ("a", 1, "m", "", 1.0): -0.4}
    scores |= {("a", 0, "m", "c", 2.0): -0.503, ("a", 1, "m", "c", 2.0): -0.401}
    found = report.differences(scores, "m", "c", 2.0)
    assert found == pytest.approx([3.0, 1.0])
    assert report.mean_and_error(found) == pytest.approx((2.0, 1.0))


def test_a_small_run_adds_a_record(monkeypatch, tmp_path):
    name = "few 2,000 / 3 / 1"
    monkeypatch.setitem(studies.STUDIES, name, dataclasses.replace(studies.STUDIES[name], rows=300))
    monkeypatch.setattr(report, "SCAN", tmp_path / "results.jsonl")
    for _ in range(2):  # the second time there is nothing to do
        run._run_if_missing(name, "virtual clients", "path", 2.0, 0)
    (record,) = report.load(report.SCAN)
    assert -0.8 < record["log_likelihood"] < -0.3


@needs_data
def test_the_tables_of_the_confirmation_are_as_described():
    silos, data = confirm.heart()
    assert list(silos) == ["cleveland", "hungarian", "switzerland", "va"]
    silos, data = confirm.diabetes()
    assert min(map(len, silos.values())) >= 500
    for name in confirm.TABLES:
        encode_silos(confirm.study(name, "not private", 0), confirm.TABLES[name].make()[0])
    assert "readmitted" not in data["bounds"]
