"""The one loop, and who answers it (SEAM): the server says something, parties answer, only their sum comes back.

parties.ask(visit, down)            # draw, solve, reply
total = parties.total(visit)
merged = server.merge(state, visit, total)
parties.settle(visit, merged.counted)
"""

import abc
from typing import Any

from silobayes.privacy.queries import Total
from silobayes.protocols.roles import Merged, Plan
from silobayes.protocols.schedule import Visit


class AbstractParties(abc.ABC):
    """The silos of a run, wherever they are. At most one visit is in flight."""

    @abc.abstractmethod
    def ask(self, visit: Visit, down: Any) -> None:
        """Let the visited silos answer."""

    @abc.abstractmethod
    def total(self, visit: Visit) -> Total:
        """The sum of their answers, which is all that anybody sees of a sum."""

    @abc.abstractmethod
    def settle(self, visit: Visit, counted: bool) -> None:
        """Silos move to their new states; a visit that did not count leaves no trace."""

    @abc.abstractmethod
    def stretch(self, state: Any, visit: Visit) -> Merged | None:
        """All steps of a visit at once, where these parties can; None where they cannot."""


def make_visit(plan: Plan, parties: AbstractParties, state: Any, visit: Visit) -> Any:
    """The server's state after a visit."""
    merged = parties.stretch(state, visit)
    if merged is not None:
        return merged.state
    for _ in range(visit.steps):
        parties.ask(visit, plan.server.down(state, visit))
        merged = plan.server.merge(state, visit, parties.total(visit))
        parties.settle(visit, merged.counted)
        state = merged.state
    return state
