"""Independent Gamma distributions: `eta = (shape - 1, -rate)` on `T(x) = (ln x, x)`, base measure 1."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from silobayes.families._special import HALF_LOG_2PI, gamma_entropy, lgamma_bregman, log_ratio, stirling_remainder
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


class GammaEta(AbstractEta):
    """Factors of ln x and of x."""

    log: Float[Array, "*event"]
    linear: Float[Array, "*event"]


class ShapeRate(NamedTuple):
    """Shape and rate (inverse scale) of each coordinate."""

    shape: Float[Array, "*event"]
    rate: Float[Array, "*event"]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Gamma(AbstractFamily[GammaEta, ShapeRate]):
    """One independent Gamma variable per entry of `event_shape`. Reparameterised."""

    event_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_event_shape(self.event_shape)

    @property
    def is_reparameterised(self) -> bool:
        """Implicitly (Figurnov, Mohamed, Mnih 2018), by the derivative rule of `jax.random.loggamma`."""
        return True

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"log": self.event_shape, "linear": self.event_shape}

    def zeros(self, dtype: Any = None) -> GammaEta:
        """The uniform factor."""
        return zeros_like_shapes(GammaEta, self._shapes, dtype)

    def from_standard(self, *, shape: Float[Array, "*event"], rate: Float[Array, "*event"]) -> GammaEta:
        """`eta` of a shape and a rate."""
        eta = GammaEta(log=shape - 1, linear=-rate)
        check_eta(eta, GammaEta, self._shapes)
        return eta

    def to_standard(self, eta: GammaEta) -> ShapeRate:
        """Shape and rate."""
        check_eta(eta, GammaEta, self._shapes)
        return ShapeRate(shape=positive_or_nan(eta.log + 1), rate=positive_or_nan(-eta.linear))

    def log_partition(self, eta: GammaEta) -> Float[Array, ""]:
        """Sum of `ln Gamma(shape) - shape ln rate`."""
        shape, rate = self.to_standard(eta)
        return jnp.sum(gammaln(shape) - shape * jnp.log(rate))

    def mean_parameters(self, eta: GammaEta) -> GammaEta:
        """E[ln x] and E[x]."""
        shape, rate = self.to_standard(eta)
        return GammaEta(log=digamma(shape) - jnp.log(rate), linear=shape / rate)

    def sufficient_statistics(self, x: Float[Array, "*event"]) -> GammaEta:
        """`ln x` and `x`."""
        return GammaEta(log=jnp.log(x), linear=x)

    def log_prob(self, eta: GammaEta, x: Float[Array, "*event"]) -> Float[Array, ""]:
        """Log density; -inf unless every x > 0."""
        shape, rate = self.to_standard(eta)
        inside = jnp.where(x <= 0, 1.0, x)
        return jnp.where(jnp.any(x <= 0), -jnp.inf, jnp.sum(gamma_log_prob(shape, rate, inside)))

    def entropy(self, eta: GammaEta) -> Float[Array, ""]:
        """Sum of `shape - ln rate + ln Gamma(shape) + (1 - shape) digamma(shape)`."""
        shape, rate = self.to_standard(eta)
        return jnp.sum(gamma_entropy(shape) - jnp.log(rate))

    def kl(self, eta_q: GammaEta, eta_p: GammaEta) -> Float[Array, ""]:
        """KL(q || p)."""
        return jnp.sum(gamma_kl(*self.to_standard(eta_q), *self.to_standard(eta_p)))

    def sample(self, key: PRNGKeyArray, eta: GammaEta, shape: tuple[int, ...] = ()) -> Float[Array, "*shape_and_event"]:
        """Draws of shape `shape + event_shape`; a draw that underflows is the smallest normal number, never 0."""
        alpha, rate = self.to_standard(eta)
        log_draw = jax.random.loggamma(key, alpha, shape + self.event_shape, alpha.dtype) - jnp.log(rate)
        return exp_inside(log_draw)

    def is_proper(self, eta: GammaEta) -> Bool[Array, ""]:
        """Finite, every shape > 0 and every rate > 0."""
        check_eta(eta, GammaEta, self._shapes)
        return all_finite(eta) & jnp.all(eta.log > -1) & jnp.all(eta.linear < 0)

    def project(self, eta: GammaEta, floor: float) -> GammaEta:
        """Raise shapes and rates below `floor` to it, each on its own."""
        check_eta(eta, GammaEta, self._shapes)
        floor = check_floor(floor)
        return GammaEta(log=raise_shape(eta.log, floor), linear=jnp.minimum(eta.linear, -floor))


def raise_shape(log: Float[Array, "*event"], floor: float) -> Float[Array, "*event"]:
    """Raise `shape - 1` so that shape >= floor, and > 0 even where `floor - 1` rounds to -1."""
    above = jnp.nextafter(jnp.asarray(-1, log.dtype), jnp.asarray(0, log.dtype))
    return jnp.maximum(log, jnp.maximum(jnp.asarray(floor - 1, log.dtype), above))


def exp_inside(log_draw: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`exp(log_draw)`, kept a positive normal number. NaN stays NaN."""
    info = jnp.finfo(log_draw.dtype)
    return jnp.clip(jnp.exp(log_draw), info.tiny, info.max)


def gamma_log_prob(
    shape: Float[Array, "*event"], rate: Float[Array, "*event"], x: Float[Array, "*event"]
) -> Float[Array, "*event"]:
    """Log density per coordinate for x > 0, with Stirling's large terms cancelled against `x^shape`."""
    mean = shape / rate
    bulk = shape * (log_ratio(x, mean) - (x - mean) / mean)
    return bulk + 0.5 * jnp.log(shape) - jnp.log(x) - HALF_LOG_2PI - stirling_remainder(shape)


def gamma_kl(
    shape_q: Float[Array, "*event"],
    rate_q: Float[Array, "*event"],
    shape_p: Float[Array, "*event"],
    rate_p: Float[Array, "*event"],
) -> Float[Array, "*event"]:
    """KL(q || p) per coordinate; also of two inverse Gamma distributions, as 1/x is one to one."""
    spread = shape_q * (rate_p - rate_q) / rate_q - shape_p * log_ratio(rate_p, rate_q)
    return lgamma_bregman(shape_p, shape_q) + spread
