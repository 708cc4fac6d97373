"""Independent Gaussians: `eta = (mu / s^2, -1 / (2 s^2))` (SPEC 1).

001 writes (precision, precision x mean) and has a sign slip in the log partition; here `A = mu^2 / (2 s^2) + ln s`
with base measure `(2 pi)^(-1/2)`.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from silobayes.families._special import log_ratio
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

LOG_2PI = math.log(2 * math.pi)


class MeanFieldGaussianEta(AbstractEta):
    """Factors of x and of x^2."""

    linear: Float[Array, "*event"]
    quadratic: Float[Array, "*event"]


class MeanStddev(NamedTuple):
    """Mean and standard deviation of each coordinate."""

    mean: Float[Array, "*event"]
    stddev: Float[Array, "*event"]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class MeanFieldGaussian(AbstractFamily[MeanFieldGaussianEta, MeanStddev]):
    """One independent Gaussian per entry of `event_shape`. Reparameterised."""

    event_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_event_shape(self.event_shape)

    @property
    def is_reparameterised(self) -> bool:
        """Pathwise: mean + stddev * standard normal."""
        return True

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"linear": self.event_shape, "quadratic": self.event_shape}

    def _mean_precision(self, eta: MeanFieldGaussianEta) -> tuple[Float[Array, "*event"], Float[Array, "*event"]]:
        check_eta(eta, MeanFieldGaussianEta, self._shapes)
        precision = positive_or_nan(-2 * eta.quadratic)
        return eta.linear / precision, precision

    def zeros(self, dtype: Any = None) -> MeanFieldGaussianEta:
        """The uniform factor."""
        return zeros_like_shapes(MeanFieldGaussianEta, self._shapes, dtype)

    def from_standard(self, *, mean: Float[Array, "*event"], stddev: Float[Array, "*event"]) -> MeanFieldGaussianEta:
        """`eta` of a mean and a standard deviation > 0 (otherwise NaN: squaring must not hide a sign)."""
        precision = positive_or_nan(stddev) ** -2
        eta = MeanFieldGaussianEta(linear=mean * precision, quadratic=-0.5 * precision)
        check_eta(eta, MeanFieldGaussianEta, self._shapes)
        return eta

    def to_standard(self, eta: MeanFieldGaussianEta) -> MeanStddev:
        """Mean and standard deviation."""
        mean, precision = self._mean_precision(eta)
        return MeanStddev(mean=mean, stddev=jax.lax.rsqrt(precision))

    def log_partition(self, eta: MeanFieldGaussianEta) -> Float[Array, ""]:
        """Sum of `mu^2 / (2 s^2) + ln s`."""
        mean, precision = self._mean_precision(eta)
        return 0.5 * jnp.sum(mean * eta.linear - jnp.log(precision))

    def mean_parameters(self, eta: MeanFieldGaussianEta) -> MeanFieldGaussianEta:
        """E[x] and E[x^2]."""
        mean, precision = self._mean_precision(eta)
        return MeanFieldGaussianEta(linear=mean, quadratic=mean**2 + 1 / precision)

    def sufficient_statistics(self, x: Float[Array, "*event"]) -> MeanFieldGaussianEta:
        """`x` and `x^2`."""
        return MeanFieldGaussianEta(linear=x, quadratic=x**2)

    def log_prob(self, eta: MeanFieldGaussianEta, x: Float[Array, "*event"]) -> Float[Array, ""]:
        """Log density, from x - mean so that a far-away mean costs no digits."""
        mean, precision = self._mean_precision(eta)
        return -0.5 * jnp.sum(precision * (x - mean) ** 2 - jnp.log(precision) + LOG_2PI)

    def entropy(self, eta: MeanFieldGaussianEta) -> Float[Array, ""]:
        """Sum of `ln s + ln(2 pi e) / 2`."""
        _, precision = self._mean_precision(eta)
        return 0.5 * jnp.sum(LOG_2PI + 1 - jnp.log(precision))

    def kl(self, eta_q: MeanFieldGaussianEta, eta_p: MeanFieldGaussianEta) -> Float[Array, ""]:
        """KL(q || p)."""
        mean_q, precision_q = self._mean_precision(eta_q)
        mean_p, precision_p = self._mean_precision(eta_p)
        spread = (precision_p - precision_q) / precision_q - log_ratio(precision_p, precision_q)
        return 0.5 * jnp.sum(spread + precision_p * (mean_q - mean_p) ** 2)

    def sample(
        self, key: PRNGKeyArray, eta: MeanFieldGaussianEta, shape: tuple[int, ...] = ()
    ) -> Float[Array, "*shape_and_event"]:
        """Draws of shape `shape + event_shape`."""
        mean, stddev = self.to_standard(eta)
        return mean + stddev * jax.random.normal(key, shape + self.event_shape, stddev.dtype)

    def is_proper(self, eta: MeanFieldGaussianEta) -> Bool[Array, ""]:
        """Finite, every precision > 0."""
        check_eta(eta, MeanFieldGaussianEta, self._shapes)
        return all_finite(eta) & jnp.all(eta.quadratic < 0)

    def project(self, eta: MeanFieldGaussianEta, floor: float) -> MeanFieldGaussianEta:
        """Raise precisions below `floor` to it and keep the linear part `mu / s^2`.

        The linear part is kept, and not the mean, because the mean `linear / precision` of a negative precision points
        the wrong way and at precision 0 does not exist: keeping it would flip signs. Keeping the linear part is
        the Euclidean projection in natural parameters, continuous everywhere and linear in what silos sent. The price:
        a raised coordinate may have a mean as far as `|linear| / floor`, so a floor near the prior's precision is
        wiser than a tiny one.
        """
        check_eta(eta, MeanFieldGaussianEta, self._shapes)
        return MeanFieldGaussianEta(linear=eta.linear, quadratic=jnp.minimum(eta.quadratic, -0.5 * check_floor(floor)))
