"""Coordinates in which a Gaussian `q` is optimised, and the chain rule of one row into them.

Mean field: `theta = mean + s * e` in coordinates (mean, log s). Full: `theta = mean + L e` with the lower Cholesky
factor L of the covariance, in coordinates (mean, A), where A is lower triangular and a step replaces L by
`L (I + A)` (on the diagonal `exp(A)`): the gradient in A is then free of the scale of theta, as it is in log s.

Three things are needed of a row, and all are closed forms: the moments of `x @ theta`, the norm of the row's gradient,
and weighted sums of gradients. `q` stays proper whatever the gradient is, and the KL term is written with the cavity's
natural parameters, so that an improper cavity is allowed (SPEC 0).
"""

import abc
from collections.abc import Callable
from typing import NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from silobayes.core.errors import InvalidInput
from silobayes.families import FullGaussian, FullGaussianEta, MeanFieldGaussian
from silobayes.models.base import GaussianEta, GaussianFamily

# Where an improper cavity or noise would let q collapse or run away, log standard deviations stop here.
_LOG_STDDEV_RANGE = (-15.0, 10.0)


class Projection(NamedTuple):
    """Rows seen through `f = x @ theta`: moments of f, and the chain rule of a derivative in f.

    A row with expected score a and expected curvature b has the gradient (a x, b dv/2), with squared norm
    `a^2 |x|^2 + b^2 spread^2`; `pull(a, b)` is the sum of these gradients over the rows. Columns of x beyond the
    coordinates hold zeros and change nothing.
    """

    mean: Float[Array, " n"]
    variance: Float[Array, " n"]
    spread: Float[Array, " n"]
    pull: Callable[[Float[Array, " n"], Float[Array, " n"]], Float[Array, " coordinates"]]


class PulledRows(NamedTuple):
    """Norms of rows' gradients in coordinates, and their weighted sums; a row of weight 0 may hold anything."""

    norms: Float[Array, " n"]
    weighted_sum: Callable[[Float[Array, " n"]], Float[Array, " coordinates"]]


class AbstractPoint(eqx.Module):
    """A Gaussian q in coordinates."""

    mean: eqx.AbstractVar[Float[Array, " dim"]]

    @property
    @abc.abstractmethod
    def num_coordinates(self) -> int:
        """Numbers in one gradient."""

    @abc.abstractmethod
    def sample(self, e: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """The theta of a standard normal draw."""

    @abc.abstractmethod
    def project(self, x: Float[Array, "n dim"]) -> Projection:
        """Moments and chain rule of `x @ theta`."""

    @abc.abstractmethod
    def pull_rows(self, gradients: Float[Array, "n dim"], e: Float[Array, " dim"]) -> PulledRows:
        """Rows' gradients with respect to theta at the draw e, in these coordinates."""

    @abc.abstractmethod
    def pull(self, gradient: Float[Array, " dim"], e: Float[Array, " dim"]) -> Float[Array, " coordinates"]:
        """A gradient with respect to theta at the draw e, in these coordinates."""

    @abc.abstractmethod
    def kl_gradient(self, eta_cavity: GaussianEta) -> Float[Array, " coordinates"]:
        """Gradient of KL(q || cavity)."""

    @abc.abstractmethod
    def move(self, step: Float[Array, " coordinates"]) -> Self:
        """The point one step away."""

    @abc.abstractmethod
    def to_eta(self) -> GaussianEta:
        """Natural parameters; always proper if the point is finite."""


class MeanFieldPoint(AbstractPoint):
    """(mean, log s)."""

    mean: Float[Array, " dim"]
    log_stddev: Float[Array, " dim"]

    @property
    def num_coordinates(self) -> int:
        """See `AbstractPoint`."""
        return 2 * self.mean.shape[0]

    def sample(self, e: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """See `AbstractPoint`."""
        return self.mean + jnp.exp(self.log_stddev) * e

    def project(self, x: Float[Array, "n dim"]) -> Projection:
        """Variance `sum_j x_j^2 s_j^2`; its half derivative in log s_j is `x_j^2 s_j^2`."""
        dim = self.mean.shape[0]
        beyond = (0, x.shape[1] - dim)
        shares = x**2 * jnp.pad(jnp.exp(2 * self.log_stddev), beyond)
        return Projection(
            mean=x @ jnp.pad(self.mean, beyond),
            variance=shares.sum(axis=1),
            spread=jnp.sqrt((shares**2).sum(axis=1)),
            pull=lambda a, b: jnp.concatenate([(a @ x)[:dim], (b @ shares)[:dim]]),
        )

    def scaled(self, e: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """The derivative of theta in log s."""
        return jnp.exp(self.log_stddev) * e

    def pull_rows(self, gradients: Float[Array, "n dim"], e: Float[Array, " dim"]) -> PulledRows:
        """See `AbstractPoint`."""
        return PulledRows(
            norms=jnp.sqrt(gradients**2 @ (1 + self.scaled(e) ** 2)),
            weighted_sum=lambda weights: self.pull(_weighted(weights, gradients), e),
        )

    def pull(self, gradient: Float[Array, " dim"], e: Float[Array, " dim"]) -> Float[Array, " coordinates"]:
        """See `AbstractPoint`."""
        # Without the barrier both parts are computed inside the concatenation, which decides number by number.
        return jnp.concatenate(jax.lax.optimization_barrier((gradient, gradient * self.scaled(e))))

    def kl_gradient(self, eta_cavity: GaussianEta) -> Float[Array, " coordinates"]:
        """`(precision_cavity * mean - linear_cavity, s^2 precision_cavity - 1)`."""
        precision = -2 * eta_cavity.quadratic
        return jnp.concatenate(
            [precision * self.mean - eta_cavity.linear, jnp.exp(2 * self.log_stddev) * precision - 1]
        )

    def move(self, step: Float[Array, " coordinates"]) -> "MeanFieldPoint":
        """See `AbstractPoint`."""
        d_mean, d_log_stddev = jnp.split(step, 2)
        return MeanFieldPoint(
            mean=self.mean + d_mean, log_stddev=jnp.clip(self.log_stddev + d_log_stddev, *_LOG_STDDEV_RANGE)
        )

    def to_eta(self) -> GaussianEta:
        """See `AbstractPoint`."""
        family = MeanFieldGaussian(event_shape=self.mean.shape)
        return family.from_standard(mean=self.mean, stddev=jnp.exp(self.log_stddev))


class FullPoint(AbstractPoint):
    """(mean, lower Cholesky factor of the covariance)."""

    mean: Float[Array, " dim"]
    factor: Float[Array, "dim dim"]

    @property
    def num_coordinates(self) -> int:
        """See `AbstractPoint`."""
        dim = self.mean.shape[0]
        return dim + dim * (dim + 1) // 2

    def sample(self, e: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """See `AbstractPoint`."""
        return self.mean + self.factor @ e

    def project(self, x: Float[Array, "n dim"]) -> Projection:
        """With h = L'x the variance is |h|^2 and its half derivative in A is the lower triangle of h h'."""
        x = x[:, : self.mean.shape[0]]
        h = x @ self.factor
        squares = h**2
        return Projection(
            mean=x @ self.mean,
            variance=squares.sum(axis=1),
            spread=jnp.sqrt((squares * jnp.cumsum(squares, axis=1)).sum(axis=1)),
            pull=lambda a, b: jnp.concatenate([a @ x, _lower((h * b[:, None]).T @ h)]),
        )

    def pull_rows(self, gradients: Float[Array, "n dim"], e: Float[Array, " dim"]) -> PulledRows:
        """The gradient in A is the lower triangle of (L'g) e'."""
        # Sums are of the very L'g whose norm is taken: L' times a sum would round otherwise where it cancels.
        turned = gradients @ self.factor

        def weighted_sum(weights: Float[Array, " n"]) -> Float[Array, " coordinates"]:
            return jnp.concatenate([_weighted(weights, gradients), _lower(jnp.outer(_weighted(weights, turned), e))])

        norms = jnp.sqrt((gradients**2).sum(axis=1) + turned**2 @ jnp.cumsum(e**2))
        return PulledRows(norms=norms, weighted_sum=weighted_sum)

    def pull(self, gradient: Float[Array, " dim"], e: Float[Array, " dim"]) -> Float[Array, " coordinates"]:
        """See `AbstractPoint`."""
        return jnp.concatenate([gradient, _lower(jnp.outer(self.factor.T @ gradient, e))])

    def kl_gradient(self, eta_cavity: GaussianEta) -> Float[Array, " coordinates"]:
        """`(Lambda mean - linear, lower triangle of L' Lambda L - I)` with the cavity's Lambda."""
        precision = -(eta_cavity.quadratic + eta_cavity.quadratic.T)
        spread = self.factor.T @ precision @ self.factor - jnp.eye(self.mean.shape[0])
        return jnp.concatenate([precision @ self.mean - eta_cavity.linear, _lower(spread)])

    def move(self, step: Float[Array, " coordinates"]) -> "FullPoint":
        """See `AbstractPoint`."""
        dim = self.mean.shape[0]
        change = jnp.zeros((dim, dim)).at[jnp.tril_indices(dim)].set(step[dim:])
        diagonal = jnp.diagonal(change)
        limits = jnp.log(jnp.diagonal(self.factor))
        diagonal = jnp.clip(diagonal + limits, *_LOG_STDDEV_RANGE) - limits
        turn = jnp.tril(change, -1) + jnp.diag(jnp.exp(diagonal))
        return FullPoint(mean=self.mean + step[:dim], factor=self.factor @ turn)

    def to_eta(self) -> GaussianEta:
        """See `AbstractPoint`."""
        inverse = jax.scipy.linalg.solve_triangular(self.factor, jnp.eye(self.mean.shape[0]), lower=True)
        return FullGaussianEta(linear=inverse.T @ (inverse @ self.mean), quadratic=-0.5 * inverse.T @ inverse)


def point_at(family: GaussianFamily, eta: GaussianEta) -> MeanFieldPoint | FullPoint:
    """The coordinates of a proper q; NaN if it is not proper."""
    if isinstance(family, FullGaussian):
        mean, covariance = family.to_standard(eta)  # type: ignore[arg-type]
        return FullPoint(mean=mean, factor=jnp.linalg.cholesky(covariance))
    mean, stddev = family.to_standard(eta)  # type: ignore[arg-type]
    return MeanFieldPoint(mean=mean, log_stddev=jnp.log(stddev))


def num_coordinates(family: GaussianFamily) -> int:
    """Numbers in one gradient: what a `StepPlan` calls its dimension."""
    if isinstance(family, FullGaussian):
        return family.dimension + family.dimension * (family.dimension + 1) // 2
    if len(family.event_shape) != 1:
        raise InvalidInput("family", "a Gaussian over a vector", family, "Use event_shape=(model.dim,).")
    return 2 * family.event_shape[0]


def _weighted(weights: Float[Array, " n"], terms: Float[Array, "n dim"]) -> Float[Array, " dim"]:
    return weights @ jnp.where(weights[:, None] > 0, terms, 0.0)


def _lower(matrix: Float[Array, "dim dim"]) -> Float[Array, " entries"]:
    return matrix[jnp.tril_indices(matrix.shape[0])]
