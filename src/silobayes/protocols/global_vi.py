"""Global VI (SPEC 3, baselines): one optimisation over the union of rows, one sum over clients per step.

A client's message is the (clipped, noised) gradient of its own rows' likelihood term; the server adds them up,
subtracts the KL term, which needs no rows, and takes one step of Adam. Communications are counted as what they are:
one message up and down per client and *step*. Where each client adds a noise of its own, all steps run in one compiled
loop (`run_steps`). Where only the sum becomes public, a step is: batches, `partial_sums` at each client, a sum with
shares of noise, `server_step`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from silobayes.inference.ascent import draw_keys
from silobayes.inference.coordinates import AbstractPoint, point_at
from silobayes.inference.row_gradients import Clipping, batch_gradient, row_gradients
from silobayes.inference.rows import Rows
from silobayes.models.base import AbstractModel, GaussianEta, GaussianFamily
from silobayes.privacy.loops import Step
from silobayes.privacy.sampling import PoissonSampler

_OPTIMISER = optax.scale_by_adam()
# Rows whose clipped gradients are added up in float32; chunks are added up in float64 (clipping.bounded_loop_sum).
CHUNK = 64


class ServerState(eqx.Module):
    """Coordinates of q and the optimiser's state; public."""

    point: AbstractPoint
    adam: Any


class Clients(eqx.Module):
    """Silos of one shape, stacked: their rows and, if private, their paid steps (silos, steps, ...)."""

    rows: Rows
    steps: Step | None
    clip_norms: Float[Array, " silos"]
    sample_rates: Float[Array, " silos"]


def init(family: GaussianFamily, eta_start: GaussianEta) -> ServerState:
    """Start at `eta_start`."""
    point = point_at(family, eta_start)
    return ServerState(point=point, adam=_OPTIMISER.init(jnp.zeros(point.num_coordinates)))


def server_step(
    server: ServerState, total: Float[Array, " coordinates"], eta_p: GaussianEta, step_size: Float[Array, ""]
) -> ServerState:
    """One step of Adam along the sum of the clients' gradients minus that of KL(q || p)."""
    slope = total - server.point.kl_gradient(eta_p)
    direction, adam = _OPTIMISER.update(slope, server.adam)
    assert isinstance(direction, jax.Array)
    return ServerState(point=server.point.move(step_size * direction), adam=adam)


@partial(jax.jit, static_argnames=("clipping", "rows_per_unit"))
def run_steps(
    model: AbstractModel,
    eta_p: GaussianEta,
    server: ServerState,
    groups: tuple[Clients, ...],
    key: PRNGKeyArray,
    step_sizes: Float[Array, " steps"],
    *,
    clipping: Clipping,
    rows_per_unit: int = 1,
) -> tuple[ServerState, tuple[Any, ...]]:
    """Several steps in one compiled loop; returns what each group's `Steps.close` needs.

    With `rows_per_unit` R, batches are of persons with R slots each (`inference.rows.slots_of_units`).

    Guarantees:
        - without privacy it reaches the optimum of global VI
        - one changed row moves each released sum by no more than the plan prices
    """
    draws = draws_of(model, key, step_sizes.shape[0])

    def body(server: ServerState, inputs: tuple) -> tuple[ServerState, tuple[Any, ...]]:
        steps, e, step_size = inputs
        total, seen = jnp.zeros(server.point.num_coordinates), []
        for group, step in zip(groups, steps, strict=True):
            gradients, collected = _gradients(model, server.point, e, group, step, clipping, rows_per_unit)
            total, seen = total + gradients.sum(axis=0), [*seen, collected]
        return server_step(server, total, eta_p, step_size), tuple(seen)

    # Scanning needs the steps in front of the silos; what is collected is turned back.
    in_front = tuple(_swap(group.steps) for group in groups)
    server, seen = jax.lax.scan(body, server, (in_front, draws, step_sizes))
    return server, tuple(_swap(collected) for collected in seen)


compiled_server_step = jax.jit(server_step)


def draws_of(model: AbstractModel, key: PRNGKeyArray, num_steps: int) -> Float[Array, "steps dim"] | None:
    """The reparameterised draw of each step; None for models that need none."""
    keys = draw_keys(model, key, num_steps)
    return None if keys is None else jax.vmap(lambda k: jax.random.normal(k, (model.dim,)))(keys)


def units_per_chunk(rows_per_unit: int) -> int:
    """Units whose rows make about a chunk."""
    return max(1, CHUNK // rows_per_unit)


def chunked(
    batches: Sequence[np.ndarray], sampler: PoissonSampler, rows_per_unit: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Slots and mask of several batches in chunks (silos, chunks, units), padded to the sampler's capacity."""
    chunk = units_per_chunk(rows_per_unit)
    slots = -(-sampler.capacity // chunk) * chunk
    indices = np.zeros((len(batches), slots), dtype=np.int32)
    mask = np.zeros(indices.shape, dtype=bool)
    for row, batch in enumerate(batches):
        indices[row, : len(batch)] = batch
        mask[row, : len(batch)] = True
    return indices.reshape(len(batches), -1, chunk), mask.reshape(len(batches), -1, chunk)


@partial(jax.jit, static_argnames=("clipping", "rows_per_unit"))
def partial_sums(
    model: AbstractModel,
    point: AbstractPoint,
    e: Array | None,
    rows: Rows,
    indices: Int[Array, "silos chunks chunk"],
    mask: Bool[Array, "silos chunks chunk"],
    clip_norm: Float[Array, ""],
    *,
    clipping: Clipping,
    rows_per_unit: int = 1,
) -> Float[Array, "silos chunks coordinates"]:
    """Sums of clipped gradients over chunks of each silo's batch; they stay with the silo."""

    def one(rows: Rows, at: Array, mask: Array) -> Array:
        return batch_gradient(model, point, e, rows, at, mask, clip_norm, clipping, rows_per_unit)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0, 0)))(rows, indices, mask)


def _gradients(
    model: AbstractModel,
    point: AbstractPoint,
    e: Array | None,
    group: Clients,
    step: Step | None,
    clipping: Clipping,
    rows_per_unit: int,
) -> tuple[Float[Array, "silos coordinates"], Any]:
    """Each client's message."""
    if step is None:

        def whole(rows: Rows) -> Array:
            return row_gradients(model, point, e, rows.x, rows.y).weighted_sum(rows.present.astype(rows.x.dtype))

        return jax.vmap(whole)(group.rows), None

    def message(rows: Rows, own: Step, clip_norm: Array, rate: Array) -> tuple[Array, Any]:
        batch = (own.indices, own.mask, own.aim(clip_norm, rows_per_unit), clipping, rows_per_unit)
        released, seen = own.release(batch_gradient(model, point, e, rows, *batch))
        return released / rate, seen

    return jax.vmap(message)(group.rows, step, group.clip_norms, group.sample_rates)


def _swap(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)
