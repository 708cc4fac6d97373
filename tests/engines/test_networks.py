"""Networks without privacy and with default settings, on curved rows that no line explains."""

import json

import numpy as np
import pandas as pd
import pytest

from silobayes.engines.fitting import fit
from silobayes.study import Study

NUM_ROWS, NUM_TEST = 1200, 600


def curved(kind: str) -> tuple[pd.DataFrame, dict]:
    """Rows, and what [data] says of their target."""
    rng = np.random.default_rng(3)
    x = rng.uniform(-1.0, 1.0, size=(NUM_ROWS + NUM_TEST, 2))
    ring = 4.0 * ((x**2).sum(axis=1) - 0.7)
    frame = pd.DataFrame(x, columns=["a", "b"])
    if kind == "real":
        frame["y"] = np.clip(6.0 + 2.0 * np.abs(x[:, 0]) + x[:, 1] + 0.3 * rng.normal(size=len(x)), 0.0, 12.0)
        return frame, {"target_bounds": [0, 12]}
    logits = np.stack([ring, np.zeros_like(ring), 3.0 * x[:, 0]], axis=1)[:, : 2 if kind == "binary" else 3]
    frame["y"] = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return frame, {"classes": list(range(logits.shape[1]))}


def metrics(directory, kind: str, model: dict, num_silos: int = 4, **protocol) -> dict[str, float]:
    """On test rows, of even silos."""
    frame, target = curved(kind)
    frame.iloc[NUM_ROWS:].to_csv(directory / "test.csv", index=False)
    bounds = {"a": [-1, 1], "b": [-1, 1]}
    study = Study.from_dict(
        {
            "study": {"name": "curved"},
            "data": {
                "target": "y",
                "bounds": bounds,
                "public": ["rows", "test"],
                "test": str(directory / "test.csv"),
                **target,
            },
            "model": model,
            "privacy": {"mode": "none"},
            "protocol": protocol,
        }
    )
    silos = {f"silo-{k}": frame.iloc[k:NUM_ROWS:num_silos] for k in range(num_silos)}
    fit(study, silos, out=directory / model["kind"])
    return json.loads((directory / model["kind"] / "metrics.json").read_text())["metrics"]


@pytest.mark.parametrize(
    ("kind", "linear", "options"),
    [
        ("real", "linear_regression", {"noise_stddev": 0.3}),
        pytest.param("binary", "logistic_regression", {}, marks=pytest.mark.slow),
        pytest.param("classes", "softmax_regression", {}, marks=pytest.mark.slow),
    ],
)
def test_a_small_network_with_defaults_beats_its_linear_counterpart(kind, linear, options, tmp_path):
    line = metrics(tmp_path, kind, {"kind": linear, "options": options})
    network = metrics(tmp_path, kind, {"kind": "mlp", "options": {"hidden": [8], **options}})
    assert network["log_likelihood"] > line["log_likelihood"] + 0.03
    if kind == "real":
        assert network["rmse"] < 0.4  # the noise is .3, a line leaves .65


@pytest.mark.slow
def test_a_network_with_full_covariance_takes_enough_steps(tmp_path):
    model = {"kind": "mlp", "options": {"hidden": [8], "noise_stddev": 0.3}}
    assert metrics(tmp_path, "real", model, posterior="full")["rmse"] < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["real", "binary"])
def test_a_network_of_sixty_silos_does_not_run_away(kind, tmp_path):
    options = {"hidden": [8], **({"noise_stddev": 0.3} if kind == "real" else {})}
    of_many = metrics(tmp_path, kind, {"kind": "mlp", "options": options}, num_silos=60)
    assert of_many["log_likelihood"] > -0.6
