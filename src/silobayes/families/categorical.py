"""Independent categorical variables: `eta = logits` on the one-hot `T(x)`, base measure 1. Every finite eta is proper.

Logits are kept for all categories, so `eta` and `eta + constant` are one distribution (the family is not minimal). It
keeps categories exchangeable; KL is 0 iff the *distributions* are equal.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_softmax, softmax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from silobayes.core.errors import require_count
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


class CategoricalEta(AbstractEta):
    """Log weights of the categories, up to a constant."""

    logits: Float[Array, "*event k"]


class Probabilities(NamedTuple):
    """Probabilities of the categories."""

    probabilities: Float[Array, "*event k"]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Categorical(AbstractFamily[CategoricalEta, Probabilities]):
    """One independent category in 0..categories-1 per entry of `event_shape`. Not reparameterised."""

    event_shape: tuple[int, ...]
    categories: int

    def __post_init__(self) -> None:
        check_event_shape(self.event_shape)
        require_count("categories", self.categories, at_least=2, fix="Pass the number of possible values.")

    @property
    def is_reparameterised(self) -> bool:
        """Draws are discrete."""
        return False

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"logits": (*self.event_shape, self.categories)}

    def _logits(self, eta: CategoricalEta) -> Float[Array, "*event k"]:
        check_eta(eta, CategoricalEta, self._shapes)
        return finite_or_nan(eta.logits)

    def zeros(self, dtype: Any = None) -> CategoricalEta:
        """The uniform factor."""
        return zeros_like_shapes(CategoricalEta, self._shapes, dtype)

    def from_standard(self, *, probabilities: Float[Array, "*event k"]) -> CategoricalEta:
        """`eta` of probabilities > 0; improper where one is 0."""
        eta = CategoricalEta(logits=jnp.log(probabilities))
        check_eta(eta, CategoricalEta, self._shapes)
        return eta

    def to_standard(self, eta: CategoricalEta) -> Probabilities:
        """Probabilities, summing to 1."""
        return Probabilities(probabilities=softmax(self._logits(eta), axis=-1))

    def log_partition(self, eta: CategoricalEta) -> Float[Array, ""]:
        """Sum of `ln sum_k exp(eta_k)`."""
        return jnp.sum(logsumexp(self._logits(eta), axis=-1))

    def mean_parameters(self, eta: CategoricalEta) -> CategoricalEta:
        """Probabilities."""
        return CategoricalEta(logits=softmax(self._logits(eta), axis=-1))

    def sufficient_statistics(self, x: Int[Array, "*event"]) -> CategoricalEta:
        """One-hot `x`."""
        return CategoricalEta(logits=jax.nn.one_hot(x, self.categories))

    def log_prob(self, eta: CategoricalEta, x: Int[Array, "*event"]) -> Float[Array, ""]:
        """Log mass; -inf unless every x is a category (an index out of range must not be clamped into one)."""
        log_probabilities = log_softmax(self._logits(eta), axis=-1)
        chosen = jnp.arange(self.categories) == jnp.expand_dims(x, -1)
        inside = jnp.all(jnp.any(chosen, axis=-1))
        return jnp.where(inside, jnp.sum(jnp.where(chosen, log_probabilities, 0.0)), -jnp.inf)

    def entropy(self, eta: CategoricalEta) -> Float[Array, ""]:
        """Entropy."""
        log_probabilities = log_softmax(self._logits(eta), axis=-1)
        return -jnp.sum(jnp.exp(log_probabilities) * log_probabilities)

    def kl(self, eta_q: CategoricalEta, eta_p: CategoricalEta) -> Float[Array, ""]:
        """KL(q || p)."""
        log_q, log_p = log_softmax(self._logits(eta_q), axis=-1), log_softmax(self._logits(eta_p), axis=-1)
        return jnp.sum(jnp.exp(log_q) * (log_q - log_p))

    def sample(
        self, key: PRNGKeyArray, eta: CategoricalEta, shape: tuple[int, ...] = ()
    ) -> Int[Array, "*shape_and_event"]:
        """Draws of shape `shape + event_shape`; all 0 if `eta` is improper, as integers know no NaN."""
        return jax.random.categorical(key, self._logits(eta), shape=shape + self.event_shape)

    def is_proper(self, eta: CategoricalEta) -> Bool[Array, ""]:
        """Finite."""
        check_eta(eta, CategoricalEta, self._shapes)
        return all_finite(eta)

    def project(self, eta: CategoricalEta, floor: float) -> CategoricalEta:
        """The identity: the cone is the whole space, so no finite eta is near its boundary."""
        check_eta(eta, CategoricalEta, self._shapes)
        check_floor(floor)
        return eta
