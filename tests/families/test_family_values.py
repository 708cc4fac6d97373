"""Values against scipy.stats and numpyro (independent code), in float64 unless said."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import numpyro.distributions as npd
import pytest
from family_cases import precision
from numpyro.distributions import kl_divergence
from scipy import stats

from silobayes import families as fam
from silobayes.families import _special

RNG = np.random.default_rng(7)
MEAN, OTHER_MEAN = RNG.normal(size=3), RNG.normal(size=3)
STDDEV, OTHER_STDDEV = RNG.uniform(0.3, 3, 3), RNG.uniform(0.3, 3, 3)
ROOT, OTHER_ROOT = np.tril(RNG.normal(size=(3, 3))), np.tril(RNG.normal(size=(3, 3)))
COVARIANCE = ROOT @ ROOT.T + 0.5 * np.eye(3)
OTHER_COVARIANCE = OTHER_ROOT @ OTHER_ROOT.T + 0.5 * np.eye(3)
POINT = RNG.normal(size=3)
SHAPE, OTHER_SHAPE = RNG.uniform(0.2, 12, 3), RNG.uniform(0.2, 12, 3)
RATE, OTHER_RATE = RNG.uniform(0.2, 12, 3), RNG.uniform(0.2, 12, 3)
SIMPLEX = RNG.dirichlet(np.ones(3))


@pytest.fixture(autouse=True)
def _double():
    with precision("float64"):
        yield


def close(value, expected, rtol=1e-10):
    np.testing.assert_allclose(np.asarray(value), expected, rtol=rtol)


def test_mean_field_gaussian_values():
    family = fam.MeanFieldGaussian(event_shape=(3,))
    q = family.from_standard(mean=MEAN, stddev=STDDEV)
    p = family.from_standard(mean=OTHER_MEAN, stddev=OTHER_STDDEV)
    close(q.linear, MEAN / STDDEV**2)
    close(q.quadratic, -1 / (2 * STDDEV**2))
    # 001's sign slip: A = mu^2 / (2 s^2) + ln s
    close(family.log_partition(q), np.sum(MEAN**2 / (2 * STDDEV**2) + np.log(STDDEV)))
    close(family.log_prob(q, POINT), stats.norm(MEAN, STDDEV).logpdf(POINT).sum())
    close(family.entropy(q), stats.norm(MEAN, STDDEV).entropy().sum())
    close(family.kl(q, p), kl_divergence(npd.Normal(MEAN, STDDEV), npd.Normal(OTHER_MEAN, OTHER_STDDEV)).sum())


def test_full_gaussian_values():
    family = fam.FullGaussian(dimension=3)
    q = family.from_standard(mean=MEAN, covariance=COVARIANCE)
    p = family.from_standard(mean=OTHER_MEAN, covariance=OTHER_COVARIANCE)
    close(q.quadratic, -0.5 * np.linalg.inv(COVARIANCE))
    close(q.linear, np.linalg.solve(COVARIANCE, MEAN))
    reference = stats.multivariate_normal(MEAN, COVARIANCE)
    close(family.log_prob(q, POINT), reference.logpdf(POINT))
    close(family.entropy(q), reference.entropy())
    expected = kl_divergence(
        npd.MultivariateNormal(MEAN, COVARIANCE), npd.MultivariateNormal(OTHER_MEAN, OTHER_COVARIANCE)
    )
    close(family.kl(q, p), expected)


def test_gamma_values():
    family = fam.Gamma(event_shape=(3,))
    q = family.from_standard(shape=SHAPE, rate=RATE)
    p = family.from_standard(shape=OTHER_SHAPE, rate=OTHER_RATE)
    reference = stats.gamma(SHAPE, scale=1 / RATE)
    close(family.log_prob(q, STDDEV), reference.logpdf(STDDEV).sum())
    close(family.entropy(q), reference.entropy().sum())
    close(family.kl(q, p), kl_divergence(npd.Gamma(SHAPE, RATE), npd.Gamma(OTHER_SHAPE, OTHER_RATE)).sum())
    assert family.log_prob(q, STDDEV * np.array([1, -1, 1])) == -np.inf


def test_beta_values():
    family = fam.Beta(event_shape=(3,))
    q = family.from_standard(alpha=SHAPE, beta=RATE)
    p = family.from_standard(alpha=OTHER_SHAPE, beta=OTHER_RATE)
    reference = stats.beta(SHAPE, RATE)
    close(family.log_prob(q, SIMPLEX), reference.logpdf(SIMPLEX).sum())
    close(family.entropy(q), reference.entropy().sum())
    close(family.kl(q, p), kl_divergence(npd.Beta(SHAPE, RATE), npd.Beta(OTHER_SHAPE, OTHER_RATE)).sum())
    assert family.log_prob(q, jnp.asarray([0.5, 1.0, 0.5])) == -np.inf


def test_dirichlet_values():
    family = fam.Dirichlet(event_shape=(3,))
    q, p = family.from_standard(concentration=SHAPE), family.from_standard(concentration=OTHER_SHAPE)
    close(family.log_prob(q, SIMPLEX), stats.dirichlet(SHAPE).logpdf(SIMPLEX))
    close(family.entropy(q), stats.dirichlet(SHAPE).entropy())
    close(family.kl(q, p), kl_divergence(npd.Dirichlet(SHAPE), npd.Dirichlet(OTHER_SHAPE)))
    rows = fam.Dirichlet(event_shape=(2, 3))
    both = rows.from_standard(concentration=np.stack([SHAPE, OTHER_SHAPE]))
    close(rows.entropy(both), family.entropy(q) + family.entropy(p))


def test_bernoulli_values():
    family = fam.Bernoulli(event_shape=(3,))
    q, p = family.from_standard(probability=SIMPLEX), family.from_standard(probability=1 - SIMPLEX)
    x = jnp.asarray([1, 0, 1])
    close(family.log_prob(q, x), stats.bernoulli(SIMPLEX).logpmf(x).sum())
    close(family.entropy(q), stats.bernoulli(SIMPLEX).entropy().sum())
    pairs = np.stack([SIMPLEX, 1 - SIMPLEX])
    close(family.kl(q, p), np.sum(pairs * np.log(pairs / pairs[::-1])))
    assert family.log_prob(q, jnp.asarray([2, 0, 1])) == -np.inf


def test_categorical_values():
    family = fam.Categorical(event_shape=(), categories=3)
    other = np.array([0.2, 0.5, 0.3])
    q, p = family.from_standard(probabilities=SIMPLEX), family.from_standard(probabilities=other)
    close(family.log_prob(q, 2), np.log(SIMPLEX[2]))
    close(family.entropy(q), stats.entropy(SIMPLEX))
    close(family.kl(q, p), stats.entropy(SIMPLEX, other))
    shifted = fam.CategoricalEta(logits=q.logits + 3.0)
    close(family.kl(shifted, p), stats.entropy(SIMPLEX, other))
    for outside in (3, -1):
        assert family.log_prob(q, outside) == -np.inf


def test_normal_inverse_gamma_values():
    family = fam.NormalInverseGamma(dimension=3)
    precision_matrix = np.linalg.inv(COVARIANCE)
    q = family.from_standard(location=MEAN, scaled_precision=precision_matrix, shape=2.5, scale=1.3)
    v = 0.7
    expected = stats.invgamma(2.5, scale=1.3).logpdf(v) + stats.multivariate_normal(MEAN, v * COVARIANCE).logpdf(POINT)
    close(family.log_prob(q, fam.CoefficientsVariance(coefficients=POINT, variance=v)), expected)
    assert family.log_prob(q, fam.CoefficientsVariance(coefficients=POINT, variance=-v)) == -np.inf


def test_normal_wishart_values():
    family = fam.NormalWishart(dimension=3)
    q = family.from_standard(location=MEAN, strength=0.8, degrees=4.2, scale=COVARIANCE)
    precision_matrix = OTHER_COVARIANCE
    wishart = stats.wishart(4.2, COVARIANCE)
    normal = stats.multivariate_normal(MEAN, np.linalg.inv(0.8 * precision_matrix))
    x = fam.MeanPrecision(mean=POINT, precision=precision_matrix)
    close(family.log_prob(q, x), wishart.logpdf(precision_matrix) + normal.logpdf(POINT))
    mean_log_det = float(family.mean_parameters(q).log_det)
    mean_normal_entropy = 0.5 * (3 * np.log(2 * np.pi * np.e / 0.8) - mean_log_det)
    close(family.entropy(q), wishart.entropy() + mean_normal_entropy)


def test_conjugate_linear_regression_is_a_sum_of_factors():
    # Silos add their statistics to a normal-inverse-gamma prior; the posterior is the textbook one on all rows.
    family = fam.NormalInverseGamma(dimension=2)
    x, y = RNG.normal(size=(30, 2)), RNG.normal(size=30)
    eta = family.from_standard(location=np.zeros(2), scaled_precision=np.eye(2), shape=2.0, scale=1.0)
    for rows in np.split(np.arange(30), [4, 19]):
        eta = eta + fam.NormalInverseGammaEta(
            linear=x[rows].T @ y[rows],
            quadratic=-0.5 * x[rows].T @ x[rows],
            inverse_variance=-0.5 * y[rows] @ y[rows],
            log_variance=jnp.asarray(-0.5 * len(rows)),
        )
    posterior = family.to_standard(eta)
    precision_matrix = x.T @ x + np.eye(2)
    location = np.linalg.solve(precision_matrix, x.T @ y)
    close(posterior.location, location)
    close(posterior.scaled_precision, precision_matrix)
    close(posterior.shape, 2 + 15)
    close(posterior.scale, 1 + 0.5 * (y @ y - location @ precision_matrix @ location))


def test_conjugate_gaussian_is_a_sum_of_factors():
    # Rows of a Gaussian add (x, -1/2, -x x^T/2, 1/2) to a normal-Wishart prior (Murphy 2007, eq. 221-224).
    family = fam.NormalWishart(dimension=2)
    x = RNG.normal(size=(20, 2))
    eta = family.from_standard(location=np.array([1.0, -1.0]), strength=0.5, degrees=3.0, scale=np.eye(2))
    for row in x:
        eta = eta + fam.NormalWishartEta(
            linear=jnp.asarray(row),
            quadratic=jnp.asarray(-0.5),
            precision=-0.5 * np.outer(row, row),
            log_det=jnp.asarray(0.5),
        )
    posterior = family.to_standard(eta)
    mean = x.mean(axis=0)
    close(posterior.strength, 20.5)
    close(posterior.degrees, 23.0)
    close(posterior.location, (0.5 * np.array([1.0, -1.0]) + 20 * mean) / 20.5)
    shift = mean - np.array([1.0, -1.0])
    inverse_scale = np.eye(2) + (x - mean).T @ (x - mean) + (0.5 * 20 / 20.5) * np.outer(shift, shift)
    close(posterior.scale, np.linalg.inv(inverse_scale))


@pytest.mark.parametrize("x", [1e-6, 0.03, 1.0, 7.9, 8.0, 8.1, 40.0, 1e5])
def test_stirling_remainder_against_fifty_digits(x):
    with mpmath.workdps(50):
        z = mpmath.mpf(x)
        expected = mpmath.loggamma(z) - (z - 0.5) * mpmath.log(z) + z - mpmath.log(2 * mpmath.pi) / 2
        slope = mpmath.digamma(z) - mpmath.log(z) + 1 / (2 * z)
    np.testing.assert_allclose(_special.stirling_remainder(jnp.asarray(x)), float(expected), rtol=1e-11, atol=2e-14)
    np.testing.assert_allclose(_special.stirling_remainder_slope(jnp.asarray(x)), float(slope), rtol=1e-9, atol=2e-14)
    derivative = jax.grad(_special.stirling_remainder)(jnp.asarray(x))
    np.testing.assert_allclose(derivative, float(slope), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(("p", "q"), [(1e5, 1.001e5), (1e5, 100.0), (100.0, 1e5), (1e-6, 3.0), (3.0, 1e-6), (9.0, 7.0)])
def test_lgamma_bregman_against_fifty_digits_in_float32(p, q):
    with mpmath.workdps(50):
        p32, q32 = mpmath.mpf(float(np.float32(p))), mpmath.mpf(float(np.float32(q)))
        expected = float(mpmath.loggamma(p32) - mpmath.loggamma(q32) - (p32 - q32) * mpmath.digamma(q32))
    value = _special.lgamma_bregman(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6 * abs(p - q) + 1e-6)
