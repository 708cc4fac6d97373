"""What a visit asks of every silo, as one sum: noise and price in one place (SPEC 0).

A query is public: the plan makes it, silos `write` answers to it behind their doors, the server `read`s their total.
Whether a silo adds a noise of its own or a share of the sum's is chosen once, by the mechanisms that the plan puts in.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.mechanisms import AbstractMechanism, SkellamMechanism
from silobayes.privacy.relation import Relation
from silobayes.secure.fixed_point import Modulus, from_grid, largest_count, modulus_for, to_grid

# Open numbers beyond the range are pulled back to it: natural parameters at a standard deviation of 1e-5 would be.
_OPEN_GRID = 2.0**-16
_LARGEST_OPEN = 2.0**34


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """What one silo sends: `payload` is added up, `value` is what it says (None: a share, which nobody may see)."""

    payload: np.ndarray = field(repr=False)
    value: np.ndarray | None = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """The sum of the payloads of one visit, and which silos are in it."""

    payload: np.ndarray = field(repr=False)
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A total in the statistics' own units, block by block, and the noise on each of a block's coordinates."""

    blocks: tuple[np.ndarray, ...]
    stddevs: tuple[float, ...]

    @property
    def value(self) -> np.ndarray:
        """The only block."""
        (value,) = self.blocks
        return value


class AbstractQuery(ABC):
    """One sum over silos."""

    @property
    @abstractmethod
    def modulus(self) -> Modulus | None:
        """What residues a secure sum of answers needs; None where answers are added up in the open."""

    @abstractmethod
    def event(self, silo: int) -> AbstractEvent | None:
        """What one answer costs a silo; None where it costs nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateSum(AbstractQuery):
    """A sum of clipped terms with noise.

    Every silo's answer is a `Bounded` sum of the layout of its entry in `layouts`, so that one changed unit of its rows
    moves it by at most what `mechanisms` price for that layout. With a noise of its own (`GaussianMechanism`) the
    answer itself is a release, and totals are post-processing of releases. With shares (`SkellamMechanism`) only the
    total may be seen: it contains the noise of every silo in it, those of `num_shares` of them are what was priced, and
    a share counts as unreleased (004 I, Theorem 1).

    Attributes:
        relation: The study's.
        layouts: What each silo would answer without rows: enough to say what an answer costs.
        mechanisms: Of each silo.
        num_terms: How many clipped terms a silo's answer has at the most.
        num_sums: How often the query is asked at the most.
        together: How many silos answer together.

    Guarantees:
        - own noise and shares of as many silos have the same variance in the total
        - a total of shares is decoded exactly
        - totals are read in units of the norms that silos clipped to
        - events equal those of the mechanism and what the door charges
        - moduli never wrap around, except with probability 2^-60 in a study
    """

    relation: Relation
    layouts: tuple[Bounded, ...] = field(repr=False)
    mechanisms: tuple[AbstractMechanism, ...]
    num_terms: int
    num_sums: int
    together: int

    @property
    def is_shared(self) -> bool:
        """Whether answers are shares."""
        return isinstance(self.mechanisms[0], SkellamMechanism)

    @property
    def modulus(self) -> Modulus | None:
        """Large enough for `num_sums` sums over `together` silos."""
        mechanism, layout = self.mechanisms[0], self.layouts[0]
        if not isinstance(mechanism, SkellamMechanism):
            return None
        return modulus_for(
            num_clients=self.together,
            largest_count=self.num_terms * int(np.ceil(layout.norm / layout.grid)),
            # Every silo adds a share, so that the sum contains more noise than was priced.
            noise_stddev=mechanism.noise_multiplier
            / layout.grid
            * float(np.sqrt(self.together / mechanism.num_shares)),
            dimension=layout.total.size,
            num_sums=self.num_sums,
        )

    def event(self, silo: int) -> AbstractEvent:
        """See `AbstractQuery`."""
        return self.mechanisms[silo].event(self.layouts[silo], self.relation)

    def write(self, door: Door, silo: int, bounded: Bounded) -> Message:
        """The answer of a silo: paid, then noised."""
        mechanism = self.mechanisms[silo]
        if isinstance(mechanism, SkellamMechanism):
            return Message(payload=door.share(mechanism, bounded).counts, value=None)
        whole = np.concatenate(door.release(mechanism, bounded).blocks)
        return Message(payload=whole, value=whole)

    def read(self, total: Total, clip_norms: Sequence[float] | None = None) -> Answer:
        """The total and its noise; `clip_norms` are those that silos clipped to where they are not the layouts'."""
        layout = self.layouts[total.members[0]].with_norms(clip_norms)
        ends = np.cumsum([block.size for block in layout.blocks])[:-1]
        blocks = layout.decode(total.payload) if self.is_shared else tuple(np.split(total.payload, ends))
        return Answer(blocks=blocks, stddevs=self.noise_of(total.members, clip_norms))

    def noise_of(self, members: Sequence[int], clip_norms: Sequence[float] | None = None) -> tuple[float, ...]:
        """The standard deviation, on each block, of the noise that the answers of these silos contain together."""
        layouts = [self.layouts[silo].with_norms(clip_norms) for silo in members]
        variances = np.zeros(len(layouts[0].blocks))
        for silo, layout in zip(members, layouts, strict=True):
            mechanism = self.mechanisms[silo]
            num_shares = mechanism.num_shares if isinstance(mechanism, SkellamMechanism) else 1
            variances += np.square(mechanism.stddevs(layout)) / num_shares
        return tuple(np.sqrt(variances).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenSum(AbstractQuery):
    """Numbers that are private already, or those of a study without privacy: as they are.

    Only inside a (secure) sum, over `together` silos, they are rounded to a fixed public grid, so that the total is the
    same with every kind of sum, to the last bit.

    Guarantees:
        - a silo knows what it said: its value is what the total contains of it
        - open numbers never wrap around in a sum
    """

    together: int | None = None

    @property
    def modulus(self) -> Modulus | None:
        """Large enough for any sum."""
        if self.together is None:
            return None
        largest = largest_count(grid=_OPEN_GRID, largest=_LARGEST_OPEN)
        return modulus_for(num_clients=self.together, largest_count=largest, noise_stddev=0.0, dimension=1, num_sums=1)

    def event(self, silo: int) -> None:
        """Nothing: what rows are in the numbers was paid for where they were released."""
        return

    def write(self, value: np.ndarray) -> Message:
        """The answer of a silo."""
        value = np.asarray(value, dtype=np.float64)
        if self.together is None:
            return Message(payload=value, value=value)
        counts = to_grid(value, grid=_OPEN_GRID, largest=_LARGEST_OPEN)
        return Message(payload=counts, value=from_grid(counts, grid=_OPEN_GRID))

    def read(self, total: Total) -> np.ndarray:
        """The total."""
        return total.payload if self.together is None else from_grid(total.payload, grid=_OPEN_GRID)
