"""Gaussian rows: their mean, or their mean and covariance, from the columns of x; there is no target.

Parameters ~ N(0, prior_stddev^2). The covariance enters by the lower Cholesky factor T of the *precision*, logs on the
diagonal, so that the log-likelihood needs no solve.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.models.base import (
    AbstractGaussianPriorModel,
    GaussianEta,
    GaussianFamily,
    Target,
    check_feature_names,
)

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class GaussianMean(AbstractGaussianPriorModel):
    """`x ~ N(theta, noise_stddev^2 I)`. The score is symmetric, so that clipping does not bias."""

    num_features: int = eqx.field(static=True, kw_only=True)
    noise_stddev: float = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def dim(self) -> int:
        """One mean per feature."""
        return self.num_features

    @property
    def target(self) -> Target:
        """There is none; y is not read."""
        return "none"

    @property
    def worst_labels(self) -> None:
        """There are no labels."""
        return

    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """`mean[feature]`."""
        return tuple(f"mean[{name}]" for name in check_feature_names(feature_names, self.num_features))

    def log_likelihood(self, theta: Float[Array, " dim"], x_row: Float[Array, " d"], y_row: Num[Array, ""]) -> Array:
        """Log density of one row."""
        standardised = (x_row - theta) / self.noise_stddev
        return -0.5 * standardised @ standardised - self.dim * (math.log(self.noise_stddev) + _HALF_LOG_2PI)

    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """See `prior_start`."""
        return self.prior_start(family)

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """The mean, for every row."""
        return jnp.broadcast_to(theta, x.shape)

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return theta + self.noise_stddev * jax.random.normal(key, x.shape), jnp.zeros(x.shape[0])


class GaussianMeanCovariance(AbstractGaussianPriorModel):
    """theta = (mean, lower triangle of T with logs on the diagonal). Clipping biases the covariance (skewed score)."""

    num_features: int = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def dim(self) -> int:
        """Means and the lower triangle."""
        return self.num_features + self.num_features * (self.num_features + 1) // 2

    @property
    def target(self) -> Target:
        """There is none; y is not read."""
        return "none"

    @property
    def worst_labels(self) -> None:
        """There are no labels."""
        return

    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """`mean[feature]`, then `precision_factor[feature,feature]` (its log on the diagonal)."""
        names = check_feature_names(feature_names, self.num_features)
        entries = [
            f"log_precision_factor[{row},{row}]" if row == column else f"precision_factor[{row},{column}]"
            for number, row in enumerate(names)
            for column in names[: number + 1]
        ]
        return (*(f"mean[{name}]" for name in names), *entries)

    def precision_factor(self, theta: Float[Array, " dim"]) -> Float[Array, "d d"]:
        """T, with covariance `(T T')^-1`."""
        size = self.num_features
        packed = jnp.zeros((size, size), theta.dtype).at[jnp.tril_indices(size)].set(theta[size:])
        return jnp.tril(packed, -1) + jnp.diag(jnp.exp(jnp.diagonal(packed)))

    def log_likelihood(self, theta: Float[Array, " dim"], x_row: Float[Array, " d"], y_row: Num[Array, ""]) -> Array:
        """Log density of one row."""
        factor = self.precision_factor(theta)
        standardised = (x_row - theta[: self.num_features]) @ factor
        log_det = jnp.sum(jnp.log(jnp.diagonal(factor)))
        return log_det - 0.5 * standardised @ standardised - self.num_features * _HALF_LOG_2PI

    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """See `prior_start`."""
        return self.prior_start(family)

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """The mean, for every row."""
        return jnp.broadcast_to(theta[: self.num_features], x.shape)

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        standardised = jax.random.normal(key, x.shape).T
        apart = jax.scipy.linalg.solve_triangular(self.precision_factor(theta), standardised, trans="T", lower=True)
        return theta[: self.num_features] + apart.T, jnp.zeros(x.shape[0])
