"""The hybrid of 001 section 4.2.3: an analytic start from noisy statistics, then DP optimisation.

The thesis proposes it for linear regression with known noise and does not run it. In the first visit each silo releases
`(sum x x', sum x y)`; the server makes the posterior that knows about their noise (UNCERTAINTY F1, F2) and starts at
its mean. All later rounds are those of PVI by DP-SGD. What is gained: near the answer residuals are small, so gradients
can be clipped far below what a silo's targets would need, and no steps are spent on the way.

PVI needs one factor per silo. Those of the start are made of releases only, so they are public, like all later ones.
Each silo gets its share, by rows, of the whole, plus what its own release says beyond that, shrunk as far as the
releases differ by their noise alone. How much they differ is a sum over silos, so there are three visits before the
first round: statistics; distances of what was released, without rows and without a price; and factors.

Guarantees:
    - a silo pays for its statistics once and for each later round
    - without noise the start is the exact posterior, and its factors are those of the silos' own rows
    - eta_q = eta_p + sum of the silos' factors after the start
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np

from silobayes.families import FullGaussian
from silobayes.inference.noisy_statistics import shrink
from silobayes.inference.solvers import AllRows
from silobayes.models.base import GaussianFamily
from silobayes.models.linear_regression import LinearRegression
from silobayes.posteriors import Posterior
from silobayes.privacy.clipping import unpack_symmetric
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.queries import Message, OpenSum, PrivateSum, Total
from silobayes.protocols import pvi
from silobayes.protocols.etas import Eta, flatten_eta, to_host, unflatten_eta
from silobayes.protocols.roles import AbstractServer, AbstractSilo, Merged, Seat
from silobayes.protocols.schedule import Visit
from silobayes.protocols.statistics import RowBounds, answer_of, present_rows

STATISTICS, DISTANCES, FACTORS, ROUNDS = range(4)


class SiloState(NamedTuple):
    """The silo's factor and its own release, in the features' own units; all of it is public."""

    eta_t: Eta
    gram: np.ndarray
    cross: np.ndarray


class Start(eqx.Module):
    """What silos make their first factors of.

    `mean` is the answer's; `whole` what all factors together must be; `believed` the sum of what the releases say by
    themselves; `kept` how much of a silo's distance from its share stays (linear part, quadratic part).
    """

    mean: np.ndarray
    whole: Eta
    believed: Eta
    kept: np.ndarray


class ServerState(eqx.Module):
    """That of PVI, the start, and the noise of one silo's factor (linear part, quadratic part)."""

    pvi: pvi.ServerState
    start: Start
    noise: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class StartingSilo(AbstractSilo[SiloState]):
    """Releases its statistics and keeps what was released."""

    then: pvi.OptimisingSilo
    model: LinearRegression
    bounds: RowBounds
    query: PrivateSum
    solve: AllRows = field(default_factory=AllRows)

    def init(self, seat: Seat) -> SiloState:
        """See `AbstractSilo`."""
        dim = self.model.dim
        return SiloState(eta_t=self.then.init(seat).eta_t, gram=np.zeros((dim, dim)), cross=np.zeros(dim))

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> tuple[()]:
        """Nothing."""
        return ()

    def reply(self, door: Door | None, seat: Seat, own: SiloState, down: Any, found: Any) -> tuple[SiloState, Message]:
        """See `AbstractSilo`."""
        assert door is not None
        message = self.query.write(door, seat.index, self.bounds.bounded(*present_rows(found)))
        assert message.value is not None
        gram, cross = np.split(message.value, [len(message.value) - self.model.dim])
        precision, slope = _units(self.model, self.bounds)
        return SiloState(eta_t=own.eta_t, gram=precision * unpack_symmetric(gram), cross=slope * cross), message

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """The statistics."""
        return (pvi.repeated(self.query.event(seat.index), num_visits),)


@dataclass(frozen=True, kw_only=True, eq=False)
class FactoringSilo(AbstractSilo[SiloState]):
    """A visit of what was released, without rows: `DISTANCES` or `FACTORS`. `shares` are those of all rows."""

    part: int
    family: GaussianFamily
    shares: tuple[float, ...]
    query: OpenSum
    solve: None = None

    def init(self, seat: Seat) -> SiloState:
        """Never the first visit."""
        raise AssertionError("statistics come first")

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> tuple[()]:
        """Nothing."""
        return ()

    def reply(
        self, door: Door | None, seat: Seat, own: SiloState, down: Start, found: Any
    ) -> tuple[SiloState, Message]:
        """See `AbstractSilo`."""
        share, believed = self.shares[seat.index], own_factor(own, down.mean, self.family)
        beyond = believed - share * down.believed
        if self.part == DISTANCES:
            parts = (beyond.linear, beyond.quadratic)
            return own, self.query.write(np.array([float(np.sum(part**2)) for part in parts]))
        kept = eqx.tree_at(
            lambda eta: (eta.linear, eta.quadratic),
            beyond,
            (down.kept[0] * beyond.linear, down.kept[1] * beyond.quadratic),
        )
        # What the releases say, rescaled to what the answer makes of them all together.
        eta_t = share * down.whole + kept
        return SiloState(eta_t=eta_t, gram=own.gram, cross=own.cross), self.query.write(flatten_eta(eta_t))

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """Nothing: post-processing."""
        return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class HybridServer(AbstractServer[ServerState]):
    """Makes the start, then leaves all to `then`. `shares` are those of the silos' public numbers of rows."""

    then: pvi.PVIServer
    model: LinearRegression
    bounds: RowBounds
    shares: tuple[float, ...]
    statistics: PrivateSum
    open: OpenSum

    def init(self) -> ServerState:
        """The prior."""
        nothing = self.then.eta_p - self.then.eta_p
        start = Start(mean=np.zeros(self.model.dim), whole=nothing, believed=nothing, kept=np.zeros(2))
        return ServerState(pvi=self.then.init(), start=start, noise=np.zeros(2))

    def down(self, state: ServerState, visit: Visit) -> Any:
        """See `AbstractServer`."""
        return self.then.down(state.pvi, visit) if visit.part == ROUNDS else state.start

    def merge(self, state: ServerState, visit: Visit, total: Total) -> Merged[ServerState]:
        """See `AbstractServer`."""
        if visit.part == STATISTICS:
            return Merged(state=self._started(state, total), counted=True)
        if visit.part == DISTANCES:
            seen = self.open.read(total)
            explained = state.noise * (len(self.shares) - 2 + len(self.shares) * np.sum(np.square(self.shares)))
            kept = np.array([shrinkage(*pair) for pair in zip(explained, seen, strict=True)])
            start = eqx.tree_at(lambda own: own.kept, state.start, kept)
            return Merged(state=ServerState(pvi=state.pvi, start=start, noise=state.noise), counted=True)
        if visit.part == FACTORS:
            eta_q = self.then.eta_p + unflatten_eta(self.open.read(total), self.then.eta_p)
            begun = ServerState(pvi=self.then.init_at(eta_q), start=state.start, noise=state.noise)
            return Merged(state=begun, counted=True)
        moved = self.then.merge(state.pvi, visit, total)
        after = ServerState(pvi=moved.state, start=state.start, noise=state.noise)
        return Merged(state=after, counted=moved.counted)

    def _started(self, state: ServerState, total: Total) -> ServerState:
        """The whole: its mean is that of the posterior that knows about the noise.

        Its precision is that of the rows, as far as the releases tell (F2), because that is where the optimisation
        would stay: it does not widen q for noise, and its own gradients of widths are mostly noise.
        """
        released = self.statistics.read(total)
        answer = answer_of(released, self.model, self.bounds)
        gram, cross = unpack_symmetric(released.blocks[0]), released.blocks[1]
        scale, slope = _units(self.model, self.bounds)
        precision = scale * shrink(gram, released.stddevs[0])[0] + self.model.prior_stddev**-2 * np.eye(self.model.dim)
        family, eta_p = self.then.local.family, self.then.eta_p
        if not isinstance(family, FullGaussian):
            precision = np.diagonal(precision)  # of the best independent Gaussians, where PVI would stay
        linear_q = precision @ answer.mean if precision.ndim == 2 else precision * answer.mean
        whole = eqx.tree_at(lambda eta: (eta.linear, eta.quadratic), eta_p, (linear_q, -0.5 * precision)) - eta_p
        everything = SiloState(eta_t=whole, gram=scale * gram, cross=slope * cross)
        believed = to_host(own_factor(everything, answer.mean, family))
        variances = np.square(np.array([scale, slope]) * released.stddevs) / len(self.shares)  # of one silo's release
        start = Start(mean=answer.mean, whole=whole, believed=believed, kept=np.zeros(2))
        return ServerState(pvi=state.pvi, start=start, noise=_noise_of_factor(variances, answer.mean, family))

    def posterior(self, state: ServerState) -> Posterior:
        """See `AbstractServer`."""
        return self.then.posterior(state.pvi)

    def info(self, state: ServerState) -> dict[str, Any]:
        """The present q."""
        return self.then.info(state.pvi)

    def facts(self, state: ServerState) -> dict[str, Any]:
        """See `AbstractServer`."""
        return self.then.facts(state.pvi)


def _units(model: LinearRegression, bounds: RowBounds) -> tuple[float, float]:
    """Of released Gram matrices and of released cross products, as parts of a likelihood."""
    return bounds.x**2 / model.noise_stddev**2, bounds.x / model.noise_stddev**2


def own_factor(state: SiloState, mean: np.ndarray, family: GaussianFamily) -> Any:
    """The factor that released statistics say by themselves, with all their noise."""
    if isinstance(family, FullGaussian):
        leaves = (state.cross, -0.5 * state.gram)
    else:
        # The optimum over independent Gaussians moves what is off the diagonal to the linear part, at the mean.
        diagonal = np.diagonal(state.gram)
        leaves = (state.cross - state.gram @ mean + diagonal * mean, -0.5 * diagonal)
    return eqx.tree_at(lambda eta: (eta.linear, eta.quadratic), state.eta_t, leaves)


def _noise_of_factor(variances: np.ndarray, mean: np.ndarray, family: GaussianFamily) -> np.ndarray:
    """The expected squared norm of the error of one silo's factor, of its linear and of its quadratic part."""
    (matrix, vector), dim = variances, len(mean)
    if isinstance(family, FullGaussian):
        return np.array([dim * vector, matrix * dim * (dim + 1) / 8])
    moved = matrix / 2 * (dim - 1) * float(mean @ mean)
    return np.array([dim * vector + moved, matrix * dim / 4])


def shrinkage(by_noise: float, seen: float) -> float:
    """How much of the distances stays if noise explains so much of what is seen.

    Guarantees:
        - without noise nothing is shrunk, and where noise explains everything they vanish
    """
    return max(0.0, 1.0 - by_noise / seen) if seen > 0.0 else 1.0
