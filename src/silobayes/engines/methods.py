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
import jax.numpy as jnp
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.engines.aggregation import Aggregator
from silobayes.engines.buckets import Buckets
from silobayes.engines.solvers import LocalSolver
from silobayes.inference.noisy_factors import noise_aware
from silobayes.inference.row_gradients import Clipping
from silobayes.models.base import GaussianEta, GaussianFamily
from silobayes.models.mlp import AbstractMLP
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.loops import StepPlan
from silobayes.privacy.relation import Relation
from silobayes.protocols import dp_pvi, pvi
from silobayes.protocols.schedule import Visit, visits_per_client

# In units of the prior's standard deviation: a weight of a network beyond it is noise.
_FARTHEST_MEAN = 10.0
# Of a natural parameter that float32 code can still work with.
_LARGEST = 1e30
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
class Call:
    """One visit: its number, who is visited, what they answer to, where solvers start, their model randomness."""

    index: int
    at: np.ndarray
    down: pvi.Broadcast
    start: GaussianEta
    key: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractMethod(abc.ABC):
    """What the engine runs.

    Attributes:
        visits: All steps, fixed beforehand.
        num_clients: How many silos there are.
        solver: Local optimisation.
        eta_p: The (stand-in for the) prior.
        damping: Of every change.
        seed: Of model randomness.
        averages: Whether the answer is the average of q over the last half of the steps.
        posterior_floor: Precisions below it are raised in the answer and in starts (cavities have the solver's own).
        visits_before: How many visits come before the first round: they leave q as it is.
        exchanges_per_visit: Messages down and up that one visit stands for.
        aggregator: Who adds up the messages of a visit; None: everybody may see them.
    """

    visits: tuple[Visit, ...]
    num_clients: int
    solver: LocalSolver
    eta_p: GaussianEta
    damping: float
    seed: int
    averages: bool
    posterior_floor: float
    visits_before: int = 0
    exchanges_per_visit: int = 1
    aggregator: Aggregator | None = None

    @abc.abstractmethod
    def init_clients(self) -> Any:
        """State of all clients before the first visit."""

    @abc.abstractmethod
    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """What a client pays for its first `num_visits` visits; nothing where nothing is released."""

    def total_events(self) -> tuple[tuple[AbstractEvent, ...], ...]:
        """What each client pays for the whole study."""
        counts = visits_per_client(self.visits, self.num_clients)
        return tuple(self.events(client, count) for client, count in enumerate(counts))

    @abc.abstractmethod
    def client_step(self, clients: Any, call: Call, doors: Sequence[Door]) -> tuple[Any, pvi.Upload]:
        """All clients' new states, and the *sum* of the uploads of those that are called."""

    def init_eta(self) -> GaussianEta:
        """Q before the first visit: the product of the prior and the clients' first factors."""
        return self.eta_p

    def init(self) -> RunState:
        """Before the first visit."""
        server = pvi.init_server(self.init_eta())
        return RunState(
            step=0,
            server=server,
            clients=self.init_clients(),
            recent=jax.tree.map(lambda leaf: np.repeat(leaf[None], _MAX_LAG + 1, axis=0), server.eta_q),
            eta_sum=jax.tree.map(np.zeros_like, server.eta_q),
            num_averaged=0,
            prior=pvi.ClientState(eta_t=self.eta_p),
        )

    def step(self, state: RunState, doors: Sequence[Door]) -> RunState:
        """The next visit; `doors` are those of the visited silos, in order (none without privacy)."""
        visit = self.visits[state.step]
        down = pvi.Broadcast(eta_q=_take(state.recent, visit.lag))
        call = Call(
            index=state.step,
            at=np.array(visit.clients),
            down=down,
            start=self._start(state, down, visit.lag),
            key=jax.random.fold_in(jax.random.key(self.seed), state.step),
        )
        clients, total = self.client_step(state.clients, call, doors)
        prior = state.prior
        if not self.solver.model.prior_is_gaussian and state.step >= self.visits_before:
            prior, up = self._prior_step(state.prior, pvi.broadcast(state.server), call)
            total = pvi.Upload(d_eta=total.d_eta + up.d_eta)
        server = pvi.server_step(state.server, total)
        if not _is_usable(server.eta_q):
            if not doors:
                fix = "Lower protocol.damping and take more rounds, or make model.options.prior_stddev smaller."
                raise InvalidInput(
                    "protocol.damping", "a q that stays finite", f"one that ran away in visit {call.index}", fix
                )
            # The visit counts as made and changes nothing: what was paid for before is not lost. That depends on
            # released numbers only.
            clients, server, prior = state.clients, state.server, state.prior
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
        if not state.num_averaged:
            return self.current(state)
        # A visit is in the average as often as a state that came after it is.
        last = np.arange(state.step, 0, -1)
        weights = np.minimum(last, state.num_averaged) / state.num_averaged
        return self.usable((1.0 / state.num_averaged) * state.eta_sum, state, weights)

    def current(self, state: RunState) -> GaussianEta:
        """The usable version of the present q, for traces."""
        return self.usable(state.server.eta_q, state, np.ones(state.step))

    def usable(self, eta: GaussianEta, state: RunState, weights: np.ndarray) -> GaussianEta:
        """The proper posterior that a raw sum of prior and factors stands for.

        Args:
            eta: The raw sum, or an average of such sums.
            state: Of the run.
            weights: How much of the change of each visit so far is in `eta`.
        """
        return pvi.usable(self.solver.family, eta, self.posterior_floor)

    def released(self, state: RunState) -> dict[str, Any]:
        """What has been made public besides q, by name, for traces and certificates."""
        return {}

    def _start(self, state: RunState, down: pvi.Broadcast, lag: int) -> GaussianEta:
        if state.step <= self.visits_before:
            return self.first_start()
        return self.usable(down.eta_q, state, np.ones(max(0, state.step - lag)))

    def first_start(self) -> GaussianEta:
        """Where solvers start in the first visit."""
        return self.solver.model.start_eta(self.solver.family, jax.random.key(self.seed))

    def add_up(self, ups: pvi.Upload, call: Call) -> pvi.Upload:
        """The sum of a stack of uploads that need no (more) noise."""
        return pvi.plain_sum(ups) if self.aggregator is None else self.aggregator.add_up(ups, call.index)

    def _prior_step(self, prior: pvi.ClientState, down: pvi.Broadcast, call: Call) -> tuple:
        """A prior that is not Gaussian is one more factor, without rows and without a price."""

        def refit(eta_cavity: GaussianEta, _: GaussianEta) -> GaussianEta:
            return self.solver.refit_prior(call.key, eta_cavity, call.start)

        return pvi.client_step(prior, down, refit, damping=self.damping)


@dataclass(frozen=True, kw_only=True, eq=False)
class PVIMethod(AbstractMethod):
    """PVI, without privacy (`plans` is None) or with DP optimisation (one plan per silo)."""

    buckets: Buckets
    plans: tuple[StepPlan, ...] | None
    clipping: Clipping

    def init_clients(self) -> pvi.ClientState:
        """See `AbstractMethod`."""
        return pvi.init_clients(self.solver.family, self.num_clients)

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        return () if self.plans is None else repeated(self.plans[client].event, num_visits)

    def client_step(self, clients, call, doors):
        """See `AbstractMethod`."""

        def refit(eta_cavity: GaussianEta, _: GaussianEta) -> GaussianEta:
            if self.plans is None:
                return self.solver.refit(self.buckets, call.at, call.key, eta_cavity, call.start)
            private = {"doors": doors, "plans": [self.plans[m] for m in call.at], "clipping": self.clipping}
            return self.solver.refit_privately(self.buckets, call.at, call.key, eta_cavity, call.start, **private)

        own = _take(clients, call.at)
        visited, ups = pvi.client_step(own, call.down, refit, damping=self.damping)
        if self.aggregator is not None:
            ups = self.aggregator.rounded(ups)
            visited = pvi.ClientState(eta_t=own.eta_t + ups.d_eta)  # so that q stays the product of the factors
        return _put(clients, call.at, visited), self.add_up(ups, call)


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbedMethod(AbstractMethod):
    """Local averaging or virtual clients; parameter perturbation is local averaging with one shard.

    `noise_multipliers` has one entry per client, because a client that is visited less often pays less; with an
    aggregator they are equal, and a total has the noise of `num_clients / num_shares` of them. Private factors, one per
    shard, are those of virtual clients, and of all methods with an aggregator: there a client's own message is not
    released.

    q is read as a noisy observation (`inference.noisy_factors`). That would throw a network back to its prior, at which
    all hidden units are alike and predictions are wild. So a network's first factors are such that q is its start, its
    changes are clipped around the current mean, and q is read as it is: means are learned, while precisions stay near
    those of the start.
    """

    shards: Buckets
    shards_per_client: tuple[int, ...]
    averages_shards: bool
    ball: dp_pvi.Ball
    noise_multipliers: tuple[float, ...]
    num_shares: int
    relation: Relation

    def init_clients(self) -> pvi.ClientState:
        """See `AbstractMethod`."""
        shards = np.array(self.shards_per_client)
        owners = np.repeat(np.arange(self.num_clients), shards if self._factor_per_shard else 1)
        shares = (shards[owners] if self.averages_shards else np.ones(len(owners))) / shards.sum()
        first = jax.tree.map(lambda start, prior: (start - prior)[None], self.init_eta(), self.eta_p)
        return pvi.ClientState(eta_t=dp_pvi.times(shares, first))

    def init_eta(self) -> GaussianEta:
        """See `AbstractMethod`."""
        return pvi.to_host(self.first_start()) if self._is_network else self.eta_p

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        noise_multiplier = self.noise_multipliers[client]
        mechanism = dp_pvi.mechanism if self.aggregator is None else self.aggregator.mechanism
        event = mechanism(noise_multiplier).event(no_change(self.ball, self.solver.family), self.relation)
        return repeated(event, num_visits)

    def client_step(self, clients, call, doors):
        """See `AbstractMethod`."""
        parts, owners, tempering, refit = self._called(call)
        noise = [self.noise_multipliers[m] for m in call.at]

        def release(bounded: Sequence[Bounded]) -> Sequence[np.ndarray]:
            if self.aggregator is not None:
                return self.aggregator.release(doors, bounded, noise[0], call.index).blocks
            released = dp_pvi.release_each(doors, bounded, noise)
            return [np.sum(parts, axis=0) for parts in zip(*(one.blocks for one in released), strict=True)]

        ball = self._ball_at(call.start)
        shared: dict[str, Any] = {"owners": owners, "damping": self.damping}
        if self._factor_per_shard:
            own = _take(clients, parts)
            visited, total = dp_pvi.shard_factors_step(
                own, call.down, refit, ball, release, weights=1.0 / tempering, **shared
            )
            return _put(clients, parts, visited), total
        own = _take(clients, call.at)
        visited, ups = dp_pvi.local_averaging_step(doors, own, call.down, refit, ball, noise, **shared)
        return _put(clients, call.at, visited), pvi.plain_sum(ups)

    def first_changes(self, call: Call) -> tuple[list[np.ndarray], np.ndarray]:
        """What the called clients' shards ask for first, as the ball sees it, and the client of each: private."""
        parts, owners, tempering, refit = self._called(call)
        first = _take(self.init_clients(), parts if self._factor_per_shard else call.at[owners])
        return self._ball_at(call.start).flatten(dp_pvi.shard_changes(first, call.down, refit, 1.0 / tempering)), owners

    def _called(self, call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray, pvi.Refit]:
        """The shards of the called clients, the client and the tempering of each, and their local inference."""
        counts = np.array(self.shards_per_client)
        owners = np.repeat(np.arange(len(call.at)), counts[call.at])
        own_shards = np.split(np.arange(sum(self.shards_per_client)), np.cumsum(counts)[:-1])
        parts = np.concatenate([own_shards[m] for m in call.at])
        tempering = counts[call.at][owners] if self.averages_shards else np.ones(len(owners))

        def refit(eta_cavity: GaussianEta, _: GaussianEta) -> GaussianEta:
            return self.solver.refit_shards(self.shards, parts, call.key, eta_cavity, call.start, tempering)

        return parts, owners, tempering, refit

    def usable(self, eta: GaussianEta, state: RunState, weights: np.ndarray) -> GaussianEta:
        """See `AbstractMethod`: the posterior given a noisy sum of factors."""
        if self._is_network:
            return self._within_reach(super().usable(eta, state, weights))
        multipliers = np.array(self.noise_multipliers)
        variances = np.array([np.sum(multipliers[list(visit.clients)] ** 2) for visit in self.visits[: len(weights)]])
        size = self.damping * float(np.sqrt(weights**2 @ variances / self.num_shares))
        clip_norms = self.ball.clip_norms
        prior = pvi.usable(self.solver.family, state.prior.eta_t, self.posterior_floor)
        posterior = noise_aware(
            eta,
            prior,
            linear_std=size * clip_norms[0] * self.ball.scales[0],
            quadratic_std=size * clip_norms[-1] * self.ball.scales[1],
        )
        return pvi.to_single(posterior)

    def _within_reach(self, eta_q: GaussianEta) -> GaussianEta:
        """The same with no mean farther out than the prior thinks possible.

        Changes are clipped around the means, so that noise on precisions moves means in proportion to their size: where
        it is large they would grow from visit to visit.
        """
        mean = self.solver.family.to_standard(eta_q).mean  # type: ignore[arg-type]
        edge = _FARTHEST_MEAN * self.solver.model.prior_stddev  # type: ignore[attr-defined]
        nearer, precision = jnp.clip(mean, -edge, edge), -2 * eta_q.quadratic
        linear = precision @ nearer if precision.ndim == 2 else precision * nearer
        return eqx.tree_at(lambda eta: eta.linear, eta_q, linear)

    def _ball_at(self, eta_q: GaussianEta) -> dp_pvi.Ball:
        if not self._is_network:
            return self.ball
        mean = self.solver.family.to_standard(eta_q).mean  # type: ignore[arg-type]
        return dataclasses.replace(self.ball, center=np.asarray(mean, dtype=np.float64))

    @property
    def _factor_per_shard(self) -> bool:
        return self.aggregator is not None or not self.averages_shards

    @property
    def _is_network(self) -> bool:
        return isinstance(self.solver.model, AbstractMLP)


def _is_usable(eta: GaussianEta) -> bool:
    """Finite, and with room to multiply in float32."""
    return all(bool(np.all(np.abs(leaf) <= _LARGEST)) for leaf in jax.tree.leaves(eta))


def no_change(ball: dp_pvi.Ball, family: GaussianFamily) -> Bounded:
    """What a client without shards would release: enough to say what a release costs."""
    return ball.bounded_sum(jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape)), family.zeros()))


def repeated(event: AbstractEvent, times: int) -> tuple[AbstractEvent, ...]:
    """So many runs of what `event` pays for."""
    return (dataclasses.replace(event, count=event.count * times),) if times else ()


def _take(tree: Any, at: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], tree)


def _put(tree: Any, at: np.ndarray, new: Any) -> Any:
    def put(old: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = old.copy()
        out[at] = values
        return out

    return jax.tree.map(put, tree, new)
