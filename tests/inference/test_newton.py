"""Newton's method where its start is bad: large counts, wide priors, starts far out. Against float64 by scipy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, gammaln, log_expit

from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.natural_step import natural_factor
from silobayes.inference.newton import maximise_glm
from silobayes.inference.rows import pad
from silobayes.models.base import isotropic_eta
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.negative_binomial_regression import NegativeBinomialRegression
from silobayes.models.poisson_regression import PoissonRegression

FAMILIES = {"mean_field": MeanFieldGaussian(event_shape=(2,)), "full": FullGaussian(dimension=2)}
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
CONCENTRATION, NOISE = 3.0, 0.5
SOLVE = jax.jit(maximise_glm)

# Log-likelihoods given the linear predictor, in float64 and by other formulas than the library's.
LOG_LIKELIHOODS = {
    "poisson": lambda f, y: y * f - np.exp(np.minimum(f, 600.0)),
    "logistic": lambda f, y: log_expit((2 * y - 1) * f),
    "negative_binomial": lambda f, y: (
        gammaln(y + CONCENTRATION) - (y + CONCENTRATION) * np.logaddexp(f, np.log(CONCENTRATION)) + y * f
    ),
    "linear": lambda f, y: -0.5 * ((y - f) / NOISE) ** 2,
}


def model_of(kind, prior_stddev):
    counts = {"max_count": 10_000, "num_features": 2, "prior_stddev": prior_stddev}
    if kind == "poisson":
        return PoissonRegression(**counts)
    if kind == "negative_binomial":
        return NegativeBinomialRegression(concentration=CONCENTRATION, **counts)
    if kind == "linear":
        return LinearRegression(num_features=2, noise_stddev=NOISE, prior_stddev=prior_stddev)
    return LogisticRegression(num_features=2, prior_stddev=prior_stddev)


def simulate(kind, num_rows, mean_count=3.0):
    rng = np.random.default_rng(num_rows)
    a = rng.normal(size=num_rows)
    x = np.column_stack([a / 4, np.ones(num_rows)]).astype(np.float32)
    if kind == "poisson":
        return x, rng.poisson(mean_count * np.exp(0.2 * a))
    if kind == "negative_binomial":
        rate = mean_count * np.exp(0.2 * a)
        return x, rng.negative_binomial(CONCENTRATION, CONCENTRATION / (CONCENTRATION + rate))
    if kind == "linear":
        return x, a + 3 + NOISE * rng.normal(size=num_rows)
    return x, (rng.random(num_rows) < expit(a - 0.5)).astype(np.int32)


def reference(kind, x, y, prior_stddev, full, tempering=1.0):
    """Mean and stddevs of the best q: the free energy by quadrature, climbed in units of the curvature at the mode."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    of = LOG_LIKELIHOODS[kind]

    def log_joint(theta):
        return tempering * of(x @ theta, y).sum() - 0.5 * theta @ theta / prior_stddev**2

    def free_energy(coordinates):
        mean = mode + root @ coordinates[:2]
        turn = np.diag(np.exp(coordinates[2:4]))
        turn[1, 0] = coordinates[4] if full else 0.0
        factor = (root if full else np.diag(stddevs)) @ turn
        f = (x @ mean)[:, None] + np.linalg.norm(x @ factor, axis=1)[:, None] * NODES
        likelihood = tempering * (of(f, y[:, None]) @ WEIGHTS).sum()
        log_volume = np.log(np.abs(np.diag(factor))).sum()
        return likelihood - 0.5 * (mean @ mean + (factor**2).sum()) / prior_stddev**2 + log_volume

    start = np.linalg.lstsq(x, np.log(y + 1) if kind in ("poisson", "negative_binomial") else y, rcond=None)[0]
    mode = minimize(lambda t: -log_joint(t), start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-9}).x
    steps = 1e-3 * np.eye(2)
    curvature = (
        -np.array(
            [
                [
                    log_joint(mode + a + b)
                    - log_joint(mode + a - b)
                    - log_joint(mode - a + b)
                    + log_joint(mode - a - b)
                    for b in steps
                ]
                for a in steps
            ]
        )
        / 4e-6
    )
    root = np.linalg.cholesky(np.linalg.inv(curvature))
    stddevs = 1 / np.sqrt(np.diag(curvature))
    first = free_energy(np.zeros(5))
    best = minimize(
        lambda c: first - free_energy(c), np.zeros(5 if full else 4), method="BFGS", options={"gtol": 1e-5}
    ).x
    turn = np.diag(np.exp(best[2:4]))
    turn[1, 0] = best[4] if full else 0.0
    factor = (root if full else np.diag(stddevs)) @ turn
    return mode + root @ best[:2], np.linalg.norm(factor, axis=1)


def check(kind, family_name, x, y, prior_stddev, *, start=None, tempering=1.0, num_slots=605):
    family = FAMILIES[family_name]
    eta_p = model_of(kind, prior_stddev).prior_eta(family)
    # The solver takes the prior from the cavity and only the likelihood from the model: one compilation for all priors.
    model, rows = model_of(kind, 1.0), pad(x, y, num_slots)
    q = family.to_standard(SOLVE(model, family, eta_p, eta_p if start is None else start, rows, jnp.asarray(tempering)))
    stddev = q.stddev if family_name == "mean_field" else np.sqrt(np.diagonal(q.covariance))
    expected_mean, expected_stddev = reference(kind, x, y, prior_stddev, family_name == "full", tempering)
    assert (np.abs(np.asarray(q.mean) - expected_mean) <= 0.02 * expected_stddev).all(), (q.mean, expected_mean)
    np.testing.assert_allclose(stddev, expected_stddev, rtol=0.01)


@pytest.mark.parametrize("family_name", FAMILIES)
@pytest.mark.parametrize("prior_stddev", [1.0, 10.0])
@pytest.mark.parametrize(("mean_count", "num_rows"), [(300, 2000), (2000, 200), (2000, 2000)])
def test_large_counts(family_name, prior_stddev, mean_count, num_rows):
    check("poisson", family_name, *simulate("poisson", num_rows, mean_count), prior_stddev, num_slots=2005)


@pytest.mark.parametrize("family_name", FAMILIES)
@pytest.mark.parametrize("prior_stddev", [20.0, 50.0, 100.0, 1000.0])
@pytest.mark.parametrize("kind", LOG_LIKELIHOODS)
def test_wide_priors(family_name, prior_stddev, kind):
    check(kind, family_name, *simulate(kind, 600), prior_stddev)


@pytest.mark.parametrize("family_name", FAMILIES)
@pytest.mark.parametrize("kind", LOG_LIKELIHOODS)
@pytest.mark.parametrize(("away", "stddev"), [(-20.0, 0.01), (20.0, 30.0)])
def test_starts_far_out(family_name, kind, away, stddev):
    """All rows on the wrong side, where the likelihood is flat or overflows."""
    start = isotropic_eta(FAMILIES[family_name], jnp.array([3.0, away]), stddev)
    check(kind, family_name, *simulate(kind, 600), 100.0, start=start)


@pytest.mark.parametrize("family_name", FAMILIES)
@pytest.mark.parametrize(("kind", "tempering"), [("logistic", 0.2), ("negative_binomial", 30.0), ("poisson", 30.0)])
def test_tempered_rows(family_name, kind, tempering):
    check(kind, family_name, *simulate(kind, 600), 50.0, tempering=tempering)


@pytest.mark.parametrize("family_name", FAMILIES)
@pytest.mark.parametrize("kind", ["poisson", "logistic"])
def test_more_features_than_rows(family_name, kind):
    """Mean and variances depend on each other strongly here: the optimum is a fixed point and not one of a cycle."""
    dim, rng = 109, np.random.default_rng(1)
    family = MeanFieldGaussian(event_shape=(dim,)) if family_name == "mean_field" else FullGaussian(dimension=dim)
    x = rng.normal(size=(40, dim))
    x, y = (x, rng.integers(2, size=40)) if kind == "logistic" else (x / 10, rng.poisson(100, size=40))
    model = {"logistic": LogisticRegression, "poisson": partial(PoissonRegression, max_count=1000)}[kind](
        num_features=dim
    )
    eta_p, rows, one = model.prior_eta(family), pad(x, y, 40), jnp.asarray(1.0)
    optimum = SOLVE(model, family, eta_p, eta_p, rows, one)
    again = eta_p + natural_factor(model, family, optimum, rows, one)
    largest = np.abs(optimum.quadratic).max()
    np.testing.assert_allclose(again.quadratic, optimum.quadratic, rtol=1e-3, atol=1e-3 * largest)
    np.testing.assert_allclose(again.linear, optimum.linear, rtol=1e-3, atol=1e-3 * np.abs(optimum.linear).max())


@pytest.mark.parametrize("family_name", FAMILIES)
def test_one_row_without_events_leaves_q_wide(family_name):
    """With a variance v the best mean m of `-e^(m + v/2) - m^2/200 ...` has `e^(m + v/2) = -m / 100 = 1/v - 1/100`."""
    model, family = (
        PoissonRegression(num_features=1, max_count=9, prior_stddev=10.0),
        {
            "mean_field": MeanFieldGaussian(event_shape=(1,)),
            "full": FullGaussian(dimension=1),
        }[family_name],
    )
    eta_p = model.prior_eta(family)
    q = family.to_standard(SOLVE(model, family, eta_p, eta_p, pad(np.ones((1, 1)), np.zeros(1), 1), jnp.asarray(1.0)))
    variance = float(q.stddev[0] ** 2 if family_name == "mean_field" else q.covariance[0, 0])
    mean = float(q.mean[0])
    rate = np.exp(mean + variance / 2)
    np.testing.assert_allclose([-mean / 100, 1 / variance - 0.01], rate, rtol=5e-3)
