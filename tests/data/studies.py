"""Study tables that tests start from and change."""

import copy
from typing import Any

import numpy as np
import pandas as pd

BASE: dict[str, Any] = {
    "study": {"name": "icu", "seed": 3},
    "data": {
        "source": "rows.csv",
        "target": "died",
        "classes": ["no", "yes"],
        "features": ["age", "ward"],
        "bounds": {"age": [0, 100], "ward": ["a", "b", "c"]},
        "public": ["rows"],
    },
    "silos": {"count": 2},
    "model": {"kind": "logistic_regression"},
    "privacy": {"epsilon": 1, "delta": 1e-5, "relation": "substitute", "unit": "row"},
}


def changed(**changes: Any) -> dict[str, Any]:
    """`BASE` with dotted keys set, written with two underscores (data__test=.5); None removes a key."""
    tables = copy.deepcopy(BASE)
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        if not key:
            tables[section] = value
        elif value is None:
            tables.get(section, {}).pop(key, None)
        else:
            tables.setdefault(section, {})[key] = value
    return tables


def rows(number: int = 40, seed: int = 0) -> pd.DataFrame:
    """Rows that `BASE` describes, both classes among them."""
    rng = np.random.default_rng(seed)
    died = np.where(np.arange(number) % 3 == 0, "yes", "no")
    return pd.DataFrame({"age": rng.integers(0, 101, number), "ward": rng.choice(list("abc"), number), "died": died})
