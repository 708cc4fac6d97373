"""Cholesky helpers and the eigenvalue floor, for families with a precision matrix."""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, ArrayLike, Bool, Float


def symmetric(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The symmetric part: the only part of a matrix that a quadratic form sees."""
    return 0.5 * (matrix + matrix.T)


def cholesky(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Lower Cholesky factor of the symmetric part; all NaN unless positive definite."""
    return jnp.linalg.cholesky(matrix, symmetrize_input=True)


def solve(factor: Float[Array, "d d"], right: Float[Array, "d *k"]) -> Float[Array, "d *k"]:
    """`matrix^-1 right` from the lower Cholesky factor of the matrix."""
    return cho_solve((factor, True), right)


def inverse(factor: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """`matrix^-1` from the lower Cholesky factor of the matrix, exactly symmetric."""
    return symmetric(solve(factor, jnp.eye(factor.shape[0], dtype=factor.dtype)))


def solve_transposed(factor: Float[Array, "d d"], right: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
    """`factor^-T right` for each vector in the last axis: standard normals become draws with that precision."""
    flat = right.reshape(-1, factor.shape[0])
    return solve_triangular(factor, flat.T, trans=1, lower=True).T.reshape(right.shape)


def half_log_det(factor: Float[Array, "d d"]) -> Float[Array, ""]:
    """Half the log determinant of the matrix whose Cholesky factor is given."""
    return jnp.sum(jnp.log(jnp.diagonal(factor)))


def is_positive_definite(matrix: Float[Array, "d d"]) -> Bool[Array, ""]:
    """Whether the Cholesky factorisation succeeds: the operation that every later use of the matrix needs."""
    return jnp.all(jnp.isfinite(cholesky(matrix)))


@jax.custom_jvp
def floor_eigenvalues(
    matrix: Float[Array, "d d"], floor: Float[Array, ""], magnitude: Float[Array, ""]
) -> Float[Array, "d d"]:
    """The nearest symmetric matrix (Frobenius) with eigenvalues >= floor; unchanged if it already is one.

    A raised eigenvalue also has to survive rounding: it becomes at least a few units of rounding of the largest
    eigenvalue, and of `magnitude`, the size of the terms from which the caller will recompute the matrix.
    """
    return _floor_eigenvalues(matrix, floor, magnitude)[0]


def _floor_eigenvalues(
    matrix: Float[Array, "d d"], floor: Float[Array, ""], magnitude: Float[Array, ""]
) -> tuple[Float[Array, "d d"], Bool[Array, ""], Float[Array, " d"], Float[Array, "d d"], Float[Array, ""]]:
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=True)
    keep = (values[0] >= floor) & is_positive_definite(matrix)
    resolution = 16 * matrix.shape[0] * jnp.finfo(matrix.dtype).eps
    target = jnp.maximum(floor, resolution * jnp.maximum(jnp.maximum(values[-1], 0.0), magnitude))
    raised = symmetric((vectors * jnp.maximum(values, target)) @ vectors.T)
    return jnp.where(keep, matrix, raised), keep, values, vectors, target


@floor_eigenvalues.defjvp
def _floor_eigenvalues_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    # Daleckii-Krein: divided differences of max(value, target). The derivative rule of eigh divides by the gap of two
    # eigenvalues and is NaN for a multiple of the identity, which is where a projection is most often used.
    out, keep, values, vectors, target = _floor_eigenvalues(*primals)
    raised = jnp.maximum(values, target)
    gap = values[:, None] - values[None, :]
    slope = (values > target).astype(values.dtype)
    distinct = gap != 0
    differences = (raised[:, None] - raised[None, :]) / jnp.where(distinct, gap, 1.0)
    weights = jnp.where(distinct, differences, slope[:, None])
    tangent = symmetric(tangents[0])
    moved = vectors @ (weights * (vectors.T @ tangent @ vectors)) @ vectors.T
    return out, jnp.where(keep, tangents[0], moved)


def rounding_floor(floor: ArrayLike, magnitude: Float[Array, ""], dimension: int) -> Float[Array, ""]:
    """`floor`, or what survives the rounding of a sum of terms of size `magnitude`, whichever is larger."""
    return jnp.maximum(floor, 16 * dimension * jnp.finfo(magnitude.dtype).eps * magnitude)
