"""From settings to something that can be stepped: which protocol, which solver, what each silo pays in total.

A method is pure: `step(state, index, doors)` maps a state to the next one and touches rows only through its solver and
the doors it is handed. States are pytrees of host arrays and integers, so they can be checkpointed and compared.
"""

import abc
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np

from silobayes.engines.buckets import Buckets
from silobayes.engines.solvers import LocalSolver
from silobayes.inference.row_gradients import Clipping
from silobayes.models.base import GaussianEta, GaussianFamily
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.loops import StepPlan
from silobayes.privacy.relation import Relation
from silobayes.protocols import dp_pvi, pvi
from silobayes.protocols.schedule import Visit, visits_per_client

# An asynchronous client may answer to a broadcast of so many steps ago.
_MAX_LAG = 3


class RunState(eqx.Module):
    """Everything a run needs to go on.

    `recent[k]` is the broadcast of k steps ago; `eta_sum / num_averaged` is the average of q over the last half of the
    steps. `clients` may hold private state (virtual clients), so a run state must not leave the machine.
    """

    step: int
    server: pvi.ServerState
    clients: Any
    recent: GaussianEta
    eta_sum: GaussianEta
    num_averaged: int
    prior: pvi.ClientState


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractMethod(abc.ABC):
    """What the engine runs.

    Attributes:
        visits: All steps, fixed beforehand.
        solver: Local optimisation.
        eta_p: The (stand-in for the) prior.
        damping: Of every change.
        seed: Of model randomness.
        averages: Whether the answer is the average of q over the last half of the steps.
        posterior_floor: Precisions below it are raised in the answer and in starts (cavities have the solver's own).
        exchanges_per_visit: Messages down and up that one visit stands for.
    """

    visits: tuple[Visit, ...]
    solver: LocalSolver
    eta_p: GaussianEta
    damping: float
    seed: int
    averages: bool
    posterior_floor: float
    exchanges_per_visit: int = 1

    @abc.abstractmethod
    def init_clients(self) -> Any:
        """State of all clients before the first visit."""

    @abc.abstractmethod
    def total_events(self) -> tuple[AbstractEvent | None, ...]:
        """What each silo pays for the whole study; None where nothing is released."""

    @abc.abstractmethod
    def client_step(
        self, clients: Any, down: pvi.Broadcast, at: np.ndarray, start: GaussianEta, key: Any, doors: Sequence[Door]
    ) -> tuple[Any, pvi.Upload]:
        """All clients' new states, and the stacked uploads of those numbered `at`; solvers start at `start`."""

    def init(self) -> RunState:
        """Start from the prior; every factor is 1."""
        server = pvi.init_server(self.eta_p)
        return RunState(
            step=0,
            server=server,
            clients=self.init_clients(),
            recent=jax.tree.map(lambda leaf: np.repeat(leaf[None], _MAX_LAG + 1, axis=0), server.eta_q),
            eta_sum=jax.tree.map(np.zeros_like, server.eta_q),
            num_averaged=0,
            prior=pvi.ClientState(eta_t=server.eta_q),
        )

    def step(self, state: RunState, doors: Sequence[Door]) -> RunState:
        """The next visit; `doors` are those of the visited silos, in order (none without privacy)."""
        visit = self.visits[state.step]
        at = np.array(visit.clients)
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        down = pvi.Broadcast(eta_q=_take(state.recent, visit.lag))
        start = self._start(state, down)
        clients, ups = self.client_step(state.clients, down, at, start, key, doors)
        total = pvi.plain_sum(ups)
        prior = state.prior
        if not self.solver.model.prior_is_gaussian:
            prior, up = self._prior_step(state.prior, pvi.broadcast(state.server), start, key)
            total = pvi.Upload(d_eta=total.d_eta + up.d_eta)
        server = pvi.server_step(state.server, total)
        counts = self.averages and 2 * (state.step + 1) > len(self.visits)
        return RunState(
            step=state.step + 1,
            server=server,
            clients=clients,
            recent=jax.tree.map(lambda new, old: np.concatenate([new[None], old[:-1]]), server.eta_q, state.recent),
            eta_sum=state.eta_sum + server.eta_q if counts else state.eta_sum,
            num_averaged=state.num_averaged + int(counts),
            prior=prior,
        )

    def eta(self, state: RunState) -> GaussianEta:
        """The usable posterior: of the average over the last half of the steps where noise makes that better."""
        raw = state.server.eta_q
        if state.num_averaged:
            raw = (1.0 / state.num_averaged) * state.eta_sum
        return pvi.usable(self.solver.family, raw, self.posterior_floor)

    def current(self, state: RunState) -> GaussianEta:
        """The usable version of the present q, for traces."""
        return pvi.usable(self.solver.family, state.server.eta_q, self.posterior_floor)

    def _start(self, state: RunState, down: pvi.Broadcast) -> GaussianEta:
        if state.step == 0:
            return self.solver.model.start_eta(self.solver.family, jax.random.key(self.seed))
        return pvi.usable(self.solver.family, down.eta_q, self.posterior_floor)

    def _prior_step(self, prior: pvi.ClientState, down: pvi.Broadcast, start: GaussianEta, key: Any) -> tuple:
        """A prior that is not Gaussian is one more factor, without rows and without a price."""

        def solve(eta_cavity: GaussianEta, _: GaussianEta) -> GaussianEta:
            return self.solver.solve_prior(key, eta_cavity, start)

        return pvi.client_step(prior, down, solve, damping=self.damping)


@dataclass(frozen=True, kw_only=True, eq=False)
class PVIMethod(AbstractMethod):
    """PVI, without privacy (`plans` is None) or with DP optimisation (one plan per silo)."""

    buckets: Buckets
    plans: tuple[StepPlan, ...] | None
    clipping: Clipping

    def init_clients(self) -> pvi.ClientState:
        """See `AbstractMethod`."""
        return pvi.init_clients(self.solver.family, len(self.buckets.slots))

    def total_events(self) -> tuple[AbstractEvent | None, ...]:
        """See `AbstractMethod`."""
        counts = visits_per_client(self.visits, len(self.buckets.slots))
        if self.plans is None:
            return (None,) * len(counts)
        return tuple(
            dataclasses.replace(plan.event, count=plan.num_steps * count) if count else None
            for plan, count in zip(self.plans, counts, strict=True)
        )

    def client_step(self, clients, down, at, start, key, doors):
        """See `AbstractMethod`."""

        def solve(eta_cavity: GaussianEta, _: GaussianEta) -> GaussianEta:
            if self.plans is None:
                return self.solver.solve(self.buckets, at, key, eta_cavity, start)
            private = {"doors": doors, "plans": [self.plans[m] for m in at], "clipping": self.clipping}
            return self.solver.solve_privately(self.buckets, at, key, eta_cavity, start, **private)

        visited, ups = pvi.client_step(_take(clients, at), down, solve, damping=self.damping)
        return _put(clients, at, visited), ups


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbedMethod(AbstractMethod):
    """Local averaging or virtual clients; parameter perturbation is local averaging with one shard.

    `noise_multipliers` has one entry per client, because a client that is visited less often pays less.
    """

    shards: Buckets
    num_shards: int
    factor_per_shard: bool
    ball: dp_pvi.Ball
    noise_multipliers: tuple[float, ...]
    relation: Relation

    def init_clients(self) -> pvi.ClientState:
        """See `AbstractMethod`."""
        num_clients = len(self.noise_multipliers)
        states = pvi.init_clients(self.solver.family, num_clients * self.num_shards)
        if not self.factor_per_shard:
            return pvi.init_clients(self.solver.family, num_clients)
        return _reshape(states, (num_clients, self.num_shards))

    def total_events(self) -> tuple[AbstractEvent | None, ...]:
        """See `AbstractMethod`."""
        counts = visits_per_client(self.visits, len(self.noise_multipliers))
        return tuple(
            round_event(self.ball, self.solver.family, self.relation, noise_multiplier, count) if count else None
            for noise_multiplier, count in zip(self.noise_multipliers, counts, strict=True)
        )

    def client_step(self, clients, down, at, start, key, doors):
        """See `AbstractMethod`."""
        parts = (at[:, None] * self.num_shards + np.arange(self.num_shards)).reshape(-1)
        shape = (len(at), self.num_shards)
        tempering = 1.0 if self.factor_per_shard else float(self.num_shards)

        def solve(eta_cavity: GaussianEta, _: GaussianEta) -> GaussianEta:
            if not self.factor_per_shard:  # all shards of a client share its cavity
                eta_cavity = jax.tree.map(lambda leaf: np.repeat(leaf[:, None], self.num_shards, axis=1), eta_cavity)
            cavities = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), eta_cavity)
            optima = self.solver.solve(self.shards, parts, key, cavities, start, tempering=tempering)
            return _reshape(optima, shape)

        noise = [self.noise_multipliers[m] for m in at]
        step = dp_pvi.virtual_clients_step if self.factor_per_shard else dp_pvi.local_averaging_step
        visited, ups = step(doors, _take(clients, at), down, solve, self.ball, noise, damping=self.damping)
        return _put(clients, at, visited), ups


def round_event(
    ball: dp_pvi.Ball, family: GaussianFamily, relation: Relation, noise_multiplier: float, count: int
) -> AbstractEvent:
    """What `count` rounds of a perturbed method cost; needs no rows."""
    no_shards = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape)), family.zeros())
    event = dp_pvi.mechanism(noise_multiplier).event(ball.bounded_sum(no_shards), relation)
    return dataclasses.replace(event, count=count)


def _take(tree: Any, at: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], tree)


def _put(tree: Any, at: np.ndarray, new: Any) -> Any:
    def put(old: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = old.copy()
        out[at] = values
        return out

    return jax.tree.map(put, tree, new)


def _reshape(tree: Any, axes: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(*axes, *leaf.shape[1:]), tree)
