"""Adult as a study: 48,842 people, half of them to train on, 108 features and an intercept (000 Appendix B).

Typical values, spreads and shares are those of the whole table and *declared public*: the paper standardises on train
and test rows, without a price. Somebody with a table of their own would take them from the literature.
"""

from functools import cache
from typing import Any

import pandas as pd

from experiments.data import path_of, table
from silobayes.study import Study

FILE = "adult/adult.csv.gz"
NUMERIC = {
    "age": (17, 90),
    "fnlwgt": (0, 1_500_000),
    "education-num": (1, 16),
    "capital-gain": (0, 100_000),
    "capital-loss": (0, 5_000),
    "hours-per-week": (1, 99),
}
SPLITS = {
    "balanced": {"scheme": "even"},
    "rho .75, kappa .95": {"scheme": "rho_kappa", "rho": 0.75, "kappa": 0.95},
    "rho .7, kappa -3": {"scheme": "rho_kappa", "rho": 0.7, "kappa": -3.0},
}


@cache
def public_facts() -> dict[str, Any]:
    """The [data] section: bounds, categories, and the declared typical values, spreads and shares."""
    rows = table(FILE)
    categorical = [name for name in rows.columns if name not in NUMERIC and name not in ("split", "income")]
    shares = {name: rows[name].value_counts(normalize=True).sort_index() for name in categorical}
    return {
        "source": str(path_of(FILE)),
        "target": "income",
        "classes": ["<=50K", ">50K"],
        "bounds": NUMERIC | {name: list(share.index) for name, share in shares.items()},
        "typical": {name: float(rows[name].mean()) for name in NUMERIC},
        "spread": {name: float(rows[name].std()) for name in NUMERIC},
        "shares": {name: _summing_to_one(share) for name, share in shares.items()},
        "coding": "one_hot",
        "ignore": ["split"],
        "public": ["rows", "test"],
        "outside": "clip",
        "test": 0.5,
    }


def study(
    *,
    seed: int,
    num_clients: int,
    split: str,
    privacy: dict[str, Any],
    protocol: dict[str, Any],
    aggregation: dict[str, Any],
    model: dict[str, Any],
) -> Study:
    """One run."""
    return Study.from_dict(
        {
            "study": {"name": "adult", "seed": seed},
            "data": public_facts(),
            "silos": {"count": num_clients, **SPLITS[split]},
            "model": model,
            "privacy": privacy,
            "protocol": protocol,
            "aggregation": aggregation,
        }
    )


def _summing_to_one(share: pd.Series) -> list[float]:
    return [float(value) for value in share]
