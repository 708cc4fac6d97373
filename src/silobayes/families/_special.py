"""Differences of gamma functions that keep their digits in float32.

`lgamma(1e5)` is about 1e6 and carries an absolute error of .06 in float32, more than the divergences built from it. So
we split off Stirling's formula, `lgamma(x) = (x - 1/2) log x - x + log(2 pi)/2 + r(x)` (NIST DLMF 5.11.1), cancel its
large terms by hand and keep only the remainder `r` as a special function.
"""

import math

import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Float

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# r(x) = sum_k c_k x^(1 - 2k), DLMF 5.11.1; the first term left out is below 2e-14 at the switch.
_COEFFICIENTS = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_SWITCH = 8.0


def stirling_remainder(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`lgamma(x)` minus Stirling's formula, for x > 0."""
    small = jnp.where(x < _SWITCH, x, 1.0)
    large = jnp.where(x < _SWITCH, _SWITCH, x)
    direct = gammaln(small) - (small - 0.5) * jnp.log(small) + small - HALF_LOG_2PI
    series = sum(c * large ** -(2 * k + 1) for k, c in enumerate(_COEFFICIENTS))
    return jnp.where(x < _SWITCH, direct, series)


def stirling_remainder_slope(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Derivative of `stirling_remainder`: `digamma(x) - log x + 1 / (2 x)`."""
    small = jnp.where(x < _SWITCH, x, 1.0)
    large = jnp.where(x < _SWITCH, _SWITCH, x)
    direct = digamma(small) - jnp.log(small) + 0.5 / small
    series = sum(-(2 * k + 1) * c * large ** -(2 * k + 2) for k, c in enumerate(_COEFFICIENTS))
    return jnp.where(x < _SWITCH, direct, series)


def log_ratio(p: Float[Array, "*shape"], q: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`log(p / q)` for p, q > 0, exact to the last digits near p = q and free of overflow far from it."""
    near = jnp.abs(p - q) < 0.5 * q
    p_near, q_near = jnp.where(near, p, 1.0), jnp.where(near, q, 1.0)  # keeps 1 / q^2 out of the far gradient
    return jnp.where(near, jnp.log1p((p_near - q_near) / q_near), jnp.log(p) - jnp.log(q))


def lgamma_bregman(p: Float[Array, "*shape"], q: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`lgamma(p) - lgamma(q) - (p - q) digamma(q)`, the part of a divergence that gamma functions give.

    Its rounding error grows like |p - q|, not like p log p.
    """
    ratio = log_ratio(p, q)
    stirling = p * ratio - (p - q) + 0.5 * ((p - q) / q - ratio)
    remainder = stirling_remainder(p) - stirling_remainder(q) - (p - q) * stirling_remainder_slope(q)
    return stirling + remainder


def gamma_entropy(shape: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Entropy of Gamma(shape, rate 1): `shape + lgamma(shape) + (1 - shape) digamma(shape)`."""
    return (
        0.5 * jnp.log(shape)
        + HALF_LOG_2PI
        + 0.5
        - 0.5 / shape
        + stirling_remainder(shape)
        + (1 - shape) * stirling_remainder_slope(shape)
    )
