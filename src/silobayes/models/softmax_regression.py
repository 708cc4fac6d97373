"""Softmax regression: `p(y = k | x) ∝ exp(x @ theta_k)`, labels 0..K-1, every coefficient ~ N(0, prior_stddev^2).

All K classes have coefficients; the prior makes them identifiable and treats the classes alike.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.models.base import GaussianEta, GaussianFamily, Target, check_feature_names
from silobayes.models.layered import AbstractLayeredModel, class_log_likelihood
from silobayes.models.scores import SoftmaxScore


class SoftmaxRegression(AbstractLayeredModel):
    """A network of one layer without bias (the encoding has an intercept column)."""

    num_features: int = eqx.field(static=True, kw_only=True)
    num_classes: int = eqx.field(static=True, kw_only=True)
    prior_stddev: float = eqx.field(static=True, kw_only=True, default=1.0)

    @property
    def target(self) -> Target:
        """Labels 0..K-1."""
        return "classes"

    @property
    def centred_score(self) -> SoftmaxScore:
        """See `AbstractModel`."""
        return SoftmaxScore(outputs=self.num_classes)

    @property
    def worst_labels(self) -> tuple[float, ...]:
        """All classes."""
        return tuple(float(label) for label in range(self.num_classes))

    @property
    def widths(self) -> tuple[int, ...]:
        """One layer."""
        return (self.num_features, self.num_classes)

    @property
    def has_bias(self) -> bool:
        """No."""
        return False

    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """`feature[class]`."""
        names = check_feature_names(feature_names, self.num_features)
        return tuple(f"{name}[{label}]" for name in names for label in range(self.num_classes))

    def output_log_likelihood(self, output: Float[Array, " outputs"], y_row: Num[Array, ""]) -> Float[Array, ""]:
        """See `AbstractLayeredModel`."""
        return class_log_likelihood(output, y_row)

    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """See `prior_start`."""
        return self.prior_start(family)

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, "n classes"]:
        """Probability of each class."""
        return jax.nn.softmax(self.forward(theta, x).output)

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """See `AbstractModel`."""
        return x, jax.random.categorical(key, self.forward(theta, x).output)
