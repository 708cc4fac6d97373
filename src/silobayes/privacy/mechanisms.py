"""Mechanisms: what turns a `Bounded` sum into a value that may leave, and what that costs.

A mechanism is a frozen description. It can say its price (`event`) and, given a source of randomness, draw; only
`door.Door` puts the two together, in the one allowed order.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from silobayes.core.errors import InvalidInput, require_count, require_number
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.discrete import discrete_gaussian, rounded_laplace
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import (
    AbstractEvent,
    DiscreteGaussianEvent,
    LaplaceEvent,
    Scheme,
    SkellamEvent,
    Terms,
)
from silobayes.privacy.relation import Relation
from silobayes.privacy.skellam import skellam

GridEvent = TypeVar("GridEvent", DiscreteGaussianEvent, SkellamEvent)


@dataclass(frozen=True, kw_only=True, eq=False)
class Release:
    """A noisy value and its price, born together; made only by the door.

    `blocks` holds one vector per block of the `Bounded` sum and `stddevs` the noise on each of its coordinates, which
    an honest posterior needs. `is_private` is False when the noise came from a fixed seed.
    """

    blocks: tuple[np.ndarray, ...]
    stddevs: tuple[float, ...]
    event: AbstractEvent
    is_private: bool

    @property
    def value(self) -> np.ndarray:
        """The only block."""
        (value,) = self.blocks
        return value


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """One silo's noisy integers for a secure sum. Its noise alone protects nobody: it must not be published."""

    counts: np.ndarray = field(repr=False)
    event: AbstractEvent
    is_private: bool


class AbstractMechanism(ABC):
    """Integer noise on a bounded sum."""

    @abstractmethod
    def event(self, bounded: Bounded, relation: Relation) -> AbstractEvent:
        """What one run on `bounded` costs."""

    @abstractmethod
    def noise(self, entropy: Entropy, bounded: Bounded) -> np.ndarray:
        """Integer noise, one number per coordinate."""

    @abstractmethod
    def stddevs(self, bounded: Bounded) -> tuple[float, ...]:
        """The noise's standard deviation on each block, in the statistic's own units."""


@dataclass(frozen=True, kw_only=True)
class GaussianMechanism(AbstractMechanism):
    """Exact discrete Gaussian noise: standard deviation `noise_multiplier` * clip norm on each block."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        require_number("noise_multiplier", self.noise_multiplier, above=0.0, fix="Pass std / clip norm.")

    def event(self, bounded: Bounded, relation: Relation) -> DiscreteGaussianEvent:
        """See `AbstractMechanism`."""
        return _event(DiscreteGaussianEvent, **_grid_fields(bounded, relation, self.noise_multiplier))

    def noise(self, entropy: Entropy, bounded: Bounded) -> np.ndarray:
        """See `AbstractMechanism`."""
        return discrete_gaussian(entropy, self.noise_multiplier / bounded.grid, bounded.total.size)

    def stddevs(self, bounded: Bounded) -> tuple[float, ...]:
        """See `AbstractMechanism`."""
        return tuple(self.noise_multiplier * block.clip_norm for block in bounded.blocks)


@dataclass(frozen=True, kw_only=True)
class SkellamMechanism(AbstractMechanism):
    """Skellam noise of which each silo draws a share, because Skellam is closed under sums.

    The *sum* over `num_shares` shares has standard deviation `noise_multiplier` * clip norm, and that is what the
    event prices. With M silos of which T may collude or drop out, pass `num_shares = M - T - 1` (004 I, Theorem 1).
    """

    noise_multiplier: float
    num_shares: int

    def __post_init__(self) -> None:
        require_number("noise_multiplier", self.noise_multiplier, above=0.0, fix="Pass std of the sum / clip norm.")
        require_count("num_shares", self.num_shares, at_least=1, fix="Pass M - T - 1.")

    def event(self, bounded: Bounded, relation: Relation) -> SkellamEvent:
        """See `AbstractMechanism`."""
        return _event(SkellamEvent, **_grid_fields(bounded, relation, self.noise_multiplier))

    def noise(self, entropy: Entropy, bounded: Bounded) -> np.ndarray:
        """See `AbstractMechanism`; the noise of one share."""
        # Dividing rounds to nearest; the next float up keeps the sum's variance at or above what was priced.
        share = np.nextafter((self.noise_multiplier / bounded.grid) ** 2 / self.num_shares, np.inf)
        return skellam(entropy, float(share), bounded.total.size)

    def stddevs(self, bounded: Bounded) -> tuple[float, ...]:
        """See `AbstractMechanism`; of the sum over all shares."""
        return tuple(self.noise_multiplier * block.clip_norm for block in bounded.blocks)


@dataclass(frozen=True, kw_only=True)
class LaplaceMechanism(AbstractMechanism):
    """Laplace noise, rounded to the grid, of scale `noise_multiplier` * clip norm; the sum must be clipped in L1."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        require_number("noise_multiplier", self.noise_multiplier, above=0.0, fix="Pass scale / clip norm.")

    def event(self, bounded: Bounded, relation: Relation) -> LaplaceEvent:
        """See `AbstractMechanism`.

        Priced as continuous Laplace noise: the draw has exactly the law of such noise rounded to the grid, and
        rounding is post-processing. (Two-sided geometric noise has another law and a slightly higher price.)
        """
        if bounded.order != 1:
            raise InvalidInput("order", "1 (Laplace noise protects an L1 norm)", bounded.order, "clip(..., order=1)")
        (block,) = bounded.blocks
        scale = self.noise_multiplier * block.clip_norm
        if bounded.sharded:
            return LaplaceEvent(sensitivity=bounded.sensitivity(relation) * block.clip_norm, scale=scale)
        return LaplaceEvent(clip_norm=block.norm * block.clip_norm, scale=scale, sampling=bounded.sampling)

    def noise(self, entropy: Entropy, bounded: Bounded) -> np.ndarray:
        """See `AbstractMechanism`."""
        return rounded_laplace(entropy, self.noise_multiplier / bounded.grid, bounded.total.size)

    def stddevs(self, bounded: Bounded) -> tuple[float, ...]:
        """See `AbstractMechanism`."""
        return tuple(np.sqrt(2.0) * self.noise_multiplier * block.clip_norm for block in bounded.blocks)


@lru_cache(maxsize=1024)
def _event(kind: type[GridEvent], **fields: Any) -> GridEvent:
    """Events do not change: one that is charged in every visit is made, and checked, once."""
    return kind(**fields)


def _grid_fields(bounded: Bounded, relation: Relation, noise_multiplier: float) -> dict:
    """Fields of a grid event. One block is stated in its own units, several in units of their clip norms."""
    if bounded.order != 2:
        raise InvalidInput("order", "2 (Gaussian noise protects an L2 norm)", bounded.order, "clip(..., order=2)")
    unit = bounded.blocks[0].clip_norm if len(bounded.blocks) == 1 else 1.0
    fields = {
        "std": noise_multiplier * unit,
        "grid": bounded.grid * unit,
        "dimension": int(bounded.total.size),
        "sampling": bounded.sampling,
    }
    kinds = {block.terms for block in bounded.blocks}
    if len(kinds) == 1 and not bounded.sharded:
        return fields | {"clip_norm": bounded.norm * unit, "terms": kinds.pop()}
    if bounded.sampling is not None and bounded.sampling.scheme is Scheme.POISSON:
        return fields | {"clip_norm": bounded.norm * unit, "terms": Terms.GENERAL}  # the absent term matters too
    return fields | {"sensitivity": bounded.sensitivity(relation) * unit}
