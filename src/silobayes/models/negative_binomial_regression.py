"""Negative-binomial regression with log link: mean `m = exp(x @ theta)`, variance `m + m^2 / concentration`.

`NegativeBinomialRegression` knows the concentration; `NegativeBinomialRegressionUnknownConcentration` has its log
as one more parameter.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.models.base import (
    AbstractGaussianPriorModel,
    AbstractGLM,
    GaussianEta,
    GaussianFamily,
    Target,
    check_feature_names,
    draw_counts,
    expected_sigmoid,
)
from silobayes.models.expectations import log_expected_likelihood
from silobayes.models.scores import CountScore


def _log_mass(
    f: Float[Array, "*shape"], y: Num[Array, "*shape"], log_concentration: float | Float[Array, ""]
) -> Float[Array, "*shape"]:
    """`log C(y + r - 1, y) + y log p + r log(1 - p)` with `p = sigmoid(f - log r)`."""
    r = jnp.exp(log_concentration)
    logit = f - log_concentration
    choose = gammaln(y + r) - gammaln(r) - gammaln(y + 1.0)
    return choose - y * jax.nn.softplus(-logit) - r * jax.nn.softplus(logit)


def _draw_counts(
    f: Float[Array, " n"], log_concentration: float | Float[Array, ""], key: PRNGKeyArray
) -> Float[Array, " n"]:
    """Poisson counts whose rates are `exp(f)` times a gamma number of mean 1."""
    rate_key, count_key = jax.random.split(key)
    log_gamma = jax.random.loggamma(rate_key, jnp.exp(log_concentration), f.shape)
    return draw_counts(f + log_gamma - log_concentration, count_key)


class NegativeBinomialRegression(AbstractGLM):
    """Known concentration; counts up to a public `max_count`, which only clipping uses."""

    num_features: int = eqx.field(static=True, kw_only=True)
    max_count: int = eqx.field(static=True, kw_only=True)
    concentration: float = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)
    typical_count: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def target(self) -> Target:
        """Counts."""
        return "count"

    @property
    def centred_score(self) -> CountScore:
        """See `AbstractModel`."""
        return CountScore(concentration=self.concentration, typical_rate=self.typical_count)

    @property
    def worst_labels(self) -> tuple[float, ...]:
        """Score and curvature are linear in the label, so the norm is largest at an end."""
        return (0.0, float(self.max_count))

    def pointwise(self, f: Float[Array, "*shape"], y: Num[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Log mass of y given the log mean f."""
        return _log_mass(f, y, math.log(self.concentration))

    def expected_derivatives(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """`y - (y + r) E[p]` and `-(y + r) E[p (1 - p)]` by quadrature, p = sigmoid(f - log r)."""
        logit = mean - math.log(self.concentration)
        p, slope = expected_sigmoid(logit, variance)
        return y - (y + self.concentration) * p, -(y + self.concentration) * slope

    def log_expected_likelihood(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> Float[Array, " n"]:
        """By quadrature."""
        bend = jnp.where(y > 0, jnp.log(jnp.maximum(y, 1.0)), min(0.0, math.log(self.concentration)))
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
        return x, _draw_counts(x @ theta, math.log(self.concentration), key)


class NegativeBinomialRegressionUnknownConcentration(AbstractGaussianPriorModel):
    """theta = (coefficients, log concentration). Clipped by a row's own norm, which biases where many rows reach it."""

    num_features: int = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def dim(self) -> int:
        """One coefficient per feature and the log concentration."""
        return self.num_features + 1

    @property
    def target(self) -> Target:
        """Counts."""
        return "count"

    @property
    def worst_labels(self) -> None:
        """The score of the concentration is not monotone in the label: no short list holds its maximum."""
        return

    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """The features' names, then `log_concentration`."""
        return (*check_feature_names(feature_names, self.num_features), "log_concentration")

    def log_likelihood(self, theta: Float[Array, " dim"], x_row: Float[Array, " d"], y_row: Num[Array, ""]) -> Array:
        """Log mass of one count."""
        return _log_mass(x_row @ theta[:-1], y_row, theta[-1])

    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """See `prior_start`."""
        return self.prior_start(family)

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Mean of each row."""
        return jnp.exp(x @ theta[:-1])

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, _draw_counts(x @ theta[:-1], theta[-1], key)
