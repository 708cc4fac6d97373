"""The case study: its parts, a quick run, and that README.md says what results.json says."""

import json

import numpy as np
import pytest
from experiments.case_study_001 import report, run, simulate
from experiments.case_study_001.simulate import Gaussian, Setting

HERE = run.HERE


def test_the_divergence_is_that_of_gaussians():
    q, p = Gaussian(mean=0.3, stddev=0.7), Gaussian(mean=-0.2, stddev=1.1)
    grid = np.linspace(-8, 8, 200_001)

    def log_density(one: Gaussian) -> np.ndarray:
        return -0.5 * ((grid - one.mean) / one.stddev) ** 2 - np.log(one.stddev) - 0.5 * np.log(2 * np.pi)

    expected = np.trapezoid(np.exp(log_density(q)) * (log_density(q) - log_density(p)), grid)
    assert q.kl(p) == pytest.approx(expected, rel=1e-6)
    assert q.kl(q) == 0.0


def test_the_thesis_update_without_noise_and_clipping_is_exact(monkeypatch):
    monkeypatch.setattr(simulate, "thesis_noise", lambda clip_norm, epsilon: 1e-3 / clip_norm)
    silos, _ = simulate.make_silos(10, 0)
    setting = Setting(method="thesis", rows=10, clip_norm=50.0, epsilon=10.0)
    (q,) = simulate.fit(setting, silos, simulate.open_doors(setting.budget, 0)).values()
    exact = simulate.exact(silos)
    assert q.mean == pytest.approx(exact.mean, abs=0.05 * exact.stddev)
    assert q.stddev == pytest.approx(exact.stddev, rel=1e-3)


def test_the_bias_of_a_positive_precision_is_its_closed_form():
    """100,000 draws: relative standard error below .6 %, five of them; without the bias term all but the first fail."""
    for one in run.bias():
        assert one["drawn"] == pytest.approx(one["expected"], rel=0.03)
    assert run.bias()[-1]["expected"] > 1.5 * run.bias()[-1]["sum"]


def test_a_quick_run_keeps_every_budget():
    results = run.run(quick=True)
    assert {one["method"] for one in results["records"]} == set(report.NAMES)
    for one in results["records"]:
        assert 0.99 * one["epsilon"] < one["spent"] <= one["epsilon"]
        assert all(kl >= 0 for kl in one["kl"] + one["kl_reverse"])


def test_the_document_shows_the_results():
    results = json.loads((HERE / "results.json").read_text())
    text = (HERE / "README.md").read_text()
    assert report.filled(text, report.tables(results)) == text
    assert results["seeds"] >= 10
    assert {"clip_norm.png", "epsilon.png"} <= {path.name for path in HERE.iterdir()}
