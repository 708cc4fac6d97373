"""Adam ascent on a free energy in one `lax.scan`; shared by the private and the non-private solver."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from silobayes.core.errors import InvalidInput, require_count
from silobayes.inference.coordinates import AbstractPoint
from silobayes.models.base import AbstractGLM, AbstractModel

# Gradients in log s fall by orders of magnitude while q shrinks from the prior; the usual .999 remembers the first ones
# for a thousand steps (5,000 rows, 400 steps of .05: standard deviations off by 200 % instead of .01 %).
_SECOND_MOMENT_DECAY = 0.95

Point = TypeVar("Point", bound=AbstractPoint)


def ascend(
    point: Point,
    gradient: Callable[[Point, Any], tuple[Float[Array, " coordinates"], Any]],
    inputs: Any,
    step_sizes: Float[Array, " steps"],
) -> tuple[Point, Any]:
    """`gradient(point, input)` gives a gradient and something to collect; returns the last point and the collection."""
    optimiser = optax.scale_by_adam(b2=_SECOND_MOMENT_DECAY)

    def body(carry: tuple, step: tuple) -> tuple[tuple, Any]:
        here, state = carry
        input_now, step_size = step
        slope, collected = gradient(here, input_now)
        direction, state = optimiser.update(slope, state)
        return (here.move(step_size * direction), state), collected

    start = (point, optimiser.init(jnp.zeros(point.num_coordinates)))
    (last, _), collected = jax.lax.scan(body, start, (inputs, step_sizes))
    return last, collected


def step_sizes_of(step_size: ArrayLike, num_steps: int) -> Float[Array, " steps"]:
    """A scalar falls to zero along a cosine; an array is taken as it is."""
    require_count("num_steps", num_steps, at_least=1, fix="Pass the steps of the optimiser.")
    if jnp.ndim(step_size) == 0:
        cosine = 0.5 * (1 + np.cos(np.pi * np.arange(num_steps) / num_steps))
        return jnp.asarray(step_size) * cosine.astype(np.float32)
    if jnp.shape(step_size) != (num_steps,):
        raise InvalidInput("step_size", f"a number or {num_steps} of them", jnp.shape(step_size), "One per step.")
    return jnp.asarray(step_size)


def draw_keys(model: AbstractModel, key: PRNGKeyArray, num_steps: int) -> PRNGKeyArray | None:
    """A key per step, or None for GLMs, whose expectations need no draws."""
    return None if isinstance(model, AbstractGLM) else jax.random.split(key, num_steps)


def check_dim(model: AbstractModel, dim: int) -> None:
    """Refuse a family over another number of parameters than the model's."""
    if dim != model.dim:
        raise InvalidInput("family", f"a Gaussian over model.dim = {model.dim} numbers", dim, "Size it by the model.")
