"""A small regression over silos, and the posterior that believes its statistics."""

from dataclasses import dataclass, field

import numpy as np

from silobayes.inference.noisy_statistics import GaussianPosterior


@dataclass(frozen=True, kw_only=True, eq=False)
class RegressionSilo:
    """Rows of one silo."""

    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class RegressionStudy:
    """Silos that share coefficients; rows have |x| <= 1 and |y| <= `y_bound` up to rare outliers."""

    silos: tuple[RegressionSilo, ...]
    names: tuple[str, ...]
    coefficients: np.ndarray
    residual_variance: float
    y_bound: float


def regression_study(seed: int, *, num_silos: int = 10, mean_rows: int = 2000) -> RegressionStudy:
    """A linear regression over silos whose sizes differ fivefold and whose covariates are shifted per silo."""
    rng = np.random.default_rng(seed)
    names = ("intercept", "age", "severity", "lactate", "comorbidity")
    coefficients = np.array([0.35, 0.25, 0.55, -0.3, 0.1])
    residual_std = 0.25
    sizes = rng.uniform(0.33, 1.67, num_silos) * mean_rows
    silos = []
    for size in sizes.astype(int):
        case_mix = rng.uniform(-0.4, 0.4, len(names) - 1)
        covariates = np.clip(rng.normal(case_mix, 0.5, (size, len(names) - 1)), -1.0, 1.0)
        x = np.column_stack([np.ones(size), covariates]) / np.sqrt(len(names))
        silos.append(RegressionSilo(x=x, y=x @ coefficients + residual_std * rng.normal(size=size)))
    return RegressionStudy(
        silos=tuple(silos),
        names=names,
        coefficients=coefficients,
        residual_variance=residual_std**2,
        y_bound=1.5,
    )


def exact_posterior(
    gram: np.ndarray, cross: np.ndarray, *, residual_variance: float, prior_precision: float
) -> GaussianPosterior:
    """The conjugate posterior that believes its statistics: exact without noise, naive with it."""
    covariance = np.linalg.inv(gram / residual_variance + prior_precision * np.eye(len(cross)))
    mean = covariance @ cross / residual_variance
    return GaussianPosterior(mean=mean, covariance=covariance, privacy_share=np.zeros(len(cross)))
