"""Linear regression from noisy sufficient statistics (001; SPEC 3, "analytic"; UNCERTAINTY F1, F2).

Each silo releases `(sum x x', sum x y)` once, one joint mechanism; the rest is post-processing. The posterior knows
about the noise. The bounds are public: rows are pulled back to them.
"""

import abc
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from silobayes.families import FullGaussian
from silobayes.inference.noisy_statistics import GaussianPosterior, bounded_statistics, noise_aware_posterior
from silobayes.inference.solvers import AllRows, usable
from silobayes.models.base import AbstractModel, GaussianFamily
from silobayes.models.linear_regression import LinearRegression
from silobayes.posteriors import Posterior
from silobayes.privacy.clipping import Bounded, unpack_symmetric
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.queries import Answer, Message, PrivateSum, Total
from silobayes.protocols import pvi
from silobayes.protocols.etas import Eta, eta_info, precision_floor, to_host, to_single
from silobayes.protocols.roles import AbstractServer, AbstractSilo, Merged, Seat
from silobayes.protocols.schedule import Visit


@dataclass(frozen=True, kw_only=True)
class RowBounds:
    """The public sizes of a row: the norm of its features, and its target."""

    x: float
    y: float

    def bounded(self, x: np.ndarray, y: np.ndarray) -> Bounded:
        """The statistics of rows, in units of `x`."""
        return bounded_statistics(np.asarray(x, np.float64) / self.x, np.asarray(y, np.float64), y_bound=self.y)


def present_rows(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """Features and targets of the slots that hold a row, as float64."""
    present = np.asarray(found.present)
    return np.asarray(found.x, np.float64)[present], np.asarray(found.y, np.float64)[present]


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractReleasingSilo(AbstractSilo[tuple[()]]):
    """Answers every visit with one release from all of its rows, and keeps nothing."""

    query: PrivateSum
    solve: AllRows = field(default_factory=AllRows)

    @abc.abstractmethod
    def asked(self, seat: Seat, found: Any, down: Any) -> Bounded:
        """The sum over the slots that hold a row, clipped to what comes down or to what is public anyway."""

    def init(self, seat: Seat) -> tuple[()]:
        """Nothing."""
        return ()

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> tuple[()]:
        """Nothing."""
        return ()

    def reply(self, door: Door | None, seat: Seat, own: tuple[()], down: Any, found: Any) -> tuple[tuple[()], Message]:
        """See `AbstractSilo`."""
        assert door is not None
        return own, self.query.write(door, seat.index, self.asked(seat, found, down))

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """One release a visit."""
        return (pvi.repeated(self.query.event(seat.index), num_visits),)


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractSummingSilo(AbstractReleasingSilo):
    """The same where it does not matter in which slots rows are."""

    @abc.abstractmethod
    def bounded(self, x: np.ndarray, y: np.ndarray, down: Any) -> Bounded:
        """The sum over these rows, clipped to what comes down or to what is public anyway."""

    def asked(self, seat: Seat, found: Any, down: Any) -> Bounded:
        """See `AbstractReleasingSilo`."""
        return self.bounded(*present_rows(found), down)


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticsSilo(AbstractSummingSilo):
    """Releases its statistics."""

    bounds: RowBounds

    def bounded(self, x: np.ndarray, y: np.ndarray, down: tuple[()]) -> Bounded:
        """See `AbstractSummingSilo`."""
        return self.bounds.bounded(x, y)


class ServerState(eqx.Module):
    """The answer's natural parameters: the prior's until the sums are there."""

    eta_q: Eta


State = TypeVar("State", bound=ServerState)


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractAnsweringServer(AbstractServer[State], Generic[State]):
    """Whose state has the answer as it is, at best a proper posterior."""

    model: AbstractModel
    family: GaussianFamily
    names: tuple[str, ...]
    eta_p: Eta

    def posterior(self, state: State) -> Posterior:
        """See `AbstractServer`."""
        return Posterior(family=self.family, eta=self._usable(state), names=self.names, model=self.model)

    def info(self, state: State) -> dict[str, Any]:
        """The answer."""
        return eta_info(self._usable(state))

    def _usable(self, state: State) -> Eta:
        return usable(self.family, to_single(state.eta_q), precision_floor(self.eta_p))


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractOnceServer(AbstractAnsweringServer[ServerState]):
    """Knows the prior until it has asked once."""

    def init(self) -> ServerState:
        """The prior."""
        return ServerState(eta_q=self.eta_p)

    def down(self, state: ServerState, visit: Visit) -> tuple[()]:
        """Nothing."""
        return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticsServer(AbstractOnceServer):
    """Makes the posterior that knows about the noise of the statistics."""

    model: LinearRegression
    bounds: RowBounds
    query: PrivateSum

    def merge(self, state: ServerState, visit: Visit, total: Total) -> Merged[ServerState]:
        """See `AbstractServer`."""
        answer = answer_of(self.query.read(total), self.model, self.bounds)
        return Merged(state=ServerState(eta_q=to_host(eta_of(answer, self.family))), counted=True)


def answer_of(statistics: Answer, model: LinearRegression, bounds: RowBounds) -> GaussianPosterior:
    """The posterior given what was released."""
    gram_std, cross_std = statistics.stddevs
    # In units of the bound, coefficients are larger by it and their prior wider.
    answer = noise_aware_posterior(
        unpack_symmetric(statistics.blocks[0]),
        statistics.blocks[1],
        gram_std=gram_std,
        cross_std=cross_std,
        residual_variance=model.noise_stddev**2,
        prior_precision=(model.prior_stddev * bounds.x) ** -2,
    )
    return dataclasses.replace(answer, mean=answer.mean / bounds.x, covariance=answer.covariance / bounds.x**2)


def eta_of(answer: GaussianPosterior, family: GaussianFamily) -> Eta:
    """An answer in the family of the study."""
    full = FullGaussian(dimension=len(answer.mean))
    eta = full.from_standard(mean=jnp.asarray(answer.mean), covariance=jnp.asarray(answer.covariance))
    return eta if isinstance(family, FullGaussian) else full.to_mean_field(eta)
