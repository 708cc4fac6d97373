"""Gradients of the likelihood term, row by row, without ever building them where a closed form exists.

Three paths, one result: GLMs by expected derivatives in the scalar linear predictor (PERFORMANCE 1), layered networks
by ghost norms (PERFORMANCE 2), everything else by `vmap(grad)` with respect to the drawn theta, never per coordinate.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

from silobayes.inference.coordinates import AbstractPoint, MeanFieldPoint, PulledRows
from silobayes.inference.rows import Rows, slots_of_units
from silobayes.models.base import AbstractGLM, AbstractModel
from silobayes.models.layered import AbstractLayeredModel
from silobayes.privacy.loops import clip_factors

Clipping = Literal["label_free", "ordinary"]


class RowGradients(NamedTuple):
    """Norms of the rows' gradients, the largest norm each row could have under another label, and weighted sums.

    `worst_norms` equals `norms` where the model has no list of worst labels. A row of weight 0 adds exactly nothing to
    `weighted_sum`, even if its gradient is not finite.
    """

    norms: Float[Array, " n"]
    worst_norms: Float[Array, " n"]
    weighted_sum: Callable[[Float[Array, " n"]], Float[Array, " coordinates"]]


def row_gradients(
    model: AbstractModel,
    point: AbstractPoint,
    e: Float[Array, " dim"] | None,
    x: Float[Array, "n d"],
    y: Num[Array, " n"],
    lengths: Float[Array, " n"] | None = None,
) -> RowGradients:
    """Gradients of each row's expected log-likelihood in the coordinates of `point`.

    Args:
        model: Of the rows.
        point: Where.
        e: The draw; GLMs need none.
        x: Features. For GLMs they may be `aligned`.
        y: Targets.
        lengths: `row_lengths(x)`; a loop over the same rows computes them once.

    Guarantees:
        - norms and sums equal those of vmap(grad), for every model
    """
    if isinstance(model, AbstractGLM):
        return _glm(model, point, x, y, row_lengths(x) if lengths is None else lengths)
    assert e is not None, "a model without closed-form expectations needs a draw"
    if isinstance(model, AbstractLayeredModel) and isinstance(point, MeanFieldPoint):
        return _layered(model, point, e, x, y)
    return _generic(model, point, e, x, y)


def row_lengths(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Euclidean norms of the rows."""
    return jnp.sqrt((x**2).sum(axis=1))


def batch_gradient(
    model: AbstractModel,
    point: AbstractPoint,
    e: Float[Array, " dim"] | None,
    rows: Rows,
    units: Int[Array | np.ndarray, " units"],
    taken: Bool[Array | np.ndarray, " units"],
    clip_norm: ArrayLike,
    clipping: Clipping,
    rows_per_unit: int,
    lengths: Float[Array, " n"] | None = None,
) -> Float[Array, " coordinates"]:
    """The clipped gradient of a batch: of the `units` (slots of `rows`, or persons) that are `taken`."""
    slots, mask = slots_of_units(units, taken, rows_per_unit)
    # A slot beyond the array is empty; plain indexing would silently read the last row instead.
    mask = mask & rows.present.at[slots].get(mode="fill", fill_value=False)
    own_lengths = None if lengths is None else lengths[slots]
    # Some devices multiply float32 matrices with the digits of bfloat16 unless told otherwise: norms would be wrong.
    with jax.default_matmul_precision("highest"):
        gradients = row_gradients(model, point, e, rows.x[slots], rows.y[slots], own_lengths)
        return clipped_gradient(gradients, mask, clip_norm, clipping, rows_per_unit)


def clipped_gradient(
    gradients: RowGradients, mask: Bool[Array, " n"], clip_norm: ArrayLike, clipping: Clipping, rows_per_unit: int = 1
) -> Float[Array, " coordinates"]:
    """Sum of the rows' gradients, each with norm at most `clip_norm`; of persons, each person's sum has.

    `label_free` divides by the worst norm over labels instead of the row's own, which keeps the expected score zero
    (UNCERTAINTY F7). The row's own norm is enforced as well, so that the bound does not rest on labels being valid.

    With `rows_per_unit` R, each R rows in turn are one person's. They share one weight, clip_norm over the sum of their
    norms: by the triangle inequality the person's sum is within the clip norm, nobody's sum is ever built, and
    label-free weights still know no label.

    Guarantees:
        - each term enters with norm at most clip_norm, whatever its values
        - all rows of a person together enter with norm at most clip_norm, whatever their values
        - a masked or non-finite term contributes zero
        - label-free clipping keeps the expected score zero
    """
    norms = gradients.norms
    if clipping == "label_free":
        norms = jnp.maximum(norms, gradients.worst_norms)
    if rows_per_unit > 1:
        mask = mask & jnp.isfinite(norms)
        norms = _norms_of_units(jnp.where(mask, norms, 0.0), rows_per_unit)
    weights = clip_factors(norms, clip_norm)  # type: ignore[arg-type]
    # Without the barrier the compiler computes a row's weight again for each of its columns.
    return gradients.weighted_sum(jax.lax.optimization_barrier(jnp.where(mask, weights, 0.0)))


def _norms_of_units(norms: Float[Array, " n"], rows_per_unit: int) -> Float[Array, " n"]:
    """For each row, a bound on the norm of the sum over its unit."""
    sums = norms.reshape(-1, rows_per_unit).sum(axis=1)
    # R float32 additions, of norms here and of gradients later, err by at most R 2^-24 of the sum each.
    return jnp.repeat(sums * (1.0 + rows_per_unit * 2.0**-22), rows_per_unit)


def _glm(
    model: AbstractGLM,
    point: AbstractPoint,
    x: Float[Array, "n d"],
    y: Num[Array, " n"],
    lengths: Float[Array, " n"],
) -> RowGradients:
    projection = point.project(x)

    def derivatives_and_norms(label: Num[Array, " n"]) -> tuple[Array, Array, Array]:
        a, b = model.expected_derivatives(projection.mean, projection.variance, label)
        # Products before squares: the square of a vanishing curvature would hide its product with a huge row.
        return a, b, jnp.sqrt((a * lengths) ** 2 + (b * projection.spread) ** 2)

    a, b, norms = derivatives_and_norms(y)

    def weighted_sum(weights: Float[Array, " n"]) -> Float[Array, " coordinates"]:
        in_use = weights > 0
        return projection.pull(jnp.where(in_use, weights * a, 0.0), jnp.where(in_use, weights * b, 0.0))

    worst_norms = norms
    if model.worst_labels is not None:
        worst_norms = jnp.stack(
            [derivatives_and_norms(jnp.full(x.shape[0], label))[2] for label in model.worst_labels]
        ).max(axis=0)
    return RowGradients(norms=norms, worst_norms=worst_norms, weighted_sum=weighted_sum)


def _layered(
    model: AbstractLayeredModel,
    point: MeanFieldPoint,
    e: Float[Array, " dim"],
    x: Float[Array, "n d"],
    y: Num[Array, " n"],
) -> RowGradients:
    """Ghost norms: a layer with inputs u and back-propagated t adds `(u^2 @ (1 + (s e)^2)) . t^2` to a squared norm."""
    theta = point.sample(e)
    passes = model.forward(theta, x)
    scores = model.output_scores(passes.output, y)
    spreads = [
        inputs**2 @ scale for inputs, scale in zip(passes.inputs, model.matrices(1 + point.scaled(e) ** 2), strict=True)
    ]

    # With one output the gradient is the score times that of the output: one backward pass serves every label.
    is_scalar = model.widths[-1] == 1
    back = model.backward(theta, passes, jnp.ones_like(scores) if is_scalar else scores)

    def norms_of(back: Sequence[Float[Array, "n width_out"]]) -> Float[Array, " n"]:
        return jnp.sqrt(sum((spread * t**2).sum(axis=1) for spread, t in zip(spreads, back, strict=True)))

    def weighted_sum(weights: Float[Array, " n"]) -> Float[Array, " coordinates"]:
        # Of the very numbers whose norm was taken: where weights of the network cancel, a second pass through it, with
        # the rows' weights inside, would round to something longer.
        in_use = weights[:, None] > 0
        factors = weights[:, None] * scores if is_scalar else weights[:, None]
        parts = [
            jnp.where(in_use, inputs, 0.0).T @ jnp.where(in_use, factors * t, 0.0)
            for inputs, t in zip(passes.inputs, back, strict=True)
        ]
        return point.pull(model.flatten(parts), e)

    def scores_of(label: float) -> Float[Array, "n outputs"]:
        return model.output_scores(passes.output, jnp.full(y.shape, label, y.dtype))

    norms, labels = norms_of(back), model.worst_labels or ()
    if is_scalar:
        worst = [jnp.abs(scores_of(label)[:, 0]) * norms for label in labels]
        norms = jnp.abs(scores[:, 0]) * norms
    else:
        worst = [norms_of(model.backward(theta, passes, scores_of(label))) for label in labels]
    worst_norms = jnp.stack(worst).max(axis=0) if worst else norms
    return RowGradients(norms=norms, worst_norms=worst_norms, weighted_sum=weighted_sum)


def _generic(
    model: AbstractModel, point: AbstractPoint, e: Float[Array, " dim"], x: Float[Array, "n d"], y: Num[Array, " n"]
) -> RowGradients:
    theta = point.sample(e)

    def pulled(label: Num[Array, " n"]) -> PulledRows:
        return point.pull_rows(jax.vmap(jax.grad(model.log_likelihood), in_axes=(None, 0, 0))(theta, x, label), e)

    own = pulled(y)
    worst = [pulled(jnp.full(y.shape, label, y.dtype)).norms for label in model.worst_labels or ()]
    worst_norms = jnp.stack(worst).max(axis=0) if worst else own.norms
    return RowGradients(norms=own.norms, worst_norms=worst_norms, weighted_sum=own.weighted_sum)
