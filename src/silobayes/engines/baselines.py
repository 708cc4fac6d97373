"""Baselines as engine methods: committee machines, global VI, and noisy sufficient statistics."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from silobayes.engines.buckets import Buckets
from silobayes.engines.methods import AbstractMethod
from silobayes.engines.solvers import stack_steps
from silobayes.families import FullGaussian
from silobayes.inference.ascent import step_sizes_of
from silobayes.inference.noisy_statistics import bounded_statistics, noise_aware_posterior, pool, release_statistics
from silobayes.inference.row_gradients import Clipping
from silobayes.models.base import GaussianEta
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.loops import StepPlan, open_steps
from silobayes.privacy.mechanisms import GaussianMechanism
from silobayes.privacy.relation import Relation
from silobayes.protocols import bcm, global_vi, pvi


def loop_events(
    plans: tuple[StepPlan, ...] | None, num_visits: int, num_silos: int
) -> tuple[AbstractEvent | None, ...]:
    """What each silo pays for that many visits of its loop."""
    if plans is None:
        return (None,) * num_silos
    return tuple(dataclasses.replace(plan.event, count=plan.num_steps * num_visits) for plan in plans)


@dataclass(frozen=True, kw_only=True, eq=False)
class BCMMethod(AbstractMethod):
    """One visit of everybody; clients keep no state. `share` is the power of the prior that each uses."""

    buckets: Buckets
    plans: tuple[StepPlan, ...] | None
    clipping: Clipping
    share: float

    def init_clients(self) -> tuple[()]:
        """See `AbstractMethod`."""
        return ()

    def total_events(self) -> tuple[AbstractEvent | None, ...]:
        """See `AbstractMethod`."""
        return loop_events(self.plans, 1, len(self.buckets.slots))

    def client_step(self, clients, down, at, start, key, doors):
        """See `AbstractMethod`."""

        def solve(eta_own: GaussianEta, _: GaussianEta) -> GaussianEta:
            cavities = jax.tree.map(lambda leaf: np.repeat(leaf[None], len(at), axis=0), eta_own)
            if self.plans is None:
                return self.solver.solve(self.buckets, at, key, cavities, start)
            private = {"doors": doors, "plans": self.plans, "clipping": self.clipping}
            return self.solver.solve_privately(self.buckets, at, key, cavities, start, **private)

        return clients, bcm.client_step(down, solve, share=self.share)


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalVIMethod(AbstractMethod):
    """Each visit is `num_steps` steps over the union of rows; the state of the clients is that of the server's Adam."""

    buckets: Buckets
    plans: tuple[StepPlan, ...] | None
    clipping: Clipping

    def init_clients(self) -> global_vi.ServerState:
        """See `AbstractMethod`."""
        start = self.solver.model.start_eta(self.solver.family, jax.random.key(self.seed))
        return jax.tree.map(np.asarray, global_vi.init(self.solver.family, start))

    def total_events(self) -> tuple[AbstractEvent | None, ...]:
        """See `AbstractMethod`."""
        return loop_events(self.plans, len(self.visits), len(self.buckets.slots))

    def client_step(self, clients, down, at, start, key, doors):
        """See `AbstractMethod`; here the server's optimiser moves, so q changes by what is returned."""
        index = int(clients.adam.count) // self.solver.num_steps
        total_steps = self.solver.num_steps * len(self.visits)
        sizes = step_sizes_of(self.solver.step_size, total_steps)
        sizes = sizes[index * self.solver.num_steps : (index + 1) * self.solver.num_steps]
        opened = None if self.plans is None else [open_steps(d, p) for d, p in zip(doors, self.plans, strict=True)]
        groups = tuple(self._group(bucket, opened) for bucket in self.buckets.buckets)
        state, seen = global_vi.run_steps(
            self.solver.model, pvi.to_single(self.eta_p), clients, groups, key, sizes, clipping=self.clipping
        )
        for bucket, collected in zip(self.buckets.buckets, seen, strict=True):
            for position, m in enumerate(bucket.parts):
                if opened is not None:
                    own = None if collected is None else tuple(np.asarray(leaf[position]) for leaf in collected)
                    opened[m].close(own)
        change = pvi.to_host(state.point.to_eta()) - down.eta_q
        return jax.tree.map(np.asarray, state), pvi.Upload(d_eta=jax.tree.map(lambda leaf: leaf[None], change))

    def _group(self, bucket: Any, opened: Any) -> global_vi.Clients:
        plans = None if self.plans is None else [self.plans[m] for m in bucket.parts]
        ones = jnp.ones(len(bucket.parts))
        return global_vi.Clients(
            rows=bucket.rows,
            steps=None if opened is None else stack_steps([opened[m].inputs for m in bucket.parts]),
            clip_norms=ones if plans is None else jnp.array([plan.clip_norm for plan in plans]),
            sample_rates=ones if plans is None else jnp.array([plan.sampler.sampling.rate for plan in plans]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticsMethod(AbstractMethod):
    """Linear regression with known noise: each silo releases `(sum x x', sum x y)` once, the rest is post-processing.

    The posterior knows about the noise (UNCERTAINTY F1 and F2). `x_bound` and `y_bound` are public: rows are pulled
    back to them.
    """

    rows: tuple[tuple[np.ndarray, np.ndarray], ...]
    x_bound: float
    y_bound: float
    noise_multiplier: float
    relation: Relation

    def init_clients(self) -> dict[str, np.ndarray]:
        """Sums over silos of releases, in units of the bounds, and their noise variances."""
        dim = self.solver.model.dim
        return {"gram": np.zeros((dim, dim)), "cross": np.zeros(dim), "variances": np.zeros(2)}

    def total_events(self) -> tuple[AbstractEvent | None, ...]:
        """See `AbstractMethod`."""
        dim = self.solver.model.dim
        nothing = bounded_statistics(np.zeros((0, dim)), np.zeros(0), y_bound=self.y_bound)
        event = GaussianMechanism(noise_multiplier=self.noise_multiplier).event(nothing, self.relation)
        return (event,) * len(self.rows)

    def client_step(self, clients, down, at, start, key, doors: Sequence[Door]):
        """See `AbstractMethod`; `down` is the prior."""
        known = {"y_bound": self.y_bound, "noise_multiplier": self.noise_multiplier}
        releases = [
            release_statistics(door, self.rows[m][0] / self.x_bound, self.rows[m][1], **known)
            for m, door in zip(at, doors, strict=True)
        ]
        gram, cross, gram_std, cross_std = pool(releases)
        state = {"gram": gram, "cross": cross, "variances": np.array([gram_std**2, cross_std**2])}
        change = pvi.to_host(self._posterior(state)) - down.eta_q
        return state, pvi.Upload(d_eta=jax.tree.map(lambda leaf: leaf[None], change))

    def _posterior(self, state: dict[str, np.ndarray]) -> GaussianEta:
        model = self.solver.model
        assert isinstance(model, LinearRegression)
        gram_std, cross_std = np.sqrt(state["variances"])
        # In units of the bound, coefficients are larger by it and their prior wider.
        answer = noise_aware_posterior(
            state["gram"],
            state["cross"],
            gram_std=float(gram_std),
            cross_std=float(cross_std),
            residual_variance=model.noise_stddev**2,
            prior_precision=(model.prior_stddev * self.x_bound) ** -2,
        )
        mean, covariance = answer.mean / self.x_bound, answer.covariance / self.x_bound**2
        full = FullGaussian(dimension=model.dim)
        eta = full.from_standard(mean=jnp.asarray(mean), covariance=jnp.asarray(covariance))
        return eta if isinstance(self.solver.family, FullGaussian) else full.to_mean_field(eta)
