"""The methods that are compared, with default and with tuned settings.

A *scenario* is a number of silos, a budget and a model. Tuned settings are the best, by log-likelihood, of the defaults
and `CANDIDATES` on a fifth of the training rows of seed 0, balanced split (`python -m experiments.adult.tune` writes
tuned.json). They are used for all splits and seeds; rows that a setting was chosen on are test rows of other seeds, so
that tuned numbers are a little flattered.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TUNED = Path(__file__).parent / "tuned.json"
SUM = {"kind": "secret_sharing"}
DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class Method:
    """A line of the tables: what the study says besides the settings of the protocol."""

    protocol: dict[str, Any]
    aggregation: dict[str, Any]
    is_private: bool = True


METHODS = {
    "DP optimisation": Method(protocol={"privatise": "dp_optimisation"}, aggregation={}),
    "local averaging": Method(protocol={"privatise": "local_averaging"}, aggregation={}),
    "local averaging, secure sum": Method(protocol={"privatise": "local_averaging"}, aggregation=SUM),
    "virtual clients": Method(protocol={"privatise": "virtual_clients"}, aggregation={}),
    "virtual clients, secure sum": Method(protocol={"privatise": "virtual_clients"}, aggregation=SUM),
    "BCM same": Method(protocol={"kind": "bcm", "committee": "same"}, aggregation={}),
    "BCM split": Method(protocol={"kind": "bcm", "committee": "split"}, aggregation={}),
    "global VI, secure sum": Method(protocol={"kind": "global_vi"}, aggregation=SUM),
    "not private": Method(protocol={}, aggregation={}, is_private=False),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A table: who takes part and what each may spend."""

    num_clients: int
    epsilon: float
    model: dict[str, Any]
    splits: tuple[str, ...]
    num_seeds: int


_LOGISTIC = {"kind": "logistic_regression"}
_ALL_SPLITS = ("balanced", "rho .75, kappa .95", "rho .7, kappa -3")
SCENARIOS = {
    "10 silos": Scenario(num_clients=10, epsilon=1.0, model=_LOGISTIC, splits=_ALL_SPLITS, num_seeds=5),
    "200 silos": Scenario(num_clients=200, epsilon=0.5, model=_LOGISTIC, splits=_ALL_SPLITS, num_seeds=5),
    "BNN": Scenario(
        num_clients=10,
        epsilon=2.0,
        model={"kind": "mlp", "options": {"hidden": [50]}},
        splits=("balanced",),
        num_seeds=5,
    ),
}


def _clip_norms(*linear: float, quadratic: float = 0.5) -> list[dict[str, Any]]:
    """The quadratic part has this share of the linear one's norm: those of the defaults."""
    return [{"clip_norm": [norm, norm * quadratic]} for norm in linear]


def _network(*linear: float, damping: float) -> list[dict[str, Any]]:
    """Clip norms with the step of the defaults, and one longer step."""
    return [*_clip_norms(*linear, quadratic=0.1), {"damping": damping}]


CANDIDATES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "10 silos": {
        "DP optimisation": [
            {"step_size": 0.035},
            {"clipping": "ordinary"},
            {"clipping": "ordinary", "clip_norm": 1.5},
            {"clip_norm": 1.5},
        ],
        "local averaging": _clip_norms(1500.0, 2800.0),
        "local averaging, secure sum": _clip_norms(800.0, 1600.0),
        "virtual clients": _clip_norms(0.35, 0.7),
        "virtual clients, secure sum": _clip_norms(0.35, 0.7),
        "BCM same": [{"clipping": "ordinary"}, {"step_size": 0.02}, {"step_size": 0.1}],
        "BCM split": [{"clipping": "ordinary"}, {"step_size": 0.02}, {"step_size": 0.1}],
        "global VI, secure sum": [
            {"rounds": 10, "steps": 30, "sample_rate": 0.3, "step_size": 0.05},
            {"rounds": 10, "steps": 30, "sample_rate": 0.3, "step_size": 0.05, "clipping": "ordinary"},
        ],
    },
    "200 silos": {
        "DP optimisation": [{"clipping": "ordinary"}, {"step_size": 0.002}, {"step_size": 0.01}],
        "local averaging": _clip_norms(10.0, 30.0),
        "local averaging, secure sum": _clip_norms(40.0, 80.0),
        "virtual clients": _clip_norms(0.1, 0.25),
        "virtual clients, secure sum": _clip_norms(0.35, 0.7),
        "BCM same": [{"clipping": "ordinary"}, {"step_size": 0.02}],
        "BCM split": [{"clipping": "ordinary"}, {"step_size": 0.02}],
        "global VI, secure sum": [
            {"rounds": 5, "steps": 30, "sample_rate": 0.3, "step_size": size} for size in (0.05, 0.1)
        ],
    },
    "BNN": {
        "DP optimisation": [{"rounds": 40}, {"rounds": 60}, {"step_size": 0.02}],
        "local averaging": _network(600.0, 2500.0, damping=0.04),
        "local averaging, secure sum": _network(600.0, 2500.0, damping=0.04),
        "virtual clients": _network(3.0, 12.0, damping=0.04),
        "virtual clients, secure sum": _network(3.0, 12.0, damping=0.04),
        "BCM same": [{"step_size": 0.01}, {"step_size": 0.005}],
        "BCM split": [{"step_size": 0.01}, {"step_size": 0.005}],
        "global VI, secure sum": [{"step_size": 0.01}, {"step_size": 0.02}],
    },
}


def tuned() -> dict[str, dict[str, dict[str, Any]]]:
    """Scenario -> method -> settings, as `tune` found them."""
    return json.loads(TUNED.read_text()) if TUNED.exists() else {}


def privacy_of(method: Method, scenario: Scenario) -> dict[str, Any]:
    """The [privacy] section."""
    if not method.is_private:
        return {"mode": "none"}
    return {"epsilon": scenario.epsilon, "delta": DELTA, "relation": "substitute", "unit": "row"}
