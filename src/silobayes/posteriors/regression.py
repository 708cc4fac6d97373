"""A regression's coefficients on the scale of its reader: per year, not per encoded unit; as ratios of odds or rates.

Features are encoded (`data/columns.py`): one unit of a column moves its feature by the feature's *unit*, so a
coefficient times it is the change of the linear predictor per unit of the column, and e to the power of that is the
ratio of odds (logistic regression) or of rates (Poisson, negative binomial regression) per unit of the column.

Of a Gaussian coefficient the ratio is log-normal: its median and its central interval are those of the coefficient,
taken to the power of e.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from silobayes.core.errors import InvalidInput, require_number
from silobayes.models.base import AbstractModel
from silobayes.models.linear_regression import LinearRegression, LinearRegressionUnknownNoise
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.negative_binomial_regression import (
    NegativeBinomialRegression,
    NegativeBinomialRegressionUnknownConcentration,
)
from silobayes.models.poisson_regression import PoissonRegression
from silobayes.models.softmax_regression import SoftmaxRegression

_ODDS, _RATES = "odds ratio", "rate ratio"
_RATIOS: dict[type[AbstractModel], str | None] = {
    LogisticRegression: _ODDS,
    PoissonRegression: _RATES,
    NegativeBinomialRegression: _RATES,
    NegativeBinomialRegressionUnknownConcentration: _RATES,
    LinearRegression: None,
    LinearRegressionUnknownNoise: None,
    # Of a class against all others together, which is no odds ratio of two classes.
    SoftmaxRegression: None,
}
"""Models whose parameters begin with a coefficient per feature (and class), and what e to the power of one is."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A weighted sum of coefficients: posterior mean, sd, and the central interval of probability `level`."""

    mean: float
    sd: float
    lower: float
    upper: float
    level: float


def ratio_name(model: AbstractModel | None) -> str | None:
    """What e to the power of a coefficient is; None where it is nothing that readers ask for."""
    return _RATIOS.get(type(model)) if model is not None else None


def coefficient_units(model: AbstractModel | None, feature_units: Sequence[float]) -> np.ndarray | None:
    """For each parameter how far one unit of its column moves its feature, NaN for one that is no coefficient.

    None for models that are no regressions on the features.
    """
    if model is None or type(model) not in _RATIOS:
        return None
    if len(feature_units) != model.num_features:
        fix = "Pass the feature_units of the encoding of these rows."
        raise InvalidInput("feature_units", f"{model.num_features} numbers", len(feature_units), fix)
    outputs = model.num_classes if isinstance(model, SoftmaxRegression) else 1
    units = np.full(model.dim, np.nan)
    units[: model.num_features * outputs] = np.repeat(np.asarray(feature_units, float), outputs)
    return units


def half_width(level: float) -> float:
    """In standard deviations, of the central interval of probability `level`."""
    fix = "Pass the probability of the interval, e.g. 0.95."
    level = require_number("level", level, above=0.0, at_most=math.nextafter(1.0, 0.0), fix=fix)
    return NormalDist().inv_cdf(0.5 + level / 2)


def weights_of(weights: Mapping[str, float] | Sequence[float] | np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """A weight for each parameter, from all of them or from those by name that are not zero."""
    fix = "Pass {parameter: weight}, or a weight for each parameter."
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in names]
        if unknown or not weights:
            raise InvalidInput("weights", f"parameters among {', '.join(names)}", unknown or "nothing", fix)
        weights = [weights.get(name, 0.0) for name in names]
    try:
        vector = np.asarray(weights, float)
    except (TypeError, ValueError):
        raise InvalidInput("weights", "numbers", "others", fix) from None
    if vector.shape != (len(names),) or not np.isfinite(vector).all():
        raise InvalidInput("weights", f"{len(names)} finite numbers", vector.shape, fix)
    return vector


def check_units(units: np.ndarray, dim: int) -> np.ndarray:
    """Units of so many parameters: positive, or NaN where a parameter is no coefficient."""
    units = np.asarray(units, float)
    if units.shape != (dim,) or not np.all(np.isnan(units) | ((units > 0) & np.isfinite(units))):
        raise InvalidInput("units", f"{dim} numbers > 0", units.shape, "Pass Encoding.feature_units to with_units.")
    return units
