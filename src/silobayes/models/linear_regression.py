"""Linear regression: `y ~ N(x @ theta, noise^2)`, coefficients ~ N(0, prior_stddev^2).

`LinearRegression` knows the noise and is conjugate (`inference.conjugate`); `LinearRegressionUnknownNoise` has its log
as one more parameter.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.models.base import (
    AbstractGaussianPriorModel,
    AbstractGLM,
    GaussianEta,
    GaussianFamily,
    Target,
    check_feature_names,
)
from silobayes.models.scores import LinearScore, UnitNoiseScore

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class LinearRegression(AbstractGLM):
    """Known noise. Labels are unbounded, but the score `(y - f) / noise^2` is symmetric: clipping it does not bias.

    Clipping a row's gradient by its own norm is clipping its residual, what UNCERTAINTY F7 asks for.
    """

    num_features: int = eqx.field(static=True, kw_only=True)
    noise_stddev: float = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def target(self) -> Target:
        """Any real number."""
        return "real"

    @property
    def centred_score(self) -> LinearScore:
        """See `AbstractModel`."""
        return LinearScore(noise_stddev=self.noise_stddev)

    @property
    def worst_labels(self) -> None:
        """None needed: see the class."""
        return

    def pointwise(self, f: Float[Array, "*shape"], y: Num[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Log density of N(f, noise^2)."""
        return -0.5 * ((y - f) / self.noise_stddev) ** 2 - math.log(self.noise_stddev) - _HALF_LOG_2PI

    def expected_derivatives(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """Exact: the log-likelihood is quadratic in f."""
        precision = self.noise_stddev**-2
        return (y - mean) * precision, jnp.full_like(mean, -precision)

    def log_expected_likelihood(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> Float[Array, " n"]:
        """Exact: the target is N(mean, noise^2 + variance)."""
        total = variance + self.noise_stddev**2
        return -0.5 * (y - mean) ** 2 / total - 0.5 * jnp.log(total) - _HALF_LOG_2PI

    def expected_prediction(self, mean: Float[Array, " n"], variance: Float[Array, " n"]) -> Float[Array, " n"]:
        """The mean."""
        return mean

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Mean of each row."""
        return x @ theta

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, x @ theta + self.noise_stddev * jax.random.normal(key, x.shape[:1])


class LinearRegressionUnknownNoise(AbstractGaussianPriorModel):
    """theta = (coefficients, log noise). The score of the log noise is skewed: clipping it biases the noise estimate.

    A clipped squared residual counts too little, so the estimate comes out too small; choose a clip norm that
    few rows reach.
    """

    num_features: int = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def dim(self) -> int:
        """One coefficient per feature and the log noise."""
        return self.num_features + 1

    @property
    def target(self) -> Target:
        """Any real number."""
        return "real"

    @property
    def centred_score(self) -> UnitNoiseScore:
        """See `AbstractModel`."""
        return UnitNoiseScore()

    @property
    def worst_labels(self) -> None:
        """There are none: labels are unbounded."""
        return

    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """The features' names, then `log_noise_stddev`."""
        return (*check_feature_names(feature_names, self.num_features), "log_noise_stddev")

    def log_likelihood(self, theta: Float[Array, " dim"], x_row: Float[Array, " d"], y_row: Num[Array, ""]) -> Array:
        """Log density of N(f, e^(2 theta_last))."""
        residual = (y_row - x_row @ theta[:-1]) * jnp.exp(-theta[-1])
        return -0.5 * residual**2 - theta[-1] - _HALF_LOG_2PI

    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """See `prior_start`."""
        return self.prior_start(family)

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Mean of each row."""
        return x @ theta[:-1]

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, x @ theta[:-1] + jnp.exp(theta[-1]) * jax.random.normal(key, x.shape[:1])
