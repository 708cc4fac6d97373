"""Normal-inverse-gamma: coefficients w and variance v of a linear regression with unknown noise, conjugate.

`v ~ InverseGamma(shape, scale)`, `w | v ~ N(location, v P^-1)` with P the scaled precision; dimension 1 is the textbook
case of an unknown mean and variance. As natural parameters, with T = (w/v, w w^T/v, 1/v, ln v) and base measure
`(2 pi)^(-d/2)`:

    eta = (P m, -P/2, -(scale + m^T P m / 2), -(shape + 1 + d/2)).

`scale` is a difference of two natural parameters: in float32 it loses the digits by which `m^T P m / 2` exceeds it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from silobayes.core.errors import require_count
from silobayes.families import _linalg as linalg
from silobayes.families._special import gamma_entropy
from silobayes.families.base import (
    AbstractEta,
    AbstractFamily,
    all_finite,
    check_eta,
    check_floor,
    positive_or_nan,
    zeros_like_shapes,
)
from silobayes.families.full_gaussian import gaussian_spread
from silobayes.families.gamma import exp_inside, gamma_kl, gamma_log_prob
from silobayes.families.mean_field_gaussian import LOG_2PI


class NormalInverseGammaEta(AbstractEta):
    """Factors of w/v, w w^T/v, 1/v and ln v."""

    linear: Float[Array, " d"]
    quadratic: Float[Array, "d d"]
    inverse_variance: Float[Array, ""]
    log_variance: Float[Array, ""]


class NormalInverseGammaStandard(NamedTuple):
    """`v ~ InverseGamma(shape, scale)`, `w | v ~ N(location, v scaled_precision^-1)`."""

    location: Float[Array, " d"]
    scaled_precision: Float[Array, "d d"]
    shape: Float[Array, ""]
    scale: Float[Array, ""]


class CoefficientsVariance(NamedTuple):
    """One event: coefficients w and variance v."""

    coefficients: Float[Array, "*shape d"]
    variance: Float[Array, "*shape"]


class _Parts(NamedTuple):
    location: Float[Array, " d"]
    factor: Float[Array, "d d"]  # lower Cholesky factor of the scaled precision
    shape: Float[Array, ""]
    scale: Float[Array, ""]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class NormalInverseGamma(AbstractFamily[NormalInverseGammaEta, NormalInverseGammaStandard]):
    """A coefficient vector of the given dimension and a variance. Reparameterised."""

    dimension: int

    def __post_init__(self) -> None:
        require_count("dimension", self.dimension, at_least=1, fix="Pass the number of coefficients.")

    @property
    def is_reparameterised(self) -> bool:
        """The variance implicitly (`jax.random.loggamma`), the coefficients pathwise."""
        return True

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        d = self.dimension
        return {"linear": (d,), "quadratic": (d, d), "inverse_variance": (), "log_variance": ()}

    def _parts(self, eta: NormalInverseGammaEta) -> _Parts:
        check_eta(eta, NormalInverseGammaEta, self._shapes)
        factor = linalg.cholesky(-2 * eta.quadratic)
        location = linalg.solve(factor, eta.linear)
        return _Parts(
            location=location,
            factor=factor,
            shape=positive_or_nan(-eta.log_variance - (1 + 0.5 * self.dimension)),
            scale=positive_or_nan(-eta.inverse_variance - 0.5 * location @ eta.linear),
        )

    def zeros(self, dtype: Any = None) -> NormalInverseGammaEta:
        """The uniform factor."""
        return zeros_like_shapes(NormalInverseGammaEta, self._shapes, dtype)

    def from_standard(
        self,
        *,
        location: Float[Array, " d"],
        scaled_precision: Float[Array, "d d"],
        shape: Float[Array, ""],
        scale: Float[Array, ""],
    ) -> NormalInverseGammaEta:
        """`eta` of the textbook parameters."""
        linear = scaled_precision @ location
        eta = NormalInverseGammaEta(
            linear=linear,
            quadratic=-0.5 * scaled_precision,
            inverse_variance=-(scale + 0.5 * location @ linear),
            log_variance=-(shape + (1 + 0.5 * self.dimension)),
        )
        check_eta(eta, NormalInverseGammaEta, self._shapes)
        return eta

    def to_standard(self, eta: NormalInverseGammaEta) -> NormalInverseGammaStandard:
        """The textbook parameters."""
        location, factor, shape, scale = self._parts(eta)
        return NormalInverseGammaStandard(
            location=location, scaled_precision=factor @ factor.T, shape=shape, scale=scale
        )

    def log_partition(self, eta: NormalInverseGammaEta) -> Float[Array, ""]:
        """`ln Gamma(shape) - shape ln scale - ln det(P) / 2`."""
        _, factor, shape, scale = self._parts(eta)
        return gammaln(shape) - shape * jnp.log(scale) - linalg.half_log_det(factor)

    def mean_parameters(self, eta: NormalInverseGammaEta) -> NormalInverseGammaEta:
        """E[w/v], E[w w^T/v], E[1/v], E[ln v]."""
        location, factor, shape, scale = self._parts(eta)
        mean_precision = shape / scale
        return NormalInverseGammaEta(
            linear=mean_precision * location,
            quadratic=linalg.inverse(factor) + mean_precision * jnp.outer(location, location),
            inverse_variance=mean_precision,
            log_variance=jnp.log(scale) - digamma(shape),
        )

    def sufficient_statistics(self, x: CoefficientsVariance) -> NormalInverseGammaEta:
        """`w/v`, `w w^T/v`, `1/v`, `ln v`."""
        w, v = x
        return NormalInverseGammaEta(
            linear=w / v, quadratic=jnp.outer(w, w) / v, inverse_variance=1 / v, log_variance=jnp.log(v)
        )

    def log_prob(self, eta: NormalInverseGammaEta, x: CoefficientsVariance) -> Float[Array, ""]:
        """Log density; -inf unless v > 0."""
        location, factor, shape, scale = self._parts(eta)
        w, v = x.coefficients, jnp.where(x.variance <= 0, 1.0, x.variance)
        residual = factor.T @ (w - location)
        normal = linalg.half_log_det(factor) - 0.5 * (residual @ residual / v + self.dimension * (LOG_2PI + jnp.log(v)))
        inverse_gamma = gamma_log_prob(shape, scale, 1 / v) - 2 * jnp.log(v)
        return jnp.where(x.variance <= 0, -jnp.inf, normal + inverse_gamma)

    def entropy(self, eta: NormalInverseGammaEta) -> Float[Array, ""]:
        """Differential entropy of (w, v)."""
        _, factor, shape, scale = self._parts(eta)
        mean_log_variance = jnp.log(scale) - digamma(shape)
        normal = 0.5 * self.dimension * (LOG_2PI + 1 + mean_log_variance) - linalg.half_log_det(factor)
        return normal + gamma_entropy(shape) + jnp.log(scale) - 2 * digamma(shape)

    def kl(self, eta_q: NormalInverseGammaEta, eta_p: NormalInverseGammaEta) -> Float[Array, ""]:
        """KL(q || p): of the variances, plus the mean KL of the coefficients given the variance."""
        q, p = self._parts(eta_q), self._parts(eta_p)
        distance = p.factor.T @ (q.location - p.location)
        spread = gaussian_spread(q.factor, p.factor, 2 * (eta_q.quadratic - eta_p.quadratic))
        normal = spread + 0.5 * (q.shape / q.scale) * (distance @ distance)
        return normal + gamma_kl(q.shape, q.scale, p.shape, p.scale)

    def sample(
        self, key: PRNGKeyArray, eta: NormalInverseGammaEta, shape: tuple[int, ...] = ()
    ) -> CoefficientsVariance:
        """Draws of shape `shape + (dimension,)` and `shape`."""
        location, factor, alpha, scale = self._parts(eta)
        key_variance, key_coefficients = jax.random.split(key)
        variance = exp_inside(jnp.log(scale) - jax.random.loggamma(key_variance, alpha, shape, alpha.dtype))
        normal = jax.random.normal(key_coefficients, (*shape, self.dimension), factor.dtype)
        deviation = jnp.sqrt(variance)[..., None] * linalg.solve_transposed(factor, normal)
        return CoefficientsVariance(coefficients=location + deviation, variance=variance)

    def is_proper(self, eta: NormalInverseGammaEta) -> Bool[Array, ""]:
        """Finite, P positive definite, shape > 0 and scale > 0."""
        parts = self._parts(eta)
        ok = jnp.all(jnp.isfinite(parts.factor)) & (parts.shape > 0) & (parts.scale > 0)
        return all_finite(eta) & ok

    def project(self, eta: NormalInverseGammaEta, floor: float) -> NormalInverseGammaEta:
        """Raise eigenvalues of P, then scale and shape, below `floor` to it; the linear part `P m` is kept.

        Why the linear part: see `MeanFieldGaussian.project`. Where `floor` is lost in the rounding of the natural
        parameter it is written into, the raised value becomes what survives (about 16 d units of rounding).
        Idempotent up to rounding.
        """
        check_eta(eta, NormalInverseGammaEta, self._shapes)
        floor = check_floor(floor)
        zero = jnp.zeros((), eta.quadratic.dtype)
        precision = linalg.floor_eigenvalues(-2 * eta.quadratic, zero + floor, zero)
        half_square = 0.5 * eta.linear @ linalg.solve(linalg.cholesky(precision), eta.linear)
        lowest_scale = linalg.rounding_floor(floor, half_square, self.dimension)
        offset = zero + (1 + 0.5 * self.dimension)
        lowest_shape = linalg.rounding_floor(floor, offset, 1)
        return NormalInverseGammaEta(
            linear=eta.linear,
            quadratic=-0.5 * precision,
            inverse_variance=jnp.where(
                -eta.inverse_variance - half_square < floor, -(lowest_scale + half_square), eta.inverse_variance
            ),
            log_variance=jnp.where(-eta.log_variance - offset < floor, -(lowest_shape + offset), eta.log_variance),
        )
