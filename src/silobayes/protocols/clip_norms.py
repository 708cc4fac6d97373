"""Clip norms chosen through the door: a private quantile of the sizes of the shards' first changes (SPEC 3).

One visit before the first round. Each shard computes the change that it asks for at the public start and counts itself
twice: in a histogram of the norms of linear parts, and in one of the norms of quadratic parts. Only the noisy sums of
these counts leave; what follows from them is public.

- `bounded_counts`: a shard adds two ones, whatever its rows hold. A changed row moves each of them from one bin to
  another: sqrt(2) in each histogram, released and priced as one joint vector (persons, dealt by their id: two shards).
- `quantile_norm`: the smallest norm of the public grid whose noisy share of counts reaches the quantile.
- `norm_per_visit`: a factor moves by `damping` times the clip norm in each visit, so it need not get there in one.

The grid is public: steps of sqrt(2) around the norm that the default rule gives, two orders of magnitude to each side.
All later prices are in units of the chosen norms, so the whole study is priced and charged before the first row is
looked at, whatever will be chosen.

Guarantees:
    - a silo pays for its counts once and for each later visit
    - the price does not depend on the norms that are chosen
    - q is where it starts until the norms are chosen
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from silobayes.inference.solvers import RefitShards
from silobayes.posteriors import Posterior
from silobayes.privacy.clipping import Bounded, clip_blocks, non_negative
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.queries import Message, PrivateSum, Total
from silobayes.privacy.relation import Unit
from silobayes.protocols import perturbed, pvi
from silobayes.protocols.ball import Ball
from silobayes.protocols.etas import Eta
from silobayes.protocols.roles import AbstractServer, AbstractSilo, Merged, Seat
from silobayes.protocols.schedule import Visit

_EXPONENTS = np.arange(-14, 15) / 2
NUM_BINS = len(_EXPONENTS)


def norm_grid(middle: float) -> np.ndarray:
    """Public norms around `middle`, in increasing order, each sqrt(2) times the one before."""
    return middle * 2.0**_EXPONENTS


def bounded_counts(parts: Sequence[np.ndarray], grids: Sequence[np.ndarray], unit: Unit) -> Bounded:
    """How many shards have a norm in each bin of the grids, ready for the door.

    Args:
        parts: The linear and the quadratic parts of the shards' changes, one shard a row.
        grids: Of each part. Bin k holds norms above `grid[k - 1]` up to `grid[k]`; the ends hold all that is beyond.
        unit: What one neighbouring change touches.

    Guarantees:
        - one changed shard moves two counts of each part by one at most, whatever it holds
        - a shard that asks for nothing, or for what is not a number, is not counted
    """
    hot = [non_negative(_one_hot(part, grid)) for part, grid in zip(parts, grids, strict=True)]
    return clip_blocks(hot, [1.0] * len(hot), unit=unit, sharded=True)


def _one_hot(part: np.ndarray, grid: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # a warning about overflow would tell of somebody's rows
        norms = np.linalg.norm(part, axis=1)
    bins = np.minimum(np.searchsorted(grid, norms), len(grid) - 1)
    counted = np.isfinite(part).all(axis=1) & (norms > 0.0)
    return np.where(counted[:, None], np.eye(len(grid))[bins], 0.0)


def quantile_norm(counts: np.ndarray, grid: np.ndarray, quantile: float) -> float:
    """The smallest norm of the grid that this share of the (noisy) counts does not exceed.

    Guarantees:
        - without noise it is the quantile of the norms, rounded up to the grid
        - a larger quantile never gives a smaller norm, whatever the noise
    """
    below = np.cumsum(counts)
    reached = np.maximum.accumulate(below) >= quantile * max(below[-1], 0.0)
    return float(grid[np.argmax(reached)])


def norm_per_visit(norm: float, *, damping: float, num_visits: float) -> float:
    """The clip norm with which a factor gets as far as `norm` in half of its visits, or `norm` itself if it cannot.

    While clipping binds, the noise of the answer grows with the path and not with how it is cut into visits. Half of
    them, because the answer is the average of q over the other half. (By hand, of three: the norm itself, a path of all
    visits, one of half of them; by the score on held-out rows of `data.simulate.icu_study`, seeds 0, 1, 5.)

    Guarantees:
        - half of the visits make a path of `norm`, and no visit is clipped to more than that
    """
    return norm / max(1.0, damping * num_visits / 2)


def noise_of_share(stddev: float, num_shards: int) -> float:
    """How far noise moves the share of shards that a norm is compared by: the standard deviation, at a quantile of 1/2.

    Half of the difference between the counts below and above it, over the number of shards; `stddev` is that of the
    noise on one count.
    """
    return stddev * float(np.sqrt(NUM_BINS)) / 2 / num_shards


@dataclass(frozen=True, kw_only=True, eq=False)
class CountingSilo(AbstractSilo[pvi.SiloState]):
    """The first visit: how many of the silo's shards ask for a first change of which size."""

    then: perturbed.AbstractPerturbingSilo
    solve: RefitShards
    query: PrivateSum

    def init(self, seat: Seat) -> pvi.SiloState:
        """See `AbstractSilo`."""
        return self.then.init(seat)

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> np.ndarray:
        """See `AbstractSilo`."""
        return self.then.draw(door, seat, visit)

    def against(self, own: pvi.SiloState, down: perturbed.Down) -> Eta:
        """See `AbstractSilo`."""
        return self.then.against(own, down)

    def reply(
        self, door: Door | None, seat: Seat, own: pvi.SiloState, down: perturbed.Down, found: Eta
    ) -> tuple[pvi.SiloState, Message]:
        """See `AbstractSilo`; the factors stay where they are."""
        assert door is not None
        parts = self.then.ball_at(down).flatten(self.then.change(seat, own, found))
        counts = bounded_counts(parts, grids_of(self.then.ball), self.then.ball.unit)
        return own, self.query.write(door, seat.index, counts)

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """The counts."""
        return (pvi.repeated(self.query.event(seat.index), num_visits),)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantileServer(AbstractServer[perturbed.ServerState]):
    """Chooses the norms in part 0 and leaves all else to `then`.

    `quantile` is that of the shards' first changes; norms times `per_silo` are in units of `protocol.clip_norm`.
    """

    then: perturbed.PerturbedServer
    query: PrivateSum
    quantile: float
    per_silo: float
    visits_of_a_silo: float

    def init(self) -> perturbed.ServerState:
        """Until norms are chosen they are those of the rule."""
        return self.then.init()

    def down(self, state: perturbed.ServerState, visit: Visit) -> perturbed.Down:
        """See `AbstractServer`."""
        return self.then.down(state, visit)

    def merge(self, state: perturbed.ServerState, visit: Visit, total: Total) -> Merged[perturbed.ServerState]:
        """See `AbstractServer`."""
        if visit.part > 0:
            return self.then.merge(state, visit, total)
        counts, grids = self.query.read(total).blocks, grids_of(self.then.ball)
        norms = [quantile_norm(own, grid, self.quantile) for own, grid in zip(counts, grids, strict=True)]
        path = {"damping": self.then.inner.damping, "num_visits": self.visits_of_a_silo}
        chosen = np.array([norm_per_visit(norm, **path) for norm in norms])
        return Merged(state=perturbed.ServerState(pvi=state.pvi, norms=chosen), counted=True)

    def posterior(self, state: perturbed.ServerState) -> Posterior:
        """See `AbstractServer`."""
        return self.then.posterior(state)

    def info(self, state: perturbed.ServerState) -> dict[str, Any]:
        """The present q and the chosen norms."""
        return self.then.info(state) | self._released(state)

    def facts(self, state: perturbed.ServerState) -> dict[str, Any]:
        """The chosen norms."""
        return self.then.facts(state) | self._released(state)

    def _released(self, state: perturbed.ServerState) -> dict[str, Any]:
        return {"released": {"clip_norms": (self.per_silo * state.norms).tolist()}}


def empty_counts(ball: Ball) -> Bounded:
    """The counts of a silo without shards: enough to say what they cost."""
    nothing = np.zeros((0, 1))
    return bounded_counts([nothing, nothing], grids_of(ball), ball.unit)


def grids_of(ball: Ball) -> list[np.ndarray]:
    """The public grid of each part, around the rule's norms."""
    return [norm_grid(middle) for middle in ball.clip_norms]
