"""Paying for a whole study at once.

A study fixes its rounds beforehand, so its whole price can be charged before the first draw; each release then uses up
a part of what was paid. Resuming after a crash charges nothing again: a round that was not checkpointed was not
released either, and its draws died with the process.
"""

import dataclasses
from dataclasses import dataclass

from silobayes.core.errors import BudgetExceeded
from silobayes.privacy.door import Account
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.relation import Relation, Unit


@dataclass
class Prepaid:
    """What was charged to `account`, to be used up: only `event` can be taken, `remaining` times.

    Guarantees:
        Nothing but the event that was paid can be taken.
        No more runs can be taken than were paid.
    """

    account: Account
    event: AbstractEvent
    remaining: int

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
        if dataclasses.replace(event, count=1) != dataclasses.replace(self.event, count=1):
            raise BudgetExceeded(f"Expected the event that was paid ({self.event}), got {event}. Pay for it first.")
        if not event.count <= self.remaining:
            raise BudgetExceeded(f"Expected at most {self.remaining} more runs, got {event.count}. Pay for them first.")
        self.remaining -= event.count
