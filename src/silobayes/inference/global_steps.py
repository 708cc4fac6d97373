"""Steps of one optimisation over the rows of many silos: each silo's gradient, and all steps in one loop."""

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from silobayes.inference.ascent import draw_keys
from silobayes.inference.coordinates import AbstractPoint, num_coordinates
from silobayes.inference.row_gradients import Clipping, batch_gradient, row_gradients
from silobayes.inference.rows import Rows
from silobayes.inference.solvers import chunk_gradients
from silobayes.models.base import AbstractModel, GaussianEta, GaussianFamily
from silobayes.privacy.clipping import Bounded, bounded_loop_sum
from silobayes.privacy.loops import Step
from silobayes.privacy.relation import Unit
from silobayes.privacy.sampling import Batch, Sampler

OPTIMISER = optax.scale_by_adam()
# Rows whose clipped gradients are added up in float32; chunks are added up in float64 (clipping.bounded_loop_sum).
CHUNK = 64


class WholeGradient(eqx.Module):
    """The gradient of all rows, without privacy."""

    model: AbstractModel
    side_by_side: ClassVar[bool] = True

    def __call__(self, rows: Rows, own: Any, down: Any, drawn: Any, key: PRNGKeyArray) -> Array:
        """The silo's message."""
        return whole_gradient(self.model, down.point, down.draw, rows)


class ReleasedGradient(eqx.Module):
    """The gradient of a batch, clipped and with its own noise."""

    model: AbstractModel
    clip_norm: np.ndarray
    clipping: Clipping = eqx.field(static=True)
    rows_per_unit: int = eqx.field(static=True)
    side_by_side: ClassVar[bool] = False

    def __call__(self, rows: Rows, own: Any, down: Any, drawn: Any, key: PRNGKeyArray) -> tuple[Array, Any]:
        """The silo's message, and what its loop is closed with."""
        steps, rate = drawn
        step: Step = jax.tree.map(lambda leaf: leaf[0], steps)
        message, seen = released_gradient(self, down.point, down.draw, rows, step, rate)
        return message, jax.tree.map(lambda leaf: leaf[None], seen)


class ChunkGradients(eqx.Module):
    """The gradient of a batch, clipped, in chunks that are added up in float64."""

    model: AbstractModel
    clip_norm: np.ndarray
    clipping: Clipping = eqx.field(static=True)
    rows_per_unit: int = eqx.field(static=True)
    side_by_side: ClassVar[bool] = True

    def __call__(self, rows: Rows, own: Any, down: Any, drawn: Any, key: PRNGKeyArray) -> Array:
        """Sums over chunks."""
        public: dict[str, Any] = {"clipping": self.clipping, "rows_per_unit": self.rows_per_unit}
        indices, mask = drawn
        return chunk_gradients(self.model, down.point, down.draw, rows, indices, mask, self.clip_norm, **public)


class Position(eqx.Module):
    """Where the optimiser is."""

    point: AbstractPoint
    adam: Any


class Group(eqx.Module):
    """Silos of one shape, stacked: their rows and, if private, their paid steps (silos, steps, ...) and rates."""

    rows: Rows
    steps: Any
    sample_rates: Any


def server_step(
    server: Position, total: Float[Array, " coordinates"], eta_p: GaussianEta, step_size: Float[Array, ""]
) -> Position:
    """One step of Adam along the sum of the silos' gradients minus that of KL(q || p)."""
    slope = total - server.point.kl_gradient(eta_p)
    direction, adam = OPTIMISER.update(slope, server.adam)
    assert isinstance(direction, jax.Array)
    return Position(point=server.point.move(step_size * direction), adam=adam)


compiled_server_step = jax.jit(server_step)


@jax.jit
def run_steps(
    gradient: WholeGradient | ReleasedGradient,
    eta_p: GaussianEta,
    server: Position,
    groups: tuple[Group, ...],
    draws: Float[Array, "steps dim"] | None,
    step_sizes: Float[Array, " steps"],
) -> tuple[Position, tuple[Any, ...]]:
    """Several steps in one compiled loop; returns what each group's loops are closed with."""

    def body(server: Position, inputs: tuple) -> tuple[Position, tuple[Any, ...]]:
        steps, e, step_size = inputs
        total, seen = jnp.zeros(server.point.num_coordinates), []
        for group, step in zip(groups, steps, strict=True):
            gradients, collected = _gradients(gradient, server.point, e, group, step)
            total, seen = total + gradients.sum(axis=0), [*seen, collected]
        return server_step(server, total, eta_p, step_size), tuple(seen)

    # Scanning needs the steps in front of the silos; what is collected is turned back.
    in_front = tuple(_swap(group.steps) for group in groups)
    server, seen = jax.lax.scan(body, server, (in_front, draws, step_sizes))
    return server, tuple(_swap(collected) for collected in seen)


def _gradients(
    gradient: WholeGradient | ReleasedGradient, point: AbstractPoint, e: Array | None, group: Group, step: Any
) -> tuple[Float[Array, "silos coordinates"], Any]:
    """Each silo's message."""
    if isinstance(gradient, WholeGradient):
        return jax.vmap(lambda rows: whole_gradient(gradient.model, point, e, rows))(group.rows), None

    def message(rows: Rows, own: Step, rate: Array) -> tuple[Array, Any]:
        return released_gradient(gradient, point, e, rows, own, rate)

    return jax.vmap(message)(group.rows, step, group.sample_rates)


def whole_gradient(model: AbstractModel, point: AbstractPoint, e: Array | None, rows: Rows) -> Array:
    """Of all rows."""
    return row_gradients(model, point, e, rows.x, rows.y).weighted_sum(rows.present.astype(rows.x.dtype))


def released_gradient(
    gradient: ReleasedGradient, point: AbstractPoint, e: Array | None, rows: Rows, step: Step, rate: ArrayLike
) -> tuple[Array, Any]:
    """Of a batch, with noise, and what the loop shows."""
    rows_per_unit = gradient.rows_per_unit
    batch = (step.indices, step.mask, step.aim(gradient.clip_norm, rows_per_unit), gradient.clipping, rows_per_unit)
    released, seen = step.release(batch_gradient(gradient.model, point, e, rows, *batch))
    return released / rate, seen


def draws_of(model: AbstractModel, key: PRNGKeyArray, num_steps: int) -> Float[Array, "steps dim"] | None:
    """The reparameterised draw of each step; None for models that need none."""
    keys = draw_keys(model, key, num_steps)
    return None if keys is None else jax.vmap(lambda k: jax.random.normal(k, (model.dim,)))(keys)


def _swap(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


def units_per_chunk(rows_per_unit: int) -> int:
    """Units whose rows make about a chunk."""
    return max(1, CHUNK // rows_per_unit)


def chunked(batch: np.ndarray, sampler: Sampler, rows_per_unit: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Slots and mask of a batch in chunks (chunks, units), padded to the sampler's capacity."""
    chunk = units_per_chunk(rows_per_unit)
    slots = -(-sampler.capacity // chunk) * chunk
    indices, mask = np.zeros(slots, dtype=np.int32), np.zeros(slots, dtype=bool)
    indices[: len(batch)], mask[: len(batch)] = batch, True
    return indices.reshape(-1, chunk), mask.reshape(-1, chunk)


def bounded_step(
    partial_sums: np.ndarray, clip_norm: float, sampler: Sampler, rows_per_unit: int, *, capacity: int, unit: Unit
) -> Bounded:
    """The sum over the chunks of a silo's batch, ready for the door."""
    return bounded_loop_sum(
        partial_sums,
        clip_norm,
        chunk=units_per_chunk(rows_per_unit) * rows_per_unit,
        batch=Batch(indices=np.zeros(0, dtype=int), sampling=sampler.sampling),
        capacity=capacity,
        unit=unit,
    )


def no_gradient(
    family: GaussianFamily, clip_norm: float, samplers: Sequence[Sampler], silo: int, rows_per_unit: int, unit: Unit
) -> Bounded:
    """What a silo without rows would share in a step: enough to say what a step costs."""
    capacity = max(sampler.capacity for sampler in samplers)
    nothing = np.zeros((1, num_coordinates(family)))
    return bounded_step(nothing, clip_norm, samplers[silo], rows_per_unit, capacity=capacity, unit=unit)
