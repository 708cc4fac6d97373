"""Regressions from centred scores (UNCERTAINTY): a few rounds, each one joint noisy sum at a public Gaussian.

The mathematics stands in `inference.centred`. Each round is a part of its own, because each has its own noise: the last
rounds, which count, have the larger shares of the budget.

Guarantees:
    - intervals include the privacy noise
    - a round's sum moves by no more than is priced
    - the server sees sums and public numbers only
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from scipy import linalg

from silobayes.families import FullGaussian
from silobayes.inference import centred
from silobayes.inference.centred import Answer, Rounds
from silobayes.inference.centred_sums import Centre, Frame, round_sum
from silobayes.inference.layouts import PersonSlots
from silobayes.models.base import AbstractModel
from silobayes.posteriors import Posterior
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.queries import PrivateSum, Total
from silobayes.privacy.relation import Unit
from silobayes.protocols.etas import eta_info, to_host
from silobayes.protocols.roles import AbstractServer, Merged, Seat
from silobayes.protocols.schedule import Visit
from silobayes.protocols.statistics import AbstractReleasingSilo, present_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class CentredSilo(AbstractReleasingSilo):
    """Answers one round; `unit` is whom it protects."""

    frame: Frame
    unit: Unit

    def asked(self, seat: Seat, found: Any, down: Centre) -> Bounded:
        """See `AbstractReleasingSilo`."""
        slots = np.flatnonzero(found.present)
        persons = slots // seat.layout.rows_per_person if isinstance(seat.layout, PersonSlots) else None
        return round_sum(
            *present_rows(found),
            down,
            self.frame,
            self.query.relation,
            capacity=len(found.present),
            unit=self.unit,
            persons=persons,
        )


class ServerState(eqx.Module):
    """What was released in rounds so far, where it was asked and of whom, and the next centre; all public."""

    num_rounds: int
    sums: np.ndarray
    stddevs: np.ndarray
    centres: np.ndarray
    members: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray
    noises: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class CentredServer(AbstractServer[ServerState]):
    """Makes an answer of the rounds so far, and asks next where it is.

    Attributes:
        model: Of the study.
        names: Of its parameters.
        frame: Public units.
        start: Where the first round asks.
        queries: Of each round.
        rows: Public numbers of the silos' rows.
        units: The same of whom it protects.
        first_noise: What the model's noise is thought to be at first, where rounds find it out; otherwise 1.
    """

    model: AbstractModel
    names: tuple[str, ...]
    frame: Frame
    start: np.ndarray
    queries: tuple[PrivateSum, ...]
    rows: tuple[int, ...]
    units: tuple[int, ...]
    first_noise: float = 1.0

    def init(self) -> ServerState:
        """The prior, around the start."""
        count, size = len(self.queries), self.queries[0].layouts[0].total.size
        return ServerState(
            num_rounds=0,
            sums=np.zeros((count, size)),
            stddevs=np.ones((count, len(self.frame.shares))),
            centres=np.zeros((count, self.frame.dim)),
            members=np.zeros((count, len(self.rows))),
            mean=self.start / self.frame.units,
            covariance=np.diag(1.0 / self.frame.prior_precision),
            noises=np.full(count + 1, self.first_noise),
        )

    def down(self, state: ServerState, visit: Visit) -> Centre:
        """See `AbstractServer`."""
        return Centre(mean=state.mean, covariance=state.covariance, noise=state.noises[state.num_rounds])

    def merge(self, state: ServerState, visit: Visit, total: Total) -> Merged[ServerState]:
        """See `AbstractServer`; a sum over some silos stands for all rows."""
        read = self.queries[visit.part].read(total)
        members = np.isin(np.arange(len(self.rows)), total.members)
        whole = sum(self.rows) / float(np.dot(members, self.rows))
        row, asked = state.num_rounds, self.down(state, visit)
        state = ServerState(
            num_rounds=row + 1,
            sums=_with_row(state.sums, row, whole * np.concatenate(read.blocks)),
            stddevs=_with_row(state.stddevs, row, whole * np.array(read.stddevs)),
            centres=_with_row(state.centres, row, state.mean),
            members=_with_row(state.members, row, whole * members),
            mean=state.mean,
            covariance=state.covariance,
            noises=state.noises,
        )
        then = centred.next_centre(asked, self.answer(state), self.frame)
        noise = float(asked.noise)
        if self.frame.score.finds_noise:
            noise *= float(np.exp(np.clip(self.log_noise(state)[0] - np.log(noise), -1.0, 1.0)))
        changed = (then.mean, then.covariance, _with_row(state.noises, row + 1, np.array(noise)))
        return Merged(
            state=eqx.tree_at(lambda own: (own.mean, own.covariance, own.noises), state, changed), counted=True
        )

    def answer(self, state: ServerState) -> Answer:
        """The posterior in the frame's units."""
        return centred.answer(self._rounds(state), self.frame)

    def log_noise(self, state: ServerState) -> tuple[float, float, float, float]:
        """See `centred.log_noise`."""
        prior = self.model.prior_stddev  # type: ignore[attr-defined]
        return centred.log_noise(self._rounds(state), self.frame, num_units=sum(self.units), prior_stddev=prior)

    def _rounds(self, state: ServerState) -> Rounds:
        made = slice(0, state.num_rounds)
        weights = centred.weights_of_rounds(state.stddevs[made])
        counts = weights @ state.members[made][-len(weights) :]
        return Rounds(
            sums=state.sums[made],
            stddevs=state.stddevs[made],
            centres=state.centres[made],
            noises=state.noises[made],
            repeats=float(np.dot(counts**2, self.rows) / sum(self.rows)),
        )

    def posterior(self, state: ServerState) -> Posterior:
        """See `AbstractServer`."""
        units = self.frame.units
        if state.num_rounds == 0:
            eta = self.model.prior_eta(FullGaussian(dimension=self.model.dim))
            return Posterior(family=FullGaussian(dimension=self.model.dim), eta=eta, names=self.names, model=self.model)
        reached = self.answer(state)
        mean, covariance = reached.mean * units, reached.covariance * np.outer(units, units)
        shares = (reached.privacy_share, reached.prior_share)
        if self.frame.score.finds_noise:
            log_mean, log_variance, *own = self.log_noise(state)
            mean, covariance = np.append(mean, log_mean), np.asarray(linalg.block_diag(covariance, log_variance))
            shares = tuple(np.append(share, one) for share, one in zip(shares, own, strict=True))
        return _gaussian(
            self.model,
            self.names,
            mean,
            covariance,
            privacy_share=shares[0],
            prior_share=shares[1],
            warnings=centred.warnings(reached, self.frame, self.names[: self.frame.dim]),
        )

    def info(self, state: ServerState) -> dict[str, Any]:
        """The present answer."""
        return eta_info(to_host(self.posterior(state).eta))


def _with_row(log: np.ndarray, row: int, values: np.ndarray) -> np.ndarray:
    new = log.copy()
    new[row] = values
    return new


def _gaussian(
    model: AbstractModel, names: tuple[str, ...], mean: np.ndarray, covariance: np.ndarray, **more: Any
) -> Posterior:
    family = FullGaussian(dimension=len(mean))
    eta = family.from_standard(mean=jnp.asarray(mean), covariance=jnp.asarray(covariance))
    return Posterior(family=family, eta=eta, names=names, model=model, covariance=covariance, **more)
