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
from scipy.special import betaln, digamma

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


def look(family, x, standard_q, standard_p):
    """eta_q, log partition, log_prob, entropy and KL(q || p), in one compilation."""

    @jax.jit
    def compute(standard_q, standard_p, x):
        q, p = family.from_standard(**standard_q), family.from_standard(**standard_p)
        return q, family.log_partition(q), family.log_prob(q, x), family.entropy(q), family.kl(q, p)

    return compute(standard_q, standard_p, x)


def numpyro_kl(build, q, p):
    return jax.jit(lambda q, p: jnp.sum(kl_divergence(build(*q), build(*p))))(q, p)


def close(value, expected, rtol=1e-10):
    np.testing.assert_allclose(np.asarray(value), expected, rtol=rtol)


def test_mean_field_gaussian_values():
    family = fam.MeanFieldGaussian(event_shape=(3,))
    standard, other = {"mean": MEAN, "stddev": STDDEV}, {"mean": OTHER_MEAN, "stddev": OTHER_STDDEV}
    eta, log_partition, log_prob, entropy, kl = look(family, POINT, standard, other)
    close(eta.linear, MEAN / STDDEV**2)
    close(eta.quadratic, -1 / (2 * STDDEV**2))
    # 001's sign slip: A = mu^2 / (2 s^2) + ln s
    close(log_partition, np.sum(MEAN**2 / (2 * STDDEV**2) + np.log(STDDEV)))
    close(log_prob, stats.norm(MEAN, STDDEV).logpdf(POINT).sum())
    close(entropy, stats.norm(MEAN, STDDEV).entropy().sum())
    close(kl, numpyro_kl(npd.Normal, (MEAN, STDDEV), (OTHER_MEAN, OTHER_STDDEV)))


def test_full_gaussian_values():
    family = fam.FullGaussian(dimension=3)
    standard = {"mean": MEAN, "covariance": COVARIANCE}
    other = {"mean": OTHER_MEAN, "covariance": OTHER_COVARIANCE}
    eta, _, log_prob, entropy, kl = look(family, POINT, standard, other)
    close(eta.quadratic, -0.5 * np.linalg.inv(COVARIANCE))
    close(eta.linear, np.linalg.solve(COVARIANCE, MEAN))
    reference = stats.multivariate_normal(MEAN, COVARIANCE)
    close(log_prob, reference.logpdf(POINT))
    close(entropy, reference.entropy())
    close(kl, numpyro_kl(npd.MultivariateNormal, (MEAN, COVARIANCE), (OTHER_MEAN, OTHER_COVARIANCE)))


def test_gamma_values():
    family = fam.Gamma(event_shape=(3,))
    standard, other = {"shape": SHAPE, "rate": RATE}, {"shape": OTHER_SHAPE, "rate": OTHER_RATE}
    eta, _, log_prob, entropy, kl = look(family, STDDEV, standard, other)
    reference = stats.gamma(SHAPE, scale=1 / RATE)
    close(log_prob, reference.logpdf(STDDEV).sum())
    close(entropy, reference.entropy().sum())
    close(kl, numpyro_kl(npd.Gamma, (SHAPE, RATE), (OTHER_SHAPE, OTHER_RATE)))
    assert jax.jit(family.log_prob)(eta, STDDEV * np.array([1, -1, 1])) == -np.inf


def test_beta_values():
    family = fam.Beta(event_shape=(3,))
    standard, other = {"alpha": SHAPE, "beta": RATE}, {"alpha": OTHER_SHAPE, "beta": OTHER_RATE}
    eta, _, log_prob, entropy, kl = look(family, SIMPLEX, standard, other)
    close(log_prob, stats.beta(SHAPE, RATE).logpdf(SIMPLEX).sum())
    close(entropy, stats.beta(SHAPE, RATE).entropy().sum())
    # not against numpyro: its log beta function has only eight digits
    d_alpha, d_beta = OTHER_SHAPE - SHAPE, OTHER_RATE - RATE
    expected = betaln(OTHER_SHAPE, OTHER_RATE) - betaln(SHAPE, RATE) - d_alpha * digamma(SHAPE) - d_beta * digamma(RATE)
    close(kl, np.sum(expected + (d_alpha + d_beta) * digamma(SHAPE + RATE)))
    assert jax.jit(family.log_prob)(eta, jnp.asarray([0.5, 1.0, 0.5])) == -np.inf


def test_dirichlet_values():
    family = fam.Dirichlet(event_shape=(3,))
    _, _, log_prob, entropy, kl = look(family, SIMPLEX, {"concentration": SHAPE}, {"concentration": OTHER_SHAPE})
    close(log_prob, stats.dirichlet(SHAPE).logpdf(SIMPLEX))
    close(entropy, stats.dirichlet(SHAPE).entropy())
    close(kl, numpyro_kl(npd.Dirichlet, (SHAPE,), (OTHER_SHAPE,)))
    rows = fam.Dirichlet(event_shape=(2, 3))
    both = rows.from_standard(concentration=np.stack([SHAPE, OTHER_SHAPE]))
    close(jax.jit(rows.entropy)(both), stats.dirichlet(SHAPE).entropy() + stats.dirichlet(OTHER_SHAPE).entropy())


def test_bernoulli_values():
    family = fam.Bernoulli(event_shape=(3,))
    x = jnp.asarray([1, 0, 1])
    eta, _, log_prob, entropy, kl = look(family, x, {"probability": SIMPLEX}, {"probability": 1 - SIMPLEX})
    close(log_prob, stats.bernoulli(SIMPLEX).logpmf(x).sum())
    close(entropy, stats.bernoulli(SIMPLEX).entropy().sum())
    pairs = np.stack([SIMPLEX, 1 - SIMPLEX])
    close(kl, np.sum(pairs * np.log(pairs / pairs[::-1])))
    assert family.log_prob(eta, jnp.asarray([2, 0, 1])) == -np.inf


def test_categorical_values():
    family = fam.Categorical(event_shape=(), categories=3)
    other = np.array([0.2, 0.5, 0.3])
    eta, _, log_prob, entropy, kl = look(family, 2, {"probabilities": SIMPLEX}, {"probabilities": other})
    close(log_prob, np.log(SIMPLEX[2]))
    close(entropy, stats.entropy(SIMPLEX))
    close(kl, stats.entropy(SIMPLEX, other))
    shifted = fam.CategoricalEta(logits=eta.logits + 3.0)
    close(family.log_prob(shifted, 2), np.log(SIMPLEX[2]))
    for outside in (3, -1):
        assert family.log_prob(eta, outside) == -np.inf


def test_normal_inverse_gamma_values():
    family = fam.NormalInverseGamma(dimension=3)
    v = 0.7
    x = fam.CoefficientsVariance(coefficients=POINT, variance=jnp.asarray(v))
    standard = {"location": MEAN, "scaled_precision": np.linalg.inv(COVARIANCE), "shape": 2.5, "scale": 1.3}
    eta, _, log_prob, _, _ = look(family, x, standard, standard)
    expected = stats.invgamma(2.5, scale=1.3).logpdf(v) + stats.multivariate_normal(MEAN, v * COVARIANCE).logpdf(POINT)
    close(log_prob, expected)
    assert jax.jit(family.log_prob)(eta, x._replace(variance=jnp.asarray(-v))) == -np.inf


def test_normal_wishart_values():
    family = fam.NormalWishart(dimension=3)
    x = fam.MeanPrecision(mean=POINT, precision=OTHER_COVARIANCE)
    standard = {"location": MEAN, "strength": 0.8, "degrees": 4.2, "scale": COVARIANCE}
    _, _, log_prob, entropy, _ = look(family, x, standard, standard)
    wishart = stats.wishart(4.2, COVARIANCE)
    normal = stats.multivariate_normal(MEAN, np.linalg.inv(0.8 * OTHER_COVARIANCE))
    close(log_prob, wishart.logpdf(OTHER_COVARIANCE) + normal.logpdf(POINT))
    mean_log_det = digamma((4.2 - np.arange(3)) / 2).sum() + 3 * np.log(2) + np.linalg.slogdet(COVARIANCE)[1]
    close(entropy, wishart.entropy() + 0.5 * (3 * np.log(2 * np.pi * np.e / 0.8) - mean_log_det))


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
    posterior = jax.jit(family.to_standard)(eta)
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
    posterior = jax.jit(family.to_standard)(eta)
    mean = x.mean(axis=0)
    close(posterior.strength, 20.5)
    close(posterior.degrees, 23.0)
    close(posterior.location, (0.5 * np.array([1.0, -1.0]) + 20 * mean) / 20.5)
    shift = mean - np.array([1.0, -1.0])
    inverse_scale = np.eye(2) + (x - mean).T @ (x - mean) + (0.5 * 20 / 20.5) * np.outer(shift, shift)
    close(posterior.scale, np.linalg.inv(inverse_scale))


def test_stirling_remainder_against_fifty_digits():
    points = [1e-6, 0.03, 1.0, 7.9, 8.0, 8.1, 40.0, 1e5]
    remainders, slopes = [], []
    with mpmath.workdps(50):
        for x in points:
            z = mpmath.mpf(x)
            remainders.append(float(mpmath.loggamma(z) - (z - 0.5) * mpmath.log(z) + z - mpmath.log(2 * mpmath.pi) / 2))
            slopes.append(float(mpmath.digamma(z) - mpmath.log(z) + 1 / (2 * z)))
    x = jnp.asarray(points)
    np.testing.assert_allclose(jax.jit(_special.stirling_remainder)(x), remainders, rtol=1e-11, atol=2e-14)
    np.testing.assert_allclose(jax.jit(_special.stirling_remainder_slope)(x), slopes, rtol=1e-9, atol=2e-14)
    derivative = jax.jit(jax.vmap(jax.grad(_special.stirling_remainder)))(x)
    np.testing.assert_allclose(derivative, slopes, rtol=1e-9, atol=1e-13)


def test_lgamma_bregman_in_float32_against_fifty_digits():
    pairs = np.array([(1e5, 1.001e5), (1e5, 100.0), (100.0, 1e5), (1e-6, 3.0), (3.0, 1e-6), (9.0, 7.0)], np.float32)
    values = jax.jit(_special.lgamma_bregman)(pairs[:, 0], pairs[:, 1])
    assert values.dtype == jnp.float32
    for value, (p, q) in zip(values, pairs, strict=True):
        with mpmath.workdps(50):
            p, q = mpmath.mpf(float(p)), mpmath.mpf(float(q))
            expected = float(mpmath.loggamma(p) - mpmath.loggamma(q) - (p - q) * mpmath.digamma(q))
        # lgamma(1e5) alone would be wrong by .06
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6 * float(abs(p - q)) + 1e-6)
