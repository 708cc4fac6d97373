"""What every model offers: the log-likelihood of ONE row; the library vmaps (DESIGN 3).

A model is static: it says which likelihood and which prior, holds no array, and passes through `jax.jit` as a constant.
Its parameters are one flat unconstrained vector `theta` of `dim` numbers, so that a Gaussian family can stand for the
posterior of every model.

Generalised linear models (`AbstractGLM`) see a row only through the scalar `f = x @ theta`; under a Gaussian `q` that
scalar is Gaussian, so expectations are one-dimensional and need no Monte-Carlo draws.
"""

import abc
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.core.errors import InvalidInput
from silobayes.families import FullGaussian, FullGaussianEta, MeanFieldGaussian, MeanFieldGaussianEta
from silobayes.models.scores import AbstractCentredScore

Target = Literal["real", "binary", "classes", "count", "none"]
GaussianFamily = MeanFieldGaussian | FullGaussian
GaussianEta = MeanFieldGaussianEta | FullGaussianEta

# Gauss-Hermite in the probabilists' form: sum of weights * g(nodes) is E[g(z)] for z ~ N(0, 1). With 12 nodes
# the expected logistic score is right to 1e-7, 1e-4 and 2e-3 at standard deviations 1, 2 and 3 of the linear predictor.
_NODES, _WEIGHTS = (array.astype(np.float32) for array in np.polynomial.hermite_e.hermegauss(12))
_WEIGHTS /= _WEIGHTS.sum()
_LARGEST_DRAWN_LOG_RATE = 20.7


class AbstractModel(eqx.Module):
    """The log-likelihood of one row and the prior.

    Guarantees:
        - the log-likelihood is normalised over the target
        - rows are drawn from the likelihood, parameters from the prior
        - parameter names are as many as parameters, and different
    """

    num_features: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Numbers in theta."""

    @property
    @abc.abstractmethod
    def target(self) -> Target:
        """What the target column holds."""

    @property
    @abc.abstractmethod
    def worst_labels(self) -> tuple[float, ...] | None:
        """Labels among which every row's gradient has its largest norm, whatever its own label is.

        Clipping by the worst case over these keeps the expected score zero (UNCERTAINTY F7), because the weight of a
        row then depends on its features only. None if there is no such list; then a row is clipped by its own norm,
        which is unbiased only where the score is symmetric around zero.
        """

    @property
    def centred_score(self) -> AbstractCentredScore | None:
        """What a row says of its linear predictors, where the model is a regression with a closed form of it."""
        return None

    @abc.abstractmethod
    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """A name for each entry of theta."""

    @abc.abstractmethod
    def log_likelihood(self, theta: Float[Array, " dim"], x_row: Float[Array, " d"], y_row: Num[Array, ""]) -> Array:
        """Log density (or mass) of one row's target given its features."""

    @abc.abstractmethod
    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, "n *classes"]:
        """Real and count targets: the mean of each row. Binary and classes: a probability per class, (n, K)."""

    @property
    @abc.abstractmethod
    def prior_is_gaussian(self) -> bool:
        """Whether `prior_eta` is the prior itself. If not, it is a start for `inference.vi.maximise_prior`."""

    @abc.abstractmethod
    def prior_eta(self, family: GaussianFamily) -> GaussianEta:
        """Natural parameters of the (Gaussian stand-in for the) prior."""

    @abc.abstractmethod
    def log_prior(self, theta: Float[Array, " dim"]) -> Float[Array, ""]:
        """Log density of the prior, in the unconstrained coordinates."""

    @abc.abstractmethod
    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """Where a first optimisation should start; the prior unless that is a saddle point. Looks at no row."""

    @abc.abstractmethod
    def draw_prior(self, key: PRNGKeyArray) -> Float[Array, " dim"]:
        """A theta from the prior."""

    @abc.abstractmethod
    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """Rows of the likelihood at theta: targets for the features `x`; models of the features alone draw these."""

    def log_predictive(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], y: Num[Array, " n"]
    ) -> Float[Array, " n"]:
        """Log-likelihood of each row."""
        return jax.vmap(self.log_likelihood, in_axes=(None, 0, 0))(theta, x, y)


class AbstractGaussianPriorModel(AbstractModel):
    """A model whose prior is N(0, prior_stddev^2), independent in each parameter."""

    prior_stddev: eqx.AbstractVar[float]

    @property
    def prior_is_gaussian(self) -> bool:
        """Always."""
        return True

    def prior_eta(self, family: GaussianFamily) -> GaussianEta:
        """The prior, exactly."""
        return isotropic_eta(family, jnp.zeros(self.dim), self.prior_stddev)

    def prior_start(self, family: GaussianFamily) -> GaussianEta:
        """The prior, but no wider than 1: likelihoods of draws from a wide one overflow, or have no slope left."""
        return isotropic_eta(family, jnp.zeros(self.dim), min(self.prior_stddev, 1.0))

    def log_prior(self, theta: Float[Array, " dim"]) -> Float[Array, ""]:
        """See `AbstractModel`."""
        return jnp.sum(jax.scipy.stats.norm.logpdf(theta, scale=self.prior_stddev))

    def draw_prior(self, key: PRNGKeyArray) -> Float[Array, " dim"]:
        """See `AbstractModel`."""
        return self.prior_stddev * jax.random.normal(key, (self.dim,))


class AbstractGLM(AbstractGaussianPriorModel):
    """A row is seen through the scalar `f = x @ theta` only.

    Guarantees:
        - expected derivatives are those of the expected log-likelihood under f ~ N(mean, variance)
        - no label has a larger score than `score_bound`
    """

    @abc.abstractmethod
    def pointwise(self, f: Float[Array, "*shape"], y: Num[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Log-likelihood given the linear predictor, entry by entry."""

    @abc.abstractmethod
    def expected_derivatives(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """E[d/df log p(y|f)] and E[d2/df2 log p(y|f)] under f ~ N(mean, variance)."""

    @abc.abstractmethod
    def log_expected_likelihood(
        self, mean: Float[Array, " n"], variance: Float[Array, " n"], y: Num[Array, " n"]
    ) -> Float[Array, " n"]:
        """The log of E[p(y|f)] under f ~ N(mean, variance): the log predictive density of each row."""

    @abc.abstractmethod
    def expected_prediction(self, mean: Float[Array, " n"], variance: Float[Array, " n"]) -> Float[Array, "n *classes"]:
        """What `predict` gives, averaged over f ~ N(mean, variance)."""

    @property
    def dim(self) -> int:
        """One coefficient per feature."""
        return self.num_features

    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """The features' own names."""
        return check_feature_names(feature_names, self.num_features)

    def log_likelihood(self, theta: Float[Array, " dim"], x_row: Float[Array, " d"], y_row: Num[Array, ""]) -> Array:
        """See `AbstractModel`."""
        return self.pointwise(x_row @ theta, y_row)

    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """See `prior_start`."""
        return self.prior_start(family)

    def score_bound(self, f: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Largest |d/df log p(y|f)| over all labels; infinite if labels are not bounded."""
        if self.worst_labels is None:
            return jnp.full(jnp.shape(f), jnp.inf)
        score = elementwise_derivative(self.pointwise)
        return jnp.stack([jnp.abs(score(f, jnp.full(jnp.shape(f), label))) for label in self.worst_labels]).max(axis=0)


def elementwise_derivative(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """d/df of a function that works entry by entry."""
    return lambda f, y: jax.jvp(lambda value: function(value, y), (f,), (jnp.ones_like(f),))[1]


def expected_sigmoid(
    mean: Float[Array, " n"], variance: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """E[p] and E[p (1 - p)] for p = sigmoid(f), f ~ N(mean, variance), by Gauss-Hermite quadrature."""
    f = mean + jnp.sqrt(variance) * _NODES[:, None]
    # Of p and 1 - p the smaller one from its own exponential: their product then never rounds to zero early.
    tail = jnp.exp(-jnp.abs(f))
    larger = 1 / (1 + tail)
    smaller = tail * larger
    # Rows on the left: the other way round XLA takes 1.7 times as long.
    return jnp.where(f > 0, larger, smaller).T @ _WEIGHTS, (larger * smaller).T @ _WEIGHTS


def isotropic_eta(family: GaussianFamily, mean: Float[Array, " dim"], stddev: float | Array) -> GaussianEta:
    """Natural parameters of independent Gaussians in either Gaussian family."""
    stddevs = jnp.broadcast_to(jnp.asarray(stddev, mean.dtype), mean.shape)
    field = MeanFieldGaussian(event_shape=mean.shape).from_standard(mean=mean, stddev=stddevs)
    return family.from_mean_field(field) if isinstance(family, FullGaussian) else field


def aligned(matrix: Float[Array, "n d"]) -> Float[Array, "n wider"]:
    """The same with columns of zeros up to a multiple of 16: vector instructions then work on whole registers."""
    return jnp.pad(matrix, ((0, 0), (0, -matrix.shape[1] % 16)))


def check_feature_names(feature_names: tuple[str, ...], num_features: int) -> tuple[str, ...]:
    """Refuse another number of names than features."""
    if len(feature_names) != num_features:
        raise InvalidInput("feature_names", f"{num_features} names", len(feature_names), "Name every column of x.")
    return tuple(feature_names)


def draw_counts(log_rate: Float[Array, " n"], key: PRNGKeyArray) -> Float[Array, " n"]:
    """Poisson counts; a rate beyond 10^9 is drawn as that, which int32 still holds."""
    return jax.random.poisson(key, jnp.exp(jnp.minimum(log_rate, _LARGEST_DRAWN_LOG_RATE))).astype(jnp.float32)


def binary_probabilities(p_one: Float[Array, " n"]) -> Float[Array, "n 2"]:
    """Probabilities of classes 0 and 1."""
    return jnp.stack([1 - p_one, p_one], axis=-1)
