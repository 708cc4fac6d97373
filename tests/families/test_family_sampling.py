"""Draws: moments, gradients, support. Keys are fixed.

A moment is accepted if it lies within 6 standard errors of the closed form. Each of the about 60 moments would be
refused by chance with probability 2e-9 (normal tails), so a wrong alarm has probability below 2e-7 for a new key.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import BY_NAME, CASES, compiled_draws, flat, precision

from silobayes import families as fam

NAMES = [case.name for case in CASES]
COUNT = 4_000
LIMIT = 6.0
every = pytest.mark.parametrize("name", NAMES)
reparameterised = pytest.mark.parametrize("name", [case.name for case in CASES if case.family.is_reparameterised])
both = pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])


def parameters(case):
    """A tame member of the family: moments of all statistics and of their derivatives exist."""
    u = jnp.asarray(np.random.default_rng(3).uniform(0.3, 0.9, case.size))
    return case.build(u)


def z_scores(samples, expected):
    samples = np.asarray(samples, np.float64)
    error = samples.std(axis=0) / np.sqrt(len(samples))
    return (samples.mean(axis=0) - np.asarray(expected, np.float64)) / error


def draws(name, eta, d_eta=None):
    d_eta = 0.1 * eta if d_eta is None else d_eta
    return compiled_draws(name, COUNT)(jax.random.key(11), eta, d_eta)


@every
@both
def test_samples_have_the_mean_parameters_as_moments(name, dtype):
    case = BY_NAME[name]
    with precision(dtype):
        eta = parameters(case)
        expected = flat(case.family.mean_parameters(eta))
        right = z_scores(draws(name, eta)[0], expected)
        assert np.max(np.abs(right)) < LIMIT, right
        # The same check sees a density tempered by 2/3 or 3/2, so it is not blind.
        for power in (2 / 3, 3 / 2):
            assert bool(case.family.is_proper(power * eta))
            wrong = z_scores(draws(name, power * eta)[0], expected)
            assert np.max(np.abs(wrong)) > 2 * LIMIT, (power, wrong)


@reparameterised
def test_gradients_flow_through_samples(name):
    # d/d eta E[T(x)] along d_eta is the derivative of the mean parameters; the draws' own derivative estimates it.
    case = BY_NAME[name]
    eta = parameters(case)
    d_eta = 0.1 * eta
    _, expected = jax.jvp(case.family.mean_parameters, (eta,), (d_eta,))
    slope = draws(name, eta, d_eta)[2]
    right = z_scores(slope, flat(expected))
    assert np.max(np.abs(right)) < LIMIT, right
    for factor in (2 / 3, 3 / 2):
        assert np.max(np.abs(z_scores(slope, factor * flat(expected)))) > 2 * LIMIT


@every
def test_draws_have_the_asked_shape_and_a_finite_log_prob(name):
    case = BY_NAME[name]
    eta = parameters(case)
    x = draws(name, eta)[1]
    one = case.point(jnp.zeros(case.size))
    assert jax.tree.structure(x) == jax.tree.structure(one)
    for leaf, event in zip(jax.tree.leaves(x), jax.tree.leaves(one), strict=True):
        assert leaf.shape == (COUNT, *event.shape)
        assert jnp.issubdtype(leaf.dtype, jnp.integer) == (name in {"bernoulli", "categorical"})
    log_prob = jax.jit(jax.vmap(case.family.log_prob, in_axes=(None, 0)))(eta, x)
    assert np.all(np.isfinite(log_prob))
    # and so the mean of -log_prob is the entropy: the density that is drawn from is the one that is evaluated
    score = z_scores(-np.asarray(log_prob), case.family.entropy(eta))
    assert abs(score) < LIMIT


@reparameterised
def test_an_improper_eta_is_never_drawn_from(name):
    case = BY_NAME[name]
    eta = parameters(case)
    for leaf, value in case.broken:
        x = draws(name, case.break_(eta, leaf, value))[1]
        assert np.any(np.isnan(flat(x))), (leaf, value)


@pytest.mark.parametrize(
    ("family", "eta"),
    [
        (fam.Gamma(event_shape=()), fam.GammaEta(log=jnp.asarray(-0.999), linear=jnp.asarray(-1.0))),
        (fam.Beta(event_shape=()), fam.BetaEta(log=jnp.asarray(-0.999), log_complement=jnp.asarray(-0.999))),
        (fam.Dirichlet(event_shape=(3,)), fam.DirichletEta(log=jnp.asarray([-0.999, -0.999, -0.9]))),
    ],
    ids=["gamma", "beta", "dirichlet"],
)
def test_draws_that_underflow_stay_inside_the_support(family, eta):
    x = family.sample(jax.random.key(5), eta, (2000,))
    assert np.all(np.asarray(x) > 0)
    assert np.min(np.asarray(x)) < 1e-30  # the case is reached
    assert np.all(np.isfinite(jax.vmap(family.log_prob, in_axes=(None, 0))(eta, x)))


def test_vmap_over_keys_and_parameters():
    family = fam.NormalInverseGamma(dimension=2)
    case = BY_NAME["normal_inverse_gamma"]
    eta = parameters(case)
    etas = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), eta)
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.jit(jax.vmap(family.sample))(keys, etas)
    assert x.coefficients.shape == (2, 2)
    assert x.variance.shape == (2,)
    for i in range(2):
        np.testing.assert_allclose(
            flat(family.sample(keys[i], eta)), flat(jax.tree.map(lambda a, i=i: a[i], x)), rtol=1e-4
        )
    assert not np.allclose(x.variance[0], x.variance[1])


def test_sample_shape_is_a_prefix():
    family = fam.NormalWishart(dimension=2)
    x = family.sample(jax.random.key(0), parameters(BY_NAME["normal_wishart"]), (3, 4))
    assert x.mean.shape == (3, 4, 2)
    assert x.precision.shape == (3, 4, 2, 2)
