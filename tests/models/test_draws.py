"""Rows are drawn from the likelihood, parameters from the prior.

Fixed keys. A p-value below 1e-4 is a failure: a false alarm in one of a thousand runs of all of them with other keys.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist
from scipy import stats

from silobayes.core.errors import InvalidInput
from silobayes.models.numpyro_model import NumpyroModel, from_numpyro
from silobayes.models.poisson_regression import PoissonRegression
from tests.models.cases import MODELS, D, sample

LEAST = 1e-4
NUM_DRAWS = 4000
# One at which rows of opposite features differ clearly under every model.
SEED = 1


def latent_noise(x, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    beta = numpyro.sample("beta", dist.Normal(1.0, 2.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, scale), obs=y)


NUMPYRO = from_numpyro(latent_noise, jnp.ones(D), jnp.float32(0.0))
ALL = {**MODELS, "numpyro": NUMPYRO}
# The others take seconds to compile.
QUICK = ("linear", "linear_unknown_noise", "logistic", "softmax")
WITH_TARGET = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in ALL
    if not name.startswith("gaussian")
]


def draws_of_one_row(model, x_row, theta):
    x = np.tile(x_row, (NUM_DRAWS, 1))
    drawn_x, y = jax.jit(model.draw_rows)(theta, x, jax.random.key(5))
    assert np.array_equal(drawn_x, x)
    return np.asarray(y)


def log_density(model, theta, x_row, grid):
    return np.asarray(jax.jit(jax.vmap(lambda y: model.log_likelihood(theta, x_row, y)))(grid), float)


def p_value(model, y, theta, x_row):
    """Counts and classes: chi-square with cells of 10 and more; real targets: Kolmogorov and Smirnov."""
    if model.target == "real":
        grid = np.linspace(-25, 25, 20001, dtype=np.float32)
        below = np.cumsum(np.exp(log_density(model, theta, x_row, grid))) * (grid[1] - grid[0])
        return stats.kstest(np.interp(y, grid, below), "uniform").pvalue
    grid = np.arange(400 if model.target == "count" else 3, dtype=np.float32)
    if model.target == "binary":
        grid = grid[:2]
    expected = len(y) * np.exp(log_density(model, theta, x_row, grid))
    counts = np.bincount(y.astype(int), minlength=len(grid))[: len(grid)].astype(float)
    rare = expected < 10
    counts, expected = (np.append(v[~rare], v[rare].sum()) for v in (counts, expected))
    kept = expected > 0.5
    counts, expected = counts[kept], expected[kept]
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("name", WITH_TARGET)
def test_rows_are_drawn_from_the_likelihood(name):
    model = ALL[name]
    data = sample(model, 1, seed=SEED)
    y = draws_of_one_row(model, data.x[0], data.theta)
    assert y.dtype == (np.int32 if model.target in ("binary", "classes") else np.float32)
    assert p_value(model, y, data.theta, data.x[0]) > LEAST
    # What is 3/2 or 2/3 as large is rejected, as are labels of another row.
    if model.target == "real":
        assert p_value(model, 1.5 * y, data.theta, data.x[0]) < LEAST
        assert p_value(model, y / 1.5, data.theta, data.x[0]) < LEAST
    else:
        assert p_value(model, y, data.theta, -data.x[0]) < LEAST


@pytest.mark.parametrize("name", [pytest.param("gaussian_mean", marks=pytest.mark.slow), "gaussian_mean_covariance"])
def test_models_of_features_draw_these(name):
    """A quadratic form of the likelihood's own covariance is chi-square with one degree for each feature."""
    model = ALL[name]
    theta = sample(model).theta
    x, y = jax.jit(model.draw_rows)(theta, np.zeros((NUM_DRAWS, D), np.float32), jax.random.key(5))
    log_p = np.asarray(jax.jit(model.log_predictive)(theta, x, y), float)
    at_mean = float(model.log_likelihood(theta, theta[:D], 0.0))
    assert stats.kstest(2 * (at_mean - log_p), stats.chi2(D).cdf).pvalue > LEAST
    assert stats.kstest(2 * (at_mean - log_p) * 1.5, stats.chi2(D).cdf).pvalue < LEAST
    apart = np.linalg.inv(np.linalg.cholesky(np.cov(np.asarray(x).T))) @ (np.asarray(x) - theta[:D]).mean(axis=0)
    assert stats.chi2(D).sf(NUM_DRAWS * apart @ apart) > LEAST


def test_parameters_are_drawn_from_the_prior():
    keys = jax.random.split(jax.random.key(6), NUM_DRAWS)
    thetas = np.asarray(jax.vmap(PoissonRegression(num_features=2, max_count=9, prior_stddev=3.0).draw_prior)(keys))
    assert stats.kstest(thetas.ravel(), stats.norm(scale=3.0).cdf).pvalue > LEAST
    assert stats.kstest(thetas.ravel(), stats.norm(scale=2.0).cdf).pvalue < LEAST


@pytest.mark.slow
def test_latents_of_a_function_are_drawn_from_its_own_prior():
    """Log scale, then beta."""
    thetas = np.asarray(jax.vmap(NUMPYRO.draw_prior)(jax.random.split(jax.random.key(6), NUM_DRAWS)))
    assert stats.kstest(thetas[:, 0], stats.norm(0.0, 0.3).cdf).pvalue > LEAST
    assert stats.kstest(thetas[:, 1:].ravel(), stats.norm(1.0, 2.0).cdf).pvalue > LEAST


def test_a_prior_with_a_factor_of_its_own_is_not_drawn_from():
    def function(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0))
        numpyro.factor("more", -(beta**2))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ jnp.ones(D) * beta, 1.0), obs=y)

    model = from_numpyro(function, jnp.ones(D), jnp.float32(0.0))
    assert isinstance(model, NumpyroModel)
    with pytest.raises(InvalidInput, match="factor"):
        model.draw_prior(jax.random.key(0))


@pytest.mark.slow
def test_huge_rates_stay_finite():
    model = PoissonRegression(num_features=1, max_count=9)
    _, y = model.draw_rows(jnp.array([1.0]), jnp.array([[500.0], [-500.0]]), jax.random.key(0))
    assert y[0] > 1e8
    assert y[1] == 0
