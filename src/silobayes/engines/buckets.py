"""Ragged parts (silos, or shards of silos) in few shapes, so that each shape compiles once.

Parts of similar size share a bucket: they are padded to its largest and stacked, and a compiled function maps
over them. Sizes are public facts of a study (SPEC 0), so which part is in which bucket tells nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from silobayes.inference.rows import Rows, stack

# A part is at least this share of its bucket's largest: the waste stays below it, buckets are few.
_FILL = 0.6


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Parts padded to `max_rows` slots each; `rows` has a leading axis over `parts`."""

    parts: np.ndarray
    rows: Rows = field(repr=False)
    max_rows: int


class Buckets:
    """All parts of a study on the device."""

    def __init__(self, parts: Sequence[tuple[np.ndarray, np.ndarray]], max_rows: Sequence[int]) -> None:
        """From (x, y) and the public number of slots of each part."""
        self.buckets = tuple(_bucket(parts, members, max_rows) for members in group_sizes(max_rows))
        self.slots = np.zeros(len(parts), dtype=int)
        for bucket in self.buckets:
            self.slots[bucket.parts] = bucket.max_rows

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


def _bucket(parts: Sequence[tuple[np.ndarray, np.ndarray]], members: np.ndarray, max_rows: Sequence[int]) -> Bucket:
    slots = max(max_rows[part] for part in members)
    return Bucket(parts=members, rows=stack([parts[part] for part in members], slots), max_rows=slots)
