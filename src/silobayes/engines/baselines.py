"""Baselines as engine methods: committee machines, global VI, and noisy sufficient statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from silobayes.engines.buckets import Buckets
from silobayes.engines.methods import AbstractMethod, Call, repeated
from silobayes.engines.solvers import LocalSolver, stack_steps
from silobayes.families import FullGaussian
from silobayes.inference.ascent import step_sizes_of
from silobayes.inference.coordinates import num_coordinates
from silobayes.inference.noisy_statistics import (
    GaussianPosterior,
    bounded_statistics,
    noise_aware_posterior,
    pool,
)
from silobayes.inference.row_gradients import Clipping
from silobayes.models.base import GaussianEta
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.clipping import Bounded, bounded_loop_sum
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.loops import StepPlan, open_steps
from silobayes.privacy.mechanisms import AbstractMechanism, GaussianMechanism, Release
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import Batch, PoissonSampler
from silobayes.protocols import bcm, global_vi, pvi


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

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        return () if self.plans is None else repeated(self.plans[client].event, num_visits)

    def client_step(self, clients, call, doors):
        """See `AbstractMethod`."""

        def refit(eta_own: GaussianEta, _: GaussianEta) -> GaussianEta:
            cavities = jax.tree.map(lambda leaf: np.repeat(leaf[None], len(call.at), axis=0), eta_own)
            if self.plans is None:
                return self.solver.refit(self.buckets, call.at, call.key, cavities, call.start)
            private = {"doors": doors, "plans": self.plans, "clipping": self.clipping}
            return self.solver.refit_privately(self.buckets, call.at, call.key, cavities, call.start, **private)

        return clients, self.add_up(bcm.client_step(call.down, refit, share=self.share), call)


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalVIMethod(AbstractMethod):
    """Each visit is `num_steps` steps over the union of rows; the state of the clients is that of the server's Adam.

    With a noise of its own in each silo all steps of a visit run in one compiled loop.
    """

    buckets: Buckets
    plans: tuple[StepPlan, ...] | None
    clipping: Clipping

    def init_clients(self) -> global_vi.ServerState:
        """See `AbstractMethod`."""
        start = self.solver.model.start_eta(self.solver.family, jax.random.key(self.seed))
        return jax.tree.map(np.asarray, global_vi.init(self.solver.family, start))

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        return () if self.plans is None else repeated(self.plans[client].event, num_visits)

    def client_step(self, clients, call, doors):
        """See `AbstractMethod`; here the server's optimiser moves, so q changes by what is returned."""
        sizes = step_sizes_of_visit(self, call.index)
        opened = None if self.plans is None else [open_steps(d, p) for d, p in zip(doors, self.plans, strict=True)]
        groups = tuple(self._group(bucket, opened) for bucket in self.buckets.buckets)
        public = {"clipping": self.clipping, "rows_per_unit": self.buckets.rows_per_unit}
        state, seen = global_vi.run_steps(
            self.solver.model, pvi.to_single(self.eta_p), clients, groups, call.key, sizes, **public
        )
        for bucket, collected in zip(self.buckets.buckets, seen, strict=True):
            for position, m in enumerate(bucket.parts):
                if opened is not None:
                    own = None if collected is None else tuple(np.asarray(leaf[position]) for leaf in collected)
                    opened[m].close(own)
        d_eta = pvi.to_host(state.point.to_eta()) - call.down.eta_q
        return jax.tree.map(np.asarray, state), pvi.Upload(d_eta=d_eta)

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
class SummedGlobalVIMethod(AbstractMethod):
    """Global VI in which only the sum over silos becomes public: one sum, of integers with shares of noise, per step.

    The noise is exact and on a grid, so the loop runs on the host, a step at a time.
    """

    buckets: Buckets
    samplers: tuple[PoissonSampler, ...]
    clip_norm: float
    noise_multiplier: float
    relation: Relation
    clipping: Clipping
    unit: Unit

    def init_clients(self) -> global_vi.ServerState:
        """See `AbstractMethod`."""
        start = self.solver.model.start_eta(self.solver.family, jax.random.key(self.seed))
        return jax.tree.map(np.asarray, global_vi.init(self.solver.family, start))

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        assert self.aggregator is not None
        units = (self.unit, self.buckets.rows_per_unit)
        nothing = loop_sum_of_nothing(self.solver, self.clip_norm, self.samplers, client, *units)
        event = self.aggregator.mechanism(self.noise_multiplier).event(nothing, self.relation)
        return repeated(event, num_visits * self.solver.num_steps)

    def client_step(self, clients, call, doors):
        """See `AbstractMethod`."""
        assert self.aggregator is not None
        server, model, num_steps = clients, self.solver.model, self.solver.num_steps
        sizes, eta_p = step_sizes_of_visit(self, call.index), pvi.to_single(self.eta_p)
        draws = global_vi.draws_of(model, call.key, num_steps)
        rate = self.samplers[0].sample_rate
        for k in range(num_steps):
            bounded = self._bounded(server, None if draws is None else draws[k], doors)
            sum_index = call.index * num_steps + k
            total = self.aggregator.release(doors, bounded, self.noise_multiplier, sum_index).value / rate
            server = global_vi.compiled_server_step(server, total.astype(np.float32), eta_p, sizes[k])
        d_eta = pvi.to_host(server.point.to_eta()) - call.down.eta_q
        return jax.tree.map(np.asarray, server), pvi.Upload(d_eta=d_eta)

    def _bounded(self, server: global_vi.ServerState, e: Any, doors: Sequence[Door]) -> list[Bounded]:
        """Each silo's clipped sum over a fresh batch."""
        batches = [door.batch(sampler) for door, sampler in zip(doors, self.samplers, strict=True)]
        bounded: dict[int, Bounded] = {}
        rows_per_unit = self.buckets.rows_per_unit
        public = {"clipping": self.clipping, "rows_per_unit": rows_per_unit}
        for bucket in self.buckets.buckets:
            indices = [batches[m].indices for m in bucket.parts]
            chunks = global_vi.chunked(indices, self.samplers[bucket.parts[0]], rows_per_unit)
            partial_sums = global_vi.partial_sums(
                self.solver.model, server.point, e, bucket.rows, *chunks, self.clip_norm, **public
            )
            for m, own in zip(bucket.parts, np.asarray(partial_sums), strict=True):
                units = (self.unit, rows_per_unit)
                bounded[int(m)] = _loop_sum(own, self.clip_norm, self.samplers, batches[m], *units)
        return [bounded[m] for m in range(len(batches))]


def loop_sum_of_nothing(
    solver: LocalSolver,
    clip_norm: float,
    samplers: Sequence[PoissonSampler],
    client: int,
    unit: Unit,
    rows_per_unit: int,
) -> Bounded:
    """What a client without rows would share in a step: enough to say what a step costs."""
    nobody = Batch(indices=np.zeros(0, dtype=int), sampling=samplers[client].sampling)
    return _loop_sum(np.zeros((1, num_coordinates(solver.family))), clip_norm, samplers, nobody, unit, rows_per_unit)


def _loop_sum(
    partial_sums: np.ndarray,
    clip_norm: float,
    samplers: Sequence[PoissonSampler],
    batch: Batch,
    unit: Unit,
    rows_per_unit: int,
) -> Bounded:
    return bounded_loop_sum(
        partial_sums,
        clip_norm,
        chunk=global_vi.units_per_chunk(rows_per_unit) * rows_per_unit,
        batch=batch,
        capacity=max(sampler.capacity for sampler in samplers),
        unit=unit,
    )


def step_sizes_of_visit(method: AbstractMethod, index: int) -> Any:
    """Adam's step sizes in one visit of global VI: they fall over the whole study."""
    num_steps = method.solver.num_steps
    sizes = step_sizes_of(method.solver.step_size, num_steps * len(method.visits))
    return sizes[index * num_steps : (index + 1) * num_steps]


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

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        dim = self.solver.model.dim
        nothing = bounded_statistics(np.zeros((0, dim)), np.zeros(0), y_bound=self.y_bound)
        return repeated(self._mechanism.event(nothing, self.relation), num_visits)

    def client_step(self, clients, call, doors: Sequence[Door]):
        """See `AbstractMethod`; the broadcast is the prior."""
        releases = self.releases(call, doors)
        gram, cross, gram_std, cross_std = pool(releases)
        state = {"gram": gram, "cross": cross, "variances": np.array([gram_std**2, cross_std**2])}
        answer = self.answer(releases)
        full = FullGaussian(dimension=self.solver.model.dim)
        eta = full.from_standard(mean=jnp.asarray(answer.mean), covariance=jnp.asarray(answer.covariance))
        eta = eta if isinstance(self.solver.family, FullGaussian) else full.to_mean_field(eta)
        return state, pvi.Upload(d_eta=pvi.to_host(eta) - call.down.eta_q)

    def releases(self, call: Call, doors: Sequence[Door]) -> list[Release]:
        """The statistics of each called silo in units of the bounds; with an aggregator their sum only."""
        bounded = [
            bounded_statistics(self.rows[m][0] / self.x_bound, self.rows[m][1], y_bound=self.y_bound) for m in call.at
        ]
        if self.aggregator is None:
            return [door.release(self._mechanism, own) for door, own in zip(doors, bounded, strict=True)]
        return [self.aggregator.release(doors, bounded, self.noise_multiplier, call.index)]

    def answer(self, releases: Sequence[Release]) -> GaussianPosterior:
        """The posterior given what was released."""
        model = self.solver.model
        assert isinstance(model, LinearRegression)
        gram, cross, gram_std, cross_std = pool(releases)
        # In units of the bound, coefficients are larger by it and their prior wider.
        answer = noise_aware_posterior(
            gram,
            cross,
            gram_std=gram_std,
            cross_std=cross_std,
            residual_variance=model.noise_stddev**2,
            prior_precision=(model.prior_stddev * self.x_bound) ** -2,
        )
        return replace(answer, mean=answer.mean / self.x_bound, covariance=answer.covariance / self.x_bound**2)

    @property
    def _mechanism(self) -> AbstractMechanism:
        if self.aggregator is not None:
            return self.aggregator.mechanism(self.noise_multiplier)
        return GaussianMechanism(noise_multiplier=self.noise_multiplier)
