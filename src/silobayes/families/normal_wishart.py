"""Normal-Wishart: mean and precision matrix of a Gaussian, conjugate (Bishop 2006, eq. B.73 and B.78).

`L ~ Wishart(degrees, V)`, `mu | L ~ N(location, (strength L)^-1)`, with nu = degrees, kappa = strength and W = V^-1. As
natural parameters, with T = (L mu, mu^T L mu, L, ln det L) and base measure `(2 pi)^(-d/2)`:

    eta = (kappa m, -kappa/2, -(W + kappa m m^T)/2, (nu - d)/2).

W is a difference of two natural parameters: in float32 it loses the digits by which `kappa m m^T` exceeds it.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from silobayes.core.errors import require_count
from silobayes.families import _linalg as linalg
from silobayes.families._special import HALF_LOG_2PI, gamma_entropy, lgamma_bregman, log_ratio, stirling_remainder
from silobayes.families.base import (
    AbstractEta,
    AbstractFamily,
    all_finite,
    check_eta,
    check_floor,
    positive_or_nan,
    zeros_like_shapes,
)
from silobayes.families.gamma import exp_inside, raise_shape
from silobayes.families.mean_field_gaussian import LOG_2PI

LOG_2 = math.log(2)
LOG_PI = math.log(math.pi)


class NormalWishartEta(AbstractEta):
    """Factors of L mu, mu^T L mu, L and ln det L."""

    linear: Float[Array, " d"]
    quadratic: Float[Array, ""]
    precision: Float[Array, "d d"]
    log_det: Float[Array, ""]


class NormalWishartStandard(NamedTuple):
    """`L ~ Wishart(degrees, scale)` with mean `degrees * scale`, `mu | L ~ N(location, (strength L)^-1)`."""

    location: Float[Array, " d"]
    strength: Float[Array, ""]
    degrees: Float[Array, ""]
    scale: Float[Array, "d d"]


class MeanPrecision(NamedTuple):
    """One event: mean mu and precision matrix L."""

    mean: Float[Array, "*shape d"]
    precision: Float[Array, "*shape d d"]


class _Parts(NamedTuple):
    location: Float[Array, " d"]
    strength: Float[Array, ""]
    degrees: Float[Array, ""]
    shapes: Float[Array, " d"]  # (nu - d + 1 + j) / 2 for j = 0..d-1: shapes of the d chi-squares in a Wishart
    factor: Float[Array, "d d"]  # lower Cholesky factor of W = scale^-1


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class NormalWishart(AbstractFamily[NormalWishartEta, NormalWishartStandard]):
    """Mean and precision of a Gaussian of the given dimension. Reparameterised."""

    dimension: int

    def __post_init__(self) -> None:
        require_count("dimension", self.dimension, at_least=1, fix="Pass the length of the mean vector.")

    @property
    def is_reparameterised(self) -> bool:
        """The chi-squares of Bartlett's decomposition implicitly, all else pathwise."""
        return True

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        d = self.dimension
        return {"linear": (d,), "quadratic": (), "precision": (d, d), "log_det": ()}

    def _parts(self, eta: NormalWishartEta) -> _Parts:
        check_eta(eta, NormalWishartEta, self._shapes)
        strength = positive_or_nan(-2 * eta.quadratic)
        location = eta.linear / strength
        excess = positive_or_nan(2 * eta.log_det + 1)  # nu - (d - 1)
        return _Parts(
            location=location,
            strength=strength,
            degrees=excess + (self.dimension - 1),
            shapes=0.5 * (excess + jnp.arange(self.dimension)),
            factor=linalg.cholesky(-2 * eta.precision - jnp.outer(location, eta.linear)),
        )

    def zeros(self, dtype: Any = None) -> NormalWishartEta:
        """The uniform factor."""
        return zeros_like_shapes(NormalWishartEta, self._shapes, dtype)

    def from_standard(
        self,
        *,
        location: Float[Array, " d"],
        strength: Float[Array, ""],
        degrees: Float[Array, ""],
        scale: Float[Array, "d d"],
    ) -> NormalWishartEta:
        """`eta` of the textbook parameters; NaN unless `scale` is positive definite."""
        linear = strength * location
        inverse_scale = linalg.inverse(linalg.cholesky(scale))
        eta = NormalWishartEta(
            linear=linear,
            quadratic=-0.5 * strength,
            precision=-0.5 * (inverse_scale + jnp.outer(location, linear)),
            log_det=0.5 * (degrees - self.dimension),
        )
        check_eta(eta, NormalWishartEta, self._shapes)
        return eta

    def to_standard(self, eta: NormalWishartEta) -> NormalWishartStandard:
        """The textbook parameters."""
        parts = self._parts(eta)
        return NormalWishartStandard(
            location=parts.location,
            strength=parts.strength,
            degrees=parts.degrees,
            scale=linalg.inverse(parts.factor),
        )

    def log_partition(self, eta: NormalWishartEta) -> Float[Array, ""]:
        """`-d ln(kappa)/2 - nu ln det(W)/2 + nu d ln(2)/2 + ln Gamma_d(nu/2)`."""
        d, parts = self.dimension, self._parts(eta)
        log_gamma_d = jnp.sum(gammaln(parts.shapes)) + 0.25 * d * (d - 1) * LOG_PI
        wishart = parts.degrees * (0.5 * d * LOG_2 - linalg.half_log_det(parts.factor)) + log_gamma_d
        return wishart - 0.5 * d * jnp.log(parts.strength)

    def _mean_log_det(self, parts: _Parts) -> Float[Array, ""]:
        return jnp.sum(digamma(parts.shapes)) + self.dimension * LOG_2 - 2 * linalg.half_log_det(parts.factor)

    def mean_parameters(self, eta: NormalWishartEta) -> NormalWishartEta:
        """E[L mu], E[mu^T L mu], E[L], E[ln det L]."""
        parts = self._parts(eta)
        mean_precision = parts.degrees * linalg.inverse(parts.factor)
        linear = mean_precision @ parts.location
        return NormalWishartEta(
            linear=linear,
            quadratic=self.dimension / parts.strength + parts.location @ linear,
            precision=mean_precision,
            log_det=self._mean_log_det(parts),
        )

    def sufficient_statistics(self, x: MeanPrecision) -> NormalWishartEta:
        """`L mu`, `mu^T L mu`, `L`, `ln det L`."""
        linear = x.precision @ x.mean
        return NormalWishartEta(
            linear=linear,
            quadratic=x.mean @ linear,
            precision=x.precision,
            log_det=2 * linalg.half_log_det(linalg.cholesky(x.precision)),
        )

    def log_prob(self, eta: NormalWishartEta, x: MeanPrecision) -> Float[Array, ""]:
        """Log density over mu and the entries of L on and below the diagonal; NaN unless L is positive definite.

        Written in `B = W^(1/2) L W^(1/2) / nu`, which is near the identity, so that large nu cancel before rounding.
        """
        d, parts = self.dimension, self._parts(eta)
        relative = parts.factor.T @ x.precision @ parts.factor / parts.degrees
        half_log_det_relative = linalg.half_log_det(linalg.cholesky(relative))
        log_det = 2 * half_log_det_relative + d * jnp.log(parts.degrees) - 2 * linalg.half_log_det(parts.factor)
        bulk = parts.degrees * (half_log_det_relative - 0.5 * (jnp.trace(relative) - d))
        half = 0.5 * parts.degrees
        # half log(half) - half - lgamma(shape) for each chi-square, by Stirling's formula
        offset = half - parts.shapes
        constants = half * log_ratio(half, parts.shapes) + (offset + 0.5) * jnp.log(parts.shapes) - offset
        constants = constants - HALF_LOG_2PI - stirling_remainder(parts.shapes)
        wishart = bulk - 0.5 * (d + 1) * log_det + jnp.sum(constants) - 0.25 * d * (d - 1) * LOG_PI
        residual = x.mean - parts.location
        square = parts.strength * (residual @ x.precision @ residual)
        return wishart + 0.5 * (d * (jnp.log(parts.strength) - LOG_2PI) + log_det - square)

    def entropy(self, eta: NormalWishartEta) -> Float[Array, ""]:
        """Differential entropy of (mu, L)."""
        d, parts = self.dimension, self._parts(eta)
        wishart = (
            (d + 1) * (0.5 * d * LOG_2 - linalg.half_log_det(parts.factor))
            + 0.25 * d * (d - 1) * (LOG_PI + 1)
            + jnp.sum(gamma_entropy(parts.shapes) + 0.5 * jnp.arange(d) * digamma(parts.shapes))
        )
        normal = 0.5 * (d * (LOG_2PI + 1 - jnp.log(parts.strength)) - self._mean_log_det(parts))
        return wishart + normal

    def kl(self, eta_q: NormalWishartEta, eta_p: NormalWishartEta) -> Float[Array, ""]:
        """KL(q || p): of the precisions, plus the mean KL of the means given the precision."""
        q, p = self._parts(eta_q), self._parts(eta_p)
        d_inverse_scale = linalg.symmetric(
            2 * (eta_q.precision - eta_p.precision)
            + (jnp.outer(q.location, eta_q.linear) - jnp.outer(p.location, eta_p.linear))
        )
        log_det_ratio = jnp.sum(log_ratio(jnp.diagonal(p.factor), jnp.diagonal(q.factor)))
        spread = 0.5 * q.degrees * jnp.trace(linalg.solve(q.factor, d_inverse_scale)) - p.degrees * log_det_ratio
        wishart = jnp.sum(lgamma_bregman(p.shapes, q.shapes)) + spread
        distance = solve_triangular(q.factor, q.location - p.location, lower=True)
        ratio = (p.strength - q.strength) / q.strength - log_ratio(p.strength, q.strength)
        return wishart + 0.5 * (self.dimension * ratio + p.strength * q.degrees * (distance @ distance))

    def sample(self, key: PRNGKeyArray, eta: NormalWishartEta, shape: tuple[int, ...] = ()) -> MeanPrecision:
        """Draws of shape `shape + (d,)` and `shape + (d, d)`, by Bartlett's decomposition (Odell, Feiveson 1966)."""
        d, parts = self.dimension, self._parts(eta)

        def draw(key: PRNGKeyArray) -> MeanPrecision:
            key_chi, key_lower, key_mean = jax.random.split(key, 3)
            log_gamma = jax.random.loggamma(key_chi, parts.shapes[::-1], dtype=parts.shapes.dtype)
            chi_square = 2 * exp_inside(log_gamma)
            lower = jnp.tril(jax.random.normal(key_lower, (d, d), parts.shapes.dtype), -1)
            bartlett = lower + jnp.diag(jnp.sqrt(chi_square))
            root = solve_triangular(parts.factor, bartlett, trans=1, lower=True)  # V^(1/2) A, so L = root root^T
            normal = jax.random.normal(key_mean, (d,), parts.shapes.dtype)
            deviation = parts.factor @ solve_triangular(bartlett, normal, trans=1, lower=True)
            return MeanPrecision(
                mean=parts.location + deviation / jnp.sqrt(parts.strength), precision=linalg.symmetric(root @ root.T)
            )

        draws = jax.vmap(draw)(jax.random.split(key, math.prod(shape)))
        return jax.tree.map(lambda leaf: leaf.reshape(shape + leaf.shape[1:]), draws)

    def is_proper(self, eta: NormalWishartEta) -> Bool[Array, ""]:
        """Finite, strength > 0, W positive definite and degrees > d - 1."""
        parts = self._parts(eta)
        ok = jnp.all(jnp.isfinite(parts.factor)) & (parts.strength > 0) & jnp.all(parts.shapes > 0)
        return all_finite(eta) & ok

    def project(self, eta: NormalWishartEta, floor: float) -> NormalWishartEta:
        """Raise strength, eigenvalues of W and `degrees - (d - 1)` below `floor` to it; `kappa m` is kept.

        Why the linear part: see `MeanFieldGaussian.project`. W is judged after the strength was raised. Where `floor`
        is lost in the rounding of the natural parameter it is written into, the raised value becomes what survives
        (about 16 d units of rounding). Idempotent up to rounding.
        """
        check_eta(eta, NormalWishartEta, self._shapes)
        floor = check_floor(floor)
        quadratic = jnp.minimum(eta.quadratic, -0.5 * floor)
        square = jnp.outer(eta.linear, eta.linear) / (-2 * quadratic)
        inverse_scale = -2 * eta.precision - square
        raised = linalg.floor_eigenvalues(inverse_scale, jnp.zeros((), square.dtype) + floor, jnp.trace(square))
        kept = jnp.all(raised == inverse_scale)
        return NormalWishartEta(
            linear=eta.linear,
            quadratic=quadratic,
            precision=jnp.where(kept, eta.precision, -0.5 * (raised + square)),
            log_det=0.5 * raise_shape(2 * eta.log_det, floor),
        )
