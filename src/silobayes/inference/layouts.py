"""How a silo's rows lie in slots. Shapes follow from public numbers, so that nobody's rows decide on anybody's.

A layout is public and belongs to a silo's seat in the plan; silos of one `shape` are stacked and share compiled code.
Row k of a silo has slot k, a person has slots of their own, and who is in which shard is dealt once, whatever rows
hold.
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.core.hashing import stable_hashes
from silobayes.data.silo import Silo, places_of_rows
from silobayes.inference.rows import Rows, stack

# A silo fills at least this share of its group's width: the waste stays below it, groups are few.
_FILL = 0.6
# Of a shard of persons: how many rows somebody is thought to have where no bound is declared, and the room above the
# mean, in standard deviations.
_ROWS_PER_PERSON, _WIDTH_DEVIATIONS = 8, 5.0


class AbstractLayout(abc.ABC):
    """Where rows go."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the slots; layouts of equal shape are stacked."""

    @property
    def num_slots(self) -> int:
        """How many rows fit."""
        return math.prod(self.shape)

    @abc.abstractmethod
    def lay_out(self, silos: Sequence[Silo], layouts: Sequence[Any]) -> Rows:
        """The rows of several silos, each by its own of `layouts` of this shape, with a leading axis over silos."""


@dataclass(frozen=True, kw_only=True)
class RowSlots(AbstractLayout):
    """A slot for each row, `slots` in all."""

    slots: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `AbstractLayout`."""
        return (self.slots,)

    def lay_out(self, silos: Sequence[Silo], layouts: Sequence["RowSlots"]) -> Rows:
        """See `AbstractLayout`."""
        return stack([(silo.x, silo.y) for silo in silos], self.slots)


@dataclass(frozen=True, kw_only=True)
class PersonSlots(AbstractLayout):
    """`rows_per_person` slots side by side for each of `persons`, so that a batch takes all rows of a person or none.

    Guarantees:
        - a person has slots of their own, whoever else is there
        - a person with more rows than rows_per_person is refused
    """

    persons: int
    rows_per_person: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `AbstractLayout`."""
        return (self.persons, self.rows_per_person)

    def lay_out(self, silos: Sequence[Silo], layouts: Sequence["PersonSlots"]) -> Rows:
        """See `AbstractLayout`."""
        ordered = [self._by_person(silo) for silo in silos]
        width = self.persons * self.rows_per_person
        return stack([part for part, _ in ordered], width, [slots for _, slots in ordered])

    def _by_person(self, silo: Silo) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """The rows person by person, and their slots."""
        assert silo.persons is not None, "a study that protects persons knows whose row it is"
        places, numbers = places_of_rows(silo.persons)
        if np.max(numbers, initial=0) >= self.rows_per_person:
            # How many rows somebody has is theirs: it must not appear in the message.
            fix = 'Declare a larger public bound, or set data.outside = "clip": then only the first rows count.'
            expected = f"at most {self.rows_per_person} rows of each person"
            raise InvalidInput("data.rows_per_person", expected, "more", fix)
        slots = places * self.rows_per_person + numbers
        order = np.argsort(slots)
        return (silo.x[order], silo.y[order]), slots[order]


@dataclass(frozen=True, kw_only=True)
class ShardSlots(AbstractLayout):
    """`num_shards` shards with `width` slots each; `shards` counts the empty ones that make silos of one shape.

    `max_rows` is the public number of rows, `seed` that of dealing.

    Guarantees:
        - the shapes of all shards follow from public numbers
        - the shard of a row depends on its slot or person only
    """

    num_shards: int
    shards: int
    width: int
    max_rows: int
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `AbstractLayout`."""
        return (self.shards, self.width)

    def lay_out(self, silos: Sequence[Silo], layouts: Sequence["ShardSlots"]) -> Rows:
        """See `AbstractLayout`."""
        parts, slots = [], []
        for silo, own in zip(silos, layouts, strict=True):
            part, places = own._by_shard(silo)
            parts.append(part)
            slots.append(places)
        flat = stack(parts, self.shards * self.width, slots)
        return jax.tree.map(lambda leaf: leaf.reshape(len(silos), *self.shape, *leaf.shape[2:]), flat)

    def _by_shard(self, silo: Silo) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """The rows shard by shard, and their slots."""
        shard_of_row = self._deal(silo)
        order = np.argsort(shard_of_row, kind="stable")
        shards = shard_of_row[order]
        first = np.searchsorted(shards, shards)  # where the shard of each row begins
        number = np.arange(len(order)) - first
        # A shard's rows beyond its width are left out: which these are is the business of that shard alone.
        kept = number < self.width
        order = order[kept]
        return (silo.x[order], silo.y[order]), (shards * self.width + number)[kept]

    def _deal(self, silo: Silo) -> np.ndarray:
        """The shard of each row; a person's rows stay together.

        Persons are dealt by a public hash of their own number, so that who else is there changes nobody's shard; a
        shard may stay empty. How many persons there are is nowhere looked at.
        """
        if silo.persons is not None:
            return np.array(stable_hashes(f"{self.seed}/{p}" for p in silo.persons.tolist())) % self.num_shards
        return deal_slots(self.num_shards, self.max_rows, self.seed)[: len(silo.y)]


def deal_slots(num_shards: int, max_rows: int, seed: int) -> np.ndarray:
    """The shard of each slot: block by block, so that one slot more changes nobody else's shard."""
    rng = np.random.default_rng([seed, num_shards])
    blocks = [rng.permutation(num_shards) for _ in range(0, max_rows, num_shards)]
    return np.concatenate(blocks)[:max_rows]


def width_of_shards(max_rows: int, num_shards: int, rows_per_person: int | None) -> int:
    """Slots of a shard of persons, from public numbers alone.

    How many rows a shard holds is somebody's secret: if shapes followed it, compiled code could round the sums of
    *other* shards differently. Persons fall into shards by chance, about as a Poisson number of them with up to
    `rows_per_person` rows each, so the width is that many standard deviations above the mean.
    """
    mean, rows = max_rows / num_shards, rows_per_person or _ROWS_PER_PERSON
    return max(1, min(max_rows, math.ceil(mean + rows + _WIDTH_DEVIATIONS * math.sqrt(mean * rows))))


def group_sizes(sizes: Sequence[int]) -> list[np.ndarray]:
    """Silos of similar public sizes: the numbers of each group, ascending; groups from the largest to the smallest."""
    remaining = np.asarray(sizes)
    groups = []
    left = np.ones(len(remaining), dtype=bool)
    while left.any():
        largest = remaining[left].max()
        group = left & (remaining >= _FILL * largest)
        groups.append(np.flatnonzero(group))
        left &= ~group
    return groups


def common_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The largest size of each silo's group: what all silos of the group are padded to."""
    widths = np.zeros(len(sizes), dtype=int)
    for group in group_sizes(sizes):
        widths[group] = np.max(np.asarray(sizes)[group])
    return tuple(widths.tolist())


def row_slots(sizes: Sequence[int]) -> tuple[RowSlots, ...]:
    """Layouts for silos of so many rows."""
    return tuple(RowSlots(slots=width) for width in common_sizes(sizes))


def person_slots(sizes: Sequence[int], rows_per_person: int) -> tuple[PersonSlots, ...]:
    """Layouts for silos of so many persons."""
    return tuple(PersonSlots(persons=width, rows_per_person=rows_per_person) for width in common_sizes(sizes))


def shard_slots(
    sizes: Sequence[int], shards: Sequence[int], seed: int, *, by_person: bool, rows_per_person: int | None
) -> tuple[ShardSlots, ...]:
    """Layouts for silos of so many rows, dealt to so many shards."""
    for rows, count in zip(sizes, shards, strict=True):
        if rows < count:
            fix = "Use fewer shards, or merge small silos."
            raise InvalidInput("protocol.shards", f"at most the {rows} rows of a silo", count, fix)
    padded = common_sizes(shards)
    widths = [
        width_of_shards(rows, count, rows_per_person) if by_person else -(-rows // count)
        for rows, count in zip(sizes, shards, strict=True)
    ]
    widest = {
        size: max(width for width, other in zip(widths, padded, strict=True) if other == size) for size in set(padded)
    }
    return tuple(
        ShardSlots(num_shards=count, shards=size, width=widest[size], max_rows=rows, seed=seed)
        for rows, count, size in zip(sizes, shards, padded, strict=True)
    )


def stacked(trees: Sequence[Any]) -> Any:
    """A leading axis over trees of one structure; ragged leaves are filled up with zeros."""
    return jax.tree.map(lambda *leaves: _stack_leaves(leaves), *trees)


def _stack_leaves(leaves: Sequence[Any]) -> np.ndarray:
    arrays = [np.asarray(leaf) for leaf in leaves]
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    shape = np.max([array.shape for array in arrays], axis=0)
    out = np.zeros((len(arrays), *shape), dtype=arrays[0].dtype)
    for place, array in enumerate(arrays):
        out[(place, *(slice(size) for size in array.shape))] = array
    return out
