"""The demo: one real run, verified from its ledgers."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from silobayes.cli.demo import _free_place
from silobayes.cli.main import main
from silobayes.demo import ALL, Answers, DemoResult
from silobayes.families import MeanFieldGaussian
from silobayes.posteriors import Posterior


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
    """Bounds are far out: in runs of four seeds 17 or 18 intervals held the truth, and 9 or 10 ICUs were beaten."""
    out = tmp_path / "demo"
    result = CliRunner().invoke(main, ["demo", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["privacy"]["epsilon"] <= 1.0
    assert len(answer["privacy"]["silos"]) == 10
    assert answer["metrics"]["private"]["auc"] > 0.83  # non-private .86; a posterior that knows nothing has .5
    assert min(answer["intervals_with_truth"], answer["intervals_with_not_private_mean"]) >= 13
    assert answer["coefficients"] == 18
    assert 1.0 < answer["width_ratio"] < 3.0
    assert answer["icus_beaten"]["private"] >= 7
    assert answer["icus_beaten"]["not_private"] >= 6
    assert (out / "report.html").stat().st_size > 10_000
    assert CliRunner().invoke(main, ["verify", str(out)]).exit_code == 0


def test_what_the_demo_says_is_counted():
    """By hand: intervals of 2 sd around 0; truths at 1 and 3 sd, means without privacy at 3 and 1."""
    result = DemoResult(
        truth={"a": 1.0, "b": 6.0},
        report=Path("report.html"),
        answers={
            ALL: _answers([0.0, 0.0], [1.0, 2.0], [3.0, 2.0], [0.5, 0.5], -0.30, -0.29),
            "icu-0": _answers([0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0], -0.40, -0.31),
            "icu-1": _answers([0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0], -0.31, -0.295),
        },
    )
    assert result.num_true_inside == 1
    assert result.num_exact_inside == 1
    assert result.width_ratio == pytest.approx(3.0)
    assert (result.num_beaten("private"), result.num_beaten("not_private")) == (2, 1)


def _answers(mean, stddev, other_mean, other_stddev, score, other_score):
    return Answers(
        rows=1,
        private=_posterior(mean, stddev),
        not_private=_posterior(other_mean, other_stddev),
        metrics={"private": {"log_likelihood": score}, "not_private": {"log_likelihood": other_score}},
        error={},
    )


def _posterior(mean, stddev):
    family = MeanFieldGaussian(event_shape=(2,))
    eta = family.from_standard(mean=jnp.asarray(mean), stddev=jnp.asarray(stddev))
    return Posterior(family=family, eta=eta, names=("a", "b"), model=None)
