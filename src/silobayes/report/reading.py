"""A posterior as readers want it: per unit of the column, as ratios, by what its width is made of, with warnings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from silobayes.data.encoding import INTERCEPT
from silobayes.posteriors import Posterior


def reading(posterior: Posterior, level: float) -> dict[str, Any]:
    """All tables that this posterior has, a parameter at a time; a number that no float holds is null."""
    tables: dict[str, pd.DataFrame] = {}
    if posterior.units is not None:
        tables["per_unit"] = posterior.per_unit(level)
        if posterior.ratio is not None:
            tables["ratio"] = posterior.ratios(level)
    parameters = records(posterior.summary(level))
    for key, table in tables.items():
        for name, values in records(table).items():
            parameters[name][key] = values
    return {
        "level": level,
        "ratio": posterior.ratio if "ratio" in tables else None,
        "parameters": parameters,
        "warnings": list(posterior.warnings),
    }


def forest(posterior: Posterior, level: float, names: Sequence[str]) -> pd.DataFrame | None:
    """Ratios, or coefficients where there are none, per encoded unit, of those of `names` that have such.

    Columns `value`, `lower`, `upper`, and `lower_without`, `upper_without`: the interval that would be left if the
    privacy noise took no part in the variance. None where there is nothing to read so, or nothing new.
    """
    if posterior.units is None or (posterior.ratio is None and posterior.privacy_share is None):
        return None
    units = {name: unit for name, unit in zip(posterior.names, posterior.units, strict=True) if np.isfinite(unit)}
    shown = [name for name in names if name in units and name != INTERCEPT]
    summary = posterior.summary(level).loc[shown]
    mean = summary["mean"].to_numpy()
    columns = {"value": mean, "lower": summary["lower"].to_numpy(), "upper": summary["upper"].to_numpy()}
    if posterior.privacy_share is not None:
        left = np.sqrt(1.0 - summary["privacy_share"].to_numpy())
        columns |= {f"{end}_without": mean + left * (columns[end] - mean) for end in ("lower", "upper")}
    if posterior.ratio is not None:
        with np.errstate(over="ignore"):
            columns = {name: np.exp(values) for name, values in columns.items()}
    is_drawn = np.all([np.isfinite(values) for values in columns.values()], axis=0)
    labels = pd.Index([_with_unit(name, units[name]) for name in shown], name="coefficient")
    return pd.DataFrame(columns, index=labels).loc[is_drawn, list(columns)]


def _with_unit(name: str, unit: float) -> str:
    """`age (per 15)`: what of its column moves the feature by one."""
    return name if unit == 1.0 else f"{name} (per {1 / unit:.4g})"


def variance_shares(posterior: Posterior) -> pd.DataFrame | None:
    """Of each parameter's variance, what is from the privacy noise, the prior and the rows; as far as it is known."""
    known = {"privacy noise": posterior.privacy_share, "prior": posterior.prior_share}
    shares = {name: share for name, share in known.items() if share is not None}
    if not shares:
        return None
    table = pd.DataFrame(shares, index=list(posterior.names))
    rest = "rows" if len(shares) == len(known) else "rows and " + next(name for name in known if name not in shares)
    return table.assign(**{rest: (1.0 - table.sum(axis=1)).clip(lower=0.0)})


def records(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Row name -> column -> number."""
    return {str(name): _finite(row) for name, row in table.to_dict(orient="index").items()}


def _finite(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): float(value) if math.isfinite(value) else None for key, value in row.items()}
