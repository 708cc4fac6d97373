"""Global VI (SPEC 3, baselines): one optimisation over the union of rows, one sum over silos per step.

A silo's message is the (clipped, noised) gradient of its own rows' likelihood term; the server adds them up, subtracts
the KL term, which needs no rows, and takes one step of Adam. Communications are counted as what they are: one message
up and down per silo and *step*, so a visit of `steps` steps is as many exchanges. Where each silo adds a noise of its
own a local engine may run all steps of a visit in one compiled loop (`run_steps`), with the same float32 noise.

Guarantees:
    - without privacy it reaches the optimum of global VI
    - one changed row moves each released sum by no more than is priced
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from silobayes.inference.ascent import step_sizes_of
from silobayes.inference.coordinates import AbstractPoint, point_at
from silobayes.inference.global_steps import (
    OPTIMISER,
    ChunkGradients,
    Group,
    Position,
    ReleasedGradient,
    WholeGradient,
    bounded_step,
    chunked,
    compiled_server_step,
    draws_of,
    run_steps,
)
from silobayes.inference.layouts import stacked
from silobayes.inference.solvers import LocalOptimum, usable
from silobayes.posteriors import Posterior
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.loops import StepPlan, close_steps
from silobayes.privacy.queries import Message, OpenSum, PrivateSum, Total
from silobayes.privacy.relation import Unit
from silobayes.protocols import pvi
from silobayes.protocols.etas import Eta, eta_info, is_in_range, to_host, to_single
from silobayes.protocols.roles import AbstractServer, AbstractSilo, Merged, Seat
from silobayes.protocols.schedule import Visit


class ServerState(eqx.Module):
    """Coordinates of q, the optimiser's state, and how many steps were taken; public."""

    point: AbstractPoint
    adam: Any
    num_steps: int
    num_visits: int
    num_counted: int


class Down(eqx.Module):
    """Where the gradient is asked for, and the step's reparameterised draw (None for models that need none)."""

    point: AbstractPoint
    draw: Array | None


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenSilo(AbstractSilo[tuple[()]]):
    """Without privacy."""

    solve: WholeGradient
    query: OpenSum

    def init(self, seat: Seat) -> tuple[()]:
        """Nothing."""
        return ()

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> tuple[()]:
        """Nothing."""
        return ()

    def reply(
        self, door: Door | None, seat: Seat, own: tuple[()], down: Down, found: Array
    ) -> tuple[tuple[()], Message]:
        """See `AbstractSilo`."""
        return own, self.query.write(np.asarray(found))

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """Nothing."""
        return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class NoisySilo(AbstractSilo[tuple[()]]):
    """With a noise of its own. `loop` says what all steps of a visit cost."""

    solve: ReleasedGradient
    query: OpenSum
    loop: StepPlan

    def init(self, seat: Seat) -> tuple[()]:
        """Nothing."""
        return ()

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> Any:
        """Batch and noise of one step."""
        return pvi.draw_loop(door, dataclasses.replace(seat.own_loop(self.loop), num_steps=1))

    def draw_visit(self, door: Door | None, seat: Seat) -> Any:
        """Batches and noise of all steps of a visit, for one compiled loop."""
        return pvi.draw_loop(door, seat.own_loop(self.loop))

    def reply(
        self, door: Door | None, seat: Seat, own: tuple[()], down: Down, found: tuple[Array, Any]
    ) -> tuple[tuple[()], Message]:
        """See `AbstractSilo`."""
        assert door is not None
        message, seen = found
        close_steps(door, seen)
        return own, self.query.write(np.asarray(message))

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """The loops of so many visits."""
        return (pvi.repeated(seat.own_loop(self.loop).event, num_visits),)


@dataclass(frozen=True, kw_only=True, eq=False)
class SharingSilo(AbstractSilo[tuple[()]]):
    """With a share of the noise of the sum: exact, on a grid. `capacity` is the largest batch of any silo."""

    solve: ChunkGradients
    query: PrivateSum
    clip_norm: float
    capacity: int
    unit: Unit
    num_steps: int

    def init(self, seat: Seat) -> tuple[()]:
        """Nothing."""
        return ()

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> tuple[np.ndarray, np.ndarray]:
        """A batch."""
        assert door is not None
        assert seat.sampler is not None
        return chunked(door.batch(seat.sampler).indices, seat.sampler, self.solve.rows_per_unit)

    def reply(
        self, door: Door | None, seat: Seat, own: tuple[()], down: Down, found: Array
    ) -> tuple[tuple[()], Message]:
        """See `AbstractSilo`."""
        assert door is not None
        return own, self.query.write(door, seat.index, self.bounded(seat, np.asarray(found)))

    def bounded(self, seat: Seat, partial_sums: np.ndarray) -> Bounded:
        """The sum over chunks, ready for the door."""
        assert seat.sampler is not None
        public: dict[str, Any] = {"capacity": self.capacity, "unit": self.unit}
        return bounded_step(partial_sums, self.clip_norm, seat.sampler, self.solve.rows_per_unit, **public)

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """A release for each step."""
        return (pvi.repeated(self.query.event(seat.index), num_visits * self.num_steps),)


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalVIServer(AbstractServer[ServerState]):
    """One step of Adam a sum.

    Attributes:
        local: Of the model and its family.
        query: What a step asks.
        sample_rate: What sums of batches are divided by; 1 where silos did.
        names: Of the model's parameters.
        eta_p: The prior.
        first_start: Where the optimisation starts.
        seed: Of model randomness.
        num_visits: Of the whole study.
        steps: Of a visit.
        is_private: Whether a q that runs away loses a step instead of ending the study.
    """

    local: LocalOptimum
    query: OpenSum | PrivateSum
    sample_rate: float
    names: tuple[str, ...]
    eta_p: Eta
    first_start: Eta
    seed: int
    num_visits: int
    steps: int
    is_private: bool

    def init(self) -> ServerState:
        """The start."""
        point = point_at(self.local.family, self.first_start)
        adam = OPTIMISER.init(jnp.zeros(point.num_coordinates))
        state = ServerState(point=point, adam=adam, num_steps=0, num_visits=0, num_counted=0)
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, int) else np.asarray(leaf), state)

    def down(self, state: ServerState, visit: Visit) -> Down:
        """See `AbstractServer`."""
        draws = self.draws(visit)
        return Down(point=state.point, draw=None if draws is None else draws[state.num_steps % self.steps])

    def draws(self, visit: Visit) -> Array | None:
        """The reparameterised draws of a visit."""
        key = jax.random.fold_in(jax.random.key(self.seed), visit.number)
        return draws_of(self.local.model, key, self.steps)

    def step_sizes(self, visit: Visit) -> Array:
        """Adam's step sizes in a visit: they fall over the whole study."""
        sizes = step_sizes_of(self.local.step_size, self.steps * self.num_visits)
        return sizes[visit.number * self.steps : (visit.number + 1) * self.steps]

    def merge(self, state: ServerState, visit: Visit, total: Total) -> Merged[ServerState]:
        """See `AbstractServer`."""
        read = self.query.read(total)
        gradient = (read if isinstance(read, np.ndarray) else read.value) / self.sample_rate
        size = self.step_sizes(visit)[state.num_steps % self.steps]
        before = Position(point=state.point, adam=state.adam)
        after = compiled_server_step(before, gradient.astype(np.float32), to_single(self.eta_p), size)
        return self.moved(state, after, 1)

    def moved(self, state: ServerState, after: Position, num_steps: int) -> Merged[ServerState]:
        """The state after so many steps, unless q would run away."""
        after = jax.tree.map(np.asarray, after)
        counted = is_in_range(to_host(after.point.to_eta()))
        if not counted:
            pvi.refuse_if_open(self.is_private, state.num_visits)
            after = Position(point=state.point, adam=state.adam)
        done = state.num_steps + num_steps
        ends_visit = done % self.steps == 0
        new = ServerState(
            point=after.point,
            adam=after.adam,
            num_steps=done,
            num_visits=state.num_visits + int(ends_visit),
            num_counted=state.num_counted + int(ends_visit and counted),
        )
        return Merged(state=new, counted=counted)

    def posterior(self, state: ServerState) -> Posterior:
        """See `AbstractServer`."""
        return Posterior(family=self.local.family, eta=self._usable(state), names=self.names, model=self.local.model)

    def info(self, state: ServerState) -> dict[str, Any]:
        """The present q."""
        return eta_info(self._usable(state))

    def facts(self, state: ServerState) -> dict[str, Any]:
        """Visits that had no effect: q would have run away."""
        skipped = state.num_visits - state.num_counted
        return {"visits_without_effect": skipped} if skipped else {}

    def _usable(self, state: ServerState) -> Eta:
        eta_q = self.eta_p if state.num_steps == 0 else to_host(state.point.to_eta())
        return usable(self.local.family, to_single(eta_q), self.local.floor)


def stretch(
    server: GlobalVIServer,
    silo: OpenSilo | NoisySilo,
    state: ServerState,
    visit: Visit,
    seats: Sequence[Seat],
    stacks: Sequence[tuple[np.ndarray, Any]],
    doors: Mapping[int, Door | None],
) -> Merged[ServerState]:
    """All steps of a visit in one compiled loop; `stacks` are the silos' rows, silos of one shape side by side."""
    opened: dict[int, Any] = {}
    if isinstance(silo, NoisySilo):
        opened = {m: silo.draw_visit(doors[m], seats[m]) for m in visit.silos}
    groups = tuple(
        Group(
            rows=rows,
            steps=stacked([opened[m][0] for m in members]) if opened else None,
            sample_rates=np.array([opened[m][1] for m in members]) if opened else None,
        )
        for members, rows in stacks
    )
    before = Position(point=state.point, adam=state.adam)
    public = (server.draws(visit), server.step_sizes(visit))
    after, seen = run_steps(silo.solve, server.eta_p, before, groups, *public)
    for (members, _), collected in zip(stacks, seen, strict=True):
        for position, m in enumerate(members.tolist()):
            door = doors[m]
            if collected is not None and door is not None:
                close_steps(door, tuple(leaf[position] for leaf in collected))
    return server.moved(state, after, visit.steps)
