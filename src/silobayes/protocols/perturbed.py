"""DP-PVI by perturbing what a silo sends (000 sections 3.2-3.4; 004 IV; SPEC 3).

Rows of a silo are dealt once, independently of their values, into fixed shards. Each shard computes a change of the
natural parameters, clipped to `clip_norm`; their sum is released once a visit. One changed row changes one shard, in
every visit, so a visit costs one Gaussian mechanism of sensitivity 2 C, whatever happened inside the shards. (Persons
are dealt by their id; substituting one for another can change two shards, 4 C. Under add_remove a row that is removed
leaves its slot empty: the others keep their shards. A silo that loses all its rows still sends a change: 2 C too.)

- `AveragingSilo`: shards stand for the whole silo (likelihood to the power of their number), the silo's factor is the
  sum of its releases and so public.
- `ShardedSilo`: each shard has its own factor, updated with its own *noise-free* clipped change: virtual clients, and
  every method inside a secure sum, where a silo's own message is not released (local averaging there: each shard stands
  for its silo, so its factor moves by its own whole change). The public code puts noise into it, after which one
  changed row moves all shards and the proof is gone (SPEC 0). Client level (001 Algorithm 3): one shard, a ball of
  unit client.
- parameter perturbation is local averaging with one shard.

We differ from the paper in the grid noise (exact discrete Gaussian), in clipping the linear and the quadratic part to
norms of their own if asked (one joint mechanism, rescaled), and in optional public scales of the two parts. Silos of
different sizes have shards in proportion; with local averaging what is clipped is a shard's part of its silo's average
change, `change / num_shards`, so that a row weighs the same in every silo. Where all silos have N shards that is the
paper's clipping with N times the norm.

q is read as a noisy observation (`inference.noisy_factors`). That would throw a network back to its prior, at which all
hidden units are alike and predictions are wild. So a network's first factors are such that q is its start, its changes
are clipped around the current mean, and q is read as it is: means are learned, while precisions stay near those of the
start.

Guarantees:
    - one changed row moves each released sum by no more than is priced, in every visit
    - a shard's factor holds neither noise nor another shard's rows
    - without noise and clipping it reaches the exact posterior of a conjugate model for any number of shards
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from silobayes.inference.layouts import ShardSlots
from silobayes.inference.noisy_factors import noise_aware
from silobayes.inference.solvers import RefitShards, usable
from silobayes.posteriors import Posterior
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.queries import Message, PrivateSum, Total
from silobayes.protocols import pvi
from silobayes.protocols.ball import Ball
from silobayes.protocols.etas import Eta, eta_info, to_host, to_single
from silobayes.protocols.roles import AbstractServer, AbstractSilo, Merged, Seat
from silobayes.protocols.schedule import Visit

# In units of the prior's standard deviation: a weight of a network beyond it is noise.
_FARTHEST_MEAN = 10.0


class Down(eqx.Module):
    """What a silo answers to; `norms` are those that changes are clipped to, `center` a network's present mean."""

    eta_q: Eta
    start: Eta
    key: PRNGKeyArray
    norms: np.ndarray
    center: np.ndarray | None


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractPerturbingSilo(AbstractSilo[pvi.SiloState]):
    """What both kinds of silos share.

    Attributes:
        solve: Local inference of shards.
        ball: Where changes are clipped; its norms are those of the rule (see `Down.norms`).
        damping: Of every change.
        averages: Whether a silo's change is the average over its shards, each standing for the whole silo.
        first: What all silos' first factors are together (of a network, whose first q is not its prior), or None.
        total_shards: Of all silos.
        query: What a visit asks.
    """

    solve: RefitShards
    ball: Ball
    damping: float
    averages: bool
    first: Eta | None
    total_shards: int
    query: PrivateSum

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> np.ndarray:
        """Nothing random: the power of a shard's likelihood."""
        return np.float32(shards_of(seat) if self.averages else 1)  # type: ignore[return-value]

    def against(self, own: pvi.SiloState, down: Down) -> Eta:
        """The cavities of all shards, or that of the silo; empty shards have one too."""
        return down.eta_q - own.eta_t

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """One release a visit."""
        return (pvi.repeated(self.query.event(seat.index), num_visits),)

    def first_factor(self, share: float) -> Eta:
        """A share of all first factors."""
        return self._nothing if self.first is None else share * self.first

    @cached_property
    def _nothing(self) -> Eta:
        return to_host(self.solve.local.family.zeros())

    def change(self, seat: Seat, own: pvi.SiloState, found: Eta) -> Eta:
        """What each of the silo's shards asks for, before it is clipped."""
        shards = shards_of(seat)
        weight = 1.0 / shards if self.averages else 1.0
        return jax.tree.map(lambda new, old: weight * (np.asarray(new[:shards], np.float64) - old), found, own.eta_t)

    def ball_at(self, down: Down) -> Ball:
        """Where this visit clips."""
        norms = tuple(np.asarray(down.norms).tolist())
        if norms == self.ball.clip_norms and down.center is None:
            return self.ball
        return dataclasses.replace(self.ball, clip_norms=norms, center=down.center)


@dataclass(frozen=True, kw_only=True, eq=False)
class AveragingSilo(AbstractPerturbingSilo):
    """All shards share the silo's factor (000 section 3.3)."""

    def init(self, seat: Seat) -> pvi.SiloState:
        """See `AbstractSilo`."""
        return pvi.SiloState(eta_t=self.first_factor(shards_of(seat) / self.total_shards))

    def reply(
        self, door: Door | None, seat: Seat, own: pvi.SiloState, down: Down, found: Eta
    ) -> tuple[pvi.SiloState, Message]:
        """See `AbstractSilo`: the factor moves by what was released."""
        assert door is not None
        ball = self.ball_at(down)
        message = self.query.write(door, seat.index, ball.bounded_sum(self.change(seat, own, found)))
        assert message.value is not None
        return pvi.SiloState(eta_t=own.eta_t + self.damping * ball.unflatten([message.value], own.eta_t)), message


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedSilo(AbstractPerturbingSilo):
    """Each shard has a factor, which is private (000 section 3.4)."""

    def init(self, seat: Seat) -> pvi.SiloState:
        """See `AbstractSilo`."""
        shards = shards_of(seat)
        # Of a shard that stands for its silo, the whole silo's share.
        first = self.first_factor((shards if self.averages else 1) / self.total_shards)
        return pvi.SiloState(eta_t=jax.tree.map(lambda leaf: np.repeat(leaf[None], shards, axis=0), first))

    def reply(
        self, door: Door | None, seat: Seat, own: pvi.SiloState, down: Down, found: Eta
    ) -> tuple[pvi.SiloState, Message]:
        """See `AbstractSilo`: a factor moves by its own shard's clipped change, noise-free."""
        assert door is not None
        ball, change = self.ball_at(down), self.change(seat, own, found)
        message = self.query.write(door, seat.index, ball.bounded_sum(change))
        pace = self.damping * (shards_of(seat) if self.averages else 1.0)
        moved = jax.tree.map(lambda old, step: old + pace * step, own.eta_t, ball.clip_each(change))
        return pvi.SiloState(eta_t=moved), message


class ServerState(eqx.Module):
    """That of PVI, and the norms that changes are clipped to."""

    pvi: pvi.ServerState
    norms: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbedServer(AbstractServer[ServerState]):
    """Adds up noisy changes, and reads q as a noisy observation.

    Attributes:
        inner: The server of PVI.
        ball: That of the silos; `clip_norms` are the rule's.
        query: What a visit asks.
        variances: Of each visit: the noise on each coordinate of its total, in units of the clip norms.
        first: What all silos' first factors are together, or None.
        is_network: Whether q is read as it is, and changes are clipped around its mean.
    """

    inner: pvi.PVIServer
    ball: Ball
    query: PrivateSum
    variances: np.ndarray
    first: Eta | None
    is_network: bool

    def init(self) -> ServerState:
        """See `AbstractServer`."""
        eta_p = self.inner.eta_p
        first = eta_p if self.first is None else eta_p + self.first
        return ServerState(pvi=self.inner.init_at(first), norms=np.array(self.ball.clip_norms))

    def down(self, state: ServerState, visit: Visit) -> Down:
        """See `AbstractServer`."""
        eta_q = pvi.lagging(state.pvi, visit)
        ones = np.ones(max(0, state.pvi.num_visits - visit.lag))
        start = self.inner.start(state.pvi, self.usable(eta_q, state, ones))
        center = None
        if self.is_network:
            mean = self.inner.local.family.to_standard(start).mean  # type: ignore[arg-type]
            center = np.asarray(mean, dtype=np.float64)
        return Down(eta_q=eta_q, start=start, key=self.inner.key(visit), norms=state.norms, center=center)

    def merge(self, state: ServerState, visit: Visit, total: Total) -> Merged[ServerState]:
        """See `AbstractServer`."""
        center = self.down(state, visit).center if self.is_network else None
        ball = dataclasses.replace(self.ball, clip_norms=tuple(state.norms.tolist()), center=center)
        blocks = self.query.read(total, state.norms.tolist()).blocks
        moved = self.inner.advance(state.pvi, visit, self.inner.damping * ball.unflatten(blocks, self.inner.eta_p))
        return Merged(state=ServerState(pvi=moved.state, norms=state.norms), counted=moved.counted)

    def usable(self, eta: Eta, state: ServerState, weights: np.ndarray) -> Eta:
        """The posterior given a noisy sum of factors; `weights`: how much of the change of each visit is in it."""
        local = self.inner.local
        if self.is_network:
            return self._within_reach(self.inner.usable(eta))
        size = self.inner.damping * float(np.sqrt(weights**2 @ self.variances[: len(weights)]))
        prior = usable(local.family, to_single(state.pvi.prior), local.floor)
        posterior = noise_aware(
            eta,
            prior,
            linear_std=size * state.norms[0] * self.ball.scales[0],
            quadratic_std=size * state.norms[-1] * self.ball.scales[1],
        )
        return to_single(posterior)

    def _within_reach(self, eta_q: Eta) -> Eta:
        """The same with no mean farther out than the prior thinks possible.

        Changes are clipped around the means, so that noise on precisions moves means in proportion to their size: where
        it is large they would grow from visit to visit.
        """
        local = self.inner.local
        mean = local.family.to_standard(eta_q).mean  # type: ignore[arg-type]
        edge = _FARTHEST_MEAN * local.model.prior_stddev  # type: ignore[attr-defined]
        nearer, precision = jnp.clip(mean, -edge, edge), -2 * eta_q.quadratic
        linear = precision @ nearer if precision.ndim == 2 else precision * nearer
        return eqx.tree_at(lambda eta: eta.linear, eta_q, linear)

    def posterior(self, state: ServerState) -> Posterior:
        """See `AbstractServer`."""
        weights = pvi.weights_of_visits(state.pvi)
        return self.inner.describe(self.usable(pvi.averaged(state.pvi), state, weights))

    def info(self, state: ServerState) -> dict[str, Any]:
        """The present q."""
        return eta_info(self.usable(state.pvi.eta_q, state, np.ones(state.pvi.num_visits)))

    def facts(self, state: ServerState) -> dict[str, Any]:
        """See `AbstractServer`."""
        return self.inner.facts(state.pvi)


def shards_of(seat: Seat) -> int:
    """How many shards a silo has; those beyond are empty."""
    assert isinstance(seat.layout, ShardSlots)
    return seat.layout.num_shards
