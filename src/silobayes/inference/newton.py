"""Local free-energy maximum of a generalised linear model by Newton's method.

A row is seen through `f = x @ theta`, and under a Gaussian q the expected derivatives of its log-likelihood are
one-dimensional quadratures (Khan and Lin 2017, "conjugate-computation variational inference", at step size 1). With
the expected curvature w of each row, the optimum satisfies

    full:       Lambda = Lambda_cavity + X' W X
    mean field: precision_j = precision_cavity_j + sum_i w_i x_ij^2

and the mean is a zero of `X' a - (Lambda_cavity mean - linear_cavity)`, found with curvature `Lambda_cavity + X'WX`. A
few iterations reach float accuracy where Adam needs hundreds of steps and a step size. That matters for small shards:
their change of the natural parameters is precision times a small movement of the mean, which inaccuracy would drown.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from silobayes.families import FullGaussianEta, MeanFieldGaussianEta
from silobayes.inference.rows import Rows
from silobayes.models.base import AbstractGLM, GaussianEta, GaussianFamily

_ITERATIONS = 8
# An improper cavity is first projected onto precisions of at least this.
_FLOOR = 1e-6
# Of Newton's step; the last one tells the slope where it starts.
_SHARES = jnp.array([1.0, 0.5, 0.2, 0.05, 0.0])


def maximise_glm(
    model: AbstractGLM,
    family: GaussianFamily,
    eta_cavity: GaussianEta,
    eta_start: GaussianEta,
    rows: Rows,
    tempering: Float[Array, ""],
) -> GaussianEta:
    """The optimum q of `tempering * E_q[log p(rows)] - KL(q || cavity)`; rows of padding count nothing.

    Guarantees:
        - it is the optimum of a long gradient ascent
        - the result is proper even if the cavity is not
    """
    weights = tempering * rows.present.astype(rows.x.dtype)
    cavity = family.project(eta_cavity, _FLOOR)  # type: ignore[arg-type]
    solve = _Full(cavity, rows.x) if isinstance(cavity, FullGaussianEta) else _MeanField(cavity, rows.x)

    def scores(predictor: Float[Array, " n"], variance: Float[Array, " n"]) -> tuple[Array, Array]:
        score, bend = model.expected_derivatives(predictor, variance, rows.y)
        # A row of weight 0 may hold anything.
        return jnp.where(weights > 0, weights * score, 0.0), jnp.where(
            weights > 0, weights * jnp.maximum(-bend, 0.0), 0.0
        )

    def narrower(state: tuple[Array, Array]) -> Array:
        mean, precision = state
        return solve.precision(scores(rows.x @ mean, solve.variances(precision))[1])

    def body(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        mean, precision = state
        precision = narrower((mean, precision))
        predictor, variance = rows.x @ mean, solve.variances(precision)
        score, curvature = scores(predictor, variance)
        direction = solve.direction(curvature, score @ rows.x - solve.cavity_slope(mean))
        moved = rows.x @ direction

        def slope(share: Float[Array, ""]) -> Float[Array, ""]:
            here = scores(predictor + share * moved, variance)[0]
            return here @ moved - direction @ solve.cavity_slope(mean + share * direction)

        # The free energy is concave in the mean: the longest step that does not run far past its summit.
        slopes = jax.lax.map(slope, _SHARES)
        share = jnp.max(jnp.where(slopes >= -0.5 * jnp.abs(slopes[-1]), _SHARES, _SHARES[-2]))
        return (mean + share * direction, precision), None

    start = family.to_standard(eta_start)  # type: ignore[arg-type]
    # The precisions first: under a wide q the best mean is far out, where a narrow q has no curvature left.
    precision = jax.lax.fori_loop(
        0, _ITERATIONS, lambda _, here: narrower((start.mean, here)), -2 * eta_start.quadratic
    )
    state = (start.mean, precision)
    (mean, precision), _ = jax.lax.scan(body, state, None, length=_ITERATIONS)
    return solve.eta(mean, precision)


class _MeanField:
    """Independent Gaussians: precisions are a vector, the curvature of the mean is a full matrix."""

    def __init__(self, cavity: MeanFieldGaussianEta, x: Float[Array, "n d"]) -> None:
        self.linear, self.cavity_precision, self.x = cavity.linear, -2 * cavity.quadratic, x

    def variances(self, precision: Float[Array, " d"]) -> Float[Array, " n"]:
        return self.x**2 @ (1 / precision)

    def cavity_slope(self, mean: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.cavity_precision * mean - self.linear

    def precision(self, curvature: Float[Array, " n"]) -> Float[Array, " d"]:
        return self.cavity_precision + curvature @ self.x**2

    def direction(self, curvature: Float[Array, " n"], slope: Float[Array, " d"]) -> Float[Array, " d"]:
        """`(D + X'WX)^-1 slope`; shards of few rows go through the small matrix (Woodbury)."""
        x, d = self.x, self.cavity_precision
        if x.shape[0] >= x.shape[1]:
            return _solve((x * curvature[:, None]).T @ x + jnp.diag(d), slope)
        root = jnp.sqrt(curvature)[:, None] * x
        small = jnp.eye(x.shape[0]) + (root / d) @ root.T
        return (slope - root.T @ _solve(small, root @ (slope / d))) / d

    def eta(self, mean: Float[Array, " d"], precision: Float[Array, " d"]) -> MeanFieldGaussianEta:
        return MeanFieldGaussianEta(linear=precision * mean, quadratic=-0.5 * precision)


class _Full:
    """A full covariance."""

    def __init__(self, cavity: FullGaussianEta, x: Float[Array, "n d"]) -> None:
        self.linear, self.x = cavity.linear, x
        self.cavity_precision = -(cavity.quadratic + cavity.quadratic.T)

    def variances(self, precision: Float[Array, "d d"]) -> Float[Array, " n"]:
        # By the small inverse: a triangular solve with a column for each row is slower.
        covariance = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(precision), True), jnp.eye(precision.shape[0]))
        return ((self.x @ covariance) * self.x).sum(axis=1)

    def cavity_slope(self, mean: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.cavity_precision @ mean - self.linear

    def precision(self, curvature: Float[Array, " n"]) -> Float[Array, "d d"]:
        return self.cavity_precision + (self.x * curvature[:, None]).T @ self.x

    def direction(self, curvature: Float[Array, " n"], slope: Float[Array, " d"]) -> Float[Array, " d"]:
        return _solve(self.precision(curvature), slope)

    def eta(self, mean: Float[Array, " d"], precision: Float[Array, "d d"]) -> FullGaussianEta:
        return FullGaussianEta(linear=precision @ mean, quadratic=-0.5 * precision)


def _solve(matrix: Float[Array, "d d"], vector: Float[Array, " d"]) -> Float[Array, " d"]:
    return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(matrix), True), vector)
