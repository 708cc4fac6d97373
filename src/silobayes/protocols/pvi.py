"""Partitioned variational inference (000 Algorithm 1; SPEC 2): `q = p prod_m t_m`, one factor per silo.

States are natural parameters as float64 host arrays: a visit is additions and subtractions, and the identity
`eta_q = eta_p + sum_m eta_m` then holds to the last digits over any number of visits. One sequential undamped pass is
streaming VB.

With private local solves (DP optimisation, SPEC 3) nothing here changes but who draws: the solver's result is
post-processing of its releases, so factors and changes are public, and what is sent needs no more noise.

The paper's change `eta* - eta_q` is the difference of the new factor and the old one. We take it as that: an improper
cavity is projected before it is used, and the way to its projection belongs to no factor. Counted as part of the change
it would be made once by every silo, and q run away where there are many.

Guarantees:
    - for conjugate models one synchronous undamped pass is the exact posterior
    - fixed points are those of global VI
    - eta_q = eta_p + sum of eta_m after every visit of every schedule
    - permuting silos changes nothing
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from silobayes.core.errors import InvalidInput
from silobayes.inference.solvers import LocalOptimum, usable
from silobayes.posteriors import Posterior
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.loops import Step, StepPlan, close_steps, open_steps
from silobayes.privacy.queries import Message, OpenSum, Total
from silobayes.protocols import etas
from silobayes.protocols.etas import Eta, flatten_eta, to_host, to_single, unflatten_eta
from silobayes.protocols.roles import AbstractServer, AbstractSilo, Merged, Seat
from silobayes.protocols.schedule import Visit

# An asynchronous silo may answer to what was said so many visits ago.
_MAX_LAG = 3


class SiloState(NamedTuple):
    """The silo's factor `t_m`; a tuple, because many silos make one in every visit."""

    eta_t: Eta


class Down(eqx.Module):
    """What a silo answers to: q, where its solver starts, and the visit's model randomness."""

    eta_q: Eta
    start: Eta
    key: PRNGKeyArray


class ServerState(eqx.Module):
    """The raw sum of prior and factors, which may be improper, and what averages and lags need.

    `recent[k]` is q of k visits ago; `eta_sum / num_averaged` the average of q over the last half of the visits;
    `prior` the factor of the prior. `num_visits` were made, `num_counted` of them had an effect.
    """

    eta_q: Eta
    recent: Eta
    eta_sum: Eta
    prior: Eta
    num_visits: int
    num_counted: int
    num_averaged: int


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractOpenSilo(AbstractSilo[SiloState]):
    """A silo that sends the damped change of its factor as it is."""

    solve: Any
    damping: float
    query: OpenSum

    def init(self, seat: Seat) -> SiloState:
        """The factor is 1."""
        return SiloState(eta_t=to_host(self.solve.local.family.zeros()))

    def against(self, own: SiloState, down: Down) -> Eta:
        """The cavity q(theta) / t_m(theta)."""
        return down.eta_q - own.eta_t


@dataclass(frozen=True, kw_only=True, eq=False)
class PVISilo(AbstractOpenSilo):
    """Without privacy."""

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> tuple[()]:
        """Nothing."""
        return ()

    def reply(self, door: Door | None, seat: Seat, own: SiloState, down: Down, found: Eta) -> tuple[SiloState, Message]:
        """See `AbstractSilo`."""
        return changed(self.query, own, self.damping * (found - own.eta_t))

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """Nothing."""
        return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimisingSilo(AbstractOpenSilo):
    """By a private local optimisation (000 section 3.1): all its steps are paid before the first draw."""

    loop: StepPlan

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> Any:
        """Batches and noise of the loop, and the rate of the batches."""
        return draw_loop(door, seat.own_loop(self.loop))

    def reply(
        self, door: Door | None, seat: Seat, own: SiloState, down: Down, found: tuple[Eta, Any]
    ) -> tuple[SiloState, Message]:
        """See `AbstractSilo`."""
        assert door is not None
        eta_t, seen = found
        close_steps(door, seen)
        return changed(self.query, own, self.damping * (eta_t - own.eta_t))

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """The loops of so many visits."""
        return (repeated(seat.own_loop(self.loop).event, num_visits),)


@dataclass(frozen=True, kw_only=True, eq=False)
class PVIServer(AbstractServer[ServerState]):
    """Adds up changes.

    Attributes:
        local: Of the model and its family; refits the prior where it is not Gaussian.
        query: What silos answer.
        names: Of the model's parameters.
        eta_p: The (stand-in for the) prior.
        first_start: Where solvers start in the first visit; None: at the q of that visit.
        damping: Of the change of the prior's factor.
        seed: Of model randomness.
        num_visits: Of the part of the study that this server makes.
        averages: Whether the answer is the average of q over the last half of the visits: noise makes that better.
        had_start: Whether a start came before the first visit: it counts as a visit when half of them are counted.
        is_private: Whether a q that runs away loses a visit instead of ending the study.
    """

    local: LocalOptimum
    query: OpenSum
    names: tuple[str, ...]
    eta_p: Eta
    first_start: Eta | None
    damping: float
    seed: int
    num_visits: int
    averages: bool
    had_start: bool = False
    is_private: bool

    def init(self) -> ServerState:
        """The prior."""
        return self.init_at(self.eta_p)

    def init_at(self, eta_q: Eta) -> ServerState:
        """The prior and silos' first factors."""
        return ServerState(
            eta_q=eta_q,
            recent=jax.tree.map(lambda leaf: np.repeat(leaf[None], _MAX_LAG + 1, axis=0), eta_q),
            eta_sum=jax.tree.map(np.zeros_like, eta_q),
            prior=self.eta_p,
            num_visits=0,
            num_counted=0,
            num_averaged=0,
        )

    def down(self, state: ServerState, visit: Visit) -> Down:
        """See `AbstractServer`."""
        eta_q = lagging(state, visit)
        return Down(eta_q=eta_q, start=self.start(state, self.usable(eta_q)), key=self.key(visit))

    def start(self, state: ServerState, usable_q: Eta) -> Eta:
        """Where solvers start."""
        is_first = state.num_visits == 0 and self.first_start is not None
        return self.first_start if is_first else usable_q  # type: ignore[return-value]

    def key(self, visit: Visit) -> PRNGKeyArray:
        """The visit's model randomness."""
        return jax.random.fold_in(jax.random.key(self.seed), visit.number)

    def usable(self, eta: Eta) -> Eta:
        """The proper posterior that a raw sum stands for."""
        return usable(self.local.family, to_single(eta), self.local.floor)

    def merge(self, state: ServerState, visit: Visit, total: Total) -> Merged[ServerState]:
        """See `AbstractServer`."""
        return self.advance(state, visit, unflatten_eta(self.query.read(total), self.eta_p))

    def advance(self, state: ServerState, visit: Visit, d_eta: Eta) -> Merged[ServerState]:
        """Q moves by the silos' changes, unless it would run away: that depends on released numbers only."""
        prior = state.prior
        if not self.local.model.prior_is_gaussian:
            prior = self._refit_prior(state, visit)
            d_eta = d_eta + (prior - state.prior)
        eta_q = state.eta_q + d_eta
        counted = etas.is_in_range(eta_q)
        if not counted:
            refuse_if_open(self.is_private, visit.number)
            # The visit counts as made and changes nothing: what was paid for before is not lost.
            eta_q, prior = state.eta_q, state.prior
        made = state.num_visits + 1
        averages = self.averages and 2 * (made + self.had_start) > self.num_visits + self.had_start
        new = ServerState(
            eta_q=eta_q,
            recent=jax.tree.map(lambda now, old: np.concatenate([now[None], old[:-1]]), eta_q, state.recent),
            eta_sum=state.eta_sum + eta_q if averages else state.eta_sum,
            prior=prior,
            num_visits=made,
            num_counted=state.num_counted + int(counted),
            num_averaged=state.num_averaged + int(averages),
        )
        return Merged(state=new, counted=counted)

    def _refit_prior(self, state: ServerState, visit: Visit) -> Eta:
        """A prior that is not Gaussian is one more factor."""
        start = self.down(state, visit).start
        found = to_host(
            _prior_factor(self.local, to_single(state.eta_q - state.prior), to_single(start), self.key(visit))
        )
        return state.prior + self.damping * (found - state.prior)

    def posterior(self, state: ServerState) -> Posterior:
        """See `AbstractServer`; of the average over the last half of the visits where noise makes that better."""
        return self.describe(self.usable(averaged(state)))

    def describe(self, eta: Eta) -> Posterior:
        """A proper q as a posterior."""
        return Posterior(family=self.local.family, eta=eta, names=self.names, model=self.local.model)

    def info(self, state: ServerState) -> dict[str, Any]:
        """The present q."""
        return etas.eta_info(self.usable(state.eta_q))

    def facts(self, state: ServerState) -> dict[str, Any]:
        """Visits that had no effect: q would have run away."""
        skipped = state.num_visits - state.num_counted
        return {"visits_without_effect": skipped} if skipped else {}


def changed(query: OpenSum, own: Any, d_eta: Eta) -> tuple[Any, Message]:
    """The state and the message of a silo whose factor changes: as it was rounded, so that q stays the product."""
    message = query.write(flatten_eta(d_eta))
    assert message.value is not None
    return own._replace(eta_t=own.eta_t + unflatten_eta(message.value, own.eta_t)), message


def draw_loop(door: Door | None, loop: StepPlan) -> tuple[Step, np.ndarray]:
    """A paid loop and the rate of its batches."""
    assert door is not None
    return open_steps(door, loop), np.float32(loop.sampler.sampling.rate)  # type: ignore[return-value]


def repeated(event: AbstractEvent, times: int) -> AbstractEvent:
    """So many runs of what `event` pays for."""
    return dataclasses.replace(event, count=event.count * times)


def lagging(state: ServerState, visit: Visit) -> Eta:
    """What the silos of a visit answer to."""
    return jax.tree.map(lambda leaf: leaf[visit.lag], state.recent)


def averaged(state: ServerState) -> Eta:
    """The average of q over the last half of the visits; q itself where there is none."""
    return (1.0 / state.num_averaged) * state.eta_sum if state.num_averaged else state.eta_q


def weights_of_visits(state: ServerState) -> np.ndarray:
    """How much of the change of each visit is in `averaged`: it is there as often as a q that came after it."""
    since = np.arange(state.num_visits, 0, -1)
    return np.minimum(since, state.num_averaged) / state.num_averaged if state.num_averaged else np.ones(len(since))


def refuse_if_open(is_private: bool, visit: int) -> None:
    """Without privacy a q that runs away is refused: nothing was paid that would be lost."""
    if not is_private:
        fix = "Lower protocol.damping and take more rounds, or make model.options.prior_stddev smaller."
        raise InvalidInput("protocol.damping", "a q that stays finite", f"one that ran away in visit {visit}", fix)


@jax.jit
def _prior_factor(local: LocalOptimum, eta_cavity: Eta, start: Eta, key: PRNGKeyArray) -> Eta:
    return local.prior_factor(eta_cavity, start, key)
