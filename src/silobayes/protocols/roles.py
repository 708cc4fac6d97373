"""Who does what in a visit: silos, which have rows, and a server that only ever sees a sum (DESIGN 3).

    server.down(state, visit)                           # what goes to the visited silos
    silo.draw(door, seat, visit)                        # batches and the noise of loops: charged, then drawn
    silo.solve(rows, own, down, drawn, key)             # pure JAX; the only function that sees a row
    silo.reply(door, seat, own, down, found)            # clip, noise or a share of it, write
    server.merge(state, visit, total)                   # the sum, nothing else

A role holds public numbers only. What changes is state: a silo's stays with the silo, the server's is public. A silo
role has no leading axis; an engine may map `solve` over silos of one shape, which changes nothing.

States, downs and what is found are pytrees of arrays of any kind. States are float64 host arrays, so that factors add
up to the last digits over any number of visits; `solve` gets them as float32.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from silobayes.inference.layouts import AbstractLayout
from silobayes.posteriors import AbstractPosterior
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.loops import StepPlan
from silobayes.privacy.queries import Message, Total
from silobayes.privacy.sampling import Sampler
from silobayes.protocols.schedule import Visit

State = TypeVar("State")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One silo's public numbers in the plan.

    Attributes:
        index: Its number in the study.
        size: Its public number of rows, or of persons where batches are of persons.
        layout: How its rows lie in slots.
        sampler: How its batches are drawn, where they are.
        noise_multiplier: Of its own loops, where it has such.
    """

    index: int
    size: int
    layout: AbstractLayout
    sampler: Sampler | None = None
    noise_multiplier: float | None = None

    def own_loop(self, loop: StepPlan) -> StepPlan:
        """The same loop with the silo's own batches and noise."""
        assert self.sampler is not None
        assert self.noise_multiplier is not None
        return replace(loop, sampler=self.sampler, noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractSilo(abc.ABC, Generic[State]):
    """Runs where rows are.

    Attributes:
        query: What a visit asks, an `AbstractQuery`.
        solve: What is computed from rows, as a pytree that compiled code takes as an argument: `solve(rows, own, down,
            drawn, key)`, mapped over silos. None in a visit without rows.
    """

    query: Any
    solve: Any

    @abc.abstractmethod
    def init(self, seat: Seat) -> State:
        """Before the first visit."""

    @abc.abstractmethod
    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> Any:
        """What `solve` needs drawn: paid, then drawn; () if nothing."""

    def against(self, own: State, down: Any) -> Any:
        """What `solve` gets as `own`: the state, or what it makes of it in float64 (a cavity)."""
        return own

    @abc.abstractmethod
    def reply(self, door: Door | None, seat: Seat, own: State, down: Any, found: Any) -> tuple[State, Message]:
        """The silo's new state and its answer."""

    @abc.abstractmethod
    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """What so many visits cost, without a row; () where they cost nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Merged(Generic[State]):
    """The server's new state. A visit that did not count leaves no trace, in silos' states neither."""

    state: State
    counted: bool


class AbstractServer(abc.ABC, Generic[State]):
    """Never sees a row, nor one silo's message where a sum hides it."""

    @abc.abstractmethod
    def init(self) -> State:
        """Before the first visit."""

    @abc.abstractmethod
    def down(self, state: State, visit: Visit) -> Any:
        """What visited silos answer to."""

    @abc.abstractmethod
    def merge(self, state: State, visit: Visit, total: Total) -> Merged[State]:
        """The state after the visit."""

    @abc.abstractmethod
    def posterior(self, state: State) -> AbstractPosterior:
        """What the state stands for."""

    @abc.abstractmethod
    def info(self, state: State) -> dict[str, Any]:
        """What a person may look at after a visit, for the trace: JSON-able and public."""

    def facts(self, state: State) -> dict[str, Any]:
        """What the certificate says of the run besides its price."""
        return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A method, worked out for a study and public sizes: no row was read.

    Attributes:
        visits: All of them, fixed beforehand.
        seats: One per silo.
        silos: The silo role of each part of the method; `Visit.part` says which one a visit is of.
        server: The server's role, of all parts.
        numbers: How many numbers go down, and up, in one exchange.
        stretch: All steps of a visit in one compiled loop, for an engine that holds all rows; or None.
        expected: Covariances of coefficients, without and with privacy, for made-up rows; None where it cannot be told.
    """

    visits: tuple[Visit, ...]
    seats: tuple[Seat, ...]
    silos: tuple[AbstractSilo, ...]
    server: AbstractServer = field(repr=False)
    numbers: int
    stretch: Callable[..., Merged] | None = None
    expected: Callable[[Any], Any] | None = None

    def events(self, silo: int, num_visits: int | None = None) -> tuple[AbstractEvent, ...]:
        """What a silo pays for the study, or for its first `num_visits` visits."""
        parts = self._parts[silo][:num_visits]
        paid: list[AbstractEvent] = []
        for part, role in enumerate(self.silos):
            count = parts.count(part)
            paid += role.events(self.seats[silo], count) if count else ()
        return tuple(paid)

    @cached_property
    def _parts(self) -> list[list[int]]:
        """Of which part each visit of each silo is: thousands of silos, each visited often, are walked through once."""
        found: list[list[int]] = [[] for _ in self.seats]
        for visit in self.visits:
            for silo in visit.silos:
                found[silo].append(visit.part)
        return found

    @cached_property
    def total_events(self) -> tuple[tuple[AbstractEvent, ...], ...]:
        """What each silo pays for the whole study."""
        return tuple(self.events(silo) for silo in range(len(self.seats)))
