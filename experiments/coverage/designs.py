"""Cells of the tables: studies whose truth is known, and the rows that they run on.

Coefficients are drawn from the study's prior, whose standard deviation is such that a typical linear predictor has the
cell's `signal`. Rare outcomes are the exception: their intercept is -3 under a wide prior, so that about one row in
twenty is an event, whatever the other coefficients are.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from silobayes.data.encoding import Encoding, clip_target
from silobayes.data.silo import Silo
from silobayes.models.base import AbstractModel
from silobayes.study import Study

_CATEGORIES = ("a", "b", "c", "d")
_RARE = -3.0
_TARGETS: dict[str, dict[str, Any]] = {
    "logistic_regression": {"classes": [0, 1]},
    "softmax_regression": {"classes": [0, 1, 2]},
    "linear_regression": {"target_bounds": [-30.0, 30.0]},
    "poisson_regression": {"target_bounds": [0, 1000]},
    "negative_binomial_regression": {"target_bounds": [0, 1000]},
}
_OPTIONS = {"linear_regression": {"noise_stddev": 1.0}, "negative_binomial_regression": {"concentration": 2.0}}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One line of a table; `features` counts columns of x without the intercept."""

    model: str = "logistic_regression"
    design: str = "independent"
    features: int = 10
    rows: int = 5000
    silos: int = 1
    summed: bool = False
    epsilon: float = 1.0
    signal: float = 1.5
    persons: int | None = None
    protocol: str = "centred"
    repetitions: int = 200

    @property
    def name(self) -> str:
        """What stands in the results, but for the number of repetitions."""
        fields = dataclasses.asdict(self)
        return " ".join(str(value) for key, value in fields.items() if key != "repetitions")

    @property
    def prior_stddev(self) -> float:
        """Of every coefficient."""
        return 2.0 if self.design == "rare" else self.signal / np.sqrt(self.features + 1)

    @property
    def num_numbers(self) -> int:
        """Numeric columns; of one-hot designs half of the features, and a few if categories do not fill the rest."""
        if self.design != "one_hot":
            return self.features
        return self.features - len(_CATEGORIES) * (self.features // 2 // len(_CATEGORIES))


def study_of(cell: Cell) -> Study:
    """As a user would write it."""
    numbers = [f"x{k}" for k in range(cell.num_numbers)]
    columns = [f"c{k}" for k in range((cell.features - cell.num_numbers) // len(_CATEGORIES))]
    protocol: dict[str, Any] = {"kind": cell.protocol}
    if cell.protocol == "pvi":
        protocol |= {"privatise": "dp_optimisation"}
    data: dict[str, Any] = {
        "features": numbers + columns,
        "target": "y",
        **_TARGETS[cell.model],
        "bounds": {name: [-4.0, 4.0] for name in numbers} | {name: list(_CATEGORIES) for name in columns},
        "spread": dict.fromkeys(numbers, 1.0),
        "coding": "one_hot",
        "outside": "clip",
        "public": ["rows"],
    }
    if cell.persons is not None:
        data |= {"unit": "person", "rows_per_person": cell.rows // cell.persons, "public": ["rows", "persons"]}
    unit = "row" if cell.persons is None else "person"
    return Study.from_dict(
        {
            "study": {"name": "coverage"},
            "data": data,
            "silos": {"count": cell.silos},
            "model": {
                "kind": cell.model,
                "options": {"prior_stddev": cell.prior_stddev, **_OPTIONS.get(cell.model, {})},
            },
            "privacy": {"epsilon": cell.epsilon, "delta": 1e-5, "relation": "substitute", "unit": unit},
            "protocol": protocol,
            "aggregation": {"kind": "trusted" if cell.summed else "none"},
        }
    )


def truth_of(cell: Cell, model: AbstractModel, rng: np.random.Generator) -> np.ndarray:
    """Coefficients."""
    if cell.design == "rare":
        others = rng.normal(size=model.dim - 1) * cell.signal / np.sqrt(cell.features + 1) / 2
        return np.append(others, _RARE)
    return rng.normal(size=model.dim) * cell.prior_stddev


def silos_of(
    cell: Cell, encoding: Encoding, model: AbstractModel, truth: np.ndarray, rng: np.random.Generator
) -> list[Silo]:
    """Rows at the truth, dealt evenly."""
    x = encoding.encode_features(_table(cell, rng))
    key = jax.random.key(int(rng.integers(2**31)))
    x, y = map(np.asarray, model.draw_rows(jnp.asarray(truth, jnp.float32), jnp.asarray(x), key))
    if encoding.target is not None and hasattr(encoding.target, "low"):
        y = clip_target(encoding.target, y)  # type: ignore[arg-type]
    each = cell.rows // cell.silos
    persons = None if cell.persons is None else np.arange(each) * (cell.persons // cell.silos) // each
    return [
        Silo(name=f"silo-{m}", x=x[m * each : (m + 1) * each], y=y[m * each : (m + 1) * each], persons=persons)
        for m in range(cell.silos)
    ]


def _table(cell: Cell, rng: np.random.Generator) -> pd.DataFrame:
    size = (cell.rows, cell.num_numbers)
    correlation = 0.9 if cell.design == "correlated" else 0.0
    numbers = np.sqrt(correlation) * rng.normal(size=(cell.rows, 1)) + np.sqrt(1 - correlation) * rng.normal(size=size)
    if cell.design == "skewed":
        numbers = rng.gamma(1.0, size=size) - 1.0
    table = {f"x{k}": np.clip(numbers[:, k], -4.0, 4.0) for k in range(cell.num_numbers)}
    for k in range((cell.features - cell.num_numbers) // len(_CATEGORIES)):
        shares = rng.dirichlet(np.full(len(_CATEGORIES), 2.0))
        table[f"c{k}"] = rng.choice(_CATEGORIES, size=cell.rows, p=shares)
    return pd.DataFrame(table)


def _models(*models: str, **common: Any) -> list[Cell]:
    return [
        Cell(model=f"{model}_regression", epsilon=epsilon, **common) for model in models for epsilon in (0.3, 1.0, 3.0)
    ]


DESIGNS = ("independent", "correlated", "skewed", "rare", "one_hot")
_MAIN = [
    cell for design in DESIGNS if design != "rare" for cell in _models("logistic", "linear", "poisson", design=design)
]
_RARE_CELLS = _models("logistic", design="rare", rows=20000)
_SIZES = [
    *(Cell(rows=rows, features=features) for rows in (1000, 5000, 50000) for features in (5, 50)),
    *(Cell(rows=rows) for rows in (1000, 50000)),
    *(Cell(rows=50000, features=109, design=design, repetitions=60) for design in ("independent", "one_hot")),
    *(Cell(rows=20000, silos=silos, summed=summed) for silos in (10, 50) for summed in (True, False)),
    *(
        Cell(rows=20000, silos=10, summed=summed, model=f"{model}_regression")
        for model in ("linear", "poisson")
        for summed in (True, False)
    ),
]
_REDUCED = [
    Cell(model="softmax_regression", features=5),
    Cell(model="negative_binomial_regression"),
    Cell(rows=10000, persons=2500),
    Cell(rows=10000, persons=2500, model="linear_regression"),
]
_NAIVE = [Cell(protocol="pvi", design=design, repetitions=60) for design in ("independent", "correlated")]
# A strong signal: most rows are nearly certain, and the posterior is far from normal.
_STRONG = [Cell(signal=3.3), Cell(signal=3.3, design="correlated")]
CELLS = {cell.name: cell for cell in (*_MAIN, *_RARE_CELLS, *_SIZES, *_REDUCED, *_NAIVE, *_STRONG)}
