"""Local free-energy maximum without privacy (SPEC 2): `tempering * E_q[log p(rows)] - KL(q || cavity)`.

Generalised linear models are solved by Newton's method (`inference.newton`), exactly and without draws. Other models
take reparameterised draws: all steps are one `lax.scan` of Adam (optax) in the coordinates of `inference.coordinates`.
Tempering by N is the shard objective of local averaging (SPEC 3).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from silobayes.inference.ascent import ascend, check_dim, step_sizes_of
from silobayes.inference.coordinates import AbstractPoint, point_at
from silobayes.inference.newton import maximise_glm
from silobayes.inference.row_gradients import row_gradients
from silobayes.inference.rows import Rows
from silobayes.models.base import AbstractGLM, AbstractModel, GaussianEta, GaussianFamily


def maximise(
    model: AbstractModel,
    family: GaussianFamily,
    key: PRNGKeyArray,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    rows: Rows,
    *,
    tempering: ArrayLike,
    num_steps: int,
    step_size: ArrayLike,
    num_draws: int = 8,
) -> GaussianEta:
    """The local optimum q, starting from `eta_start`. Compiled once per shape; vmap over silos or shards.

    Args:
        model: Log-likelihood of one row.
        family: Mean-field or full Gaussian over `model.dim` numbers.
        key: For reparameterised draws; GLMs need none and ignore it.
        eta_cavity: May be improper.
        eta_start: Must be proper.
        rows: Empty slots have `present=False`.
        tempering: Power of the likelihood; 1 unless the rows stand for more of their kind.
        num_steps: Steps of Adam (not for GLMs, nor is `step_size`).
        step_size: One number, lowered to zero by a cosine; or one number per step, taken as they are.
        num_draws: Reparameterised draws per step (not for GLMs).

    Guarantees:
        - the result is proper even if the cavity is not
        - padding rows change nothing
        - the optimum is that of a long optimisation
    """
    step_sizes = step_sizes_of(step_size, num_steps)
    return _maximise(
        model, family, key, eta_cavity, eta_start, rows, jnp.asarray(tempering), step_sizes, num_draws=num_draws
    )


def maximise_prior(
    model: AbstractModel,
    family: GaussianFamily,
    key: PRNGKeyArray,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    *,
    num_steps: int,
    step_size: ArrayLike,
    num_draws: int = 8,
) -> GaussianEta:
    """The same for the prior as a site without rows: maximises `E_q[log p(theta)] - KL(q || cavity)`.

    A prior that is not Gaussian takes part in PVI as one more factor: `cavity = eta_q - eta_p`, and afterwards
    `eta_p = result - cavity`. It needs no rows, so it costs no privacy and any party may compute it.
    """
    step_sizes = step_sizes_of(step_size, num_steps)
    return _maximise_prior(model, family, key, eta_cavity, eta_start, step_sizes, num_draws=num_draws)


@partial(jax.jit, static_argnames="num_draws")
def _maximise(
    model: AbstractModel,
    family: GaussianFamily,
    key: PRNGKeyArray,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    rows: Rows,
    tempering: Float[Array, ""],
    step_sizes: Float[Array, " steps"],
    *,
    num_draws: int,
) -> GaussianEta:
    check_dim(model, point_at(family, eta_start).mean.shape[0])
    if isinstance(model, AbstractGLM):
        return maximise_glm(model, family, eta_cavity, eta_start, rows, tempering)
    weights = rows.present.astype(rows.x.dtype)

    def gradient(here: AbstractPoint, step_key: PRNGKeyArray) -> tuple[Array, None]:
        def likelihood(e: Float[Array, " dim"]) -> Array:
            return row_gradients(model, here, e, rows.x, rows.y).weighted_sum(weights)

        slope = jax.vmap(likelihood)(jax.random.normal(step_key, (num_draws, model.dim))).mean(axis=0)
        return tempering * slope - here.kl_gradient(eta_cavity), None

    keys = jax.random.split(key, step_sizes.shape[0])
    point, _ = ascend(point_at(family, eta_start), gradient, keys, step_sizes)
    return point.to_eta()


@partial(jax.jit, static_argnames="num_draws")
def _maximise_prior(
    model: AbstractModel,
    family: GaussianFamily,
    key: PRNGKeyArray,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    step_sizes: Float[Array, " steps"],
    *,
    num_draws: int,
) -> GaussianEta:
    point = point_at(family, eta_start)
    check_dim(model, point.mean.shape[0])

    def gradient(here: AbstractPoint, step_key: PRNGKeyArray) -> tuple[Array, None]:
        draws = jax.random.normal(step_key, (num_draws, model.dim))
        slopes = jax.vmap(lambda e: here.pull(jax.grad(model.log_prior)(here.sample(e)), e))(draws)
        return slopes.mean(axis=0) - here.kl_gradient(eta_cavity), None

    point, _ = ascend(point, gradient, jax.random.split(key, step_sizes.shape[0]), step_sizes)
    return point.to_eta()
