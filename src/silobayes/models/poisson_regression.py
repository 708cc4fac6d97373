"""Poisson regression with log link: `y ~ Poisson(exp(x @ theta))`, theta ~ N(0, prior_stddev^2)."""

import math

import equinox as eqx
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.models.base import AbstractGLM, Target, draw_counts
from silobayes.models.expectations import log_expected_likelihood
from silobayes.models.scores import CountScore

# A row whose rate overflows has a score that is not finite and would count as zero, so that a q gone astray would never
# come back; with a large finite score it is clipped like any other.
_LARGEST_LOG_RATE = 30.0


class PoissonRegression(AbstractGLM):
    """Counts up to a public `max_count`, which only clipping uses: it is the worst label beside 0.

    `typical_count` is a public guess of a row's mean: where centred scores start.
    """

    num_features: int = eqx.field(static=True, kw_only=True)
    max_count: int = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)
    typical_count: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def target(self) -> Target:
        """Counts."""
        return "count"

    @property
    def centred_score(self) -> CountScore:
        """See `AbstractModel`."""
        return CountScore(concentration=math.inf, typical_rate=self.typical_count)

    @property
    def worst_labels(self) -> tuple[float, ...]:
        """The score is linear in the label, so its norm is largest at an end."""
        return (0.0, float(self.max_count))

    def pointwise(self, f: Float[Array, "*shape"], y: Num[Array, "*shape"]) -> Float[Array, "*shape"]:
        """`y f - e^f - log y!`."""
        return y * f - jnp.exp(f) - gammaln(y + 1.0)

    def expected_derivatives(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """Exact: E[e^f] = exp(mean + variance / 2), up to the largest rate."""
        rate = jnp.exp(jnp.minimum(mean + 0.5 * variance, _LARGEST_LOG_RATE))
        return y - rate, -rate

    def log_expected_likelihood(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> Float[Array, " n"]:
        """By quadrature."""
        bend = jnp.log(jnp.maximum(y, 1.0))
        return log_expected_likelihood(self.pointwise, bend, mean, variance, y)

    def expected_prediction(self, mean: Float[Array, " n"], variance: Float[Array, " n"]) -> Float[Array, " n"]:
        """Exact: the mean of a log-normal; infinite where float32 ends."""
        return jnp.exp(mean + 0.5 * variance)

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Mean of each row."""
        return jnp.exp(x @ theta)

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, draw_counts(x @ theta, key)
