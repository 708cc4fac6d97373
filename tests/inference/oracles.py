"""Slow, plain versions of what the solvers compute: explicit per-row gradients by vmap(grad) of the objective."""

import jax
import jax.numpy as jnp
import numpy as np

from silobayes.inference.coordinates import FullPoint, MeanFieldPoint
from silobayes.models.base import AbstractGLM

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(12)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def moved(point, step):
    """`point.move` without its limits, written out."""
    dim = point.mean.shape[0]
    if isinstance(point, MeanFieldPoint):
        return MeanFieldPoint(mean=point.mean + step[:dim], log_stddev=point.log_stddev + step[dim:])
    change = jnp.zeros((dim, dim)).at[jnp.tril_indices(dim)].set(step[dim:])
    turn = jnp.tril(change, -1) + jnp.diag(jnp.exp(jnp.diagonal(change)))
    return FullPoint(mean=point.mean + step[:dim], factor=point.factor @ turn)


def factor_of(point):
    return jnp.diag(jnp.exp(point.log_stddev)) if isinstance(point, MeanFieldPoint) else point.factor


def expected_log_likelihood(model, point, e, x_row, y_row):
    """Of one row: quadrature over f for a GLM, at the draw e otherwise."""
    if isinstance(model, AbstractGLM):
        f = x_row @ point.mean + jnp.linalg.norm(factor_of(point).T @ x_row) * NODES
        return model.pointwise(f, jnp.full(len(NODES), y_row)) @ WEIGHTS
    return model.log_likelihood(point.mean + factor_of(point) @ e, x_row, y_row)


def explicit_gradients(model, point, e, x, y):
    """One gradient per row, in full."""

    def objective(step, x_row, y_row):
        return expected_log_likelihood(model, moved(point, step), e, x_row, y_row)

    return jax.vmap(jax.grad(objective), in_axes=(None, 0, 0))(jnp.zeros(point.num_coordinates), x, y)


def free_energy(model, family, eta_cavity, rows, tempering):
    """The objective of vi.maximise for a GLM as a function of the coordinates of a point."""

    def of(point):
        terms = jax.vmap(lambda x, y: expected_log_likelihood(model, point, None, x, y))(rows.x, rows.y)
        likelihood = jnp.where(rows.present, terms, 0.0).sum()
        return tempering * likelihood - family.kl(point.to_eta(), eta_cavity)

    return of


def assert_close(tree, other, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), tree, other)
