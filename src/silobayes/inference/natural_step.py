"""The likelihood factor of rows, as a Gaussian q sees them.

A row of a generalised linear model is seen through `f = x @ theta`, and the natural gradient of `E_q[log p(rows)]` is
itself a natural parameter (Khan and Lin 2017, "conjugate-computation variational inference"). With expected scores a
and curvatures w of the rows,

    full:       precision = X' W X,               linear = X' a + precision @ mean
    mean field: precision_j = sum_i w_i x_ij^2,   linear = X' a + precision * mean

At the optimum of the whole study `eta_q = eta_p + sum of these factors`, so a step to them has PVI's fixed points,
whatever the tempering and the split into shards. The full local optimum of a *tempered* shard has not: it follows the
chance of its own few rows, and the mean over shards of such optima is not the optimum of the mean. For untempered
shards of few rows the step is their optimum but for second-order terms. It needs no cavity, so a noisy one cannot
make it run away.

Networks take draws from q instead of closed forms, and squares of the rows' gradients for their curvatures, which are
the same in expectation over the model's own labels (Khan et al. 2018, "VOGN").
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from silobayes.families import FullGaussian, FullGaussianEta, MeanFieldGaussian, MeanFieldGaussianEta
from silobayes.inference.rows import Rows
from silobayes.models.base import AbstractGLM, GaussianEta, GaussianFamily
from silobayes.models.layered import AbstractLayeredModel

_NUM_DRAWS = 4


def natural_factor(
    model: AbstractGLM, family: GaussianFamily, eta_q: GaussianEta, rows: Rows, tempering: Float[Array, ""]
) -> GaussianEta:
    """Natural parameters of the rows' likelihood to the power `tempering`, at a proper q.

    Guarantees:
        - it is the gradient of the expected log-likelihood with respect to q's mean parameters
        - for linear regression and the full family it is the exact factor, whatever q is
        - padding rows change nothing
    """
    x = rows.x

    def derivatives(mean: Float[Array, " d"], variances: Float[Array, " n"]) -> tuple[Array, Array]:
        score, bend = model.expected_derivatives(x @ mean, variances, rows.y)
        # A row of weight 0 may hold anything.
        curvature = tempering * jnp.maximum(-bend, 0.0)
        return jnp.where(rows.present, tempering * score, 0.0), jnp.where(rows.present, curvature, 0.0)

    if isinstance(eta_q, FullGaussianEta):
        assert isinstance(family, FullGaussian)
        mean, covariance = family.to_standard(eta_q)
        score, curvature = derivatives(mean, ((x @ covariance) * x).sum(axis=1))
        precision = (x * curvature[:, None]).T @ x
        return FullGaussianEta(linear=score @ x + precision @ mean, quadratic=-0.5 * precision)
    assert isinstance(family, MeanFieldGaussian)
    mean, stddev = family.to_standard(eta_q)
    score, curvature = derivatives(mean, x**2 @ stddev**2)
    precision = curvature @ x**2
    return MeanFieldGaussianEta(linear=score @ x + precision * mean, quadratic=-0.5 * precision)


def network_factor(
    model: AbstractLayeredModel,
    family: MeanFieldGaussian,
    key: PRNGKeyArray,
    eta_q: MeanFieldGaussianEta,
    rows: Rows,
    tempering: Float[Array, ""],
) -> MeanFieldGaussianEta:
    """The same for a network and the mean-field family, at a few draws of q: `linear = g + precision * mean`.

    Guarantees:
        - g and precision are sums of the rows' gradients and of their squares, averaged over draws
        - padding rows change nothing
    """
    mean, stddev = family.to_standard(eta_q)

    def at_draw(e: Float[Array, " dim"]) -> tuple[Array, Array]:
        theta = mean + stddev * e
        passes = model.forward(theta, rows.x)
        scores = jnp.where(rows.present[:, None], model.output_scores(passes.output, rows.y), 0.0)
        layers = list(zip(passes.inputs, model.backward(theta, passes, scores), strict=True))
        gradient = model.flatten([inputs.T @ back for inputs, back in layers])
        return gradient, model.flatten([(inputs**2).T @ back**2 for inputs, back in layers])

    gradients, squares = jax.lax.map(at_draw, jax.random.normal(key, (_NUM_DRAWS, model.dim)))
    gradient, precision = tempering * gradients.mean(axis=0), tempering * squares.mean(axis=0)
    return MeanFieldGaussianEta(linear=gradient + precision * mean, quadratic=-0.5 * precision)
