"""The demo: one real run, verified from its ledgers."""

import json

import pytest
from click.testing import CliRunner

from silobayes.cli.demo import _free_place
from silobayes.cli.main import main


def test_an_existing_directory_is_refused_before_anything_runs(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "--out" in result.output
    assert not list(tmp_path.iterdir())


def test_the_demo_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for expected in ("silobayes-demo", "silobayes-demo-2", "silobayes-demo-3"):
        assert str(_free_place()) == expected
        (tmp_path / expected).mkdir()


@pytest.mark.slow
def test_the_demo_runs_reports_and_verifies(tmp_path):
    out = tmp_path / "demo"
    result = CliRunner().invoke(main, ["demo", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["privacy"]["epsilon"] <= 1.0
    assert len(answer["privacy"]["silos"]) == 10
    assert answer["metrics"]["private"]["auc"] > 0.75  # non-private .86; a posterior that knows nothing has .5
    assert (out / "report.html").stat().st_size > 10_000
    assert CliRunner().invoke(main, ["verify", str(out)]).exit_code == 0
