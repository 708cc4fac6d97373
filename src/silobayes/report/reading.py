"""A posterior as readers want it, for machines: per encoded unit, per unit of the column, as ratios, with warnings."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from silobayes.posteriors import Posterior

if TYPE_CHECKING:
    import pandas as pd


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


def records(table: "pd.DataFrame") -> dict[str, dict[str, Any]]:
    """Row name -> column -> number."""
    return {str(name): _finite(row) for name, row in table.to_dict(orient="index").items()}


def _finite(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): float(value) if math.isfinite(value) else None for key, value in row.items()}
