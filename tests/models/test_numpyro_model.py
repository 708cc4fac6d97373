"""A user's NumPyro function against NumPyro's own log density, and through the solvers."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy, unconstrain_fn

from silobayes.core.errors import InvalidInput
from silobayes.families import MeanFieldGaussian
from silobayes.inference.rows import pad
from silobayes.inference.vi import maximise, maximise_prior
from silobayes.models.numpyro_model import NumpyroModel, from_numpyro

D = 3
X_ROW, KEY = np.zeros(D), jax.random.key(0)


def shrinkage(x, y=None):
    """A hierarchical prior with constraints of three kinds, one of which depends on another site."""
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    limit = numpyro.sample("limit", dist.Uniform(0.0, 1.0 + scale))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ (beta * shares) + limit), obs=y)


def plain(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(jnp.arange(3.0), 2.0).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 0.5), obs=y)


def categories(x, y=None):
    beta = numpyro.sample("beta", dist.Laplace(0.0, 1.0).expand([x.shape[1], 4]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=x @ beta), obs=y)


def counts(x, y=None):
    beta = numpyro.sample("beta", dist.StudentT(3.0, jnp.zeros(x.shape[1]), 1.0).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta)), obs=y)


FUNCTIONS = {"shrinkage": (shrinkage, 1), "plain": (plain, 0.5), "categories": (categories, 1), "counts": (counts, 2)}


def make(name):
    function, y_row = FUNCTIONS[name]
    model = from_numpyro(function, X_ROW, np.asarray(y_row))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, D)).astype(np.float32)
    y = rng.integers(2, size=6).astype(np.asarray(y_row).dtype)
    return model, jnp.asarray(0.4 * rng.normal(size=model.dim), dtype=jnp.float32), x, y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_log_prior_plus_log_likelihoods_is_numpyros_own_log_density(name):
    model, theta, x, y = make(name)
    free = unconstrain_fn(model.function, (x, y), {}, jax.jit(model.constrain)(theta))
    flat = jnp.concatenate([jnp.ravel(free[site.name]) for site in model.sites])
    np.testing.assert_allclose(flat, theta, rtol=1e-4, atol=1e-5)  # the same coordinates as NumPyro's
    total = jax.jit(model.log_prior)(theta) + jax.jit(model.log_predictive)(theta, x, y).sum()
    potential = jax.jit(lambda free: potential_energy(model.function, (x, y), {}, free))(free)
    np.testing.assert_allclose(total, -potential, rtol=1e-4, atol=1e-4)


def test_names_and_constraints_are_the_functions_own():
    model, theta, _, _ = make("shrinkage")
    names = model.parameter_names(("a", "b", "c"))
    assert names == ("scale", "limit", "shares[0]", "shares[1]", "beta[0]", "beta[1]", "beta[2]")
    assert len(names) == model.dim
    values = jax.jit(model.constrain)(theta)
    assert values["scale"] > 0
    assert 0 < values["limit"] < 1 + values["scale"]
    assert np.isclose(values["shares"].sum(), 1)


@pytest.mark.parametrize(
    ("name", "target"), [("shrinkage", "binary"), ("plain", "real"), ("categories", "classes"), ("counts", "count")]
)
def test_target_and_predictions_come_from_the_observed_site(name, target):
    model, theta, x, _ = make(name)
    assert model.target == target
    predicted = np.asarray(jax.jit(model.predict)(theta, x))
    beta = np.asarray(jax.jit(model.constrain)(theta)["beta"])
    if target == "real":
        np.testing.assert_allclose(predicted, x @ beta, rtol=1e-5)
    elif target == "count":
        np.testing.assert_allclose(predicted, np.exp(x @ beta), rtol=1e-5)
    elif target == "classes":
        np.testing.assert_allclose(predicted, jax.nn.softmax(x @ beta), rtol=1e-4)
    else:
        assert predicted.shape == (6, 2)
        np.testing.assert_allclose(predicted.sum(axis=1), 1, rtol=1e-5)


def test_a_gaussian_prior_is_recognised_and_exact():
    model, theta, _, _ = make("plain")
    family = MeanFieldGaussian(event_shape=(model.dim,))
    mean, stddev = family.to_standard(model.prior_eta(family))
    assert model.prior_is_gaussian
    np.testing.assert_allclose(mean, np.arange(3.0), atol=1e-6)
    np.testing.assert_allclose(stddev, 2.0, rtol=1e-6)
    np.testing.assert_allclose(family.log_prob(model.prior_eta(family), theta), model.log_prior(theta), rtol=1e-5)


def test_another_prior_has_a_proper_gaussian_stand_in():
    model, _, _, _ = make("shrinkage")
    family = MeanFieldGaussian(event_shape=(model.dim,))
    assert not model.prior_is_gaussian
    assert family.is_proper(model.prior_eta(family))


@pytest.mark.slow
def test_a_prior_factor_and_a_silos_factor_reach_the_optimum_of_the_joint_density():
    """PVI with the Laplace prior as a site of its own against one optimisation of the whole log density."""

    def laplace(x, y=None):
        beta = numpyro.sample("beta", dist.Laplace(0.0, 0.5).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)

    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, 2)).astype(np.float32)
    y = (x @ [1.0, 0.0] + rng.normal(size=12)).astype(np.float32)
    model, rows = from_numpyro(laplace, np.zeros(2), np.asarray(0.0)), pad(x, y, 12)
    family = MeanFieldGaussian(event_shape=(2,))
    options = {"num_steps": 400, "step_size": 0.03, "num_draws": 32}
    eta_p, eta_t = model.prior_eta(family), family.zeros()
    for _ in range(5):
        eta_q = eta_p + eta_t
        eta_t = maximise(model, family, KEY, eta_p, eta_q, rows, tempering=1.0, **options) - eta_p
        eta_p = maximise_prior(model, family, KEY, eta_t, eta_p + eta_t, **options) - eta_t
    mean, stddev = family.to_standard(eta_p + eta_t)

    class Joint(NumpyroModel):
        """The whole log density as the 'prior' of a model without rows."""

        def log_prior(self, theta):
            return model.log_prior(theta) + model.log_predictive(theta, x, y).sum()

    whole = Joint(**{name: getattr(model, name) for name in model.__dataclass_fields__})
    flat = family.zeros()
    joint_mean, joint_stddev = family.to_standard(
        maximise_prior(whole, family, KEY, flat, model.prior_eta(family), **options)
    )
    np.testing.assert_allclose(mean, joint_mean, atol=0.03)
    np.testing.assert_allclose(stddev, joint_stddev, rtol=0.05)


def test_functions_that_do_not_fit_are_refused_and_told_why():
    def no_plate(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(x[:, 0] * beta, 1.0).to_event(1), obs=y)

    def local_latent(x, y=None):
        with numpyro.plate("rows", x.shape[0]):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def discrete(x, y=None):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(k, 1.0), obs=y)

    def unobserved(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("likelihood", -(beta**2) * x[:, 0])

    for function, why in (
        (no_plate, "plate"), (local_latent, "outside the row plate"), (discrete, "continuous"), (unobserved, "obs=y"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=why):
            from_numpyro(function, X_ROW, np.asarray(0.0))
