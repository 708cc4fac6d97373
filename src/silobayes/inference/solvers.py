"""Local inference on the rows of one silo, as the functions that a silo's visit needs; each compiles once per shape.

A solver is a small pytree: what is static decides what is compiled, and rows, factors, draws and keys are arguments.
Only solvers (and the models that they call) see a row. They work on one silo without a leading axis; who has many maps
them, `side_by_side` or one after the other.
"""

import dataclasses
from functools import partial, singledispatch
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.conjugate import full_factor, mean_field_factor
from silobayes.inference.coordinates import AbstractPoint
from silobayes.inference.dp_vi import ascend_privately
from silobayes.inference.natural_step import natural_factor, network_factor
from silobayes.inference.row_gradients import Clipping, batch_gradient
from silobayes.inference.rows import Rows
from silobayes.inference.vi import maximise, maximise_prior
from silobayes.models.base import AbstractGLM, AbstractModel, GaussianEta, GaussianFamily
from silobayes.models.layered import AbstractLayeredModel
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.loops import Step


class LocalOptimum(eqx.Module):
    """The public settings of a local optimisation: `floor` is that of usable cavities, the rest is Adam's."""

    model: AbstractModel
    family: GaussianFamily
    floor: float = eqx.field(static=True)
    num_steps: int = eqx.field(static=True)
    step_size: np.ndarray

    def floored(self, share: float) -> "LocalOptimum":
        """The same with a share of the floor."""
        return dataclasses.replace(self, floor=share * self.floor)

    def factor(
        self, rows: Rows, eta_cavity: GaussianEta, eta_start: GaussianEta, key: PRNGKeyArray, power: Any = 1.0
    ) -> GaussianEta:
        """The local free-energy maximum divided by its cavity, likelihood to a `power`, without privacy.

        Guarantees:
            - linear regression with known noise is solved exactly
        """
        return _factor_of(self.model, self, rows, eta_cavity, eta_start, key, power)

    def private_factor(
        self,
        rows: Rows,
        eta_cavity: GaussianEta,
        eta_start: GaussianEta,
        key: PRNGKeyArray,
        steps: Step,
        *,
        clip_norm: Float[Array, ""],
        sample_rate: Float[Array, ""],
        clipping: Clipping,
        rows_per_unit: int,
    ) -> tuple[GaussianEta, Any]:
        """The same by DP-SGD, and what the paid `steps` must be closed with."""
        cavity = usable(self.family, eta_cavity, self.floor)
        public: dict[str, Any] = {"clip_norm": clip_norm, "sample_rate": sample_rate}
        public |= {"clipping": clipping, "rows_per_unit": rows_per_unit}
        # Of one size: falling steps would waste what the last ones cost; visits are averaged instead.
        public["step_size"] = jnp.full(self.num_steps, self.step_size)
        optimum, seen = ascend_privately(self.model, self.family, key, cavity, eta_start, rows, steps, **public)
        return _quotient(optimum, cavity), seen

    def shard_factors(
        self,
        rows: Rows,
        eta_cavity: GaussianEta,
        eta_q: GaussianEta,
        key: PRNGKeyArray,
        common_key: PRNGKeyArray,
        power: Float[Array, ""],
    ) -> GaussianEta:
        """Factors of all shards of a silo (the leading axis of `rows` and `eta_cavity`), likelihoods to a `power`.

        Generalised linear models and networks take one natural step from the proper `eta_q` (see `natural_step` why),
        other models go to their local optimum.
        """
        if isinstance(self.model, AbstractGLM):
            model = self.model
            return jax.vmap(lambda own: natural_factor(model, self.family, eta_q, own, power))(rows)
        if isinstance(self.model, AbstractLayeredModel) and isinstance(self.family, MeanFieldGaussian):
            network = (self.model, self.family, common_key, eta_q)
            return jax.vmap(lambda own: network_factor(*network, own, power))(rows)  # type: ignore[arg-type]
        keys = jax.random.split(key, rows.x.shape[0])

        return jax.lax.map(
            lambda shard: self.factor(shard[0], shard[1], eta_q, shard[2], power), (rows, eta_cavity, keys)
        )

    def prior_factor(self, eta_cavity: GaussianEta, eta_start: GaussianEta, key: PRNGKeyArray) -> GaussianEta:
        """A prior that is not Gaussian is one more factor (no rows, no price)."""
        cavity = usable(self.family, eta_cavity, self.floor)
        steps = {"num_steps": self.num_steps, "step_size": self.step_size}
        return _quotient(maximise_prior(self.model, self.family, key, cavity, eta_start, **steps), cavity)


@singledispatch
def _factor_of(
    model: AbstractModel,
    local: LocalOptimum,
    rows: Rows,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    key: PRNGKeyArray,
    power: Any,
) -> GaussianEta:
    cavity = usable(local.family, eta_cavity, local.floor)
    optimum = _optimum(local, rows, cavity, eta_start, key, power)
    return _quotient(optimum, cavity)


@_factor_of.register
def _glm_factor(model: AbstractGLM, local, rows, eta_cavity, eta_start, key, power) -> GaussianEta:
    cavity = usable(local.family, eta_cavity, local.floor)
    optimum = _optimum(local, rows, cavity, eta_start, key, power)
    # At the optimum this is `optimum - cavity`, of which float32 would leave a small silo only rounding errors.
    return natural_factor(model, local.family, optimum, rows, power)


@_factor_of.register
def _exact_factor(model: LinearRegression, local, rows, eta_cavity, eta_start, key, power) -> GaussianEta:
    if isinstance(local.family, FullGaussian):
        return full_factor(model, rows)
    return mean_field_factor(model, rows, usable(local.family, eta_cavity, local.floor))


def _optimum(local: LocalOptimum, rows, cavity, eta_start, key, power) -> GaussianEta:
    steps = {"tempering": power, "num_steps": local.num_steps, "step_size": local.step_size}
    return maximise(local.model, local.family, key, cavity, eta_start, rows, **steps)


class Refit(eqx.Module):
    """Local inference without privacy; `own` is the cavity."""

    local: LocalOptimum
    side_by_side: ClassVar[bool] = True

    def __call__(self, rows: Any, own: Any, down: Any, drawn: Any, key: PRNGKeyArray) -> GaussianEta:
        """The silo's new factor."""
        return self.local.factor(rows, own, down.start, key)


class RefitPrivately(eqx.Module):
    """Local inference by DP-SGD; `own` is the cavity."""

    local: LocalOptimum
    clip_norm: np.ndarray
    clipping: Clipping = eqx.field(static=True)
    rows_per_unit: int = eqx.field(static=True)
    # One silo after the other: a batch fits the processor's cache, those of all silos side by side do not.
    side_by_side: ClassVar[bool] = False

    def __call__(self, rows: Any, own: Any, down: Any, drawn: Any, key: PRNGKeyArray) -> tuple[GaussianEta, Any]:
        """The silo's new factor, and what its loop is closed with."""
        steps, sample_rate = drawn
        public: dict[str, Any] = {"clip_norm": self.clip_norm, "sample_rate": sample_rate}
        public |= {"clipping": self.clipping, "rows_per_unit": self.rows_per_unit}
        return self.local.private_factor(rows, own, down.start, key, steps, **public)


class RefitShards(eqx.Module):
    """Local inference of all shards of a silo. `tempers`: a shard's likelihood counts as often as there are shards."""

    local: LocalOptimum
    factor_per_shard: bool = eqx.field(static=True)
    side_by_side: ClassVar[bool] = True

    def __call__(self, rows: Any, own: Any, down: Any, drawn: Any, key: PRNGKeyArray) -> GaussianEta:
        """The shards' new factors; `drawn` is how often each shard's likelihood counts."""
        cavity = own
        if not self.factor_per_shard:
            shards = rows.y.shape[0]
            cavity = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (shards, *leaf.shape)), cavity)
        return self.local.shard_factors(rows, cavity, down.start, key, down.key, drawn)


class AllRows(eqx.Module):
    """No inference: the rows themselves, for statistics that are clipped and summed on the host."""

    side_by_side: ClassVar[bool] = True

    def __call__(self, rows: Rows, own: Any, down: Any, drawn: Any, key: PRNGKeyArray) -> Rows:
        """The rows."""
        return rows


def chunk_gradients(
    model: AbstractModel,
    point: AbstractPoint,
    e: Array | None,
    rows: Rows,
    indices: Array,
    mask: Array,
    clip_norm: Any,
    *,
    clipping: Clipping,
    rows_per_unit: int,
) -> Float[Array, "chunks coordinates"]:
    """Sums of clipped gradients over the chunks of a batch; they stay with the silo."""

    def one(at: Array, taken: Array) -> Array:
        return batch_gradient(model, point, e, rows, at, taken, clip_norm, clipping, rows_per_unit)

    return jax.vmap(one)(indices, mask)


def usable(family: GaussianFamily, eta: GaussianEta, floor: float) -> GaussianEta:
    """The proper version of a raw sum of factors: what may be sampled from. The raw one stays in states (SPEC 0)."""
    return _project(family, eta, floor)


@partial(jax.jit, static_argnums=2)
def _project(family: GaussianFamily, eta: GaussianEta, floor: float) -> GaussianEta:
    return family.project(eta, floor)  # type: ignore[arg-type]


def _quotient(optimum: GaussianEta, cavity: GaussianEta) -> GaussianEta:
    return jax.tree.map(lambda whole, rest: whole - rest, optimum, cavity)
