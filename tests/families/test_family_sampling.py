"""Draws: moments, gradients, support. Keys are fixed.

A moment is accepted if it lies within 6 standard errors of the closed form. Each of the about 60 moments would be
refused by chance with probability 2e-9 (normal tails), so a wrong alarm has probability below 2e-7 for a new key.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import BY_NAME, CASES, compiled_draws, flat, precision

from silobayes import families as fam

# All of these draw Gamma variables, which take seconds to compile: the quick suite draws from Gamma itself only.
GAMMA_INSIDE = {"beta", "dirichlet", "independent", "normal_inverse_gamma", "normal_wishart"}
COUNT = 4_000
LIMIT = 6.0
WRONG = (2 / 3, 3 / 2)


def named(names):
    marks = [pytest.mark.slow]
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks if n in GAMMA_INSIDE else []) for n in names])


every = named([case.name for case in CASES])
reparameterised = named([case.name for case in CASES if case.family.is_reparameterised])
both = pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])


@cache
def _closed_forms(name):
    case = BY_NAME[name]

    @jax.jit
    def look(u):
        eta = case.build(u)
        mean, slope = jax.jvp(case.family.mean_parameters, (eta,), (0.1 * eta,))
        tempered = jnp.stack([case.family.is_proper(power * eta) for power in WRONG])
        return eta, mean, slope, case.family.entropy(eta), tempered

    return look


def closed_forms(name):
    """A tame member of the family (all moments used here exist), its moments, their slope along itself, its entropy."""
    u = jnp.asarray(np.random.default_rng(3).uniform(0.3, 0.9, BY_NAME[name].size))
    return _closed_forms(name)(u)


def parameters(name):
    return closed_forms(name)[0]


def z_scores(samples, expected):
    samples = np.asarray(samples, np.float64)
    error = samples.std(axis=0) / np.sqrt(len(samples))
    return (samples.mean(axis=0) - np.asarray(expected, np.float64)) / error


def draws(name, eta):
    return compiled_draws(name, COUNT)(jax.random.key(11), eta, 0.1 * eta)


@every
@both
def test_samples_have_the_mean_parameters_as_moments(name, dtype):
    with precision(dtype):
        eta, mean, _, _, tempered_is_proper = closed_forms(name)
        expected = flat(mean)
        right = z_scores(draws(name, eta)[0], expected)
        assert np.max(np.abs(right)) < LIMIT, right
        # The same check sees a density tempered by 2/3 or 3/2, so it is not blind.
        assert np.all(tempered_is_proper)
        for power in WRONG:
            wrong = z_scores(draws(name, power * eta)[0], expected)
            assert np.max(np.abs(wrong)) > LIMIT, (power, wrong)


@reparameterised
def test_gradients_flow_through_samples(name):
    # d/d eta E[T(x)] along d_eta is the derivative of the mean parameters; the draws' own derivative estimates it.
    eta, _, expected, _, _ = closed_forms(name)
    slope = draws(name, eta)[2]
    right = z_scores(slope, flat(expected))
    assert np.max(np.abs(right)) < LIMIT, right
    for factor in WRONG:
        assert np.max(np.abs(z_scores(slope, factor * flat(expected)))) > LIMIT


@every
def test_draws_have_the_asked_shape_and_a_finite_log_prob(name):
    case = BY_NAME[name]
    eta, _, _, entropy, _ = closed_forms(name)
    x = draws(name, eta)[1]
    one = case.point(jnp.zeros(case.size))
    assert jax.tree.structure(x) == jax.tree.structure(one)
    for leaf, event in zip(jax.tree.leaves(x), jax.tree.leaves(one), strict=True):
        assert leaf.shape == (COUNT, *event.shape)
        assert jnp.issubdtype(leaf.dtype, jnp.integer) == (name in {"bernoulli", "categorical"})
    log_prob = jax.jit(jax.vmap(case.family.log_prob, in_axes=(None, 0)))(eta, x)
    assert np.all(np.isfinite(log_prob))
    # and so the mean of -log_prob is the entropy: the density that is drawn from is the one that is evaluated
    score = z_scores(-np.asarray(log_prob), entropy)
    assert abs(score) < LIMIT


@reparameterised
def test_an_improper_eta_is_never_drawn_from(name):
    case = BY_NAME[name]
    eta = parameters(name)
    for leaf, value in case.broken:
        x = draws(name, case.break_(eta, leaf, value))[1]
        assert np.any(np.isnan(flat(x))), (leaf, value)


@pytest.mark.slow
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
    assert np.all(np.isfinite(jax.jit(jax.vmap(family.log_prob, in_axes=(None, 0)))(eta, x)))


@pytest.mark.slow
def test_vmap_over_keys_and_parameters():
    family = fam.NormalInverseGamma(dimension=2)
    eta = parameters("normal_inverse_gamma")
    etas = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), eta)
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.jit(jax.vmap(family.sample))(keys, etas)
    assert x.coefficients.shape == (2, 2)
    assert x.variance.shape == (2,)
    one = jax.jit(family.sample)
    for i in range(2):
        np.testing.assert_allclose(flat(one(keys[i], eta)), flat(jax.tree.map(lambda a, i=i: a[i], x)), rtol=1e-4)
    assert not np.allclose(x.variance[0], x.variance[1])


def test_sample_shape_is_a_prefix():
    family = fam.NormalWishart(dimension=2)
    x = jax.eval_shape(lambda key: family.sample(key, parameters("normal_wishart"), (3, 4)), jax.random.key(0))
    assert x.mean.shape == (3, 4, 2)
    assert x.precision.shape == (3, 4, 2, 2)
