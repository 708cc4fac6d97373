"""Ragged parts (silos, or shards of silos) in few shapes, so that each shape compiles once.

Parts of similar size share a bucket: they are padded to its largest and stacked, and a compiled function maps
over them. Sizes are public facts of a study (SPEC 0), so which part is in which bucket tells nothing.

Where batches are of persons, a part is padded to a public number of persons with a public number of rows each: person p
has the slots from p * rows_per_unit on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import places_of_rows
from silobayes.inference.rows import Rows, stack

# A part is at least this share of its bucket's largest: the waste stays below it, buckets are few.
_FILL = 0.6


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Parts padded to `max_units` units each (rows, or persons); `rows` has a leading axis over `parts`."""

    parts: np.ndarray
    rows: Rows = field(repr=False)
    max_units: int


class Buckets:
    """All parts of a study on the device."""

    def __init__(
        self,
        parts: Sequence[tuple[np.ndarray, np.ndarray]],
        max_units: Sequence[int],
        *,
        persons: Sequence[np.ndarray] | None = None,
        rows_per_unit: int = 1,
    ) -> None:
        """From (x, y) and the public number of rows of each part.

        With `persons`, who names the person of each row of each part: from the public number of persons of each part
        and that of the rows of one person.

        Guarantees:
            - a person has slots of their own, whoever else is there
            - a person with more rows than rows_per_unit is refused
        """
        self.rows_per_unit = rows_per_unit
        slots = None
        if persons is not None:
            laid_out = [_by_person(part, own, rows_per_unit) for part, own in zip(parts, persons, strict=True)]
            parts, slots = [part for part, _ in laid_out], [own for _, own in laid_out]
        self.buckets = tuple(
            _bucket(parts, slots, members, max_units, rows_per_unit) for members in group_sizes(max_units)
        )
        self.slots = np.zeros(len(parts), dtype=int)
        for bucket in self.buckets:
            self.slots[bucket.parts] = bucket.max_units

    def map(self, chosen: np.ndarray, call: Callable[[Rows, np.ndarray], Any]) -> Any:
        """`call(rows, positions)` on each bucket; returns its results stacked in the order of `chosen`.

        `positions` points into `chosen`. Its length is a power of two or the whole bucket, so that visits of ever
        changing subsets compile a few times only; the surplus repeats a part and is dropped.

        Guarantees:
            - the result does not depend on how parts are bucketed
        """
        order, results = [], []
        for bucket in self.buckets:
            positions = np.flatnonzero(np.isin(chosen, bucket.parts))
            if len(positions) == 0:
                continue
            count = min(1 << (len(positions) - 1).bit_length(), len(bucket.parts))
            padded = np.concatenate([positions, np.repeat(positions[:1], count - len(positions))])
            places = np.searchsorted(bucket.parts, chosen[padded])
            whole = np.array_equal(places, np.arange(len(bucket.parts)))
            rows = bucket.rows if whole else jax.tree.map(lambda leaf, at=places: leaf[at], bucket.rows)
            result = call(rows, padded)
            order.append(positions)
            results.append(jax.tree.map(lambda leaf, n=positions.size: np.asarray(leaf)[:n], result))
        inverse = np.argsort(np.concatenate(order), kind="stable")
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[inverse], *results)


def group_sizes(sizes: Sequence[int]) -> list[np.ndarray]:
    """Numbers of the parts of each bucket, ascending; buckets from the largest sizes to the smallest."""
    remaining = np.asarray(sizes)
    groups = []
    left = np.ones(len(remaining), dtype=bool)
    while left.any():
        largest = remaining[left].max()
        group = left & (remaining >= _FILL * largest)
        groups.append(np.flatnonzero(group))
        left &= ~group
    return groups


def _bucket(
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    slots: Sequence[np.ndarray] | None,
    members: np.ndarray,
    max_units: Sequence[int],
    rows_per_unit: int,
) -> Bucket:
    units = max(max_units[part] for part in members)
    own_slots = None if slots is None else [slots[part] for part in members]
    rows = stack([parts[part] for part in members], units * rows_per_unit, own_slots)
    return Bucket(parts=members, rows=rows, max_units=units)


def _by_person(
    part: tuple[np.ndarray, np.ndarray], persons: np.ndarray, rows_per_person: int
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The rows person by person, and their slots."""
    places, numbers = places_of_rows(persons)
    if np.max(numbers, initial=0) >= rows_per_person:
        # How many rows somebody has is theirs: it must not appear in the message.
        fix = 'Declare a larger public bound, or set data.outside = "clip": then only the first rows count.'
        raise InvalidInput("data.rows_per_person", f"at most {rows_per_person} rows of each person", "more", fix)
    slots = places * rows_per_person + numbers
    order = np.argsort(slots)
    return (part[0][order], part[1][order]), slots[order]
