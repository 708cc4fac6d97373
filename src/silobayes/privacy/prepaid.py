"""Paying for a whole study at once.

A study fixes its rounds beforehand, so its whole price can be charged before the first draw; each release then uses up
a part of what was paid. Resuming after a crash charges nothing again: a round that was not checkpointed was not
released either, and its draws died with the process.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from silobayes.core.errors import BudgetExceeded
from silobayes.privacy.door import Account
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.relation import Relation, Unit


@dataclass
class Prepaid:
    """What was charged to `account`, to be used up: `remaining` says how often each event can still be taken.

    Guarantees:
        Nothing but an event that was paid can be taken.
        No more runs can be taken than were paid.
    """

    account: Account
    remaining: Counter[AbstractEvent]

    @classmethod
    def of(cls, account: Account, paid: Iterable[AbstractEvent], taken: Iterable[AbstractEvent] = ()) -> "Prepaid":
        """What is left of the events `paid` after those `taken`."""
        remaining: Counter[AbstractEvent] = Counter()
        for sign, events in ((1, paid), (-1, taken)):
            for event in events:
                remaining[_one_run(event)] += sign * event.count
        return cls(account=account, remaining=remaining)

    @property
    def relation(self) -> Relation:
        """See `Account`."""
        return self.account.relation

    @property
    def unit(self) -> Unit:
        """See `Account`."""
        return self.account.unit

    def charge(self, event: AbstractEvent) -> None:
        """Use up `event.count` of the runs that were paid."""
        run = _one_run(event)
        left = self.remaining.get(run)
        if left is None:
            raise BudgetExceeded(f"Expected an event that was paid, got {event}. Pay for it first.")
        if not event.count <= left:
            raise BudgetExceeded(f"Expected at most {left} more runs, got {event.count}. Pay for them first.")
        self.remaining[run] = left - event.count


def _one_run(event: AbstractEvent) -> AbstractEvent:
    return event if event.count == 1 else dataclasses.replace(event, count=1)
