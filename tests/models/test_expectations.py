"""Quadrature over a Gaussian linear predictor, against adaptive integration in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

from silobayes.models import LinearRegression, LogisticRegression, NegativeBinomialRegression, PoissonRegression

WIDTHS = (1e-3, 0.1, 1.0, 3.0, 30.0, 1e3)
MEANS = (0.0, 0.7, -2.0, 5.0)  # and so many standard deviations more, below


def logistic(f, y):
    return -np.logaddexp(0.0, -f if y else f)


def poisson(f, y):
    return y * f - np.exp(np.minimum(f, 700.0)) - special.gammaln(y + 1.0)


def negative_binomial(r):
    def log_mass(f, y):
        choose = special.gammaln(y + r) - special.gammaln(r) - special.gammaln(y + 1.0)
        logit = f - np.log(r)
        return choose - y * np.logaddexp(0.0, -logit) - r * np.logaddexp(0.0, logit)

    return log_mass


def exact(log_mass, mean, stddev, y) -> float:
    """A trapezoid rule with so many points that both scales are resolved: shared between the two of them."""
    centre = np.log(max(y, 1.0))
    near = centre + np.sinh(np.linspace(-16, 16, 20_001)) * 1e-1
    wide = mean + stddev * np.linspace(-45, 45, 20_001)
    f = np.unique(np.concatenate([near, wide]))
    values = log_mass(f, y) + stats.norm.logpdf(f, mean, stddev)
    top = values.max()
    return float(top + np.log(integrate.trapezoid(np.exp(values - top), f)))


CASES = [
    (LogisticRegression(num_features=1), logistic, (0, 1)),
    (PoissonRegression(num_features=1, max_count=1000), poisson, (0, 1, 40, 1000)),
    (NegativeBinomialRegression(num_features=1, max_count=99, concentration=2.0), negative_binomial(2.0), (0, 3, 90)),
    (NegativeBinomialRegression(num_features=1, max_count=99, concentration=0.05), negative_binomial(0.05), (0, 1, 90)),
]


@pytest.mark.parametrize(("model", "log_mass", "labels"), CASES, ids=["logistic", "poisson", "nb", "nb-small"])
def test_right_for_narrow_and_for_very_wide_f_and_for_labels_in_the_far_tail(model, log_mass, labels):
    cases = [
        (mean + shift * width, width, y)
        for width in WIDTHS
        for mean in MEANS
        for shift in (0.0, -1.0, 2.0, 6.0)
        for y in labels
    ]
    mean, width, y = (np.array(column, np.float32) for column in zip(*cases, strict=True))
    ours = model.log_expected_likelihood(jnp.asarray(mean), jnp.asarray(width**2), jnp.asarray(y))
    expected = np.array(
        [exact(log_mass, *case) for case in zip(*(column.tolist() for column in (mean, width, y)), strict=True)]
    )
    tolerance = 1e-4 + 3e-6 * np.abs(expected) + 1e-6 * special.gammaln(y + 1.0)  # float32 cancels the last one
    error = np.abs(np.asarray(ours) - expected)
    worst = int(np.argmax(error - tolerance))
    assert np.all(error <= tolerance), (cases[worst], float(ours[worst]), expected[worst])


def test_linear_regression_has_a_closed_form():
    model = LinearRegression(num_features=1, noise_stddev=0.5)
    ours = model.log_expected_likelihood(jnp.array([1.0]), jnp.array([4.0]), jnp.array([2.0]))
    np.testing.assert_allclose(ours, stats.norm.logpdf(2.0, 1.0, np.sqrt(4.25)), rtol=1e-6)


def test_expected_predictions_are_those_of_many_draws():
    """A million draws; the widest tolerance is 5 standard errors."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=1_000_000)
    logistic_model = LogisticRegression(num_features=1)
    for mean, stddev in ((0.3, 0.2), (-1.0, 3.0), (20.0, 50.0), (-400.0, 1000.0)):
        p = np.asarray(logistic_model.expected_prediction(jnp.array([mean]), jnp.array([stddev**2])))
        assert abs(p[0, 1] - special.expit(mean + stddev * draws).mean()) < 5 * 0.5 / 1000
        np.testing.assert_allclose(p.sum(), 1.0, atol=1e-5)
    count = PoissonRegression(num_features=1, max_count=9)
    np.testing.assert_allclose(
        count.expected_prediction(jnp.array([0.5]), jnp.array([0.25])), np.exp(0.5 + 0.5 * draws).mean(), rtol=5e-3
    )
