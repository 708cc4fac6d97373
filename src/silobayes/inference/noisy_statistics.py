"""Bayesian linear regression from privately released sufficient statistics, with honest uncertainty.

A silo releases `sum x x'` and `sum x y` with noise. The noise has a known law, so the released sums are treated as
noisy observations instead of as the truth (UNCERTAINTY, F1 at t = 0 and F2). The naive posterior, which believes the
released sums, covers far less than it says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from silobayes.privacy.clipping import Bounded, clip_blocks, general, psd, unpack_symmetric
from silobayes.privacy.mechanisms import Release

# The fixed point for (mean, covariance) is reached to float accuracy well within this many damped steps.
_ITERATIONS = 40
_STEP_SIZE = 0.7
_EIGENVALUE_FLOOR = 0.05
# Of the score's variance: without noise and rows it would be zero.
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianPosterior:
    """Mean and covariance of the coefficients, and the share of each variance that privacy noise caused."""

    mean: np.ndarray
    covariance: np.ndarray
    privacy_share: np.ndarray

    @property
    def stddev(self) -> np.ndarray:
        """Marginal standard deviations."""
        return np.sqrt(np.diag(self.covariance))


def bounded_statistics(x: np.ndarray, y: np.ndarray, *, y_bound: float) -> Bounded:
    """(`sum x x'`, `sum x y`) as one bounded sum, for rows with |x| <= 1 and |y| <= `y_bound`.

    Rows beyond the public bounds are pulled back to them *before* the statistics are formed: clipping a product would
    bend the regression more than clipping its factors.
    """
    with np.errstate(invalid="ignore"):  # a row that is not finite counts as zero; no warning tells of it
        x = x / np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))
    y = np.clip(y, -y_bound, y_bound)
    return clip_blocks([psd(x), general(x * y[:, None])], [1.0, y_bound])


def pool(releases: Sequence[Release]) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Sum the silos' releases: (`sum x x'`, `sum x y`, noise std of the packed matrix, noise std of the vector)."""
    gram = unpack_symmetric(np.sum([release.blocks[0] for release in releases], axis=0))
    cross = np.sum([release.blocks[1] for release in releases], axis=0)
    matrix_std, vector_std = np.sqrt(np.sum([np.square(release.stddevs) for release in releases], axis=0))
    return gram, cross, float(matrix_std), float(vector_std)


def noise_aware_posterior(
    gram: np.ndarray,
    cross: np.ndarray,
    *,
    gram_std: float,
    cross_std: float,
    residual_variance: float,
    prior_precision: float | np.ndarray,
    prior_linear: float | np.ndarray = 0.0,
) -> GaussianPosterior:
    """Posterior of the coefficients given noisy statistics.

    The score `cross - gram theta` at the truth has covariance
    `residual_variance gram + cross_std^2 I + (v/2)(tr(Q) I + Q)` with `Q = E[theta theta']`: the last part is the
    matrix noise times the coefficients. Q depends on the answer, so mean and covariance are iterated.

    Args:
        gram: Released `sum x x'`.
        cross: Released `sum x y`.
        gram_std: Noise of the packed matrix: variance `gram_std^2` on the diagonal, half of it off the diagonal.
        cross_std: Noise on each entry of `cross`.
        residual_variance: Variance of y given x.
        prior_precision: Of the Gaussian prior: one number, one for each coefficient, or a matrix.
        prior_linear: The prior's precision times its mean.
    """
    dim = len(cross)
    gram, matrix_variance = shrink(gram, gram_std)
    prior = np.asarray(prior_precision)
    prior = prior if prior.ndim == 2 else np.diag(np.broadcast_to(prior, dim))
    exact = np.linalg.inv(gram / residual_variance + prior)
    mean, covariance = np.zeros(dim), np.linalg.inv(prior)
    for _ in range(_ITERATIONS):
        second_moment = np.outer(mean, mean) + covariance
        omega = residual_variance * gram + (cross_std**2 + _TINY) * np.eye(dim)
        omega += matrix_variance / 2 * (np.trace(second_moment) * np.eye(dim) + second_moment)
        weights = np.linalg.solve(omega, gram)
        new_covariance = np.linalg.inv(gram @ weights + prior)
        new_mean = new_covariance @ (weights.T @ cross + prior_linear)
        mean = mean + _STEP_SIZE * (new_mean - mean)
        covariance = covariance + _STEP_SIZE * (new_covariance - covariance)
    share = 1.0 - np.clip(np.diag(exact) / np.diag(covariance), 0.0, 1.0)
    return GaussianPosterior(mean=mean, covariance=covariance, privacy_share=share)


def shrink(gram: np.ndarray, gram_std: float) -> tuple[np.ndarray, float]:
    """Shrink a noisy Gram matrix towards a multiple of the identity by empirical Bayes (UNCERTAINTY, F2).

    Returns the matrix, with an eigenvalue floor, and the variance of the noise that is left in it. Without this the
    inverse of a noisy matrix explodes at small epsilon.
    """
    dim = len(gram)
    average = float(np.trace(gram)) / dim
    deviation = gram - average * np.eye(dim)
    spread = np.sum(deviation**2) / max(dim * (dim + 1) / 2 - 1, 1)
    signal = max(0.0, spread - gram_std**2)
    weight = signal / (signal + gram_std**2) if signal > 0 else 0.0
    # The true trace is not negative, though its noisy version can be: its floor is the noise of the average.
    level = max(average, gram_std / np.sqrt(dim))
    shrunk = level * np.eye(dim) + weight * deviation
    values, vectors = np.linalg.eigh(shrunk)
    # Eigenvalues of the noise reach to this; without noise small ones are what collinear features have.
    floor = min(_EIGENVALUE_FLOOR * level, weight * gram_std * np.sqrt(2 * dim))
    return (vectors * np.maximum(values, floor)) @ vectors.T, weight * gram_std**2
