"""The door: charge, commit to disk, draw, release - in that order and nowhere else (SPEC 0).

A silo has one door. It holds the account that pays and the draws (batches and noise); a method gets the door and can
let values out only through it. Record/replay (`silobayes.testing`) replaces the draws and nothing else.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.privacy.batches import poisson_batches, subsets_without_replacement
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.discrete import randomised_response
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import AbstractEvent, RandomisedResponseEvent
from silobayes.privacy.mechanisms import AbstractMechanism, Release, Share, SkellamMechanism
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import Batch, PoissonSampler, Sampler


class Account(Protocol):
    """Who pays: `ledger.Account`, or a stand-in of the tests."""

    @property
    def relation(self) -> Relation:
        """The neighbours that the budget speaks of."""
        ...

    @property
    def unit(self) -> Unit:
        """What one neighbouring change touches."""
        ...

    def charge(self, event: AbstractEvent) -> object:
        """Write the price durably, or raise `BudgetExceeded` with nothing changed."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopDraws:
    """Randomness of a compiled loop: the slots of each batch and standard normal noise.

    `replayed` belongs to record/replay: releases to feed back instead, NaN where they are drawn and recorded. So does
    `widest`, the largest batch before a slot was left out. A real run has neither.
    """

    batches: list[np.ndarray] = field(repr=False)
    noise: np.ndarray = field(repr=False)
    replayed: np.ndarray | None = None
    widest: int = 0


class AbstractDraws(ABC):
    """Everything random about a release. `FreshDraws` is the real one.

    Each method is told the `event` that was just paid; only record/replay looks at it.
    """

    @property
    @abstractmethod
    def is_private(self) -> bool:
        """Whether the noise is unknown to everybody."""

    @abstractmethod
    def batch(self, sampler: Sampler) -> np.ndarray:
        """Slots of one draw, at most `sampler.capacity` of them."""

    @abstractmethod
    def noisy_counts(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """The bounded sum with noise, in grid counts."""

    @abstractmethod
    def share(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """The same with one share of the noise: it goes into a sum and is not released itself."""

    @abstractmethod
    def total(self, counts: np.ndarray) -> np.ndarray:
        """The sum of all silos' shares, which is released."""

    @abstractmethod
    def answers(self, answers: np.ndarray, event: RandomisedResponseEvent) -> np.ndarray:
        """Randomised answers."""

    @abstractmethod
    def loop(self, sampler: Sampler, dimension: int, event: AbstractEvent) -> LoopDraws:
        """Batches and noise for the `event.count` steps of a compiled loop."""

    @abstractmethod
    def close_loop(self, totals: np.ndarray, releases: np.ndarray) -> None:
        """Take what the oldest loop that is still open has shown: only replayed loops show anything."""


@dataclass(frozen=True)
class FreshDraws(AbstractDraws):
    """Draws from a cryptographic stream."""

    entropy: Entropy = field(repr=False)

    @property
    def is_private(self) -> bool:
        """See `AbstractDraws`."""
        return self.entropy.is_private

    def batch(self, sampler: Sampler) -> np.ndarray:
        """See `AbstractDraws`."""
        (indices,) = self._batches(sampler, 1)
        return indices

    def noisy_counts(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        return bounded.total + mechanism.noise(self.entropy, bounded)

    def share(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        return self.noisy_counts(mechanism, bounded, event)

    def total(self, counts: np.ndarray) -> np.ndarray:
        """See `AbstractDraws`."""
        return counts

    def answers(self, answers: np.ndarray, event: RandomisedResponseEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        return randomised_response(self.entropy, answers, event.categories, event.gamma)

    def loop(self, sampler: Sampler, dimension: int, event: AbstractEvent) -> LoopDraws:
        """See `AbstractDraws`."""
        return LoopDraws(
            batches=self._batches(sampler, event.count),
            noise=self.entropy.normal_float32((event.count, dimension)),
        )

    def close_loop(self, totals: np.ndarray, releases: np.ndarray) -> None:
        """See `AbstractDraws`."""

    def _batches(self, sampler: Sampler, num_draws: int) -> list[np.ndarray]:
        if isinstance(sampler, PoissonSampler):
            indices, offsets = poisson_batches(self.entropy, sampler.max_rows, sampler.sample_rate, num_draws)
            return [indices[start:end][: sampler.capacity] for start, end in pairwise(offsets.tolist())]
        return list(subsets_without_replacement(self.entropy, sampler.max_rows, sampler.batch_size, num_draws))


@dataclass(frozen=True)
class Door:
    """The one place where values derived from rows become public.

    Guarantees:
        Every release is charged, durably, before its noise is drawn.
        A refused charge draws nothing and releases nothing.
        A sum clipped for another unit than the account's is refused.
    """

    account: Account
    draws: AbstractDraws = field(repr=False)

    @classmethod
    def open(cls, account: Account) -> "Door":
        """The normal door: noise from the operating system's entropy."""
        return cls(account, FreshDraws(Entropy.from_os()))

    def batch(self, sampler: Sampler) -> Batch:
        """One fresh batch; free by itself, its law enters the price of the sum over it."""
        return Batch(indices=self.draws.batch(sampler), sampling=sampler.sampling)

    def release(self, mechanism: AbstractMechanism, bounded: Bounded) -> Release:
        """Pay for `mechanism` on `bounded`, then draw."""
        if isinstance(mechanism, SkellamMechanism) and mechanism.num_shares != 1:
            raise InvalidInput("num_shares", "1 for a release of its own", mechanism.num_shares, "Use door.share(...).")
        event = self._pay(mechanism, bounded)
        counts = self.draws.noisy_counts(mechanism, bounded, event)
        return Release(
            blocks=bounded.decode(counts),
            stddevs=mechanism.stddevs(bounded),
            event=event,
            is_private=self.draws.is_private,
        )

    def share(self, mechanism: SkellamMechanism, bounded: Bounded) -> Share:
        """Pay for the secure sum that this share goes into, then draw the share."""
        event = self._pay(mechanism, bounded)
        return Share(counts=self.draws.share(mechanism, bounded, event), event=event, is_private=self.draws.is_private)

    def randomise(self, answers: np.ndarray, *, categories: int, gamma: float) -> Release:
        """Each row's category by k-ary randomised response; rows are disjoint, so the price is that of one."""
        self.check_unit(Unit.ROW)
        answers = np.asarray(answers)
        event = RandomisedResponseEvent(categories=categories, gamma=gamma)
        in_range = answers.size == 0 or (answers.min() >= 0 and answers.max() < categories)
        if answers.dtype.kind not in "iu" or not in_range:
            # The offending answer is somebody's: it must not appear in the message.
            raise InvalidInput("answers", f"integers in [0, {categories})", "others", "List every category.")
        self.account.charge(event)
        value = self.draws.answers(answers, event)
        return Release(blocks=(value,), stddevs=(), event=event, is_private=self.draws.is_private)

    def _pay(self, mechanism: AbstractMechanism, bounded: Bounded) -> AbstractEvent:
        self.check_unit(bounded.unit)
        event = mechanism.event(bounded, self.account.relation)
        self.account.charge(event)
        return event

    def check_unit(self, unit: Unit) -> None:
        """Refuse a value bounded per `unit` if the account protects another one."""
        if unit is not self.account.unit:
            raise InvalidInput(
                "unit", f"a value bounded per {self.account.unit.value}", unit.value, "Bound what one unit can change."
            )
