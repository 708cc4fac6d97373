"""Small studies for the engine's tests."""

import numpy as np

from silobayes.data.silo import Silo
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.study import Study

DIM = 4
MODEL = LogisticRegression(num_features=DIM)
NAMES = (*(f"x{k}" for k in range(DIM - 1)), "intercept")
TRUTH = np.array([1.0, -0.7, 0.0, 0.3])


def make_silo(name: str, num_rows: int, seed: int) -> Silo:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, DIM)).astype(np.float32)
    x[:, -1] = 1.0
    p = 1 / (1 + np.exp(-x @ TRUTH))
    return Silo(name=name, x=x, y=(rng.random(num_rows) < p).astype(np.int32))


def make_silos(sizes=(80, 100, 120)) -> list[Silo]:
    return [make_silo(f"silo-{k}", size, seed=k) for k, size in enumerate(sizes)]


def make_study(
    mode: str = "dp",
    seed: int = 0,
    epsilon: float = 1.0,
    unit: str = "row",
    rows_per_person: int | None = None,
    outside: str = "refuse",
    aggregation=None,
    **protocol,
) -> Study:
    protocol = {"kind": "pvi", **protocol}  # which method leads is a test of its own
    privacy = {"mode": mode}
    if mode == "dp":
        privacy |= {"epsilon": epsilon, "delta": 1e-5, "relation": "substitute", "unit": unit}
    data = {
        "target": "y",
        "classes": [0, 1],
        "bounds": {name: [-1.0, 1.0] for name in NAMES[:-1]},
        "public": ["rows", "test"],
        "outside": outside,
    }
    if unit == "person":
        data["unit"] = "person"
    if rows_per_person is not None:
        data |= {"rows_per_person": rows_per_person, "public": [*data["public"], "persons"]}
    return Study.from_dict(
        {
            "study": {"name": "small", "seed": seed},
            "data": data,
            "model": {"kind": "logistic_regression"},
            "privacy": privacy,
            "protocol": protocol,
            "aggregation": aggregation or {},
        }
    )
