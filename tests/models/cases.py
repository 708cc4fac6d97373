"""Every model once, with rows that suit it: the contract suites run over this table."""

from dataclasses import dataclass

import numpy as np

from silobayes.models.base import AbstractModel
from silobayes.models.gaussian import GaussianMean, GaussianMeanCovariance
from silobayes.models.linear_regression import LinearRegression, LinearRegressionUnknownNoise
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.mlp import BinaryMLP, ClassesMLP, RealMLP
from silobayes.models.negative_binomial_regression import (
    NegativeBinomialRegression,
    NegativeBinomialRegressionUnknownConcentration,
)
from silobayes.models.poisson_regression import PoissonRegression
from silobayes.models.softmax_regression import SoftmaxRegression

D, K, MAX_COUNT = 3, 3, 9

MODELS: dict[str, AbstractModel] = {
    "linear": LinearRegression(num_features=D, noise_stddev=0.7),
    "linear_unknown_noise": LinearRegressionUnknownNoise(num_features=D),
    "logistic": LogisticRegression(num_features=D),
    "softmax": SoftmaxRegression(num_features=D, num_classes=K),
    "poisson": PoissonRegression(num_features=D, max_count=MAX_COUNT),
    "negative_binomial": NegativeBinomialRegression(num_features=D, max_count=MAX_COUNT, concentration=2.5),
    "negative_binomial_unknown": NegativeBinomialRegressionUnknownConcentration(num_features=D),
    "mlp_binary": BinaryMLP(num_features=D, hidden=(4, 3)),
    "mlp_classes": ClassesMLP(num_features=D, hidden=(5,), num_classes=K),
    "mlp_real": RealMLP(num_features=D, hidden=(4,), noise_stddev=0.5),
    "gaussian_mean": GaussianMean(num_features=D, noise_stddev=0.5),
    "gaussian_mean_covariance": GaussianMeanCovariance(num_features=D),
}


@dataclass(frozen=True)
class Sample:
    theta: np.ndarray
    x: np.ndarray
    y: np.ndarray


def labels(model: AbstractModel, rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """Labels of the model's kind, unrelated to the features."""
    if model.target in ("real", "none"):
        return rng.normal(size=num_rows).astype(np.float32)
    if model.target == "count":
        return rng.integers(MAX_COUNT + 1, size=num_rows).astype(np.float32)
    return rng.integers(2 if model.target == "binary" else K, size=num_rows).astype(np.int32)


def sample(model: AbstractModel, num_rows: int = 7, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    return Sample(
        theta=(0.5 * rng.normal(size=model.dim)).astype(np.float32),
        x=rng.normal(size=(num_rows, D)).astype(np.float32),
        y=labels(model, rng, num_rows),
    )
