"""Local free-energy maximum of a generalised linear model by Newton's method.

A row is seen through `f = x @ theta`, and under a Gaussian q the expected derivatives of its log-likelihood are
one-dimensional quadratures (Khan and Lin 2017, "conjugate-computation variational inference", at step size 1). With
the expected curvature w of each row, the optimum satisfies

    full:       Lambda = Lambda_cavity + X' W X
    mean field: precision_j = precision_cavity_j + sum_i w_i x_ij^2

and the mean is a zero of `X' a - (Lambda_cavity mean - linear_cavity)`, found with curvature `Lambda_cavity + X'WX`. A
few iterations reach float accuracy where Adam needs hundreds of steps and a step size. That matters for small shards:
their change of the natural parameters is precision times a small movement of the mean, which inaccuracy would drown.

For fixed variances the free energy is concave in the mean, and the step is shortened until it surely climbs. For
variances there is no such safeguard: under a wide q a bounded score has no curvature left, so that q stays wide. They
are therefore capped until the mean is about right.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from silobayes.families import FullGaussianEta, MeanFieldGaussianEta
from silobayes.inference.rows import Rows
from silobayes.models.base import AbstractGLM, GaussianEta, GaussianFamily

# Usually five to twelve are enough; a log rate that starts too high comes down by 1 in each.
_MOST_ITERATIONS = 60
_UNDAMPED_ITERATIONS = 8
_LEAST_CURVATURE = 1e-12
_MOST_HALVINGS = 40
# An improper cavity is first projected onto precisions of at least this.
_FLOOR = 1e-6
# Of a row's linear predictor, while steps are longer than `_NEAR`.
_VARIANCE_CAP = 4.0
# Squared lengths of a step, in standard deviations of q.
_NEAR = 1.0
_ARRIVED = 1e-6
# Relative change of the precisions, and of linear predictors, that counts as none.
_SAME_PRECISION = 1e-4
_SAME_PREDICTOR = 1e-6


class _State(NamedTuple):
    """The precision is made of the rows' `curvature`; `variance` is what it makes of their linear predictors."""

    iteration: Int[Array, ""]
    mean: Float[Array, " d"]
    precision: Float[Array, "..."]
    curvature: Float[Array, " n"]
    variance: Float[Array, " n"]
    cap: Float[Array, ""]
    arrived: Bool[Array, ""]


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
        - large counts, wide priors and starts far out do not change that (but for separable labels, or fewer rows than
          features, under a prior of a hundred and more: there it may end before it arrives)
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

    def body(state: _State) -> _State:
        predictor = rows.x @ state.mean
        _, curvature = scores(predictor, jnp.minimum(state.variance, state.cap))
        # Mean and variances may answer each other in circles: the longer they do, the less a new curvature counts.
        # Geometric, because counts' curvatures range over many powers; from zero it could not rise again.
        damping = jnp.minimum(1.0, _UNDAMPED_ITERATIONS / (1.0 + state.iteration))
        new, old = (jnp.maximum(part, _LEAST_CURVATURE) for part in (curvature, state.curvature))
        curvature = jnp.where(damping < 1, new**damping * old ** (1 - damping), curvature)
        precision = solve.precision(curvature)
        solver, next_variance = solve.solver_and_variances(curvature, precision)
        variance = jnp.minimum(next_variance, state.cap)
        gradient = scores(predictor, variance)[0] @ rows.x - solve.cavity_slope(state.mean)
        direction = solver(gradient)
        moved = rows.x @ direction

        def slope(share: Float[Array, ""]) -> Float[Array, ""]:
            here = scores(predictor + share * moved, variance)[0]
            return here @ moved - direction @ solve.cavity_slope(state.mean + share * direction)

        share = _climbing_share(slope)
        step = share * gradient @ direction
        still = jnp.max(jnp.abs(share * moved)) <= _SAME_PREDICTOR * jnp.maximum(1.0, jnp.max(jnp.abs(predictor)))
        change = jnp.abs(solve.diagonal(precision) / solve.diagonal(state.precision) - 1)
        same = (jnp.max(change) <= damping * _SAME_PRECISION) & jnp.isinf(state.cap)
        return _State(
            iteration=state.iteration + 1,
            mean=state.mean + share * direction,
            precision=precision,
            curvature=curvature,
            variance=next_variance,
            cap=jnp.where((step <= _NEAR) | still, jnp.inf, state.cap),
            arrived=same & ((step <= _ARRIVED) | still),
        )

    precision = -2 * eta_start.quadratic
    state = _State(
        iteration=jnp.zeros((), jnp.int32),
        mean=family.to_standard(eta_start).mean,  # type: ignore[arg-type]
        precision=precision,
        curvature=jnp.zeros_like(weights),
        variance=solve.variances(precision),
        cap=jnp.full((), _VARIANCE_CAP, rows.x.dtype),
        arrived=jnp.zeros((), bool),
    )
    state = jax.lax.while_loop(lambda here: ~here.arrived & (here.iteration < _MOST_ITERATIONS), body, state)
    return solve.eta(state.mean, state.precision)


def _climbing_share(slope: Callable[[Float[Array, ""]], Float[Array, ""]]) -> Float[Array, ""]:
    """The longest of 1, 1/2, 1/4, ... of a step that surely climbs.

    The slope of a concave function falls, so that over a share t it gains at least
    `t/2 (slope(t/2) + slope(t))`. Here that is at least half of its first term, up to rounding errors. If 2t was
    refused, the summit is before 2t, and t is not a short step.
    """

    def refused(state: tuple[Array, Array, Array]) -> Array:
        share, here, halfway = state
        return (here + 0.5 * halfway < -_ARRIVED) & (share > 0.5**_MOST_HALVINGS)

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        share, _, halfway = state
        return 0.5 * share, halfway, slope(0.25 * share)

    whole = jnp.ones(())
    return jax.lax.while_loop(refused, halve, (whole, slope(whole), slope(0.5 * whole)))[0]


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

    def diagonal(self, precision: Float[Array, " d"]) -> Float[Array, " d"]:
        return precision

    def solver_and_variances(
        self, curvature: Float[Array, " n"], precision: Float[Array, " d"]
    ) -> tuple[Callable[[Array], Array], Float[Array, " n"]]:
        return partial(self._direction, curvature), self.variances(precision)

    def _direction(self, curvature: Float[Array, " n"], slope: Float[Array, " d"]) -> Float[Array, " d"]:
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
        return self._variances(jnp.linalg.cholesky(precision))

    def _variances(self, factor: Float[Array, "d d"]) -> Float[Array, " n"]:
        # By the small inverse: a triangular solve with a column for each row is slower.
        covariance = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(factor.shape[0]))
        return ((self.x @ covariance) * self.x).sum(axis=1)

    def cavity_slope(self, mean: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.cavity_precision @ mean - self.linear

    def precision(self, curvature: Float[Array, " n"]) -> Float[Array, "d d"]:
        return self.cavity_precision + (self.x * curvature[:, None]).T @ self.x

    def diagonal(self, precision: Float[Array, "d d"]) -> Float[Array, " d"]:
        return jnp.diagonal(precision)

    def solver_and_variances(
        self, curvature: Float[Array, " n"], precision: Float[Array, "d d"]
    ) -> tuple[Callable[[Array], Array], Float[Array, " n"]]:
        """The precision is the curvature of the mean, so that one factor serves both."""
        factor = jnp.linalg.cholesky(precision)
        return partial(jax.scipy.linalg.cho_solve, (factor, True)), self._variances(factor)

    def eta(self, mean: Float[Array, " d"], precision: Float[Array, "d d"]) -> FullGaussianEta:
        return FullGaussianEta(linear=precision @ mean, quadratic=-0.5 * precision)


def _solve(matrix: Float[Array, "d d"], vector: Float[Array, " d"]) -> Float[Array, " d"]:
    return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(matrix), True), vector)
