"""The exact likelihood factor of a linear regression with known noise (SPEC 2: one pass of PVI is then exact).

In the full Gaussian family the factor of a silo's rows is `eta_t = (X'y / noise^2, -X'X / (2 noise^2))` whatever the
cavity is. In the mean-field family the optimum of the local free energy depends on the cavity, but in closed form: the
precisions are those of the diagonal, the means solve one linear system.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from silobayes.families import FullGaussianEta, MeanFieldGaussianEta
from silobayes.inference.rows import Rows
from silobayes.models.linear_regression import LinearRegression


@jax.jit
def full_factor(model: LinearRegression, rows: Rows) -> FullGaussianEta:
    """Natural parameters of the rows' likelihood.

    Guarantees:
        - prior times factors is the exact posterior, whatever the split into silos
        - padding rows change nothing
    """
    gram, cross = _statistics(model, rows)
    return FullGaussianEta(linear=cross, quadratic=-0.5 * gram)


@jax.jit
def mean_field_factor(model: LinearRegression, rows: Rows, eta_cavity: MeanFieldGaussianEta) -> MeanFieldGaussianEta:
    """`eta* - eta_cavity` where eta* maximises `E_q[log p(rows)] - KL(q || cavity)` over independent Gaussians.

    The cavity's precisions plus the diagonal of the rows' must be positive definite with the rows' Gram matrix, as they
    are whenever the cavity is proper.

    Guarantees:
        - the factor is that of the optimised free energy
    """
    gram, cross = _statistics(model, rows)
    cavity_precision = -2 * eta_cavity.quadratic
    mean = jnp.linalg.solve(gram + jnp.diag(cavity_precision), cross + eta_cavity.linear)
    precision = jnp.diagonal(gram) + cavity_precision
    return MeanFieldGaussianEta(linear=precision * mean, quadratic=-0.5 * precision) - eta_cavity


def _statistics(model: LinearRegression, rows: Rows) -> tuple[Float[Array, "d d"], Float[Array, " d"]]:
    """`X'X / noise^2` and `X'y / noise^2`."""
    x = rows.x / model.noise_stddev
    return x.T @ x, x.T @ (rows.y / model.noise_stddev)
