"""Local free-energy maximum by DP-SGD (000 section 3.1, "DP optimisation"; SPEC 3).

Per-row gradients of the *likelihood* term are clipped, summed over a sampled batch and noised at the door; the KL term
sees no rows, so it is added exactly after the noise. We differ from the paper in the sampler (Poisson, afresh in each
step), in clipping GLMs by the worst case over the label (UNCERTAINTY F7), and in quadrature instead of draws for GLMs.
Where the unit is a person, batches are of persons, and a person's rows are clipped together.

    steps = open_steps(door, plan)                       # pays for the whole loop
    eta, seen = maximise_privately(model, family, key, eta_cavity, eta_start, rows, steps, plan, ...)
    close_steps(door, seen)

Everything but the released sums is public: the result is post-processing of what was paid for.
"""

import math
from functools import partial
from typing import Any, get_args

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from silobayes.core.errors import InvalidInput
from silobayes.inference.ascent import ascend, check_dim, draw_keys, step_sizes_of
from silobayes.inference.coordinates import AbstractPoint, num_coordinates, point_at
from silobayes.inference.row_gradients import Clipping, batch_gradient, row_lengths
from silobayes.inference.rows import Rows
from silobayes.models.base import AbstractGLM, AbstractModel, GaussianEta, GaussianFamily, aligned
from silobayes.privacy.loops import Step, StepPlan
from silobayes.privacy.relation import Unit


def maximise_privately(
    model: AbstractModel,
    family: GaussianFamily,
    key: PRNGKeyArray,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    rows: Rows,
    steps: Step,
    plan: StepPlan,
    *,
    step_size: ArrayLike,
    clipping: Clipping = "label_free",
    rows_per_unit: int = 1,
) -> tuple[GaussianEta, Any]:
    """The local optimum q, and what the scan collected for `close_steps`. Compiled once per shape.

    Map over silos with a leading axis on key, cavity, start, rows and steps; silos whose plans differ in
    `sample_rate` or `clip_norm` go through `ascend_privately`, where these are arrays.

    Args:
        model: Log-likelihood of one row.
        family: Mean-field or full Gaussian over `model.dim` numbers.
        key: For reparameterised draws: model randomness, not privacy. GLMs ignore it.
        eta_cavity: May be improper.
        eta_start: Must be proper.
        rows: At least `plan.sampler.max_rows * rows_per_unit` slots; empty ones have `present=False`.
        steps: What `open_steps(door, plan)` gives.
        plan: Public; `plan.dimension` is `num_coordinates(family)`.
        step_size: Of Adam. One number, lowered to zero by a cosine; or one per step, taken as they are.
        clipping: `label_free` where the model lists its worst labels (else as `ordinary`), or `ordinary`.
        rows_per_unit: Slots of one unit, side by side in `rows`: more than 1 only where the plan's unit is a person.

    Guarantees:
        - one changed row moves each released sum by no more than the plan prices
        - one changed person moves each released sum by no more than the plan prices
        - with one row per person it is the loop over rows
        - without noise, clipping and sampling it is vi.maximise
        - padding rows change nothing
    """
    if plan.dimension != num_coordinates(family):
        raise InvalidInput(
            "plan.dimension", f"{num_coordinates(family)} for {family}", plan.dimension, "Use num_coordinates(family)."
        )
    if rows_per_unit != 1 and plan.unit is not Unit.PERSON:
        fix = "Only persons have several rows."
        raise InvalidInput("rows_per_unit", f"1 for a plan of unit {plan.unit.value}", rows_per_unit, fix)
    slots = plan.sampler.max_rows * rows_per_unit
    if rows.x.shape[0] < slots:
        raise InvalidInput("rows", f"at least {slots} slots", rows.x.shape[0], "Pad to max_rows.")
    return ascend_privately(
        model,
        family,
        key,
        eta_cavity,
        eta_start,
        rows,
        steps,
        clip_norm=plan.clip_norm,
        sample_rate=plan.sampler.sampling.rate,
        step_size=step_size,
        clipping=clipping,
        rows_per_unit=rows_per_unit,
    )


def ascend_privately(
    model: AbstractModel,
    family: GaussianFamily,
    key: PRNGKeyArray,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    rows: Rows,
    steps: Step,
    *,
    clip_norm: ArrayLike,
    sample_rate: ArrayLike,
    step_size: ArrayLike,
    clipping: Clipping,
    rows_per_unit: int = 1,
) -> tuple[GaussianEta, Any]:
    """`maximise_privately` with the plan's public numbers as arrays, so that they may differ between mapped silos."""
    if clipping not in get_args(Clipping):
        raise InvalidInput("clipping", "one of " + ", ".join(get_args(Clipping)), clipping, "Use label_free.")
    step_sizes = step_sizes_of(step_size, steps.noise.shape[0])
    static = {"clipping": clipping, "rows_per_unit": rows_per_unit}
    return _ascend(model, family, key, eta_cavity, eta_start, rows, steps, clip_norm, sample_rate, step_sizes, **static)


@partial(jax.jit, static_argnames=("clipping", "rows_per_unit"))
def _ascend(
    model: AbstractModel,
    family: GaussianFamily,
    key: PRNGKeyArray,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    rows: Rows,
    steps: Step,
    clip_norm: ArrayLike,
    sample_rate: ArrayLike,
    step_sizes: Float[Array, " steps"],
    *,
    clipping: Clipping,
    rows_per_unit: int,
) -> tuple[GaussianEta, Any]:
    point = point_at(family, eta_start)
    check_dim(model, point.mean.shape[0])
    keys = draw_keys(model, key, step_sizes.shape[0])
    # All draws before the loop: one per step, drawn as vi.maximise(num_draws=1) draws them.
    draws = None if keys is None else jax.vmap(lambda k: jax.random.normal(k, (1, model.dim))[0])(keys)

    aim = jax.numpy.asarray(steps.aim(clip_norm, rows_per_unit))[0]  # batches of one loop are equally wide
    lengths = row_lengths(rows.x)
    if isinstance(model, AbstractGLM):
        rows = eqx.tree_at(lambda own: own.x, rows, aligned(rows.x))

    def gradient(here: AbstractPoint, inputs: tuple[Step, Array | None]) -> tuple[Array, Any]:
        step, e = inputs

        def part(units: Array | np.ndarray, taken: Array | np.ndarray) -> Array:
            return batch_gradient(model, here, e, rows, units, taken, aim, clipping, rows_per_unit, lengths)

        # Batches are padded to the longest of the loop; the slots that few of them fill are computed only for those.
        usual = usual_part(step.indices.shape[0])
        total = part(step.indices[:usual], step.mask[:usual])
        if usual < step.indices.shape[0]:
            total = jax.lax.cond(
                step.mask[usual:].any(),
                lambda head: head + part(step.indices[usual:], step.mask[usual:]),
                lambda head: head,
                total,
            )
        released, seen = step.release(total)
        return released / sample_rate - here.kl_gradient(eta_cavity), seen

    point, seen = ascend(point, gradient, (steps, draws), step_sizes)
    return point.to_eta(), seen


def usual_part(width: int) -> int:
    """How many slots most Poisson batches fill whose loop is padded to `width` (about mean + 5.3 stddevs), in 16s."""
    stddev = (math.sqrt(5.3**2 + 4 * width) - 5.3) / 2
    return min(width, 16 * math.ceil((stddev**2 + 1.5 * stddev) / 16))
