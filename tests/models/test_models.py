"""Every model against scipy, and the contract of the table in `cases`."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from silobayes.core.errors import InvalidInput
from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.models import MODELS as KINDS
from silobayes.models import build
from silobayes.models.base import AbstractGLM, elementwise_derivative
from silobayes.models.mlp import BinaryMLP
from silobayes.models.negative_binomial_regression import NegativeBinomialRegression
from silobayes.models.poisson_regression import PoissonRegression
from tests.models.cases import MAX_COUNT, MODELS, D, K, sample

FEATURES = ("age", "weight", "intercept")


def relu_network(theta, x, widths):
    """A second, plain implementation."""
    values, start = x.astype(np.float64), 0
    for layer, (size_in, size_out) in enumerate(pairwise(widths)):
        weights = theta[start : start + (size_in + 1) * size_out].reshape(size_in + 1, size_out)
        start += weights.size
        values = values @ weights[:-1] + weights[-1]
        if layer + 2 < len(widths):
            values = np.maximum(values, 0)
    return values


def negative_binomial(y, log_mean, concentration):
    return stats.nbinom.logpmf(y, concentration, concentration / (concentration + np.exp(log_mean)))


def log_classes(logits, y):
    return special.log_softmax(logits, axis=1)[np.arange(len(y)), y]


def gaussian_rows(theta, x):
    factor = np.zeros((D, D))
    factor[np.tril_indices(D)] = theta[D:]
    factor[np.diag_indices(D)] = np.exp(np.diag(factor))
    return stats.multivariate_normal(theta[:D], np.linalg.inv(factor @ factor.T)).logpdf(x)


EXPECTED = {
    "linear": lambda t, x, y: stats.norm.logpdf(y, x @ t, 0.7),
    "linear_unknown_noise": lambda t, x, y: stats.norm.logpdf(y, x @ t[:-1], np.exp(t[-1])),
    "logistic": lambda t, x, y: stats.bernoulli.logpmf(y, special.expit(x @ t)),
    "softmax": lambda t, x, y: log_classes(x @ t.reshape(D, K), y),
    "poisson": lambda t, x, y: stats.poisson.logpmf(y, np.exp(x @ t)),
    "negative_binomial": lambda t, x, y: negative_binomial(y, x @ t, 2.5),
    "negative_binomial_unknown": lambda t, x, y: negative_binomial(y, x @ t[:-1], np.exp(t[-1])),
    "mlp_binary": lambda t, x, y: stats.bernoulli.logpmf(y, special.expit(relu_network(t, x, (D, 4, 3, 1))[:, 0])),
    "mlp_classes": lambda t, x, y: log_classes(relu_network(t, x, (D, 5, K)), y),
    "mlp_real": lambda t, x, y: stats.norm.logpdf(y, relu_network(t, x, (D, 4, 1))[:, 0], 0.5),
    "gaussian_mean": lambda t, x, y: stats.norm.logpdf(x, t, 0.5).sum(axis=1),
    "gaussian_mean_covariance": lambda t, x, y: gaussian_rows(t, x),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_log_likelihood_is_that_of_scipy(name):
    model = MODELS[name]
    data = sample(model, 20)
    got = jax.jit(model.log_predictive)(data.theta, data.x, data.y)
    np.testing.assert_allclose(got, EXPECTED[name](data.theta.astype(float), data.x, data.y), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gaussian")])
def test_predictions_are_the_mean_of_the_likelihood(name):
    """Sum or integrate over the target: also shows that the likelihood is normalised over it."""
    model = MODELS[name]
    data = sample(model, 5)
    predicted = np.asarray(jax.jit(model.predict)(data.theta, data.x))
    if model.target in ("binary", "classes"):
        grid, step = np.arange(predicted.shape[1], dtype=np.int32), 1.0
    elif model.target == "count":
        grid, step = np.arange(400.0, dtype=np.float32), 1.0
    else:
        grid, step = np.linspace(-25, 25, 4001, dtype=np.float32), 50 / 4000
    log_p = jax.jit(jax.vmap(lambda y: model.log_predictive(data.theta, data.x, jnp.full(5, y))))(grid)
    mass = step * np.exp(np.asarray(log_p, dtype=np.float64))
    np.testing.assert_allclose(mass.sum(axis=0), 1.0, rtol=1e-3)
    expected = mass.T if model.target in ("binary", "classes") else grid @ mass
    np.testing.assert_allclose(predicted, expected, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_names_are_as_many_as_parameters_and_different(name):
    model = MODELS[name]
    names = model.parameter_names(FEATURES)
    assert len(names) == len(set(names)) == model.dim
    assert any("age" in entry for entry in names)
    with pytest.raises(InvalidInput, match="feature_names"):
        model.parameter_names(FEATURES[:2])


@pytest.mark.parametrize("name", ["logistic", "softmax", "gaussian_mean_covariance"])
def test_prior_eta_is_the_prior_in_both_families(name):
    model = MODELS[name]
    theta = sample(model).theta
    for family in (MeanFieldGaussian(event_shape=(model.dim,)), FullGaussian(dimension=model.dim)):
        np.testing.assert_allclose(family.log_prob(model.prior_eta(family), theta), model.log_prior(theta), rtol=1e-4)
        assert family.is_proper(model.start_eta(family, jax.random.key(0)))
    assert model.prior_is_gaussian


def test_a_prior_too_wide_for_float32_is_refused():
    with pytest.raises(InvalidInput, match="prior_stddev"):
        build("logistic_regression", {"prior_stddev": 2e6}, num_features=3)


def test_flatten_is_the_inverse_of_matrices():
    model = BinaryMLP(num_features=D, hidden=(20, 7))
    theta = jnp.arange(1.0, model.dim + 1)
    np.testing.assert_array_equal(model.flatten(model.matrices(theta)), theta)


def test_a_network_does_not_start_at_the_saddle_point_of_the_prior():
    model = MODELS["mlp_binary"]
    family = MeanFieldGaussian(event_shape=(model.dim,))
    mean, _ = family.to_standard(model.start_eta(family, jax.random.key(0)))
    slope = jax.jit(jax.grad(lambda theta: model.log_predictive(theta, sample(model).x, sample(model).y).sum()))
    assert np.count_nonzero(slope(jnp.zeros(model.dim))) == 1  # only the last bias would move
    assert np.count_nonzero(slope(mean)) > 10


GLMS = [name for name, model in MODELS.items() if isinstance(model, AbstractGLM)]


@pytest.mark.parametrize("name", GLMS)
def test_expected_derivatives_are_those_of_the_expected_log_likelihood(name):
    """A dense grid over f, independent of the quadrature; |f| stays where float32 resolves e^f."""
    model = MODELS[name]
    mean, variance = np.array([-1.5, 0.0, 2.0], np.float32), np.array([1e-6, 0.5, 4.0], np.float32)
    y = np.array([1.0, 0.0, 1.0], np.float32)
    z = np.linspace(-8, 8, 4001)
    density = np.exp(-0.5 * z**2)
    density /= density.sum()
    f = jnp.asarray(mean[:, None] + np.sqrt(variance)[:, None] * z, dtype=jnp.float32)
    score = jax.jit(elementwise_derivative(model.pointwise))
    curvature = jax.jit(elementwise_derivative(elementwise_derivative(model.pointwise)))
    y_grid = jnp.broadcast_to(y[:, None], f.shape)
    a, b = jax.jit(model.expected_derivatives)(mean, variance, y)
    np.testing.assert_allclose(a, np.asarray(score(f, y_grid)) @ density, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(b, np.asarray(curvature(f, y_grid)) @ density, rtol=4e-3, atol=1e-4)


@pytest.mark.parametrize("name", GLMS)
def test_no_label_has_a_larger_score_than_the_bound(name):
    model = MODELS[name]
    f = np.linspace(-4, 4, 33, dtype=np.float32)
    bound = np.asarray(model.score_bound(f))
    if model.worst_labels is None:
        assert np.isinf(bound).all()
        return
    top = MAX_COUNT if model.target == "count" else 1
    score = jax.jit(elementwise_derivative(model.pointwise))
    scores = np.stack([np.abs(score(f, np.full(33, float(label)))) for label in range(top + 1)])
    np.testing.assert_allclose(bound, scores.max(axis=0), rtol=1e-5)


OPTIONS = {
    "noise_stddev": 0.5,
    "num_classes": 3,
    "max_count": 9,
    "concentration": 2.0,
    "hidden": [4],
    "prior_stddev": 2.0,
    "typical_count": 3.0,
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_kind_or_option_a_missing_option_or_a_bad_value_is_refused_and_named(kind):
    _, readers = KINDS[kind]
    good = {key: OPTIONS[key] for key in readers}
    model = build(kind, good, D)
    assert model.prior_stddev == 2.0
    for key in good:
        with pytest.raises(InvalidInput, match=f"^model.options.{key}: "):
            build(kind, good | {key: "many"}, D)
        if key not in ("prior_stddev", "typical_count"):
            with pytest.raises(InvalidInput, match=rf"^model.options.{key}: .*\[model.options\]"):
                build(kind, {other: value for other, value in good.items() if other != key}, D)
    with pytest.raises(InvalidInput, match=r"^model.options.colour: "):
        build(kind, good | {"colour": 1}, D)
    with pytest.raises(InvalidInput, match="kind"):
        build("astrology", good, D)
    with pytest.raises(InvalidInput, match="num_features"):
        build(kind, good, 0)


def test_a_huge_rate_is_clipped_and_not_lost():
    """A q gone astray has to come back: the score of an overflowing rate is finite."""
    for model in (
        PoissonRegression(num_features=1, max_count=9),
        NegativeBinomialRegression(num_features=1, max_count=9, concentration=1.0),
    ):
        a, b = model.expected_derivatives(jnp.array([300.0]), jnp.array([100.0]), jnp.array([1.0]))
        assert np.isfinite(a).all()
        assert np.isfinite(b).all()
        assert float(a[0]) < -0.5
