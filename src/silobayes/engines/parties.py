"""All silos of a run in this process: draws one by one, solves side by side, replies one by one.

Silos of one shape are stacked and a role's `solve` is mapped over them, in one place (`_solve_all`), so that each shape
compiles once. Batched = one by one, to float32 rounding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from silobayes.data.silo import Silo
from silobayes.engines.loop import AbstractParties
from silobayes.inference.layouts import stacked
from silobayes.inference.rows import Rows
from silobayes.plans.aggregation import sum_of
from silobayes.privacy.door import Door
from silobayes.privacy.queries import Message, Total
from silobayes.protocols.roles import Merged, Plan
from silobayes.protocols.schedule import Visit
from silobayes.secure.sums import AbstractSum
from silobayes.studies.study import AggregationSection

# What is worked on side by side shall fit the processor's cache.
_CACHED_NUMBERS = 1 << 17

DoorOf = Callable[[int, int], Door | None]


class _Stack:
    """Silos of one shape: their numbers, ascending, and their rows with a leading axis."""

    def __init__(self, members: np.ndarray, rows: Rows) -> None:
        self.members, self.rows = members, rows

    def take(self, chosen: np.ndarray) -> Rows:
        """The rows of some of them."""
        places = np.searchsorted(self.members, chosen)
        if np.array_equal(places, np.arange(len(self.members))):
            return self.rows
        return jax.tree.map(lambda leaf: leaf[places], self.rows)


class LocalParties(AbstractParties):
    """Every silo in this process.

    Args:
        plan: Of the study.
        silos: Their rows, in the order of the plan's seats.
        door_of: The door of a silo in a visit; None without privacy.
        section: How answers are added up.
        identity: Names the study in secure sums.

    Guarantees:
        - batched = one by one
        - the total is the same with every kind of sum
        - the result does not depend on how silos are stacked
    """

    def __init__(
        self, plan: Plan, silos: Sequence[Silo], door_of: DoorOf, section: AggregationSection, identity: str = "0" * 64
    ) -> None:
        self.plan, self.door_of, self.section, self.identity = plan, door_of, section, identity
        self.states: list[Any] = [plan.silos[0].init(seat) for seat in plan.seats]
        self._stacks = _stacks(plan, silos)
        self._sums: dict[int, AbstractSum] = {}
        self._num_sums = 0
        self._doors: tuple[int, dict[int, Door | None]] = (-1, {})
        self._messages: list[Message] = []
        self._pending: list[Any] = []

    def ask(self, visit: Visit, down: Any) -> None:
        """See `AbstractParties`."""
        silo, seats = self.plan.silos[visit.part], self.plan.seats
        drawn = [silo.draw(self._door(m, visit), seats[m], visit) for m in visit.silos]
        found: list[Any] = [()] * len(visit.silos)
        if silo.solve is not None:
            found = self._solve(silo.solve, visit, down, drawn)
        replies = [
            silo.reply(self._door(m, visit), seats[m], self.states[m], down, own)
            for m, own in zip(visit.silos, found, strict=True)
        ]
        self._pending = [state for state, _ in replies]
        self._messages = [message for _, message in replies]

    def total(self, visit: Visit) -> Total:
        """See `AbstractParties`."""
        query = self.plan.silos[visit.part].query
        payloads = {m: message.payload for m, message in zip(visit.silos, self._messages, strict=True)}
        if query.modulus is None:
            return Total(payload=np.sum(list(payloads.values()), axis=0), members=visit.silos)
        if visit.part not in self._sums:
            self._sums[visit.part] = sum_of(self.section, query, len(self.plan.seats), self.identity)
        self._num_sums += 1
        total = self._sums[visit.part].total(payloads, sum_index=self._num_sums, among=visit.silos)
        return Total(payload=total, members=visit.silos)

    def settle(self, visit: Visit, counted: bool) -> None:
        """See `AbstractParties`."""
        if counted:
            for m, state in zip(visit.silos, self._pending, strict=True):
                self.states[m] = state
        self._pending, self._messages = [], []

    def stretch(self, state: Any, visit: Visit) -> Merged | None:
        """See `AbstractParties`; how, the plan says."""
        if self.plan.stretch is None:
            return None
        return self.plan.stretch(
            state, visit, self.plan.seats, [(stack.members, stack.rows) for stack in self._stacks], self._door
        )

    def _door(self, silo: int, visit: Visit) -> Door | None:
        """One door a silo and visit."""
        number, doors = self._doors
        if number != visit.number:
            doors = {}
            self._doors = (visit.number, doors)
        if silo not in doors:
            doors[silo] = self.door_of(silo, visit.number)
        return doors[silo]

    def _solve(self, solve: Any, visit: Visit, down: Any, drawn: Sequence[Any]) -> list[Any]:
        """What is found in the rows of each visited silo, in order; unstacked on the host.

        The number of silos in one call is a power of two or all of a shape, so that visits of ever changing subsets
        compile a few times only; the surplus repeats a silo and is dropped.
        """
        chosen = np.array(visit.silos)
        found: list[Any] = [None] * len(chosen)
        for stack in self._stacks:
            positions = np.flatnonzero(np.isin(chosen, stack.members))
            if len(positions) == 0:
                continue
            count = min(1 << (len(positions) - 1).bit_length(), len(stack.members))
            padded = np.concatenate([positions, np.repeat(positions[:1], count - len(positions))])
            # In the order of the stack, so that all of it needs no copy.
            padded = padded[np.argsort(chosen[padded], kind="stable")]
            own = stacked([self.states[m] for m in chosen[padded]])
            rows, draws = stack.take(chosen[padded]), stacked([drawn[k] for k in padded])
            results = _solve_all(solve, rows, own, down, draws, chosen[padded], side_by_side=_side_by_side(solve, rows))
            leaves, structure = jax.tree.flatten(results)
            on_host = [np.asarray(leaf) for leaf in leaves]
            for place, position in enumerate(padded.tolist()):
                found[position] = jax.tree.unflatten(structure, [leaf[place] for leaf in on_host])
        return found


@partial(jax.jit, static_argnames="side_by_side")
def _solve_all(solve, rows, own, down, drawn, numbers, *, side_by_side):
    key = getattr(down, "key", None)
    key = jax.random.key(0) if key is None else key

    def one(silo):
        own_rows, state, draws, number = silo
        return solve(own_rows, state, down, draws, jax.random.fold_in(key, number))

    return jax.lax.map(one, (rows, own, drawn, numbers), batch_size=side_by_side)


def _side_by_side(solve: Any, rows: Rows) -> int | None:
    """How many silos are worked on at a time: small ones together, large ones one after the other."""
    if not solve.side_by_side:
        return None
    return max(1, _CACHED_NUMBERS // (rows.x.size // rows.x.shape[0]))


def _stacks(plan: Plan, silos: Sequence[Silo]) -> list[_Stack]:
    """Silos of one shape together, from the largest to the smallest."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for seat in plan.seats:
        by_shape.setdefault(seat.layout.shape, []).append(seat.index)
    stacks = []
    for _, members in sorted(by_shape.items(), reverse=True):
        layouts = [plan.seats[m].layout for m in members]
        stacks.append(_Stack(np.array(members), layouts[0].lay_out([silos[m] for m in members], layouts)))
    return stacks
