"""A regression on the scale of its reader: per unit of a column, as ratios, as contrasts, with intervals of means."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import special, stats

import silobayes
from silobayes.core.errors import InvalidInput
from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.models import (
    LinearRegression,
    LinearRegressionUnknownNoise,
    NegativeBinomialRegression,
    PoissonRegression,
    RealMLP,
    SoftmaxRegression,
)
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.posteriors import Posterior
from silobayes.study import Study
from tests.data.studies import changed, rows

NAMES = ("age", "ward=b", "intercept")
MEAN = np.array([0.8, -0.5, -2.0])
COVARIANCE = np.array([[0.04, 0.01, 0.0], [0.01, 0.09, -0.02], [0.0, -0.02, 0.16]])
SD = np.sqrt(np.diag(COVARIANCE))
UNITS = (1 / 16, 1.0, 1.0)
X = np.array([[0.0, 0.0, 1.0], [2.0, 1.0, 1.0], [-1.5, 1.0, 1.0]])


def posterior(model=None, units=UNITS, names=NAMES, mean=MEAN, covariance=COVARIANCE, **more) -> Posterior:
    family = FullGaussian(dimension=len(names))
    eta = family.from_standard(mean=jnp.asarray(mean), covariance=jnp.asarray(covariance))
    model = LogisticRegression(num_features=3) if model is None else model
    given = Posterior(family=family, eta=eta, names=names, model=model, **more)
    return given if units is None else given.with_units(units)


def test_coefficients_per_unit_by_hand():
    table = posterior().per_unit()
    assert tuple(table.index) == NAMES
    np.testing.assert_allclose(table["mean"], MEAN * UNITS, rtol=1e-5)
    np.testing.assert_allclose(table["sd"], SD * UNITS, rtol=1e-5)
    np.testing.assert_allclose(table["lower"], stats.norm.ppf(0.025, MEAN, SD) * UNITS, rtol=1e-5)
    np.testing.assert_allclose(table["unit"], UNITS)


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize(
    ("model", "word"),
    [
        (LogisticRegression(num_features=3), "odds ratio"),
        (PoissonRegression(num_features=3, max_count=9), "rate ratio"),
        (NegativeBinomialRegression(num_features=3, max_count=9, concentration=2.0), "rate ratio"),
    ],
)
def test_ratios_are_those_of_the_log_normal(model, word, level):
    given = posterior(model)
    table = given.ratios(level)
    assert given.ratio == word
    assert tuple(table.index) == NAMES[:2]  # the intercept compares with nothing
    for scale, prefix in ((np.array(UNITS[:2]), ""), (np.ones(2), "encoded_")):
        law = stats.lognorm(s=SD[:2] * scale, scale=np.exp(MEAN[:2] * scale))
        np.testing.assert_allclose(table[f"{prefix}ratio"], law.median(), rtol=1e-5)
        np.testing.assert_allclose(table[f"{prefix}lower"], law.ppf((1 - level) / 2), rtol=1e-5)
        np.testing.assert_allclose(table[f"{prefix}upper"], law.ppf((1 + level) / 2), rtol=1e-5)


@pytest.mark.parametrize(
    "model", [LinearRegression(num_features=3, noise_stddev=1.0), SoftmaxRegression(num_features=1, num_classes=3)]
)
def test_a_model_without_ratios_says_so(model):
    given = posterior(model, UNITS[: model.num_features])
    assert given.ratio is None
    with pytest.raises(InvalidInput, match="Read the coefficients"):
        given.ratios()


def test_parameters_that_are_no_coefficients_have_no_unit():
    given = posterior(LinearRegressionUnknownNoise(num_features=2), (0.1, 1.0), ("a", "intercept", "log_noise_stddev"))
    assert tuple(given.per_unit().index) == ("a", "intercept")
    classes = SoftmaxRegression(num_features=2, num_classes=2)
    names = classes.parameter_names(("a", "intercept"))
    softmax = posterior(classes, (0.1, 1.0), names, np.ones(4), np.eye(4))
    assert softmax.per_unit()["unit"].to_dict() == {"a[0]": 0.1, "a[1]": 0.1, "intercept[0]": 1.0, "intercept[1]": 1.0}


def test_without_an_encoding_there_are_no_units():
    network = RealMLP(num_features=1, hidden=(1,), noise_stddev=1.0)
    dim = network.dim
    for given in (
        posterior(units=None),
        posterior(network, (1.0,), tuple(f"w{k}" for k in range(dim)), np.zeros(dim), np.eye(dim)),
    ):
        for read in (given.per_unit, given.ratios):
            with pytest.raises(InvalidInput, match="feature_units") as caught:
                read()
            assert caught.value.key == "units"
    with pytest.raises(InvalidInput, match="3 numbers"):
        posterior(units=(1.0,))
    for units in (np.ones(2), np.array([1.0, -1.0, 1.0]), np.array([1.0, np.inf, 1.0])):
        with pytest.raises(InvalidInput, match="numbers > 0"):
            Posterior(family=FullGaussian(dimension=3), eta=posterior().eta, names=NAMES, model=None, units=units)


def test_a_contrast_has_the_variance_of_the_weighted_sum():
    weights = np.array([2.0, -1.0, 0.5])
    law = stats.norm(weights @ MEAN, np.sqrt(weights @ COVARIANCE @ weights))
    for given in (weights, dict(zip(NAMES, weights, strict=True))):
        found = posterior().contrast(given, level=0.8)
        assert (found.mean, found.sd) == pytest.approx((law.mean(), law.std()), rel=1e-5)
        assert (found.lower, found.upper) == pytest.approx(law.ppf([0.1, 0.9]), rel=1e-5)
    one = posterior().contrast({"ward=b": 1.0})
    assert (one.mean, one.sd) == pytest.approx((MEAN[1], SD[1]), rel=1e-5)


def test_a_contrast_of_independent_coordinates_adds_their_variances():
    family = MeanFieldGaussian(event_shape=(3,))
    eta = family.from_standard(mean=jnp.asarray(MEAN), stddev=jnp.asarray(SD))
    given = Posterior(family=family, eta=eta, names=NAMES, model=None)
    assert given.contrast([1, 1, 0]).sd == pytest.approx(np.hypot(SD[0], SD[1]), rel=1e-5)
    wider = Posterior(family=family, eta=eta, names=NAMES, model=None, covariance=COVARIANCE)
    assert wider.contrast([1, 1, 0]).sd == pytest.approx(np.sqrt(0.04 + 0.09 + 0.02), rel=1e-5)


@pytest.mark.parametrize(
    "weights", [{}, {"height": 1.0}, [1.0], [1.0, 2.0, np.nan], ["a", "b", "c"], {"age": None}, 3.0, {"age": "x"}]
)
def test_weights_that_cannot_be_are_refused(weights):
    with pytest.raises(InvalidInput) as caught:
        posterior().contrast(weights)
    assert caught.value.key == "weights"


@pytest.mark.parametrize("level", [0.0, 1.0, 95, float("nan"), "a"])
def test_a_level_that_is_no_probability_is_refused(level):
    given = posterior()
    for read in (
        given.per_unit,
        given.ratios,
        lambda p: given.contrast([1, 0, 0], p),
        lambda p: given.predict_interval(X, p),
    ):
        with pytest.raises(InvalidInput) as caught:
            read(level)
        assert caught.value.key == "level"


def test_intervals_of_means_are_those_of_the_linear_predictor_through_the_link():
    mean, sd = X @ MEAN, np.sqrt(np.einsum("ni,ij,nj->n", X, COVARIANCE, X))
    ends = stats.norm.ppf([[0.05], [0.95]], mean, sd)
    cases = [
        (LinearRegression(num_features=3, noise_stddev=7.0), lambda f: f),
        (PoissonRegression(num_features=3, max_count=9), np.exp),
    ]
    for model, link in cases:
        np.testing.assert_allclose(posterior(model).predict_interval(X, 0.9), link(ends), rtol=1e-4)
    lower, upper = posterior().predict_interval(X, 0.9)
    np.testing.assert_allclose([lower[:, 1], upper[:, 1]], special.expit(ends), rtol=1e-4)
    np.testing.assert_allclose(lower[:, 0], 1 - upper[:, 1], rtol=1e-4)


def test_intervals_of_other_models_are_those_of_their_draws():
    """4000 draws: the standard error of a 5 % quantile is about .033 sd."""
    model = LinearRegressionUnknownNoise(num_features=2)
    given = posterior(model, (1.0, 1.0), ("a", "intercept", "log_noise_stddev"))
    rows = np.array([[1.0, 1.0], [-2.0, 1.0]])
    lower, upper = given.predict_interval(rows, 0.9, num_draws=4000)
    sd = np.sqrt(np.einsum("ni,ij,nj->n", rows, COVARIANCE[:2, :2], rows))
    for found, place in ((lower, 0.05), (upper, 0.95)):
        np.testing.assert_allclose(found, stats.norm.ppf(place, rows @ MEAN[:2], sd), atol=0.17 * sd.max())


def test_units_are_saved_and_loaded_and_an_older_posterior_has_none(tmp_path):
    posterior().save(tmp_path / "new")
    np.testing.assert_array_equal(Posterior.load(tmp_path / "new").units, UNITS)
    posterior(units=None).save(tmp_path / "old")
    assert Posterior.load(tmp_path / "old").units is None


def test_a_run_knows_its_units(tmp_path):
    tables = changed(data__typical={"age": 50}, data__spread={"age": 20}, privacy={"mode": "none"})
    study = Study.from_dict(tables)
    frame = rows(400)
    found = silobayes.fit(study, {"one": frame}, out=tmp_path / "run")
    assert found.units.tolist() == [1 / 20, 1.0, 1.0, 1.0]
    loaded = Posterior.load(tmp_path / "run")
    pd.testing.assert_frame_equal(loaded.ratios(), found.ratios())
    years = found.contrast({"age": 10 / 20})
    assert np.exp(years.mean) == pytest.approx(found.ratios().loc["age", "ratio"] ** 10, rel=1e-6)
