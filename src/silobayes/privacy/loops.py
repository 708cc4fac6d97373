"""The door for compiled loops: all steps of a DP-SGD run are paid at once, before the first draw.

Batches and noise are drawn on the host and enter the loop as scan inputs, so the compiled code holds no randomness of
its own. The noise is float32 Gaussian: inside a loop that is accepted, and the event says `gaussian` so that a
certificate can say so too (DESIGN 6). A loop reads

    steps = open_steps(door, plan)
    def body(state, step):
        terms = gradients(state, rows[step.indices])
        released, seen = step.release(clipped_sum(terms, step.mask, plan.clip_norm))
        return update(state, released), seen
    state, seen = jax.lax.scan(body, state, steps)
    close_steps(door, seen)
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from silobayes.core.errors import require_count, require_number
from silobayes.privacy.door import Door
from silobayes.privacy.events import GaussianEvent
from silobayes.privacy.relation import Unit
from silobayes.privacy.sampling import Sampler

# Float32 arithmetic may land a few ulp above the bound of a term; clipping aims this much below it.
_FLOAT32_SLACK = 1.0 - 1e-5
# A float32 sum of n terms within C was seen to err by up to .6 n C 2^-24 (n up to 32,768, terms all alike); clipping
# leaves room for 16 n C 2^-24. Measured, not proved: in the worst order of additions it could err by more.
_SUM_ROOM = 2.0**-20


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A loop of `num_steps` clipped noisy sums of `dimension` numbers, noise `noise_multiplier` * `clip_norm`.

    `unit` says whose terms the sampler's slots and the clip norm are: rows', or whole persons'. A door of another unit
    refuses the plan.
    """

    sampler: Sampler
    num_steps: int
    clip_norm: float
    noise_multiplier: float
    dimension: int
    unit: Unit = Unit.ROW

    def __post_init__(self) -> None:
        require_count("num_steps", self.num_steps, at_least=1, fix="Pass the steps of the whole loop.")
        require_count("dimension", self.dimension, at_least=1, fix="Pass the numbers in one gradient.")
        require_number("clip_norm", self.clip_norm, above=0.0, fix="Pass the L2 bound of one unit's gradient.")
        require_number("noise_multiplier", self.noise_multiplier, above=0.0, fix="Pass std / clip norm.")

    @property
    def event(self) -> GaussianEvent:
        """The price of the whole loop."""
        return GaussianEvent(
            clip_norm=self.clip_norm,
            std=self.noise_multiplier * self.clip_norm,
            sampling=self.sampler.sampling,
            count=self.num_steps,
        )


class Step(eqx.Module):
    """What one step of the loop gets; stacked along a leading axis, on the host, it is the scan's input.

    `slots` is the width of the batch as it was drawn: beside silos with wider ones it may be filled up further, which
    adds nothing, so that a silo clips alone to the norm that it clips to among others.

    `replayed` is there for record/replay only: a release to feed back, or NaN where it is drawn and recorded.
    """

    indices: Int[Array | np.ndarray, "*steps batch"]
    mask: Bool[Array | np.ndarray, "*steps batch"]
    slots: Int[Array | np.ndarray, "*steps"]
    noise: Float[Array | np.ndarray, "*steps dim"]
    replayed: Float[Array | np.ndarray, "*steps dim"] | None = None

    def aim(self, clip_norm: ArrayLike, rows_per_unit: int = 1) -> Float[ArrayLike, "*steps"]:
        """The norm to clip to, so that what rounding adds to the sum over the batch is within `clip_norm` too."""
        return clip_norm / (1.0 + self.slots * rows_per_unit * _SUM_ROOM)

    def release(self, total: Float[Array, " dim"]) -> tuple[Float[Array, " dim"], tuple | None]:
        """The noisy sum, and what a recorder may see (None in a normal run: the pre-noise sum never leaves)."""
        if self.replayed is None:
            return total + self.noise, None
        # One program draws and replays, and the barrier makes it use the very number that it shows: otherwise two
        # compilations may round differently, and a replay could not be compared to the last bit.
        drawn = jax.lax.optimization_barrier(total + self.noise)
        released = jnp.where(jnp.isnan(self.replayed), drawn, self.replayed)
        return released, (total, released)


def open_steps(door: Door, plan: StepPlan) -> Step:
    """Pay for the whole loop, then draw its batches and noise: the scan's inputs.

    Guarantees:
        All steps are charged, as one event, before the first draw.
        A plan for another unit than the account's is refused.
    """
    door.check_unit(plan.unit)
    event = plan.event
    door.account.charge(event)
    draws = door.draws.loop(plan.sampler, plan.dimension, event)
    np.multiply(draws.noise, np.float32(event.std), out=draws.noise)  # in place: a second array takes longer to get
    indices, mask = _padded(draws.batches, plan.sampler, draws.widest)
    slots = np.full(len(mask), mask.shape[1], dtype=np.int32)
    return Step(indices=indices, mask=mask, slots=slots, noise=draws.noise, replayed=draws.replayed)


def close_steps(door: Door, seen: tuple | None) -> None:
    """Hand what the scan collected to the door: nothing, but in record/replay."""
    if seen is not None:
        door.draws.close_loop(np.asarray(seen[0]), np.asarray(seen[1]))


def _padded(batches: list[np.ndarray], sampler: Sampler, widest: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches side by side and which slots of them are taken, at most the sampler's capacity.

    The width is one of two. Sizes of batches are drawn from slots and tell nothing of rows, so neither does the width.
    """
    sizes = np.array([len(batch) for batch in batches])
    usual = max(1, sampler.usual_size(len(batches)))
    width = usual if max(sizes.max(), widest) <= usual else sampler.capacity
    mask = np.arange(width) < sizes[:, None]
    indices = np.zeros(mask.shape, dtype=np.int32)
    indices[mask] = np.concatenate(batches)
    return indices, mask


def clip_factors(norms: Float[Array, " batch"], clip_norm: float) -> Float[Array, " batch"]:
    """Multipliers that bring terms of these norms to at most `clip_norm`; 0 where the norm is not finite."""
    factors = jnp.minimum(1.0, clip_norm * _FLOAT32_SLACK / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))
    return jnp.where(jnp.isfinite(norms), factors, 0.0)


def clipped_sum(
    terms: Float[Array, "batch dim"], mask: Bool[Array, " batch"], clip_norm: float
) -> Float[Array, " dim"]:
    """Sum over the batch of terms clipped to `clip_norm`.

    Guarantees:
        Each term enters with norm at most `clip_norm`, whatever its values.
        A masked or non-finite term contributes zero.
    """
    usable = mask & jnp.isfinite(terms).all(axis=1)
    terms = jnp.where(usable[:, None], terms, 0.0)
    # Dividing by the largest entry first: float32 squares overflow from 2e19 on.
    largest = jnp.maximum(jnp.abs(terms).max(axis=1), jnp.finfo(terms.dtype).tiny)
    shape = terms / largest[:, None]
    shape_norm = jnp.linalg.norm(shape, axis=1)
    aim = clip_norm * _FLOAT32_SLACK / (1.0 + terms.shape[0] * _SUM_ROOM)
    length = jnp.minimum(aim, largest * shape_norm)
    return (length / jnp.maximum(shape_norm, 1e-30)) @ shape
