"""Models: the log-likelihood of one row, one model per file; `build` makes one from a study file."""

from collections.abc import Callable, Mapping
from typing import Any

from silobayes.core.errors import InvalidInput, refuse_unknown_keys, require_count, require_number
from silobayes.models.base import AbstractGLM, AbstractModel
from silobayes.models.gaussian import GaussianMean, GaussianMeanCovariance
from silobayes.models.linear_regression import LinearRegression, LinearRegressionUnknownNoise
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.mlp import BinaryMLP, ClassesMLP, RealMLP
from silobayes.models.negative_binomial_regression import (
    NegativeBinomialRegression,
    NegativeBinomialRegressionUnknownConcentration,
)
from silobayes.models.numpyro_model import NumpyroModel, from_numpyro
from silobayes.models.poisson_regression import PoissonRegression
from silobayes.models.softmax_regression import SoftmaxRegression

__all__ = [
    "MODELS",
    "AbstractGLM",
    "AbstractModel",
    "BinaryMLP",
    "ClassesMLP",
    "GaussianMean",
    "GaussianMeanCovariance",
    "LinearRegression",
    "LinearRegressionUnknownNoise",
    "LogisticRegression",
    "NegativeBinomialRegression",
    "NegativeBinomialRegressionUnknownConcentration",
    "NumpyroModel",
    "PoissonRegression",
    "RealMLP",
    "SoftmaxRegression",
    "build",
    "from_numpyro",
]

Reader = Callable[[str, object], Any]
# Products of its square and of a row's largest features are then finite in float32.
_WIDEST_PRIOR = 1e6


def _positive(key: str, value: object) -> float:
    return require_number(key, value, above=0.0, fix="Pass a positive number.")


def _prior_stddev(key: str, value: object) -> float:
    fix = "Features lie within a few units; a prior this wide knows nothing already."
    return require_number(key, value, above=0.0, at_most=_WIDEST_PRIOR, fix=fix)


def _count(key: str, value: object) -> int:
    return require_count(key, value, at_least=1, fix="Pass a positive integer.")


def _classes(key: str, value: object) -> int:
    return require_count(key, value, at_least=2, fix="List the classes of the target.")


def _widths(key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(key, "a list of layer widths", value, "E.g. hidden = [50].")
    return tuple(require_count(key, width, at_least=1, fix="Pass positive widths.") for width in value)


_PRIOR = {"prior_stddev": _prior_stddev}
_TYPICAL = {"typical_count": _positive}
# The options of each kind that a study file may set; those without a default in the class are required.
MODELS: dict[str, tuple[Callable[..., AbstractModel], dict[str, Reader]]] = {
    "linear_regression": (LinearRegression, {"noise_stddev": _positive, **_PRIOR}),
    "linear_regression_unknown_noise": (LinearRegressionUnknownNoise, _PRIOR),
    "logistic_regression": (LogisticRegression, _PRIOR),
    "softmax_regression": (SoftmaxRegression, {"num_classes": _classes, **_PRIOR}),
    "poisson_regression": (PoissonRegression, {"max_count": _count, **_TYPICAL, **_PRIOR}),
    "negative_binomial_regression": (
        NegativeBinomialRegression,
        {"max_count": _count, "concentration": _positive, **_TYPICAL, **_PRIOR},
    ),
    "negative_binomial_regression_unknown_concentration": (NegativeBinomialRegressionUnknownConcentration, _PRIOR),
    "mlp_binary": (BinaryMLP, {"hidden": _widths, **_PRIOR}),
    "mlp_classes": (ClassesMLP, {"hidden": _widths, "num_classes": _classes, **_PRIOR}),
    "mlp_real": (RealMLP, {"hidden": _widths, "noise_stddev": _positive, **_PRIOR}),
    "gaussian_mean": (GaussianMean, {"noise_stddev": _positive, **_PRIOR}),
    "gaussian_mean_covariance": (GaussianMeanCovariance, _PRIOR),
}
_OPTIONAL = frozenset({*_PRIOR, *_TYPICAL})
_WHERE = "model.options."


def build(kind: str, options: Mapping[str, object], num_features: int) -> AbstractModel:
    """The model of a study file: `kind` of the table above with its options. A NumPyro model: `from_numpyro`.

    Guarantees:
        - an unknown kind, unknown option, missing option or bad value is refused and named
    """
    if kind not in MODELS:
        raise InvalidInput("kind", "one of " + ", ".join(MODELS), kind, "See the list of models.")
    require_count("num_features", num_features, at_least=1, fix="Declare at least one feature.")
    model, readers = MODELS[kind]
    known = [_WHERE + key for key in readers]
    refuse_unknown_keys([_WHERE + str(key) for key in options], known, f"kind {kind}")
    for key in readers:
        if key not in options and key not in _OPTIONAL:
            raise InvalidInput(_WHERE + key, f"a value for kind {kind}", "nothing", "Set it in [model.options].")
    read = {key: readers[key](_WHERE + key, value) for key, value in options.items()}
    return model(num_features=num_features, **read)
