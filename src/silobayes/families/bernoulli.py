"""Independent Bernoulli variables: `eta = logit(probability)` on `T(x) = x`, base measure 1.

Every finite eta is proper.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid, softplus
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from silobayes.families.base import (
    AbstractEta,
    AbstractFamily,
    all_finite,
    check_eta,
    check_event_shape,
    check_floor,
    finite_or_nan,
    zeros_like_shapes,
)


class BernoulliEta(AbstractEta):
    """Log odds of 1 against 0."""

    logit: Float[Array, "*event"]


class Probability(NamedTuple):
    """Probability of a 1."""

    probability: Float[Array, "*event"]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Bernoulli(AbstractFamily[BernoulliEta, Probability]):
    """One independent 0/1 variable per entry of `event_shape`. Not reparameterised."""

    event_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_event_shape(self.event_shape)

    @property
    def is_reparameterised(self) -> bool:
        """Draws are discrete."""
        return False

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"logit": self.event_shape}

    def _logit(self, eta: BernoulliEta) -> Float[Array, "*event"]:
        check_eta(eta, BernoulliEta, self._shapes)
        return finite_or_nan(eta.logit)

    def zeros(self, dtype: Any = None) -> BernoulliEta:
        """The uniform factor: a fair coin."""
        return zeros_like_shapes(BernoulliEta, self._shapes, dtype)

    def from_standard(self, *, probability: Float[Array, "*event"]) -> BernoulliEta:
        """`eta` of a probability in (0, 1); improper at 0 and 1."""
        eta = BernoulliEta(logit=jnp.log(probability) - jnp.log1p(-probability))
        check_eta(eta, BernoulliEta, self._shapes)
        return eta

    def to_standard(self, eta: BernoulliEta) -> Probability:
        """Probability of a 1."""
        return Probability(probability=sigmoid(self._logit(eta)))

    def log_partition(self, eta: BernoulliEta) -> Float[Array, ""]:
        """Sum of `ln(1 + exp(eta))`."""
        return jnp.sum(softplus(self._logit(eta)))

    def mean_parameters(self, eta: BernoulliEta) -> BernoulliEta:
        """Probability of a 1."""
        return BernoulliEta(logit=sigmoid(self._logit(eta)))

    def sufficient_statistics(self, x: Int[Array, "*event"]) -> BernoulliEta:
        """`x` as a float."""
        return BernoulliEta(logit=jnp.asarray(x, float))

    def log_prob(self, eta: BernoulliEta, x: Int[Array, "*event"]) -> Float[Array, ""]:
        """Log mass; -inf unless every x is 0 or 1."""
        logit = self._logit(eta)
        outside = jnp.any((x != 0) & (x != 1))
        return jnp.where(outside, -jnp.inf, jnp.sum(log_sigmoid(jnp.where(x == 1, logit, -logit))))

    def entropy(self, eta: BernoulliEta) -> Float[Array, ""]:
        """Entropy, from |eta| so that a sure coin keeps its digits."""
        size = jnp.abs(self._logit(eta))
        return jnp.sum(softplus(-size) + size * sigmoid(-size))

    def kl(self, eta_q: BernoulliEta, eta_p: BernoulliEta) -> Float[Array, ""]:
        """KL(q || p)."""
        q, p = self._logit(eta_q), self._logit(eta_p)
        ones = sigmoid(q) * (log_sigmoid(q) - log_sigmoid(p))
        return jnp.sum(ones + sigmoid(-q) * (log_sigmoid(-q) - log_sigmoid(-p)))

    def sample(self, key: PRNGKeyArray, eta: BernoulliEta, shape: tuple[int, ...] = ()) -> Int[Array, "*event"]:
        """Draws of shape `shape + event_shape`; all 0 if `eta` is improper, as integers know no NaN."""
        return jax.random.bernoulli(key, sigmoid(self._logit(eta)), shape + self.event_shape).astype(int)

    def is_proper(self, eta: BernoulliEta) -> Bool[Array, ""]:
        """Finite."""
        check_eta(eta, BernoulliEta, self._shapes)
        return all_finite(eta)

    def project(self, eta: BernoulliEta, floor: float) -> BernoulliEta:
        """The identity: the cone is the whole space, so no finite eta is near its boundary."""
        check_eta(eta, BernoulliEta, self._shapes)
        check_floor(floor)
        return eta
