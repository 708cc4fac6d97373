"""The least noise that keeps a budget, and who draws it: a silo for itself, or all silos of a sum together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from silobayes.privacy.accounting import calibrate
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.ledger import Budget
from silobayes.privacy.mechanisms import AbstractMechanism, GaussianMechanism, SkellamMechanism
from silobayes.privacy.queries import OpenSum, PrivateSum
from silobayes.studies.study import AggregationKind, AggregationSection

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Makes the queries of visits of `together` silos: the one place where own noise or shares are chosen."""

    section: AggregationSection
    together: int

    @property
    def is_used(self) -> bool:
        """Whether answers are added up before anybody sees them."""
        return self.section.kind is not AggregationKind.NONE

    def mechanism(self, noise_multiplier: float) -> AbstractMechanism:
        """The noise of a release: each silo's own, or of the sum."""
        if not self.is_used:
            return GaussianMechanism(noise_multiplier=noise_multiplier)
        num_shares = self.section.num_shares(self.together)
        return SkellamMechanism(noise_multiplier=noise_multiplier, num_shares=num_shares)

    def open(self) -> OpenSum:
        """For answers that need no (more) noise."""
        return OpenSum(together=self.together if self.is_used else None)

    def private(
        self,
        layouts: Sequence[Bounded],
        noise_multipliers: Sequence[float],
        budget: Budget,
        *,
        num_terms: int,
        num_sums: int,
    ) -> PrivateSum:
        """For answers like `layouts`, of up to `num_terms` terms each, asked for up to `num_sums` times."""
        return PrivateSum(
            relation=budget.relation,
            layouts=tuple(layouts),
            mechanisms=tuple(self.mechanism(noise) for noise in noise_multipliers),
            num_terms=num_terms,
            num_sums=num_sums,
            together=self.together,
        )


def noise_multipliers(
    keys: Sequence[Key],
    event_of: Callable[[Key], Callable[[float], AbstractEvent]],
    budget: Budget,
    *,
    besides: tuple[AbstractEvent, ...] = (),
) -> list[float]:
    """The least noise of each key within the budget; equal keys are calibrated once."""
    known: dict[Key, float] = {}
    for key in keys:
        if key not in known:
            known[key] = least_noise(event_of(key), budget, besides=besides)
    return [known[key] for key in keys]


def least_noise(
    event_of: Callable[[float], AbstractEvent | tuple[AbstractEvent, ...]],
    budget: Budget,
    *,
    besides: tuple[AbstractEvent, ...] = (),
) -> float:
    """The least noise with which the event, or the events together, beside others keep the budget."""
    tried: dict[AbstractEvent | tuple[AbstractEvent, ...], float] = {}

    def at(noise: float) -> AbstractEvent | tuple[AbstractEvent, ...]:
        event = event_of(noise)
        tried[event] = noise
        return event

    chosen = calibrate(at, relation=budget.relation, epsilon=budget.epsilon, delta=budget.delta, besides=besides)
    return tried[chosen]  # the number that was priced, not one recomputed from the event
