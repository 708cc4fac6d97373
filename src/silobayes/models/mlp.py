"""Bayesian multi-layer perceptron of any widths: ReLU, a bias in every layer, all weights ~ N(0, prior_stddev^2).

The paper's network (000, Adult) is `hidden=(50,)` with a binary target.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.models.base import (
    GaussianEta,
    GaussianFamily,
    Target,
    binary_probabilities,
    check_feature_names,
    isotropic_eta,
)
from silobayes.models.layered import AbstractLayeredModel, class_log_likelihood

# A first q this narrow lets the means be learned before the weights' noise drowns the signal.
_START_STDDEV = 0.05


class AbstractMLP(AbstractLayeredModel):
    """What the three kinds of target share."""

    hidden: eqx.AbstractVar[tuple[int, ...]]

    @property
    def has_bias(self) -> bool:
        """In every layer."""
        return True

    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """`layer1[feature,0]`, `layer2[unit3,0]`, ..., with `bias` beside the inputs of each layer."""
        inputs = check_feature_names(feature_names, self.num_features)
        names = []
        for number, (_, outputs) in enumerate(self.shapes, start=1):
            names += [f"layer{number}[{name},{unit}]" for name in (*inputs, "bias") for unit in range(outputs)]
            inputs = tuple(f"unit{unit}" for unit in range(outputs))
        return tuple(names)

    @property
    def start_stddev(self) -> float:
        """Of each weight in `start_eta`."""
        return min(_START_STDDEV, self.prior_stddev)

    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """Random means (He et al. 2015, biases 0) and small deviations: at the prior all hidden units are alike."""
        means = []
        for layer_key, (rows, columns) in zip(jax.random.split(key, len(self.shapes)), self.shapes, strict=True):
            weights = jax.random.normal(layer_key, (rows - 1, columns)) * math.sqrt(2 / (rows - 1))
            means.append(jnp.concatenate([weights, jnp.zeros((1, columns))]).ravel())
        return isotropic_eta(family, jnp.concatenate(means), self.start_stddev)


class BinaryMLP(AbstractMLP):
    """One output: the log odds of class 1."""

    num_features: int = eqx.field(static=True, kw_only=True)
    hidden: tuple[int, ...] = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def target(self) -> Target:
        """Labels 0 and 1."""
        return "binary"

    @property
    def worst_labels(self) -> tuple[float, ...]:
        """Both."""
        return (0.0, 1.0)

    @property
    def widths(self) -> tuple[int, ...]:
        """See `AbstractLayeredModel`."""
        return (self.num_features, *self.hidden, 1)

    def output_log_likelihood(self, output: Float[Array, " outputs"], y_row: Num[Array, ""]) -> Float[Array, ""]:
        """See `AbstractLayeredModel`."""
        return y_row * output[0] - jax.nn.softplus(output[0])

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, "n 2"]:
        """Probabilities of classes 0 and 1."""
        return binary_probabilities(jax.nn.sigmoid(self.forward(theta, x).output[:, 0]))

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, jax.random.bernoulli(key, jax.nn.sigmoid(self.forward(theta, x).output[:, 0])).astype(jnp.int32)


class ClassesMLP(AbstractMLP):
    """One logit per class."""

    num_features: int = eqx.field(static=True, kw_only=True)
    hidden: tuple[int, ...] = eqx.field(static=True, kw_only=True)
    num_classes: int = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def target(self) -> Target:
        """Labels 0..K-1."""
        return "classes"

    @property
    def worst_labels(self) -> tuple[float, ...]:
        """All classes: label-free clipping costs one backward pass for each."""
        return tuple(float(label) for label in range(self.num_classes))

    @property
    def widths(self) -> tuple[int, ...]:
        """See `AbstractLayeredModel`."""
        return (self.num_features, *self.hidden, self.num_classes)

    def output_log_likelihood(self, output: Float[Array, " outputs"], y_row: Num[Array, ""]) -> Float[Array, ""]:
        """See `AbstractLayeredModel`."""
        return class_log_likelihood(output, y_row)

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, "n classes"]:
        """Probability of each class."""
        return jax.nn.softmax(self.forward(theta, x).output)

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, jax.random.categorical(key, self.forward(theta, x).output)


class RealMLP(AbstractMLP):
    """One output: the mean of a Gaussian target with known noise; the score is symmetric, as in linear regression."""

    num_features: int = eqx.field(static=True, kw_only=True)
    hidden: tuple[int, ...] = eqx.field(static=True, kw_only=True)
    noise_stddev: float = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def target(self) -> Target:
        """Any real number."""
        return "real"

    @property
    def worst_labels(self) -> None:
        """None needed: see the class."""
        return

    @property
    def widths(self) -> tuple[int, ...]:
        """See `AbstractLayeredModel`."""
        return (self.num_features, *self.hidden, 1)

    def output_log_likelihood(self, output: Float[Array, " outputs"], y_row: Num[Array, ""]) -> Float[Array, ""]:
        """See `AbstractLayeredModel`."""
        return jax.scipy.stats.norm.logpdf(y_row, output[0], self.noise_stddev)

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Mean of each row."""
        return self.forward(theta, x).output[:, 0]

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, self.predict(theta, x) + self.noise_stddev * jax.random.normal(key, x.shape[:1])
