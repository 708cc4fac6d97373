"""The factor of a GLM's rows at q: a gradient with respect to q's mean parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.conjugate import full_factor
from silobayes.inference.natural_step import natural_factor, network_factor
from silobayes.inference.newton import maximise_glm
from silobayes.inference.rows import pad
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.mlp import BinaryMLP, ClassesMLP
from silobayes.models.poisson_regression import PoissonRegression

DIM, ROWS = 3, 40
MODELS = {
    "logistic": LogisticRegression(num_features=DIM),
    "linear": LinearRegression(num_features=DIM, noise_stddev=0.7),
    "poisson": PoissonRegression(num_features=DIM, max_count=20),
}


def rows_of(seed: int, model, max_rows: int = ROWS):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, DIM)) / 2
    y = rng.normal(size=ROWS) if isinstance(model, LinearRegression) else rng.integers(2, size=ROWS)
    return pad(x, y, max_rows)


def posterior_of(family, seed: int):
    rng = np.random.default_rng(seed)
    mean = jnp.asarray(rng.normal(size=DIM) / 2)
    if isinstance(family, FullGaussian):
        root = rng.normal(size=(DIM, DIM)) / 4 + np.eye(DIM) / 2
        return family.from_standard(mean=mean, covariance=jnp.asarray(root @ root.T))
    return family.from_standard(mean=mean, stddev=jnp.asarray(rng.uniform(0.2, 0.8, size=DIM)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("family", [MeanFieldGaussian(event_shape=(DIM,)), FullGaussian(dimension=DIM)])
def test_it_is_the_gradient_of_the_expected_log_likelihood_in_mean_parameters(name, family):
    """With E[theta] = m, E[theta theta'] = S + mm': d/dm at fixed S is linear + 2 quadratic m, d/dS is quadratic."""
    model, rows, eta_q = MODELS[name], rows_of(0, MODELS[name]), posterior_of(family, 1)
    q = family.to_standard(eta_q)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()

    def expected(mean, spread):  # stddevs, or the covariance
        variance = ((rows.x @ spread) * rows.x).sum(1) if spread.ndim == 2 else rows.x**2 @ spread**2
        f = rows.x @ mean + jnp.sqrt(variance) * nodes[:, None]
        return jnp.sum(weights @ model.pointwise(f, jnp.broadcast_to(rows.y, f.shape)))

    spread = q.covariance if isinstance(family, FullGaussian) else q.stddev
    by_mean, by_spread = jax.grad(expected, argnums=(0, 1))(q.mean, spread)
    factor = natural_factor(model, family, eta_q, rows, jnp.asarray(1.0))
    if isinstance(family, FullGaussian):
        np.testing.assert_allclose(factor.linear + 2 * factor.quadratic @ q.mean, by_mean, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(factor.quadratic, (by_spread + by_spread.T) / 2, rtol=2e-3, atol=2e-3)
    else:
        np.testing.assert_allclose(factor.linear + 2 * factor.quadratic * q.mean, by_mean, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(factor.quadratic, by_spread / (2 * q.stddev), rtol=2e-3, atol=2e-3)


@given(seed=st.integers(0, 100))
def test_the_factor_of_a_linear_regression_is_exact_whatever_q_is(seed):
    model, family = MODELS["linear"], FullGaussian(dimension=DIM)
    rows = rows_of(seed, model)
    factor = natural_factor(model, family, posterior_of(family, seed + 1), rows, jnp.asarray(1.0))
    exact = full_factor(model, rows)
    np.testing.assert_allclose(factor.linear, exact.linear, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(factor.quadratic, exact.quadratic, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", [MeanFieldGaussian(event_shape=(DIM,)), FullGaussian(dimension=DIM)])
def test_the_optimum_of_the_free_energy_is_its_fixed_point(family):
    model, rows, tempering = MODELS["logistic"], rows_of(2, MODELS["logistic"]), jnp.asarray(3.0)
    eta_p = model.prior_eta(family)
    optimum = maximise_glm(model, family, eta_p, eta_p, rows, tempering)
    again = eta_p + natural_factor(model, family, optimum, rows, tempering)
    np.testing.assert_allclose(again.linear, optimum.linear, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(again.quadratic, optimum.quadratic, rtol=1e-3, atol=1e-3)


def test_padding_and_rows_that_are_not_finite_change_nothing():
    model, family = MODELS["logistic"], MeanFieldGaussian(event_shape=(DIM,))
    eta_q, rows = posterior_of(family, 0), rows_of(3, model)
    padded = rows_of(3, model, ROWS + 7)
    dirty = jax.tree.map(lambda leaf: leaf, padded)
    dirty = type(dirty)(x=dirty.x.at[-1].set(jnp.nan), y=dirty.y, present=dirty.present.at[-1].set(True))
    one = jnp.asarray(1.0)
    first, second, third = (natural_factor(model, family, eta_q, part, one) for part in (rows, padded, dirty))
    for other in (second, third):
        np.testing.assert_allclose(other.linear, first.linear, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(other.quadratic, first.quadratic, rtol=1e-5, atol=1e-5)


NETWORKS = {
    "binary": BinaryMLP(num_features=DIM, hidden=(4,)),
    "classes": ClassesMLP(num_features=DIM, hidden=(4, 3), num_classes=3),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_of_a_network_it_holds_sums_of_gradients_and_of_their_squares(name):
    model, rows, key = NETWORKS[name], rows_of(4, NETWORKS[name]), jax.random.key(5)
    family = MeanFieldGaussian(event_shape=(model.dim,))
    eta_q = model.start_eta(family, jax.random.key(6))
    mean, stddev = family.to_standard(eta_q)
    factor = network_factor(model, family, key, eta_q, rows, jnp.asarray(3.0))
    by_row = jax.vmap(jax.grad(model.log_likelihood), in_axes=(None, 0, 0))
    draws = jax.random.normal(key, (4, model.dim))
    gradients = np.stack([by_row(mean + stddev * e, rows.x, rows.y) for e in draws])
    precision = 3 * (gradients**2).sum(axis=1).mean(axis=0)
    np.testing.assert_allclose(-2 * factor.quadratic, precision, rtol=1e-4, atol=1e-5)
    slope = factor.linear + 2 * factor.quadratic * mean
    np.testing.assert_allclose(slope, 3 * gradients.sum(axis=1).mean(axis=0), rtol=1e-3, atol=1e-4)


def test_padding_and_rows_that_are_not_finite_change_nothing_of_a_networks_factor():
    model, key, one = NETWORKS["classes"], jax.random.key(5), jnp.asarray(1.0)
    family = MeanFieldGaussian(event_shape=(model.dim,))
    eta_q = model.start_eta(family, key)
    rows, padded = rows_of(3, model), rows_of(3, model, ROWS + 7)
    dirty = type(rows)(x=padded.x.at[-1].set(jnp.inf), y=padded.y, present=padded.present.at[-1].set(True))
    first, second, third = (network_factor(model, family, key, eta_q, part, one) for part in (rows, padded, dirty))
    for other in (second, third):
        np.testing.assert_allclose(other.linear, first.linear, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(other.quadratic, first.quadratic, rtol=1e-4, atol=1e-5)
