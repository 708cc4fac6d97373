"""Local inference of many parts at once: one call of a compiled function per bucket.

All of it answers with factors: the local optimum divided by the usable cavity that it was found with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from silobayes.engines.buckets import Buckets
from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.conjugate import full_factor, mean_field_factor
from silobayes.inference.coordinates import num_coordinates
from silobayes.inference.dp_vi import ascend_privately
from silobayes.inference.natural_step import natural_factor, network_factor
from silobayes.inference.row_gradients import Clipping
from silobayes.inference.rows import Rows
from silobayes.inference.vi import maximise, maximise_prior
from silobayes.models.base import AbstractGLM, AbstractModel, GaussianEta, GaussianFamily
from silobayes.models.layered import AbstractLayeredModel
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.door import Door
from silobayes.privacy.loops import Step, StepPlan, open_steps
from silobayes.privacy.relation import Unit
from silobayes.protocols.pvi import to_host, to_single, usable

_CACHED_NUMBERS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class LocalSolver:
    """The public settings of a local optimisation.

    `floor` is that of usable cavities; `num_steps` and `step_size` are Adam's.
    """

    model: AbstractModel
    family: GaussianFamily
    floor: float
    num_steps: int
    step_size: float

    def refit(
        self,
        buckets: Buckets,
        chosen: np.ndarray,
        key: PRNGKeyArray,
        eta_cavity: GaussianEta,
        eta_start: GaussianEta,
    ) -> GaussianEta:
        """Factors of the chosen parts without privacy; `eta_cavity` is stacked in the order of `chosen`.

        Guarantees:
            - linear regression with known noise is solved exactly
        """
        cavities, start = to_single(eta_cavity), to_single(eta_start)
        if isinstance(self.model, LinearRegression):
            model = self.model

            def exactly(rows: Rows, at: np.ndarray) -> GaussianEta:
                return _exact_factors(model, self.family, _take(cavities, at), rows, floor=self.floor)

            return to_host(buckets.map(chosen, exactly))

        def call(rows: Rows, at: np.ndarray) -> GaussianEta:
            powers = np.ones(len(at), dtype=np.float32)
            return self._optimal(key, chosen[at], _take(cavities, at), start, rows, powers)

        return to_host(buckets.map(chosen, call))

    def refit_shards(
        self,
        buckets: Buckets,
        chosen: np.ndarray,
        key: PRNGKeyArray,
        eta_cavity: GaussianEta,
        eta_q: GaussianEta,
        tempering: np.ndarray,
    ) -> GaussianEta:
        """Factors of the chosen shards, their likelihoods to the powers `tempering`.

        Generalised linear models and networks take one natural step from the proper `eta_q` (see `natural_step` why),
        other models go to their local optimum.
        """
        cavities, q = to_single(eta_cavity), to_single(eta_q)
        powers = tempering.astype(np.float32)

        def call(rows: Rows, at: np.ndarray) -> GaussianEta:
            if isinstance(self.model, AbstractGLM):
                return _natural_factors(self.model, self.family, q, rows, powers[at])
            if isinstance(self.model, AbstractLayeredModel) and isinstance(self.family, MeanFieldGaussian):
                return _network_factors(self.model, self.family, key, q, rows, powers[at])
            return self._optimal(key, chosen[at], _take(cavities, at), q, rows, powers[at])

        return to_host(buckets.map(chosen, call))

    def _optimal(self, key, parts, eta_cavity, eta_start, rows, tempering) -> GaussianEta:
        steps = {"num_steps": self.num_steps, "floor": self.floor}
        return _optimal_factors(
            self.model, self.family, key, parts, eta_cavity, eta_start, rows, tempering, self.step_size, **steps
        )

    def refit_prior(self, key: PRNGKeyArray, eta_cavity: GaussianEta, eta_start: GaussianEta) -> GaussianEta:
        """The prior's own factor (no rows, no price)."""
        cavity = usable(self.family, to_single(eta_cavity), self.floor)
        steps = {"num_steps": self.num_steps, "step_size": self.step_size}
        optimum = maximise_prior(self.model, self.family, key, cavity, to_single(eta_start), **steps)
        return to_host(_factor(optimum, cavity))

    def refit_privately(
        self,
        buckets: Buckets,
        chosen: np.ndarray,
        key: PRNGKeyArray,
        eta_cavity: GaussianEta,
        eta_start: GaussianEta,
        *,
        doors: Sequence[Door],
        plans: Sequence[StepPlan],
        clipping: Clipping,
    ) -> GaussianEta:
        """The same by DP-SGD: `doors` and `plans` are those of the chosen silos; each loop is paid before it starts."""
        opened = [open_steps(door, plan) for door, plan in zip(doors, plans, strict=True)]
        cavities, start = to_single(eta_cavity), to_single(eta_start)
        clip_norms = np.array([plan.clip_norm for plan in plans], dtype=np.float32)
        rates = np.array([plan.sampler.sampling.rate for plan in plans], dtype=np.float32)

        def call(rows: Rows, at: np.ndarray) -> tuple[GaussianEta, Any]:
            return _private_factors(
                self.model,
                self.family,
                key,
                chosen[at],
                _take(cavities, at),
                start,
                rows,
                stack_steps([opened[k].inputs for k in at]),
                clip_norms[at],
                rates[at],
                # Of one size: falling steps would waste what the last ones cost; rounds are averaged instead.
                np.full(self.num_steps, self.step_size, dtype=np.float32),
                clipping=clipping,
                rows_per_unit=buckets.rows_per_unit,
                floor=self.floor,
            )

        factors, seen = buckets.map(chosen, call)
        for k, steps in enumerate(opened):
            steps.close(None if seen is None else tuple(leaf[k] for leaf in seen))
        return to_host(factors)

    def plan(self, sampler: Any, *, clip_norm: float, noise_multiplier: float, unit: Unit = Unit.ROW) -> StepPlan:
        """One visit's loop."""
        return StepPlan(
            sampler=sampler,
            num_steps=self.num_steps,
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            dimension=num_coordinates(self.family),
            unit=unit,
        )


@partial(jax.jit, static_argnames=("num_steps", "floor"))
def _optimal_factors(model, family, key, parts, eta_cavity, eta_start, rows, tempering, step_size, *, num_steps, floor):
    def one(part: tuple[Array, GaussianEta, Rows, Array]) -> GaussianEta:
        number, cavity, own_rows, power = part
        cavity = usable(family, cavity, floor)
        steps = {"tempering": power, "num_steps": num_steps, "step_size": step_size}
        optimum = maximise(model, family, jax.random.fold_in(key, number), cavity, eta_start, own_rows, **steps)
        if isinstance(model, AbstractGLM):
            # At the optimum this is `optimum - cavity`, of which float32 would leave a small silo only rounding errors.
            return natural_factor(model, family, optimum, own_rows, power)
        return _factor(optimum, cavity)

    # Small shards side by side, large silos one after the other: what is worked on shall fit the processor's cache.
    side_by_side = max(1, _CACHED_NUMBERS // rows.x[0].size)
    return jax.lax.map(one, (parts, eta_cavity, rows, tempering), batch_size=side_by_side)


@jax.jit
def _natural_factors(model, family, eta_q, rows, tempering):
    return jax.vmap(lambda part, power: natural_factor(model, family, eta_q, part, power))(rows, tempering)


@jax.jit
def _network_factors(model, family, key, eta_q, rows, tempering):
    return jax.vmap(lambda part, power: network_factor(model, family, key, eta_q, part, power))(rows, tempering)


@partial(jax.jit, static_argnames="floor")
def _exact_factors(model, family, eta_cavity, rows, *, floor):
    def one(cavity: GaussianEta, part: Rows) -> GaussianEta:
        if isinstance(family, FullGaussian):
            return full_factor(model, part)
        return mean_field_factor(model, part, usable(family, cavity, floor))

    return jax.vmap(one)(eta_cavity, rows)


@partial(jax.jit, static_argnames=("clipping", "rows_per_unit", "floor"))
def _private_factors(
    model,
    family,
    key,
    parts,
    eta_cavity,
    eta_start,
    rows,
    steps,
    clip_norms,
    rates,
    step_size,
    *,
    clipping,
    rows_per_unit,
    floor,
):
    def one(silo: tuple[Array, GaussianEta, Rows, Step, Array, Array]) -> tuple:
        number, cavity, part, step, clip_norm, rate = silo
        cavity = usable(family, cavity, floor)
        public = {"clip_norm": clip_norm, "sample_rate": rate, "step_size": step_size}
        public |= {"clipping": clipping, "rows_per_unit": rows_per_unit}
        own_key = jax.random.fold_in(key, number)
        optimum, seen = ascend_privately(model, family, own_key, cavity, eta_start, part, step, **public)
        return _factor(optimum, cavity), seen

    # One silo after the other inside the compiled function: a batch fits the processor's cache, those of all silos side
    # by side do not (200 silos of 122 rows, 109 features: half the CPU time of vmap).
    return jax.lax.map(one, (parts, eta_cavity, rows, steps, clip_norms, rates))


def stack_steps(steps: Sequence[Step]) -> Step:
    """Scan inputs of several silos with a leading axis; batches are padded to the longest."""
    width = max(step.indices.shape[1] for step in steps)

    def widen(step: Step) -> Step:
        if step.indices.shape[1] == width:
            return step
        fill = ((0, 0), (0, width - step.indices.shape[1]))
        return eqx.tree_at(lambda s: (s.indices, s.mask), step, (np.pad(step.indices, fill), np.pad(step.mask, fill)))

    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(widen, steps))


def _factor(optimum: GaussianEta, cavity: GaussianEta) -> GaussianEta:
    return jax.tree.map(lambda whole, rest: whole - rest, optimum, cavity)


def _take(eta: GaussianEta, at: np.ndarray) -> GaussianEta:
    return jax.tree.map(lambda leaf: leaf[at], eta)
