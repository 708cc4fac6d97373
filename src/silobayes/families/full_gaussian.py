"""Gaussian with a full covariance: `eta = (Lambda mu, -Lambda / 2)` (SPEC 1), base measure `(2 pi)^(-d/2)`.

Only the symmetric part of the quadratic parameter is read, as in `x^T M x`; gradients with respect to it are symmetric.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from silobayes.core.errors import require_count
from silobayes.families import _linalg as linalg
from silobayes.families._special import log_ratio
from silobayes.families.base import AbstractEta, AbstractFamily, all_finite, check_eta, check_floor, zeros_like_shapes
from silobayes.families.mean_field_gaussian import LOG_2PI, MeanFieldGaussianEta


class FullGaussianEta(AbstractEta):
    """Factors of x and of x x^T."""

    linear: Float[Array, " d"]
    quadratic: Float[Array, "d d"]


class MeanCovariance(NamedTuple):
    """Mean vector and covariance matrix."""

    mean: Float[Array, " d"]
    covariance: Float[Array, "d d"]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class FullGaussian(AbstractFamily[FullGaussianEta, MeanCovariance]):
    """A Gaussian vector of the given dimension. Reparameterised.

    Guarantees:
        - a mean-field Gaussian converts to a full one and back
        - conversion from mean field is linear, so improper factors convert too
    """

    dimension: int

    def __post_init__(self) -> None:
        require_count("dimension", self.dimension, at_least=1, fix="Pass the length of the vector.")

    @property
    def is_reparameterised(self) -> bool:
        """Pathwise: mean + L^-T * standard normal, with Lambda = L L^T."""
        return True

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"linear": (self.dimension,), "quadratic": (self.dimension, self.dimension)}

    def _mean_factor(self, eta: FullGaussianEta) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
        """Mean and lower Cholesky factor of the precision."""
        check_eta(eta, FullGaussianEta, self._shapes)
        factor = linalg.cholesky(-2 * eta.quadratic)
        return linalg.solve(factor, eta.linear), factor

    def zeros(self, dtype: Any = None) -> FullGaussianEta:
        """The uniform factor."""
        return zeros_like_shapes(FullGaussianEta, self._shapes, dtype)

    def from_standard(self, *, mean: Float[Array, " d"], covariance: Float[Array, "d d"]) -> FullGaussianEta:
        """`eta` of a mean and a positive definite covariance (otherwise NaN)."""
        factor = linalg.cholesky(covariance)
        eta = FullGaussianEta(linear=linalg.solve(factor, mean), quadratic=-0.5 * linalg.inverse(factor))
        check_eta(eta, FullGaussianEta, self._shapes)
        return eta

    def to_standard(self, eta: FullGaussianEta) -> MeanCovariance:
        """Mean and covariance."""
        mean, factor = self._mean_factor(eta)
        return MeanCovariance(mean=mean, covariance=linalg.inverse(factor))

    def from_mean_field(self, eta: MeanFieldGaussianEta) -> FullGaussianEta:
        """The same distribution, or the same improper factor: a linear map, so it commutes with the algebra."""
        check_eta(eta, MeanFieldGaussianEta, {"linear": (self.dimension,), "quadratic": (self.dimension,)})
        return FullGaussianEta(linear=eta.linear, quadratic=jnp.diag(eta.quadratic))

    def to_mean_field(self, eta: FullGaussianEta) -> MeanFieldGaussianEta:
        """The independent Gaussians with the same means and standard deviations: the minimum of KL(full || field).

        The marginals are what a person reads from a posterior; the minimum of the other divergence would report too
        small deviations. Defined for proper `eta` only (otherwise NaN).
        """
        mean, covariance = self.to_standard(eta)
        precision = 1 / jnp.diagonal(covariance)
        return MeanFieldGaussianEta(linear=mean * precision, quadratic=-0.5 * precision)

    def log_partition(self, eta: FullGaussianEta) -> Float[Array, ""]:
        """`mu^T Lambda mu / 2 - ln det(Lambda) / 2`."""
        mean, factor = self._mean_factor(eta)
        return 0.5 * mean @ eta.linear - linalg.half_log_det(factor)

    def mean_parameters(self, eta: FullGaussianEta) -> FullGaussianEta:
        """E[x] and E[x x^T]."""
        mean, covariance = self.to_standard(eta)
        return FullGaussianEta(linear=mean, quadratic=covariance + jnp.outer(mean, mean))

    def sufficient_statistics(self, x: Float[Array, " d"]) -> FullGaussianEta:
        """`x` and `x x^T`."""
        return FullGaussianEta(linear=x, quadratic=jnp.outer(x, x))

    def log_prob(self, eta: FullGaussianEta, x: Float[Array, " d"]) -> Float[Array, ""]:
        """Log density."""
        mean, factor = self._mean_factor(eta)
        standardised = factor.T @ (x - mean)
        return linalg.half_log_det(factor) - 0.5 * (standardised @ standardised + self.dimension * LOG_2PI)

    def entropy(self, eta: FullGaussianEta) -> Float[Array, ""]:
        """`d ln(2 pi e) / 2 - ln det(Lambda) / 2`."""
        _, factor = self._mean_factor(eta)
        return 0.5 * self.dimension * (LOG_2PI + 1) - linalg.half_log_det(factor)

    def kl(self, eta_q: FullGaussianEta, eta_p: FullGaussianEta) -> Float[Array, ""]:
        """KL(q || p)."""
        mean_q, factor_q = self._mean_factor(eta_q)
        mean_p, factor_p = self._mean_factor(eta_p)
        distance = factor_p.T @ (mean_q - mean_p)
        return gaussian_spread(factor_q, factor_p, 2 * (eta_q.quadratic - eta_p.quadratic)) + 0.5 * distance @ distance

    def sample(self, key: PRNGKeyArray, eta: FullGaussianEta, shape: tuple[int, ...] = ()) -> Float[Array, "*shape d"]:
        """Draws of shape `shape + (dimension,)`."""
        mean, factor = self._mean_factor(eta)
        return mean + linalg.solve_transposed(factor, jax.random.normal(key, (*shape, self.dimension), factor.dtype))

    def is_proper(self, eta: FullGaussianEta) -> Bool[Array, ""]:
        """Finite, and the precision has a Cholesky factor."""
        check_eta(eta, FullGaussianEta, self._shapes)
        return all_finite(eta) & linalg.is_positive_definite(-2 * eta.quadratic)

    def project(self, eta: FullGaussianEta, floor: float) -> FullGaussianEta:
        """Raise eigenvalues of the precision below `floor` to it and keep the linear part `Lambda mu`.

        Why the linear part and not the mean: see `MeanFieldGaussian.project`. Along eigenvectors that were above the
        floor, the mean stays what it was. Where `floor` is below what the dtype resolves beside the largest eigenvalue
        (about 16 d units of rounding), raised eigenvalues become that instead, so that a Cholesky factor exists.
        Idempotent up to rounding.
        """
        check_eta(eta, FullGaussianEta, self._shapes)
        precision = -2 * eta.quadratic
        zero = jnp.zeros((), precision.dtype)
        raised = linalg.floor_eigenvalues(precision, zero + check_floor(floor), zero)
        return FullGaussianEta(linear=eta.linear, quadratic=-0.5 * raised)


def gaussian_spread(
    factor_q: Float[Array, "d d"], factor_p: Float[Array, "d d"], difference: Float[Array, "d d"]
) -> Float[Array, ""]:
    """KL of two Gaussians with equal means, from the Cholesky factors and the difference p - q of their precisions.

    `tr(Lambda_q^-1 Lambda_p) - d` is taken from the difference, so that near p = q nothing cancels.
    """
    trace = jnp.trace(linalg.solve(factor_q, linalg.symmetric(difference)))
    return 0.5 * trace - jnp.sum(log_ratio(jnp.diagonal(factor_p), jnp.diagonal(factor_q)))
