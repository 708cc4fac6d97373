"""Small studies, one for each method, aggregation and unit that is to stay as it is, whatever happens to the engine.

Only what a user sees is used: a study of tables, `silobayes.fit` and the files of its run directory.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import silobayes
from silobayes.privacy.ledger import Ledger
from silobayes.study import Study

NOISE_SEED = 11
# Two shapes: the first silo is so small that it is padded apart from the others.
SIZES = (12, 24, 30)
PERSONS = (8, 12, 15)
ROWS_PER_PERSON = 3
SEEN_VISITS = (1, 3)

Tables = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One study and what of it differs from the others.

    Attributes:
        name: In the frozen file.
        model: Its section.
        protocol: Its section.
        epsilon: None: mode none.
        unit: Of privacy.
        relation: Of privacy.
        aggregation: Its section.
        num_silos: The first so many sizes, and again from the first.
        tolerance: Of means, in posterior sds, and of sds, relative; after the first visit.
    """

    name: str
    protocol: Tables
    model: Tables = field(default_factory=lambda: {"kind": "logistic_regression"})
    epsilon: float | None = 8.0
    unit: str = "row"
    relation: str = "substitute"
    aggregation: Tables = field(default_factory=dict)
    num_silos: int = 3
    tolerance: float = 1e-4

    def __str__(self) -> str:
        return self.name

    @property
    def first_tolerance(self) -> float:
        """Of eta after the first visit, relative to its largest number.

        A clipped change or a message goes on an integer grid, and where its last bits differ a count may fall to the
        other side: on other processors (AVX2 or SSE) one does, 8e-7 to 4e-6 of eta; without a grid it is below 5e-7.
        """
        perturbs = self.protocol.get("privatise") in (
            "parameter_perturbation",
            "local_averaging",
            "virtual_clients",
        )
        return 1e-5 if perturbs or self.aggregation else 1e-6

    @property
    def study(self) -> Study:
        privacy: Tables = {"mode": "none"}
        if self.epsilon is not None:
            privacy = {"epsilon": self.epsilon, "delta": 1e-5, "relation": self.relation, "unit": self.unit}
        data = {"target": "y", "bounds": {"a": [-1, 1], "b": [-1, 1]}, "public": ["rows"], **_TARGETS[self._target]}
        if self.unit == "person":
            data |= {"unit": "who", "rows_per_person": ROWS_PER_PERSON, "public": ["rows", "persons"]}
        return Study.from_dict(
            {
                "study": {"name": "oracle", "seed": 5},
                "data": data,
                "model": self.model,
                "privacy": privacy,
                "protocol": self.protocol,
                "aggregation": self.aggregation,
            }
        )

    @property
    def silos(self) -> dict[str, pd.DataFrame]:
        return {f"silo-{k}": self._rows(k) for k in range(self.num_silos)}

    @property
    def _target(self) -> str:
        by_kind = {
            "softmax_regression": "many",
            "poisson_regression": "count",
            "negative_binomial_regression": "count",
            "linear_regression": "real",
        }
        return by_kind.get(self.model["kind"], "classes")

    def _rows(self, k: int) -> pd.DataFrame:
        rng = np.random.default_rng([2024, k])
        who = None
        if self.unit == "person":
            counts = rng.integers(1, ROWS_PER_PERSON + 1, PERSONS[k % len(PERSONS)])
            who = np.repeat([f"p-{person}" for person in range(len(counts))], counts)
        num_rows = SIZES[k % len(SIZES)] if who is None else len(who)
        x = rng.uniform(-1.0, 1.0, size=(num_rows, 2))
        score = 1.2 * x[:, 0] - 0.8 * x[:, 1] + 0.3
        noise = rng.gumbel(size=(num_rows, 3))
        y = {
            "classes": (noise[:, 0] + score > noise[:, 1]).astype(int),
            "many": (np.stack([score, np.zeros(num_rows), 2.0 * x[:, 0]], axis=1) + noise).argmax(axis=1),
            "count": np.minimum(rng.poisson(np.exp(score)), 10),
            "real": np.clip(0.4 * score + 0.3 * rng.normal(size=num_rows), -2.0, 2.0),
        }[self._target]
        frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y})
        return frame if who is None else frame.assign(who=who)


_TARGETS: dict[str, Tables] = {
    "classes": {"classes": [0, 1]},
    "many": {"classes": [0, 1, 2]},
    "count": {"target_bounds": [0, 10]},
    "real": {"target_bounds": [-2, 2]},
}


def run(case: Case, out: Path) -> Tables:
    """All that is frozen of a run: JSON-able, floats to the last digit."""
    posterior = silobayes.fit(case.study, case.silos, out=out, noise_seed=NOISE_SEED)
    trace = [json.loads(line) for line in (out / "trace.jsonl").read_text().splitlines()]
    certificate = json.loads((out / "certificate.json").read_text())
    seen = sorted({visit for visit in (*SEEN_VISITS, len(trace)) if visit <= len(trace)})
    paying = certificate.get("silos", [])
    return {
        "num_visits": len(trace),
        "visited": [line["visited"] for line in trace],
        "eta": {str(visit): trace[visit - 1]["eta"] for visit in seen},
        "released": {str(visit): trace[visit - 1].get("released") for visit in seen},
        "mean": posterior.mean.tolist(),
        "stddev": posterior.stddev.tolist(),
        "covariance": covariance_of(posterior).tolist() if np.ndim(trace[-1]["eta"]["quadratic"]) == 2 else None,
        "prices": {silo["name"]: silo["epsilon"] for silo in paying},
        "events": {silo["name"]: silo["events"] for silo in paying},
        "charges": {silo["name"]: len(Ledger.open(out / silo["ledger"]).entries()) for silo in paying},
        "visits_without_effect": certificate.get("visits_without_effect"),
        "communications": json.loads((out / "metrics.json").read_text())["communications"],
    }


def covariance_of(posterior: Any) -> np.ndarray:
    """Of a full posterior."""
    if posterior.covariance is not None:
        return np.asarray(posterior.covariance, float)
    return np.asarray(posterior.family.to_standard(posterior.eta).covariance, float)


SHARING, MASKS, TRUSTED = ({"kind": kind} for kind in ("secret_sharing", "pairwise_masks", "trusted"))
LOOP = {"rounds": 4, "damping": 0.4, "steps": 6, "step_size": 0.1}
OPTIMISATION = {**LOOP, "privatise": "dp_optimisation", "sample_rate": 0.4, "clip_norm": 0.7}
SHARDED = {**LOOP, "steps": 8, "shards": 4, "posterior": "mean_field"}
AVERAGING = {**SHARDED, "privatise": "local_averaging", "clip_norm": [1.5, 0.5]}
VIRTUAL = {**SHARDED, "privatise": "virtual_clients", "clip_norm": [0.8, 0.2]}
PERTURBATION = {**LOOP, "privatise": "parameter_perturbation", "clip_norm": 1.0}
GLOBAL = {"kind": "global_vi", "rounds": 4, "steps": 4, "step_size": 0.05}
KNOWN_NOISE = {"kind": "linear_regression", "options": {"noise_stddev": 0.3}}
UNKNOWN_NOISE = {"kind": "linear_regression"}
NETWORK = {"kind": "mlp", "options": {"hidden": [2]}}

CASES = (
    # PVI without privacy.
    Case(name="none", epsilon=None, protocol={**LOOP, "posterior": "mean_field"}),
    Case(name="none, full", epsilon=None, protocol={**LOOP, "posterior": "full"}),
    Case(
        name="none, masks, softmax",
        epsilon=None,
        protocol={**LOOP, "posterior": "mean_field"},
        model={"kind": "softmax_regression"},
        aggregation=MASKS,
    ),
    Case(
        name="none, asynchronous, unknown noise",
        epsilon=None,
        protocol={**LOOP, "rounds": 3, "posterior": "full", "schedule": "asynchronous"},
        model=UNKNOWN_NOISE,
    ),
    # DP optimisation.
    Case(name="dp_optimisation", protocol=OPTIMISATION),
    Case(
        name="dp_optimisation, ordinary, full", protocol={**OPTIMISATION, "clipping": "ordinary", "posterior": "full"}
    ),
    Case(name="dp_optimisation, fixed size", protocol={**OPTIMISATION, "sampler": "without_replacement"}),
    Case(name="dp_optimisation, person", protocol=OPTIMISATION, unit="person"),
    Case(
        name="dp_optimisation, sharing, add_remove", protocol=OPTIMISATION, aggregation=SHARING, relation="add_remove"
    ),
    Case(name="dp_optimisation, sequential", protocol={**OPTIMISATION, "rounds": 2, "schedule": "sequential"}),
    Case(
        name="dp_optimisation, asynchronous, poisson",
        protocol={**OPTIMISATION, "rounds": 3, "schedule": "asynchronous"},
        model={"kind": "poisson_regression"},
    ),
    Case(
        name="dp_optimisation, sampled",
        protocol={**OPTIMISATION, "schedule": "sampled", "clients_per_round": 2},
    ),
    # Perturbing methods.
    Case(name="parameter_perturbation", protocol=PERTURBATION, epsilon=30.0),
    Case(
        name="parameter_perturbation, sharing, client",
        protocol=PERTURBATION,
        epsilon=30.0,
        unit="client",
        aggregation=SHARING,
    ),
    Case(name="local_averaging", protocol=AVERAGING, epsilon=30.0),
    Case(
        name="local_averaging, trusted, sampled",
        protocol={**AVERAGING, "schedule": "sampled", "clients_per_round": 3},
        num_silos=4,
        epsilon=30.0,
        aggregation=TRUSTED,
    ),
    Case(
        name="local_averaging, masks",
        protocol={**AVERAGING, "clip_norm": 1.5},
        epsilon=30.0,
        aggregation={**MASKS, "colluding": 1},
    ),
    Case(name="local_averaging, person", protocol=AVERAGING, epsilon=30.0, unit="person"),
    Case(name="virtual_clients", protocol={**VIRTUAL, "clip_norm": [0.5, 0.5], "scales": [2.0, 0.5]}, epsilon=30.0),
    Case(
        name="virtual_clients, sharing, full",
        protocol={**VIRTUAL, "posterior": "full"},
        epsilon=30.0,
        aggregation={**SHARING, "compute_nodes": 2},
        relation="add_remove",
    ),
    Case(name="virtual_clients, masks", protocol=VIRTUAL, epsilon=30.0, aggregation=MASKS),
    Case(name="virtual_clients, masks, person", protocol=VIRTUAL, epsilon=30.0, unit="person", aggregation=MASKS),
    Case(
        name="virtual_clients, masks, sampled",
        protocol={**VIRTUAL, "schedule": "sampled", "clients_per_round": 3},
        num_silos=4,
        epsilon=30.0,
        aggregation=MASKS,
    ),
    # So few shards that only a large budget finds a quantile of their norms.
    Case(
        name="quantile, virtual_clients",
        protocol={**SHARDED, "privatise": "virtual_clients", "clip_norm": "quantile", "first_share": 0.5},
        epsilon=3000.0,
    ),
    Case(
        name="quantile, local_averaging, trusted",
        protocol={**SHARDED, "privatise": "local_averaging", "clip_norm": "quantile", "clip_quantile": 0.4},
        epsilon=5000.0,
        aggregation=TRUSTED,
    ),
    # Linear regression with known noise.
    Case(
        name="sufficient_statistics",
        protocol={"privatise": "sufficient_statistics"},
        model=KNOWN_NOISE,
        epsilon=30.0,
    ),
    Case(
        name="sufficient_statistics, sharing, full",
        protocol={"privatise": "sufficient_statistics", "posterior": "full"},
        model=KNOWN_NOISE,
        epsilon=30.0,
        aggregation=SHARING,
    ),
    Case(
        name="hybrid",
        protocol={**OPTIMISATION, "privatise": "hybrid", "step_size": 0.02, "clip_norm": 2.0},
        model=KNOWN_NOISE,
        epsilon=30.0,
    ),
    # Committees.
    Case(name="bcm, same", epsilon=None, protocol={"kind": "bcm", "steps": 20, "posterior": "full"}),
    Case(
        name="bcm, same, private, masks",
        protocol={"kind": "bcm", "steps": 10, "sample_rate": 0.4},
        aggregation=MASKS,
    ),
    Case(
        name="bcm, split",
        epsilon=None,
        protocol={"kind": "bcm", "committee": "split", "steps": 20},
        aggregation=TRUSTED,
    ),
    Case(
        name="bcm, split, private",
        protocol={"kind": "bcm", "committee": "split", "steps": 10, "sample_rate": 0.4},
    ),
    # Global VI.
    Case(name="global_vi", epsilon=None, protocol=GLOBAL),
    Case(name="global_vi, private", protocol={**GLOBAL, "sample_rate": 0.4}),
    Case(name="global_vi, private, sharing", protocol={**GLOBAL, "sample_rate": 0.4}, aggregation=SHARING),
    Case(
        name="global_vi, private, masks, person",
        protocol={**GLOBAL, "steps": 2, "sample_rate": 0.4},
        unit="person",
        aggregation=MASKS,
    ),
    # One visit to each silo, one after the other.
    Case(name="streaming_vb", epsilon=None, protocol={"kind": "streaming_vb", "steps": 20}),
    Case(
        name="streaming_vb, private",
        protocol={"kind": "streaming_vb", "steps": 10, "sample_rate": 0.4, "clip_norm": 0.7},
    ),
    # Linear regression from sums of clipped rows.
    Case(name="linreg", protocol={"kind": "linreg"}, model=KNOWN_NOISE, epsilon=30.0),
    Case(
        name="linreg, no projection", protocol={"kind": "linreg", "projection": False}, model=KNOWN_NOISE, epsilon=30.0
    ),
    Case(name="linreg, sharing", protocol={"kind": "linreg"}, model=KNOWN_NOISE, epsilon=30.0, aggregation=SHARING),
    Case(
        name="linreg, input_perturbation",
        protocol={"kind": "linreg", "privatise": "input_perturbation"},
        model=KNOWN_NOISE,
        epsilon=30.0,
    ),
    Case(name="linreg, none", protocol={"kind": "linreg"}, model=KNOWN_NOISE, epsilon=None),
    # Networks: without privacy errors grow from visit to visit.
    Case(name="network, none", epsilon=None, protocol=LOOP, model=NETWORK, tolerance=1e-2),
    Case(
        name="network, local_averaging",
        protocol={**AVERAGING, "clip_norm": [2.0, 0.5]},
        model=NETWORK,
        epsilon=30.0,
    ),
)
# What compiles little that another one of these has not compiled.
QUICK = (
    "none",
    "dp_optimisation",
    "dp_optimisation, sharing, add_remove",
    "dp_optimisation, sampled",
    "parameter_perturbation, sharing, client",
    "local_averaging",
    "local_averaging, masks",
    "virtual_clients",
    "virtual_clients, masks",
    "quantile, virtual_clients",
    "quantile, local_averaging, trusted",
    "sufficient_statistics",
    "sufficient_statistics, sharing, full",
    "linreg",
    "linreg, sharing",
    "linreg, input_perturbation",
)
