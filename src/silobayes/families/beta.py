"""Independent Beta distributions: `eta = (alpha - 1, beta - 1)` on `T(x) = (ln x, ln(1 - x))`, base measure 1.

A Beta variable is the first coordinate of a Dirichlet over two categories, and is computed as such.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Bool, Float, PRNGKeyArray

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
from silobayes.families.dirichlet import dirichlet_entropy, dirichlet_kl, dirichlet_log_prob, dirichlet_sample
from silobayes.families.gamma import raise_shape


class BetaEta(AbstractEta):
    """Factors of ln x and of ln(1 - x)."""

    log: Float[Array, "*event"]
    log_complement: Float[Array, "*event"]


class AlphaBeta(NamedTuple):
    """Pseudo-counts of successes and of failures."""

    alpha: Float[Array, "*event"]
    beta: Float[Array, "*event"]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Beta(AbstractFamily[BetaEta, AlphaBeta]):
    """One independent Beta variable per entry of `event_shape`. Reparameterised."""

    event_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_event_shape(self.event_shape)

    @property
    def is_reparameterised(self) -> bool:
        """Implicitly, by the derivative rule of `jax.random.loggamma`."""
        return True

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"log": self.event_shape, "log_complement": self.event_shape}

    def _concentration(self, eta: BetaEta) -> Float[Array, "*event 2"]:
        return jnp.stack(self.to_standard(eta), axis=-1)

    def zeros(self, dtype: Any = None) -> BetaEta:
        """The uniform factor; proper here."""
        return zeros_like_shapes(BetaEta, self._shapes, dtype)

    def from_standard(self, *, alpha: Float[Array, "*event"], beta: Float[Array, "*event"]) -> BetaEta:
        """`eta` of the two pseudo-counts."""
        eta = BetaEta(log=alpha - 1, log_complement=beta - 1)
        check_eta(eta, BetaEta, self._shapes)
        return eta

    def to_standard(self, eta: BetaEta) -> AlphaBeta:
        """The two pseudo-counts."""
        check_eta(eta, BetaEta, self._shapes)
        return AlphaBeta(alpha=positive_or_nan(eta.log + 1), beta=positive_or_nan(eta.log_complement + 1))

    def log_partition(self, eta: BetaEta) -> Float[Array, ""]:
        """Sum of `ln B(alpha, beta)`."""
        alpha, beta = self.to_standard(eta)
        return jnp.sum(gammaln(alpha) + gammaln(beta) - gammaln(alpha + beta))

    def mean_parameters(self, eta: BetaEta) -> BetaEta:
        """E[ln x] and E[ln(1 - x)]."""
        alpha, beta = self.to_standard(eta)
        total = digamma(alpha + beta)
        return BetaEta(log=digamma(alpha) - total, log_complement=digamma(beta) - total)

    def sufficient_statistics(self, x: Float[Array, "*event"]) -> BetaEta:
        """`ln x` and `ln(1 - x)`."""
        return BetaEta(log=jnp.log(x), log_complement=jnp.log1p(-x))

    def log_prob(self, eta: BetaEta, x: Float[Array, "*event"]) -> Float[Array, ""]:
        """Log density; -inf unless every x is in (0, 1)."""
        outside = (x <= 0) | (x >= 1)
        inside = jnp.where(outside, 0.5, x)
        pairs = jnp.stack([inside, 1 - inside], axis=-1)
        return jnp.where(jnp.any(outside), -jnp.inf, jnp.sum(dirichlet_log_prob(self._concentration(eta), pairs)))

    def entropy(self, eta: BetaEta) -> Float[Array, ""]:
        """Differential entropy."""
        return jnp.sum(dirichlet_entropy(self._concentration(eta)))

    def kl(self, eta_q: BetaEta, eta_p: BetaEta) -> Float[Array, ""]:
        """KL(q || p)."""
        return jnp.sum(dirichlet_kl(self._concentration(eta_q), self._concentration(eta_p)))

    def sample(self, key: PRNGKeyArray, eta: BetaEta, shape: tuple[int, ...] = ()) -> Float[Array, "*shape_and_event"]:
        """Draws of shape `shape + event_shape`."""
        return dirichlet_sample(key, self._concentration(eta), shape)[..., 0]

    def is_proper(self, eta: BetaEta) -> Bool[Array, ""]:
        """Finite, every pseudo-count > 0."""
        check_eta(eta, BetaEta, self._shapes)
        return all_finite(eta) & jnp.all(eta.log > -1) & jnp.all(eta.log_complement > -1)

    def project(self, eta: BetaEta, floor: float) -> BetaEta:
        """Raise pseudo-counts below `floor` to it, each on its own."""
        check_eta(eta, BetaEta, self._shapes)
        floor = check_floor(floor)
        return BetaEta(log=raise_shape(eta.log, floor), log_complement=raise_shape(eta.log_complement, floor))
