"""Independent Dirichlet distributions over the last axis: `eta = concentration - 1` on `T(x) = ln x`, base measure 1.

Densities are with respect to all but the last coordinate of the simplex, as usual.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from silobayes.families._special import HALF_LOG_2PI, gamma_entropy, lgamma_bregman, log_ratio, stirling_remainder
from silobayes.families.base import (
    AbstractEta,
    AbstractFamily,
    all_finite,
    check_eta,
    check_event_shape,
    check_floor,
    positive_or_nan,
    zeros_like_shapes,
)
from silobayes.families.gamma import raise_shape


class DirichletEta(AbstractEta):
    """Factor of ln x."""

    log: Float[Array, "*rows k"]


class Concentration(NamedTuple):
    """Pseudo-counts, one per category."""

    concentration: Float[Array, "*rows k"]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Dirichlet(AbstractFamily[DirichletEta, Concentration]):
    """Points of the simplex in the last axis of `event_shape`, independent over the other axes. Reparameterised."""

    event_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_event_shape(self.event_shape, at_least_axes=1)

    @property
    def is_reparameterised(self) -> bool:
        """Implicitly, by the derivative rule of `jax.random.loggamma`."""
        return True

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"log": self.event_shape}

    def zeros(self, dtype: Any = None) -> DirichletEta:
        """The uniform factor; proper here."""
        return zeros_like_shapes(DirichletEta, self._shapes, dtype)

    def from_standard(self, *, concentration: Float[Array, "*rows k"]) -> DirichletEta:
        """`eta` of the pseudo-counts."""
        eta = DirichletEta(log=concentration - 1)
        check_eta(eta, DirichletEta, self._shapes)
        return eta

    def to_standard(self, eta: DirichletEta) -> Concentration:
        """Pseudo-counts."""
        check_eta(eta, DirichletEta, self._shapes)
        return Concentration(concentration=positive_or_nan(eta.log + 1))

    def log_partition(self, eta: DirichletEta) -> Float[Array, ""]:
        """Sum of `sum_k ln Gamma(c_k) - ln Gamma(sum_k c_k)`."""
        (concentration,) = self.to_standard(eta)
        return jnp.sum(gammaln(concentration)) - jnp.sum(gammaln(jnp.sum(concentration, axis=-1)))

    def mean_parameters(self, eta: DirichletEta) -> DirichletEta:
        """E[ln x]."""
        (concentration,) = self.to_standard(eta)
        total = jnp.sum(concentration, axis=-1, keepdims=True)
        return DirichletEta(log=digamma(concentration) - digamma(total))

    def sufficient_statistics(self, x: Float[Array, "*rows k"]) -> DirichletEta:
        """`ln x`."""
        return DirichletEta(log=jnp.log(x))

    def log_prob(self, eta: DirichletEta, x: Float[Array, "*rows k"]) -> Float[Array, ""]:
        """Log density; -inf unless every x > 0. That x sums to 1 is the caller's business."""
        (concentration,) = self.to_standard(eta)
        inside = jnp.where(x <= 0, 1.0, x)
        return jnp.where(jnp.any(x <= 0), -jnp.inf, jnp.sum(dirichlet_log_prob(concentration, inside)))

    def entropy(self, eta: DirichletEta) -> Float[Array, ""]:
        """Differential entropy on the simplex."""
        return jnp.sum(dirichlet_entropy(*self.to_standard(eta)))

    def kl(self, eta_q: DirichletEta, eta_p: DirichletEta) -> Float[Array, ""]:
        """KL(q || p)."""
        return jnp.sum(dirichlet_kl(*self.to_standard(eta_q), *self.to_standard(eta_p)))

    def sample(
        self, key: PRNGKeyArray, eta: DirichletEta, shape: tuple[int, ...] = ()
    ) -> Float[Array, "*shape_and_rows k"]:
        """Draws of shape `shape + event_shape`."""
        return dirichlet_sample(key, self.to_standard(eta).concentration, shape)

    def is_proper(self, eta: DirichletEta) -> Bool[Array, ""]:
        """Finite, every pseudo-count > 0."""
        check_eta(eta, DirichletEta, self._shapes)
        return all_finite(eta) & jnp.all(eta.log > -1)

    def project(self, eta: DirichletEta, floor: float) -> DirichletEta:
        """Raise pseudo-counts below `floor` to it."""
        check_eta(eta, DirichletEta, self._shapes)
        return DirichletEta(log=raise_shape(eta.log, check_floor(floor)))


def dirichlet_log_prob(concentration: Float[Array, "*rows k"], x: Float[Array, "*rows k"]) -> Float[Array, "*rows"]:
    """Log density for x > 0, with Stirling's large terms cancelled against `x^concentration`."""
    total = jnp.sum(concentration, axis=-1, keepdims=True)
    bulk = jnp.sum(concentration * log_ratio(x, concentration / total), axis=-1)
    rest = jnp.sum(0.5 * jnp.log(concentration) - jnp.log(x) - stirling_remainder(concentration), axis=-1)
    degrees = concentration.shape[-1] - 1
    total = total[..., 0]
    return bulk + rest - degrees * HALF_LOG_2PI - 0.5 * jnp.log(total) + stirling_remainder(total)


def dirichlet_entropy(concentration: Float[Array, "*rows k"]) -> Float[Array, "*rows"]:
    """Entropy per row, from entropies of Gamma variables, so that large pseudo-counts cancel before rounding."""
    total = jnp.sum(concentration, axis=-1)
    degrees = concentration.shape[-1] - 1
    return jnp.sum(gamma_entropy(concentration), axis=-1) - gamma_entropy(total) - degrees * digamma(total)


def dirichlet_kl(
    concentration_q: Float[Array, "*rows k"], concentration_p: Float[Array, "*rows k"]
) -> Float[Array, "*rows"]:
    """KL(q || p) per row."""
    total_q, total_p = jnp.sum(concentration_q, axis=-1), jnp.sum(concentration_p, axis=-1)
    return jnp.sum(lgamma_bregman(concentration_p, concentration_q), axis=-1) - lgamma_bregman(total_p, total_q)


def dirichlet_sample(
    key: PRNGKeyArray, concentration: Float[Array, "*rows k"], shape: tuple[int, ...]
) -> Float[Array, "*shape_and_rows k"]:
    """Draws inside the open simplex: normalised Gamma draws, in logarithms because small ones underflow."""
    log_gamma = jax.random.loggamma(key, concentration, shape + concentration.shape, concentration.dtype)
    info = jnp.finfo(concentration.dtype)
    return jnp.clip(jax.nn.softmax(log_gamma, axis=-1), info.tiny, 1 - info.epsneg)
