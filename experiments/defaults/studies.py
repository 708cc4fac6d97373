"""Simulated studies that the default rules are derived on: no row here comes from a person.

Four kinds of table. *ICU* is `data.simulate.icu_study`, cut into silos in the order of its units, so that silos differ
in whom they admit. *Census* has 6 numbers, some of them skewed, and 8 columns of 102 categories with uneven shares;
latent factors stand behind all of them. *Few* has 4 correlated numbers; its target is a class, a real number or a
count. *Curved* has 6 numbers whose log odds are products and waves, for networks. Beside the rows of a study 8,000 more
are made and held out, dealt to the silos like the others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from silobayes.data.simulate import icu_study
from silobayes.study import Study

DELTA = 1e-5
_HELD_OUT = 8_000
_NUM_FACTORS = 3
_CATEGORIES = (2, 3, 5, 8, 12, 16, 24, 32)
_NOISE_STDDEV = 0.5
_MAX_COUNT = 20


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows, the section [data] and the section [model]."""

    rows: pd.DataFrame = field(repr=False)
    data: dict[str, Any]
    model: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A simulated study: which table, how many rows in how many silos, what each may spend.

    Attributes:
        make: (number of rows, generator of randomness) -> table.
        rows: To learn from, of all silos together.
        silos: Of equal sizes; by default the table's order decides who is where.
        epsilon: Of each silo.
        declared: Whether the spread of each number and the shares of categories are declared.
    """

    make: Callable[[int, int], Table]
    rows: int
    silos: int
    epsilon: float
    declared: bool

    @cache  # noqa: B019 - a handful of studies, kept as long as the module
    def table(self, seed: int) -> Table:
        """The rows of this seed."""
        return self.make(self.rows + _HELD_OUT, seed)

    def frames(self, seed: int) -> dict[str, pd.DataFrame]:
        """Silo -> rows."""
        rows = self.table(seed).rows
        ends = np.linspace(0, len(rows), self.silos + 1).astype(int)
        return {f"silo-{m:02d}": rows.iloc[ends[m] : ends[m + 1]] for m in range(self.silos)}

    def study(self, seed: int, *, is_private: bool, protocol: dict[str, Any], aggregation: dict[str, Any]) -> Study:
        """One run."""
        table = self.table(seed)
        budget = {"epsilon": self.epsilon, "delta": DELTA, "relation": "substitute", "unit": "row"}
        public = {"public": ["rows", "test"], "outside": "clip", "test": _HELD_OUT / (self.rows + _HELD_OUT)}
        return Study.from_dict(
            {
                "study": {"name": "defaults", "seed": seed},
                "data": table.data | public | {"coding": "one_hot"} | (_declared(table) if self.declared else {}),
                "model": table.model,
                "privacy": budget if is_private else {"mode": "none"},
                "protocol": protocol,
                "aggregation": aggregation,
            }
        )


def _declared(table: Table) -> dict[str, Any]:
    """What somebody who knows such tables would declare."""
    bounds = table.data["bounds"]
    numbers = [name for name, bound in bounds.items() if not isinstance(bound[0], str)]
    facts: dict[str, Any] = {
        "typical": {name: float(table.rows[name].mean()) for name in numbers},
        "spread": {name: float(table.rows[name].std()) for name in numbers},
    }
    categories = [name for name in bounds if name not in numbers]
    if categories:
        counts = {name: table.rows[name].value_counts(normalize=True) for name in categories}
        facts["shares"] = {name: [float(counts[name].get(one, 0.0)) for one in bounds[name]] for name in categories}
    return facts


def icu(num_rows: int, seed: int) -> Table:
    """Of 20,000 simulated patients, in the order of their units."""
    study = icu_study(seed)
    rows = pd.concat(study.frames.values(), ignore_index=True)
    kept = np.sort(np.random.default_rng([seed, 1]).permutation(len(rows))[:num_rows])
    return Table(rows=rows.iloc[kept], data=study.data, model={"kind": "logistic_regression"})


def census(num_rows: int, seed: int) -> Table:
    """Numbers and many categories of uneven shares; about a quarter of the rows are of class yes."""
    rng = np.random.default_rng([seed, 2])
    factors = rng.normal(size=(num_rows, _NUM_FACTORS))
    log_odds = np.full(num_rows, -1.6)
    columns, bounds = {}, {}
    for number in range(6):
        value = factors @ rng.normal(0, 0.6, _NUM_FACTORS) + rng.normal(0, 0.8, num_rows)
        log_odds += rng.normal(0, 0.4) * value
        # Two of them are skewed, as incomes and gains are.
        columns[f"n{number}"] = np.clip(np.exp(value), 0, 30) if number < 2 else np.clip(value, -5, 5)
        bounds[f"n{number}"] = [0.0, 30.0] if number < 2 else [-5.0, 5.0]
    for number, size in enumerate(_CATEGORIES):
        names = [f"k{k}" for k in range(size)]
        log_shares = -1.2 * np.log(np.arange(1, size + 1)) + factors @ rng.normal(0, 0.5, (_NUM_FACTORS, size))
        code = np.argmax(log_shares + rng.gumbel(size=(num_rows, size)), axis=1)
        log_odds += rng.normal(0, 0.5, size)[code]
        columns[f"c{number}"] = np.array(names)[code]
        bounds[f"c{number}"] = names
    return _classes(columns, bounds, log_odds, rng, {"kind": "logistic_regression"})


def few(num_rows: int, seed: int) -> Table:
    """Four correlated numbers and a class."""
    rng = np.random.default_rng([seed, 3])
    columns, bounds, predictor = _numbers(num_rows, 4, rng)
    return _classes(columns, bounds, 1.2 * predictor - 0.5, rng, {"kind": "logistic_regression"})


def few_real(num_rows: int, seed: int) -> Table:
    """Four correlated numbers and a real target."""
    rng = np.random.default_rng([seed, 4])
    columns, bounds, predictor = _numbers(num_rows, 4, rng)
    columns["y"] = np.clip(0.5 * predictor + rng.normal(0, _NOISE_STDDEV, num_rows), -4, 4)
    model = {"kind": "linear_regression", "options": {"noise_stddev": _NOISE_STDDEV}}
    data = {"target": "y", "target_bounds": [-4.0, 4.0], "bounds": bounds}
    return Table(rows=pd.DataFrame(columns), data=data, model=model)


def few_counts(num_rows: int, seed: int) -> Table:
    """Four correlated numbers and a count."""
    rng = np.random.default_rng([seed, 5])
    columns, bounds, predictor = _numbers(num_rows, 4, rng)
    columns["y"] = np.minimum(rng.poisson(np.exp(0.4 * predictor + 0.5)), _MAX_COUNT)
    data = {"target": "y", "target_bounds": [0, _MAX_COUNT], "bounds": bounds}
    return Table(rows=pd.DataFrame(columns), data=data, model={"kind": "poisson_regression"})


def curved(num_rows: int, seed: int) -> Table:
    """Six numbers and log odds that no linear predictor describes; a network of one layer."""
    rng = np.random.default_rng([seed, 6])
    columns, bounds, predictor = _numbers(num_rows, 6, rng)
    a, b, c, d = (columns[f"n{number}"] for number in range(4))
    log_odds = 0.7 * predictor + 1.5 * a * b + 2.0 * np.sin(2.0 * c) - 1.0 * np.abs(d)
    return _classes(columns, bounds, log_odds, rng, {"kind": "mlp", "options": {"hidden": [20]}})


def _numbers(
    num_rows: int, num_columns: int, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], dict[str, list[float]], np.ndarray]:
    """(columns, bounds, a linear predictor of variance 1 or so)."""
    common = rng.normal(size=num_rows)
    values = np.clip(0.6 * common[:, None] + 0.8 * rng.normal(size=(num_rows, num_columns)), -3, 3)
    weights = rng.choice([-1.0, 1.0], num_columns) * rng.uniform(0.3, 1.0, num_columns)
    names = [f"n{number}" for number in range(num_columns)]
    return dict(zip(names, values.T, strict=True)), {name: [-3.0, 3.0] for name in names}, values @ weights


def _classes(
    columns: dict[str, np.ndarray],
    bounds: dict[str, Any],
    log_odds: np.ndarray,
    rng: np.random.Generator,
    model: dict[str, Any],
) -> Table:
    columns["y"] = np.where(rng.random(len(log_odds)) < 1 / (1 + np.exp(-log_odds)), "yes", "no")
    data = {"target": "y", "classes": ["no", "yes"], "bounds": bounds}
    return Table(rows=pd.DataFrame(columns), data=data, model=model)


def _study(make: Callable[[int, int], Table], rows: int, silos: int, epsilon: float, declared: bool) -> Simulated:
    return Simulated(make=make, rows=rows, silos=silos, epsilon=epsilon, declared=declared)


# "table rows / silos / epsilon". Many and few rows, silos and budgets appear with every kind of table; it is no full
# factorial design.
CORE = {
    "few 2,000 / 3 / 1": _study(few, 2_000, 3, 1.0, True),
    "few 10,000 / 10 / .3": _study(few, 10_000, 10, 0.3, False),
}
NETWORKS = {
    "curved 20,000 / 10 / 1": _study(curved, 20_000, 10, 1.0, True),
    "curved 10,000 / 3 / 3": _study(curved, 10_000, 3, 3.0, False),
}
OTHERS = {
    "ICU 10,000 / 3 / .3": _study(icu, 10_000, 3, 0.3, True),
    "census 24,000 / 10 / 1": _study(census, 24_000, 10, 1.0, True),
    "linear 10,000 / 10 / 1": _study(few_real, 10_000, 10, 1.0, True),
    "counts 10,000 / 10 / 1": _study(few_counts, 10_000, 10, 1.0, True),
    "ICU 12,000 / 10 / 1": _study(icu, 12_000, 10, 1.0, False),
    "few 50,000 / 50 / 1": _study(few, 50_000, 50, 1.0, False),
    "ICU 5,000 / 10 / 3": _study(icu, 5_000, 10, 3.0, True),
    "census 12,000 / 3 / 3": _study(census, 12_000, 3, 3.0, False),
    "census 50,000 / 50 / 1": _study(census, 50_000, 50, 1.0, True),
}
STUDIES = NETWORKS | CORE | OTHERS
