"""Logistic regression: `p(y = 1 | x, theta) = sigmoid(x @ theta)`, labels 0 and 1, theta ~ N(0, prior_stddev^2)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.models.base import AbstractGLM, Target, binary_probabilities, expected_sigmoid
from silobayes.models.expectations import log_expected_likelihood
from silobayes.models.scores import LogisticScore


class LogisticRegression(AbstractGLM):
    """Binary regression. The expected curvature does not depend on the label, the score lies within [-1, 1]."""

    num_features: int = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def target(self) -> Target:
        """Labels 0 and 1."""
        return "binary"

    @property
    def centred_score(self) -> LogisticScore:
        """See `AbstractModel`."""
        return LogisticScore()

    @property
    def worst_labels(self) -> tuple[float, ...]:
        """Both."""
        return (0.0, 1.0)

    def pointwise(self, f: Float[Array, "*shape"], y: Num[Array, "*shape"]) -> Float[Array, "*shape"]:
        """`y f - log(1 + e^f)`."""
        return y * f - jax.nn.softplus(f)

    def expected_derivatives(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """`y - E[p]` and `-E[p (1 - p)]` by quadrature."""
        p, slope = expected_sigmoid(mean, variance)
        return y - p, -slope

    def log_expected_likelihood(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> Float[Array, " n"]:
        """By quadrature."""
        return log_expected_likelihood(self.pointwise, jnp.zeros_like(mean), mean, variance, y)

    def expected_prediction(self, mean: Float[Array, " n"], variance: Float[Array, " n"]) -> Float[Array, "n 2"]:
        """Each class by its own quadrature, so that the smaller probability keeps its digits."""
        labels = (jnp.zeros_like(mean), jnp.ones_like(mean))
        return jnp.exp(jnp.stack([self.log_expected_likelihood(mean, variance, y) for y in labels], axis=-1))

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, "n 2"]:
        """Probabilities of classes 0 and 1."""
        return binary_probabilities(jax.nn.sigmoid(x @ theta))

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, jax.random.bernoulli(key, jax.nn.sigmoid(x @ theta)).astype(jnp.int32)
