"""The hybrid of 001 section 4.2.3: an analytic start from noisy statistics, then DP optimisation.

The thesis proposes it for linear regression with known noise and does not run it. In the first visit each silo releases
`(sum x x', sum x y)`; the server makes the posterior that knows about their noise (UNCERTAINTY F1, F2) and starts at
its mean. All later visits are rounds of PVI by DP-SGD. What is gained: near the answer residuals are small, so
gradients can be clipped far below what a silo's targets would need, and no steps are spent on the way.

PVI needs one factor per silo. Those of the start are made of releases only, so they are public, like all later ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from silobayes.engines.baselines import StatisticsMethod
from silobayes.engines.methods import AbstractMethod, Call, PVIMethod
from silobayes.families import FullGaussian
from silobayes.inference.noisy_statistics import pool, shrink
from silobayes.models.base import GaussianEta
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.clipping import unpack_symmetric
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.mechanisms import Release
from silobayes.protocols import pvi


class _Noisy(NamedTuple):
    """A value per silo, and the expected squared norm of the error of each."""

    values: np.ndarray
    noise: float


@dataclass(frozen=True, kw_only=True, eq=False)
class HybridMethod(AbstractMethod):
    """Visit 0 is that of `first` (all silos at once), every other visit one of `then`.

    `sizes` are the silos' public numbers of rows: they say what share of the whole a silo is expected to have.

    Guarantees:
        - a client pays for its statistics once and for each later visit
        - without noise the start is the exact posterior, and its factors are those of the silos' own rows
        - eta_q = eta_p + sum of the silos' factors after the start
    """

    first: StatisticsMethod
    then: PVIMethod
    sizes: tuple[int, ...]

    def init_clients(self) -> pvi.ClientState:
        """See `AbstractMethod`."""
        return self.then.init_clients()

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        first = self.first.events(client, min(num_visits, 1))
        return (*first, *self.then.events(client, max(num_visits - 1, 0)))

    def client_step(self, clients: Any, call: Call, doors: Sequence[Door]) -> tuple[Any, pvi.Upload]:
        """See `AbstractMethod`; the start is not damped."""
        if call.index > 0:
            return self.then.client_step(clients, call, doors)
        eta_t = self._factors(self.first.releases(call, doors))
        return pvi.ClientState(eta_t=eta_t), pvi.plain_sum(pvi.Upload(d_eta=eta_t))

    def _factors(self, releases: Sequence[Release]) -> GaussianEta:
        """A stack of factors whose product with the prior is the q of the start.

        Its mean is the mean of the posterior that knows about the noise. Its precision is that of the rows, as far as
        the releases tell (F2), because that is where the optimisation would stay: it does not widen q for noise, and
        its own gradients of widths are mostly noise. Each silo gets its share, by rows, of the whole, plus what its own
        release says beyond that, shrunk as far as the releases differ by their noise alone (`differences`).
        """
        model = self.solver.model
        assert isinstance(model, LinearRegression)
        answer = self.first.answer(releases)
        gram, _, gram_std, _ = pool(releases)
        scale = (self.first.x_bound / model.noise_stddev) ** 2
        precision = scale * shrink(gram, gram_std)[0] + model.prior_stddev**-2 * np.eye(model.dim)
        if not isinstance(self.solver.family, FullGaussian):
            precision = np.diagonal(precision)  # of the best independent Gaussians, where PVI would stay
        linear_q = precision @ answer.mean if precision.ndim == 2 else precision * answer.mean
        shares = np.array(self.sizes) / sum(self.sizes)

        def split(whole: np.ndarray, own: _Noisy) -> np.ndarray:
            return _along(shares, own.values) * whole + differences(own.values, shares, own.noise)

        linear, quadratic = self._own(releases, answer.mean)
        kind: Any = type(self.eta_p)  # states are host arrays
        return kind(
            linear=split(linear_q - self.eta_p.linear, linear),
            quadratic=split(-0.5 * precision - self.eta_p.quadratic, quadratic),
        )

    def _own(self, releases: Sequence[Release], mean: np.ndarray) -> tuple[_Noisy, _Noisy]:
        """Linear and quadratic parts of the silos' factors as their releases have them: believed, with all noise."""
        model, x_bound = self.solver.model, self.first.x_bound
        assert isinstance(model, LinearRegression)
        units = np.array([x_bound**2, x_bound]) / model.noise_stddev**2
        gram = units[0] * np.stack([unpack_symmetric(own.blocks[0]) for own in releases])
        cross = units[1] * np.stack([own.blocks[1] for own in releases])
        matrix, vector = np.mean([(units * own.stddevs) ** 2 for own in releases], axis=0)  # variances
        dim = model.dim
        if isinstance(self.solver.family, FullGaussian):
            quadratic = _Noisy(values=-0.5 * gram, noise=matrix * dim * (dim + 1) / 8)
            return _Noisy(values=cross, noise=dim * vector), quadratic
        # The optimum over independent Gaussians moves what is off the diagonal to the linear part, at the mean.
        diagonal = np.diagonal(gram, axis1=1, axis2=2)
        moved = matrix / 2 * (dim - 1) * float(mean @ mean)
        return (
            _Noisy(values=cross - gram @ mean + diagonal * mean, noise=dim * vector + moved),
            _Noisy(values=-0.5 * diagonal, noise=matrix * dim / 4),
        )


def differences(values: np.ndarray, shares: np.ndarray, noise: float) -> np.ndarray:
    """How each silo's `values` differ from its share of their sum, shrunk by how much of that noise explains.

    Args:
        values: One entry per silo along the first axis, each with an error of its own.
        shares: Expected shares of the silos; they sum to 1.
        noise: Expected squared norm of one silo's error.

    Guarantees:
        - the differences add up to zero
        - without noise nothing is shrunk, and where noise explains everything they vanish
    """
    beyond = values - _along(shares, values) * values.sum(axis=0)
    num_silos = len(shares)
    by_noise = noise * (num_silos - 2 + num_silos * np.sum(shares**2))
    seen = float(np.sum(beyond**2))
    return beyond * max(0.0, 1.0 - by_noise / seen) if seen > 0.0 else beyond


def _along(shares: np.ndarray, like: np.ndarray) -> np.ndarray:
    return shares.reshape(-1, *[1] * (like.ndim - 1))
