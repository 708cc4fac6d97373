"""Log of an expected likelihood, `log E[p(y | f)]` for f ~ N(mean, variance), where p(y | f) is log-concave in f.

With z = (f - mean) / stddev the integrand is a likelihood times a standard normal density. It has one mode, and around
it falls at least as fast as that density, so 8 on either side of the mode hold all of it, however unlikely the label
is and however wide f is. Inside, it may bend within a tiny part of this range: at the mode itself, and where the
likelihood turns from flat to falling. Panels of Gauss-Legendre nodes therefore shrink geometrically towards both.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

_REACH = 8.0
_STEPS_OF_BISECTION = 48
# A likelihood that is this many stddevs away is out of float32's sight.
_FARTHEST = 1e6
# From the whole reach down to a millionth of it, two panels an octave.
_OFFSETS = 2.0 ** (-np.arange(41) / 2)
_OFFSETS = np.concatenate([-_OFFSETS, [0.0], _OFFSETS[::-1]]).astype(np.float32)
_NODES, _WEIGHTS = (array.astype(np.float32) for array in np.polynomial.legendre.leggauss(6))
_ROWS_AT_ONCE = 512

Pointwise = Callable[[Array, Array], Array]


def log_expected_likelihood(
    pointwise: Pointwise,
    bend: Float[Array, " n"],
    mean: Float[Array, " n"],
    variance: Float[Array, " n"],
    y: Num[Array, " n"],
) -> Float[Array, " n"]:
    """The log of the expected likelihood of each row.

    Args:
        pointwise: `(f, y) -> log p(y | f)`, concave in f.
        bend: Where, on the axis of f, the likelihood of the label bends most.
        mean: Of f.
        variance: Of f.
        y: Labels.

    Guarantees:
        - right to 1e-4, for narrow and for very wide f, and for labels in the far tail
    """

    def one(row: tuple[Array, Array, Array, Array]) -> Array:
        bend, mean, stddev, y = row
        return _log_integral(lambda f: pointwise(f, jnp.broadcast_to(y, f.shape)), bend, mean, stddev)

    stddev = jnp.maximum(jnp.sqrt(variance), 1e-6)
    return jax.lax.map(one, (bend, mean, stddev, y), batch_size=_ROWS_AT_ONCE)


def _log_integral(log_likelihood: Callable[[Array], Array], bend: Array, mean: Array, stddev: Array) -> Array:
    def slope(z: Array) -> Array:
        f = mean + stddev * z
        return stddev * jax.jvp(log_likelihood, (f,), (jnp.ones_like(f),))[1] - z

    # The slope falls by at least 1 per unit of z, so its root lies between 0 and its value there.
    first = jnp.clip(slope(jnp.zeros_like(mean)), -_FARTHEST, _FARTHEST)
    ends = (jnp.minimum(first, 0.0), jnp.maximum(first, 0.0))

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        rises = slope(middle) > 0
        return jnp.where(rises, middle, low), jnp.where(rises, high, middle)

    mode = 0.5 * sum(jax.lax.fori_loop(0, _STEPS_OF_BISECTION, halve, ends))
    low, high = mode - _REACH, mode + _REACH
    turn = jnp.clip((bend - mean) / stddev, low, high)
    edges = jnp.concatenate([mode + _REACH * _OFFSETS, turn + 2 * _REACH * _OFFSETS])
    edges = jnp.sort(jnp.clip(edges, low, high))
    half = 0.5 * jnp.diff(edges)[:, None]
    z = 0.5 * (edges[1:] + edges[:-1])[:, None] + half * _NODES
    # A panel without width is no evidence, and log 0 of its weight would be -inf - inf at an infinite density.
    log_weights = jnp.log(jnp.maximum(half * _WEIGHTS, jnp.finfo(jnp.float32).tiny))
    log_density = log_likelihood(mean + stddev * z) - 0.5 * z**2 - 0.5 * jnp.log(2 * jnp.pi)
    return jax.scipy.special.logsumexp(jnp.where(half > 0, log_density + log_weights, -jnp.inf))
