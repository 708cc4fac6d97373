"""Linear regression with projection, from two private sums (004 I, Algorithm 2), and by input perturbation (SPEC 4).

The arithmetic, its bounds and where we differ from the paper stand in `inference.projection`. With projection visit 0
asks for the marginal squares, from which the server chooses thresholds, and visit 1 for the moments of the projected
rows. Without it the one visit asks for moments within the bounds.

Input perturbation is the local model: every row is noised by itself, once, and everything else is arithmetic. What a
silo sends is the second moments of its noised rows.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from silobayes.inference import projection
from silobayes.inference.noisy_statistics import GaussianPosterior
from silobayes.inference.projection import Bounds
from silobayes.inference.solvers import AllRows
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.queries import Message, OpenSum, PrivateSum, Total
from silobayes.protocols import pvi, statistics
from silobayes.protocols.etas import to_host
from silobayes.protocols.roles import AbstractSilo, Merged, Seat
from silobayes.protocols.schedule import Visit
from silobayes.protocols.statistics import AbstractAnsweringServer, AbstractSummingSilo, eta_of


class ServerState(statistics.ServerState):
    """The box that rows are projected onto (the bounds, then the thresholds), its bias, and the answer; all public."""

    box: np.ndarray
    bias: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SquaresSilo(AbstractSummingSilo):
    """The first sum."""

    bounds: Bounds

    def bounded(self, x: np.ndarray, y: np.ndarray, down: np.ndarray) -> Bounded:
        """See `AbstractSummingSilo`."""
        return projection.bounded_squares(x, y, self.bounds)


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentsSilo(AbstractSummingSilo):
    """The second sum, of rows projected onto the box that comes down."""

    bounds: Bounds

    def bounded(self, x: np.ndarray, y: np.ndarray, down: np.ndarray) -> Bounded:
        """See `AbstractSummingSilo`."""
        return projection.bounded_moments(x, y, np.asarray(down), self.bounds)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsSilo(AbstractSilo[tuple[()]]):
    """Input perturbation: releases each row with noise, and sends the second moments of what was released."""

    bounds: Bounds
    rows: PrivateSum
    query: OpenSum
    solve: AllRows = field(default_factory=AllRows)

    def init(self, seat: Seat) -> tuple[()]:
        """Nothing."""
        return ()

    def draw(self, door: Door | None, seat: Seat, visit: Visit) -> tuple[()]:
        """Nothing."""
        return ()

    def reply(self, door: Door | None, seat: Seat, own: tuple[()], down: Any, found: Any) -> tuple[tuple[()], Message]:
        """See `AbstractSilo`."""
        assert door is not None
        # All of them, also those that compiled code leaves out: how many are sent may not depend on what they hold.
        x, y = (np.asarray(leaf, np.float64)[: seat.size] for leaf in (found.x, found.y))
        bounded = projection.bounded_rows(x, y, self.bounds)
        released = self.rows.write(door, seat.index, bounded).value
        assert released is not None
        noised = released.reshape(-1, len(self.bounds.all))
        return own, self.query.write(np.ravel(noised.T @ noised))

    def events(self, seat: Seat, num_visits: int) -> tuple[AbstractEvent, ...]:
        """Every row's release."""
        return (pvi.repeated(self.rows.event(seat.index), num_visits),)


@dataclass(frozen=True, kw_only=True, eq=False)
class AbstractLinregServer(AbstractAnsweringServer[ServerState]):
    """What both kinds of servers share; `num_rows` is the public number of all silos' rows."""

    model: LinearRegression
    bounds: Bounds
    num_rows: int

    def init(self) -> ServerState:
        """The prior and the bounds."""
        return ServerState(eta_q=self.eta_p, box=self.bounds.all, bias=0.0)

    def down(self, state: ServerState, visit: Visit) -> np.ndarray:
        """The box."""
        return state.box

    def answered(self, state: ServerState, answer: GaussianPosterior) -> Merged[ServerState]:
        """The state with an answer."""
        eta_q = to_host(eta_of(answer, self.family))
        return Merged(state=ServerState(eta_q=eta_q, box=state.box, bias=state.bias), counted=True)

    @property
    def known(self) -> dict[str, float]:
        """What the model knows."""
        return {"residual_stddev": self.model.noise_stddev, "prior_stddev": self.model.prior_stddev}


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectionServer(AbstractLinregServer):
    """`squares` is None without projection; `moments_noise` is the sd of the noise on the second sum."""

    squares: PrivateSum | None
    moments: PrivateSum
    moments_noise: float

    def merge(self, state: ServerState, visit: Visit, total: Total) -> Merged[ServerState]:
        """See `AbstractServer`."""
        if self.squares is not None and visit.part == 0:
            return Merged(state=self._projected(state, self.squares, total), counted=True)
        released = self.moments.read(total)
        (noise,) = released.stddevs
        return self.answered(
            state, projection.posterior(released.value, noise, state.box, self.bounds, bias=state.bias, **self.known)
        )

    def _projected(self, state: ServerState, squares: PrivateSum, total: Total) -> ServerState:
        released = squares.read(total)
        (noise,) = released.stddevs
        stds = projection.marginal_stds(released.value, noise, self.num_rows, self.bounds)
        chosen = projection.choose_projection(
            stds, noise, self.moments_noise, self.num_rows, self.bounds, self.model.prior_stddev
        )
        return ServerState(
            eta_q=state.eta_q, box=projection.thresholds(stds, chosen, self.bounds), bias=float(chosen.bias)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class InputServer(AbstractLinregServer):
    """Input perturbation; `noise_std` is that on each number of a row."""

    query: OpenSum
    noise_std: float

    def merge(self, state: ServerState, visit: Visit, total: Total) -> Merged[ServerState]:
        """See `AbstractServer`."""
        size = len(self.bounds.all)
        noised = self.query.read(total).reshape(size, size)
        return self.answered(
            state, projection.perturbed_posterior(noised, self.num_rows, self.noise_std, self.bounds, **self.known)
        )
