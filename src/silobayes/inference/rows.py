"""Rows of a silo on the device, padded to a public number of slots so that ragged silos share one compiled loop."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

from silobayes.core.errors import InvalidInput, require_count

# Beyond this a feature or target counts as not finite, below that a feature counts as zero: norms are computed from
# squares, and in float32 a square that overflows or vanishes would let a row through with a wrong norm.
LARGEST_VALUE = 1e9
SMALLEST_FEATURE = 1e-15


class Rows(eqx.Module):
    """Features, targets and which slots hold a row. Batches of silos have a leading axis on all three.

    Every slot that is empty or holds a value that is not finite is zeroed and marked absent, once, when the rows are
    made: a row that is not finite contributes nothing (PITFALLS), and 0 * NaN is NaN, so its values must go too. Each
    slot is judged by itself, so one changed row changes no other.
    """

    x: Float[Array, "*silos n d"]
    y: Num[Array, "*silos n"]
    present: Bool[Array, "*silos n"]

    def __init__(
        self, x: Float[ArrayLike, "*silos n d"], y: Num[ArrayLike, "*silos n"], present: Bool[ArrayLike, "*silos n"]
    ) -> None:
        self.x, self.y, self.present = _only_finite(x, y, present)


@jax.jit  # as one program: one by one, its operations take longer to compile than to run
def _only_finite(x: ArrayLike, y: ArrayLike, present: ArrayLike) -> tuple[Array, Array, Array]:
    finite = (jnp.abs(x) <= LARGEST_VALUE).all(axis=-1) & (jnp.abs(y) <= LARGEST_VALUE)
    present = finite & present
    x = jnp.where(present[..., None] & (jnp.abs(x) >= SMALLEST_FEATURE), x, 0)
    return x, jnp.where(present, y, 0), present


def pad(x: np.ndarray, y: np.ndarray, max_rows: int) -> Rows:
    """Rows in the first of `max_rows` slots; the others are empty.

    Guarantees:
        - padding rows change nothing
    """
    return jax.tree.map(lambda leaf: leaf[0], stack([(x, y)], max_rows))


def stack(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], max_rows: int, slots: Sequence[np.ndarray] | None = None
) -> Rows:
    """`pad` of many parts (x, y) at once, with a leading axis over them; `slots` are ascending places of each row."""
    require_count("max_rows", max_rows, at_least=1, fix="Pass the public bound on the rows of a silo.")
    for x, y in parts:
        if np.ndim(x) != 2 or np.shape(y) != np.shape(x)[:1]:
            raise InvalidInput("x, y", "(n, d) features and n targets", (np.shape(x), np.shape(y)), "Reshape them.")
        if len(x) > max_rows:
            raise InvalidInput("max_rows", "at least the rows of the silo", max_rows, "Declare a larger public bound.")
    counts = np.array([len(x) for x, _ in parts])
    present = np.arange(max_rows) < counts[:, None]
    if slots is not None:
        if any(np.max(own, initial=-1) >= max_rows for own in slots):
            raise InvalidInput("max_rows", "at least the slots of the silo", max_rows, "Declare a larger public bound.")
        present = np.stack([np.isin(np.arange(max_rows), own, assume_unique=True) for own in slots])
    labels = np.concatenate([y for _, y in parts])
    # Filled on the host: thousands of small arrays would take the device minutes.
    all_x = np.zeros((*present.shape, np.shape(parts[0][0])[1]), dtype=np.float32)
    all_y = np.zeros(present.shape, dtype=np.int32 if np.issubdtype(labels.dtype, np.integer) else np.float32)
    all_x[present] = np.concatenate([x for x, _ in parts])
    all_y[present] = labels
    return Rows(x=all_x, y=all_y, present=present)


def slots_of_units(
    units: Int[Array | np.ndarray, " units"], mask: Bool[Array | np.ndarray, " units"], rows_per_unit: int
) -> tuple[Int[Array, " rows"], Bool[Array, " rows"]]:
    """All slots of the chosen units, and which of them are of a unit in use: unit u has the R slots from u * R on."""
    if rows_per_unit == 1:
        return jnp.asarray(units), jnp.asarray(mask)
    slots = jnp.asarray(units)[:, None] * rows_per_unit + jnp.arange(rows_per_unit)
    return slots.reshape(-1), jnp.repeat(jnp.asarray(mask), rows_per_unit)
