"""The posterior as users see it: closed forms, files, and the two generations of ArviZ."""

import json
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pandas as pd
import pytest
from numpyro import distributions as dist
from scipy import special, stats

from silobayes.core.errors import InvalidInput
from silobayes.families import FullGaussian, FullGaussianEta, MeanFieldGaussian, MeanFieldGaussianEta
from silobayes.models import (
    AbstractModel,
    LinearRegression,
    PoissonRegression,
    RealMLP,
    SoftmaxRegression,
    from_numpyro,
)
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.posteriors import ARRAYS, DESCRIPTION, Posterior

NAMES = ("age", "lactate", "intercept")
MEAN, STDDEV = np.array([0.5, -1.0, 2.0]), np.array([0.1, 0.2, 0.3])
COVARIANCE = np.array([[0.04, 0.01, 0.0], [0.01, 0.09, -0.02], [0.0, -0.02, 0.16]])
X = np.array([[1.0, 0.0, 1.0], [0.2, 3.0, 1.0], [0.0, 1.5, 1.0]])


def mean_field(**other) -> Posterior:
    family = MeanFieldGaussian(event_shape=(3,))
    eta = family.from_standard(mean=jnp.asarray(MEAN), stddev=jnp.asarray(STDDEV))
    given = {"model": LogisticRegression(num_features=3, prior_stddev=2.0), "provenance": {"study_hash": "abc"}}
    return Posterior(family=family, eta=eta, names=NAMES, **{**given, **other})


def full() -> Posterior:
    family = FullGaussian(dimension=3)
    eta = family.from_standard(mean=jnp.asarray(MEAN), covariance=jnp.asarray(COVARIANCE))
    return Posterior(family=family, eta=eta, names=NAMES, model=LogisticRegression(num_features=3))


@pytest.mark.parametrize(
    "eta",
    [
        MeanFieldGaussianEta(linear=jnp.zeros(3), quadratic=jnp.array([-1.0, 0.5, -1.0])),
        MeanFieldGaussianEta(linear=jnp.array([0.0, jnp.nan, 0.0]), quadratic=-jnp.ones(3)),
    ],
    ids=["negative precision", "nan"],
)
def test_an_improper_eta_is_refused(eta: MeanFieldGaussianEta) -> None:
    with pytest.raises(InvalidInput, match="proper"):
        Posterior(family=MeanFieldGaussian(event_shape=(3,)), eta=eta, names=NAMES, model=None)


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize(
    ("posterior", "stddev"), [(mean_field(), STDDEV), (full(), np.sqrt(np.diag(COVARIANCE)))], ids=["field", "full"]
)
def test_the_summary_is_that_of_the_family(posterior: Posterior, stddev: np.ndarray, level: float) -> None:
    table = posterior.summary(level)
    assert tuple(table.index) == NAMES
    np.testing.assert_allclose(table["mean"], MEAN, rtol=1e-5)
    np.testing.assert_allclose(table["sd"], stddev, rtol=1e-5)
    np.testing.assert_allclose(table["lower"], stats.norm.ppf((1 - level) / 2, MEAN, stddev), rtol=1e-5)
    np.testing.assert_allclose(table["upper"], stats.norm.ppf((1 + level) / 2, MEAN, stddev), rtol=1e-5)


@pytest.mark.parametrize("level", [0.0, 1.0, 95, float("nan")])
def test_a_level_that_is_no_probability_is_refused(level: float) -> None:
    with pytest.raises(InvalidInput, match="level"):
        mean_field().summary(level)


@pytest.mark.parametrize(
    ("posterior", "covariance"),
    [(mean_field(), np.diag(STDDEV**2)), (full(), COVARIANCE), (mean_field(covariance=COVARIANCE), COVARIANCE)],
    ids=["field", "full", "noise-aware"],
)
def test_draws_have_the_covariance_of_the_summary(posterior: Posterior, covariance: np.ndarray) -> None:
    """Chi-square of 4000 whitened draws in three dimensions; a right scale fails once in 1e6 keys."""
    draws = np.asarray(posterior.sample(4000, seed=1), float)
    np.testing.assert_allclose(posterior.stddev, np.sqrt(np.diag(covariance)), rtol=1e-5)
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 4000 * 3)
    for factor, accepted in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        white = np.linalg.solve(np.linalg.cholesky(factor**2 * covariance), (draws - MEAN).T)
        assert (low < np.sum(white**2) < high) == accepted, factor
    # The directions too: each whitened pair is uncorrelated within 5 standard errors.
    white = np.linalg.solve(np.linalg.cholesky(covariance), (draws - MEAN).T)
    assert np.abs(np.corrcoef(white) - np.eye(3)).max() < 5 / np.sqrt(4000)


def test_a_given_covariance_replaces_the_familys() -> None:
    wide = mean_field(covariance=COVARIANCE)
    np.testing.assert_allclose(wide.summary()["sd"], np.sqrt(np.diag(COVARIANCE)))
    np.testing.assert_allclose(wide.mean, mean_field().mean)


@pytest.mark.parametrize(
    "covariance",
    [np.eye(2), np.full((3, 3), np.nan), -np.eye(3), np.eye(3) + np.eye(3, k=1)],
    ids=["shape", "nan", "negative", "asymmetric"],
)
def test_a_covariance_that_is_none_is_refused(covariance: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="covariance"):
        mean_field(covariance=covariance)


@pytest.mark.parametrize("width", [0.1, 3.0, 300.0])
@pytest.mark.parametrize("kind", ["field", "full", "given"])
def test_predictions_of_generalised_linear_models_are_those_of_very_many_draws(kind: str, width: float) -> None:
    """A million draws: 5 standard errors of a probability are at most .0025."""
    family = MeanFieldGaussian(event_shape=(3,)) if kind != "full" else FullGaussian(dimension=3)
    spread = {"covariance": width**2 * COVARIANCE} if kind == "full" else {"stddev": jnp.asarray(width * STDDEV)}
    given = width**2 * COVARIANCE if kind == "given" else None
    eta = family.from_standard(mean=jnp.asarray(MEAN), **spread)  # type: ignore[arg-type]
    model = LogisticRegression(num_features=3)
    posterior = Posterior(family=family, eta=eta, names=NAMES, model=model, covariance=given)
    f = X @ posterior.sample(1_000_000).T.astype(float)
    expected = (1 / (1 + np.exp(-np.clip(f, -700, 700)))).mean(axis=1)
    proba = posterior.predict_proba(X)
    np.testing.assert_allclose(proba[:, 1], expected, atol=0.0025)
    np.testing.assert_allclose(proba.sum(axis=1), 1.0, atol=1e-5)
    np.testing.assert_array_equal(proba, posterior.predict_proba(X, num_draws=3, seed=5))
    np.testing.assert_allclose(posterior.log_likelihood(X, [1, 1, 1]), np.log(proba[:, 1]), atol=1e-5)


def softmax() -> Posterior:
    model = SoftmaxRegression(num_features=3, num_classes=3)
    family = MeanFieldGaussian(event_shape=(9,))
    eta = family.from_standard(mean=jnp.linspace(-1, 1, 9), stddev=jnp.full(9, 0.5))
    return Posterior(family=family, eta=eta, names=model.parameter_names(NAMES), model=model)


def test_predictive_probabilities_average_over_the_draws() -> None:
    posterior = softmax()
    logits = np.einsum("nd,sdk->snk", X, posterior.sample(50, seed=3).reshape(50, 3, 3).astype(float))
    expected = special.softmax(logits, axis=-1).mean(axis=0)
    proba = posterior.predict_proba(X, num_draws=50, seed=3)
    np.testing.assert_allclose(proba, expected, rtol=1e-4)
    np.testing.assert_allclose(proba.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(posterior.predict(X, num_draws=50, seed=3), expected.argmax(axis=1))


def test_draws_need_neither_a_number_nor_a_key() -> None:
    posterior = mean_field()
    assert posterior.sample().shape == (1000, 3)
    np.testing.assert_array_equal(posterior.sample(5), posterior.sample(5, seed=0))
    assert not np.array_equal(posterior.sample(5), posterior.sample(5, seed=1))
    for wrong in (0, -5, 2.5, jax.random.key(0)):
        with pytest.raises(InvalidInput, match="num_draws"):
            posterior.sample(wrong)  # type: ignore[arg-type]


CANARY = 8675309


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X[:, :2], [0, 1, 1]),
        (X[0], [0, 1, 1]),
        (np.full((3, 3), CANARY * np.nan), [0, 1, 1]),
        (np.array([[CANARY, np.inf, 1.0]] * 3), [0, 1, 1]),
        (pd.DataFrame(X * CANARY, columns=list(NAMES)), [0, 1, 1]),
        (np.full((3, 3), str(CANARY)), [0, 1, 1]),
        ([[CANARY, 1.0], [1.0], [2.0]], [0, 1, 1]),
        (X, [CANARY, 0, 1]),
        (X, [5, 6, 5]),
        (X, [0.5, 0, 1]),
        (X, [-1, 0, 1]),
        (X, [np.nan, 0, 1]),
        (X, [str(CANARY), "no", "yes"]),
        (X, [0, 1]),
    ],
)
def test_rows_and_targets_that_do_not_fit_the_model_are_refused_and_no_cell_is_quoted(x, y) -> None:
    with pytest.raises(InvalidInput) as refused:
        mean_field().log_likelihood(x, y)
    assert str(CANARY) not in str(refused.value)
    if x is not X:
        with pytest.raises(InvalidInput):
            mean_field().predict(x)


def test_labels_of_other_models_are_checked_too() -> None:
    with pytest.raises(InvalidInput, match="labels 0 to 2"):
        softmax().log_likelihood(X, [0, 1, 3])
    counts = mean_field(model=PoissonRegression(num_features=3, max_count=9))
    for wrong in ([-1, 0, 1], [0.5, 0, 1]):
        with pytest.raises(InvalidInput, match="whole numbers"):
            counts.log_likelihood(X, wrong)
    assert np.isfinite(counts.log_likelihood(X, [0, 3, 20])).all()


def test_the_log_likelihood_is_the_log_of_the_average_density() -> None:
    posterior = mean_field()
    y = np.array([1, 0, 1])
    proba = posterior.predict_proba(X)
    np.testing.assert_allclose(posterior.log_likelihood(X, y), np.log(proba[np.arange(3), y]), rtol=1e-4)
    with pytest.raises(InvalidInput, match="y"):
        posterior.log_likelihood(X, y[:2])


def test_the_same_posterior_predicts_the_same_twice() -> None:
    np.testing.assert_array_equal(mean_field().predict_proba(X), mean_field().predict_proba(X))
    np.testing.assert_array_equal(softmax().predict_proba(X), softmax().predict_proba(X))
    assert not np.array_equal(softmax().predict_proba(X), softmax().predict_proba(X, seed=1))


@pytest.mark.parametrize("make", [mean_field, full, lambda: mean_field(covariance=COVARIANCE)])
def test_what_is_saved_is_loaded_equal(make, tmp_path: Path) -> None:
    saved = make()
    saved.save(tmp_path)
    loaded = Posterior.load(tmp_path)
    assert loaded.names == saved.names
    assert loaded.model == saved.model
    assert loaded.family == saved.family
    assert loaded.provenance == saved.provenance
    np.testing.assert_array_equal(loaded.mean, saved.mean)
    np.testing.assert_array_equal(loaded.stddev, saved.stddev)
    np.testing.assert_array_equal(loaded.predict_proba(X), saved.predict_proba(X))
    assert sorted(path.name for path in tmp_path.iterdir()) == [DESCRIPTION, ARRAYS]


CATALOGUE = [
    LinearRegression(num_features=3, noise_stddev=0.5),
    SoftmaxRegression(num_features=1, num_classes=3),
    RealMLP(num_features=1, hidden=(1,), noise_stddev=0.1),
    PoissonRegression(num_features=3, max_count=9),
]


@pytest.mark.parametrize("model", CATALOGUE, ids=lambda model: type(model).__name__)
def test_models_of_the_catalogue_are_restored(model: AbstractModel, tmp_path: Path) -> None:
    family = MeanFieldGaussian(event_shape=(model.dim,))
    names = tuple(f"w{k}" for k in range(model.dim))
    eta = family.from_standard(mean=jnp.zeros(model.dim), stddev=jnp.ones(model.dim))
    Posterior(family=family, eta=eta, names=names, model=model).save(tmp_path)
    assert Posterior.load(tmp_path).model == model


def test_a_model_without_a_description_is_passed_again(tmp_path: Path) -> None:
    class Own(LogisticRegression):  # as a user's model is: not in the catalogue
        pass

    mean_field(model=Own(num_features=3)).save(tmp_path)
    loaded = Posterior.load(tmp_path)
    assert loaded.summary().shape == (3, 4)
    with pytest.raises(InvalidInput, match=r"Posterior\.load"):
        loaded.predict(X)
    again = Posterior.load(tmp_path, model=Own(num_features=3))
    np.testing.assert_array_equal(again.predict_proba(X), mean_field().predict_proba(X))


@pytest.mark.parametrize("name", [ARRAYS, DESCRIPTION])
def test_a_missing_or_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    mean_field().save(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for damaged in (whole[:-20], b"", whole.replace(b"posterior", b"X").replace(b"linear", b"lineaX", 1)):
        if damaged == whole:
            continue
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(InvalidInput, match="the files of a posterior"):
            Posterior.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(InvalidInput, match="the files of a posterior"):
        Posterior.load(tmp_path)


def test_an_exchanged_file_is_refused(tmp_path: Path) -> None:
    mean_field().save(tmp_path / "a")
    full().save(tmp_path / "b")
    (tmp_path / "a" / ARRAYS).write_bytes((tmp_path / "b" / ARRAYS).read_bytes())
    with pytest.raises(InvalidInput, match="other arrays"):
        Posterior.load(tmp_path / "a")


@pytest.mark.parametrize(
    "model",
    [
        {"file": "base", "class": "Callable", "settings": {}},
        {"file": "../os", "class": "system", "settings": {}},
        {"file": "logistic_regression", "class": "AbstractGLM", "settings": {}},
        {"file": "no_such_file", "class": "A", "settings": {}},
        {"file": "logistic_regression", "class": "LogisticRegression", "settings": {"command": "ls"}},
    ],
)
def test_only_models_of_the_catalogue_are_built(model: dict, tmp_path: Path) -> None:
    mean_field().save(tmp_path)
    text = json.loads((tmp_path / DESCRIPTION).read_text())
    (tmp_path / DESCRIPTION).write_text(json.dumps({**text, "model": model}))
    with pytest.raises(InvalidInput, match="the files of a posterior"):
        Posterior.load(tmp_path)


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    """An .npz with pickled objects is never opened, even if the description vouches for it."""
    import hashlib

    mean_field().save(tmp_path)
    np.savez(tmp_path / ARRAYS, linear=np.array([{}], dtype=object), quadratic=np.zeros(3))
    text = json.loads((tmp_path / DESCRIPTION).read_text())
    text["sha256"] = hashlib.sha256((tmp_path / ARRAYS).read_bytes()).hexdigest()
    (tmp_path / DESCRIPTION).write_text(json.dumps(text))
    with pytest.raises(InvalidInput, match="allow_pickle"):
        Posterior.load(tmp_path)


def test_provenance_that_is_not_json_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="provenance"):
        mean_field(provenance={"rows": X}).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "value"), [("names", ("a", "b")), ("names", ("a", "a", "b"))])
def test_names_must_fit(key: str, value: tuple) -> None:
    family = MeanFieldGaussian(event_shape=(3,))
    eta = family.from_standard(mean=jnp.zeros(3), stddev=jnp.ones(3))
    with pytest.raises(InvalidInput, match="names"):
        Posterior(family=family, eta=eta, model=None, **{key: value})
    with pytest.raises(InvalidInput, match="model"):
        Posterior(family=family, eta=eta, names=NAMES, model=LogisticRegression(num_features=2))


def test_arviz_0_gets_the_draws_and_the_names() -> None:
    arviz = pytest.importorskip("arviz")
    if int(arviz.__version__.split(".")[0]) >= 1:
        pytest.skip("arviz 1.x is installed")
    data = mean_field().to_arviz(num_draws=200)
    theta = data.posterior["theta"]
    assert theta.shape == (1, 200, 3)
    assert list(theta.coords["parameter"].values) == list(NAMES)
    np.testing.assert_array_equal(theta.values[0], mean_field().sample(200))


def test_arviz_1_is_called_as_its_from_dict_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 1.x the groups are one mapping, the first positional argument; keyword `posterior` is gone."""
    fake = ModuleType("arviz")
    fake.__version__ = "1.1.0"  # type: ignore[attr-defined]

    def from_dict(data, *, coords=None, dims=None):
        return data, coords, dims

    fake.from_dict = from_dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arviz", fake)
    data, coords, dims = mean_field().to_arviz(num_draws=10)
    assert data["posterior"]["theta"].shape == (1, 10, 3)
    assert coords == {"parameter": list(NAMES)}
    assert dims == {"theta": ["parameter"]}


def shrinkage(x, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, scale), obs=y)


def numpyro_posterior() -> Posterior:
    model = from_numpyro(shrinkage, jnp.zeros(2), jnp.zeros(()))
    family = MeanFieldGaussian(event_shape=(3,))
    eta = family.from_standard(mean=jnp.asarray(MEAN), stddev=jnp.asarray(STDDEV))
    return Posterior(family=family, eta=eta, names=model.parameter_names(("a", "b")), model=model)


def test_a_numpyro_model_is_summarised_on_the_scale_of_its_own_sites(tmp_path: Path) -> None:
    """`scale` is log-normal with (0.5, 0.1); 4000 draws give its mean within 5 standard errors."""
    posterior = numpyro_posterior()
    table = posterior.summary(0.9)
    assert list(table.index) == ["scale", "beta[0]", "beta[1]"]
    law = stats.lognorm(s=0.1, scale=np.exp(0.5))
    assert abs(table["mean"]["scale"] - law.mean()) < 5 * law.std() / np.sqrt(4000)
    np.testing.assert_allclose(table["sd"]["scale"], law.std(), rtol=0.06)  # 5 standard errors
    np.testing.assert_allclose(table.loc["scale", ["lower", "upper"]].astype(float), law.ppf([0.05, 0.95]), rtol=0.02)
    posterior.save(tmp_path)
    assert Posterior.load(tmp_path).summary().index[0] == "scale (unconstrained)"
    again = Posterior.load(tmp_path, model=posterior.model).summary(0.9)
    np.testing.assert_array_equal(again.to_numpy(), table.to_numpy())


def test_arviz_gets_the_sites_of_a_numpyro_model() -> None:
    sites = numpyro_posterior().to_arviz(num_draws=50).posterior
    assert sites["beta"].shape == (1, 50, 2)
    assert (sites["scale"].values > 0).all()


def test_derived_sites_of_a_numpyro_model_are_reported_unless_they_depend_on_rows() -> None:
    def horseshoe(x, y=None):
        lam = numpyro.sample("lam", dist.HalfNormal(1.0).expand([x.shape[1]]).to_event(1))
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        w = numpyro.deterministic("w", beta * lam)
        numpyro.deterministic("first", x[0] @ w)
        f = numpyro.deterministic("f", x @ w)
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    model = from_numpyro(horseshoe, jnp.zeros(2), jnp.zeros(()))
    family = MeanFieldGaussian(event_shape=(4,))
    eta = family.from_standard(mean=jnp.ones(4), stddev=jnp.full(4, 0.1))
    posterior = Posterior(family=family, eta=eta, names=model.parameter_names(("a", "b")), model=model)
    sites = posterior.sample_sites(20)
    assert list(sites) == ["lam", "beta", "w"]
    np.testing.assert_allclose(sites["w"], sites["lam"] * sites["beta"], rtol=1e-6)
    assert list(posterior.summary().index) == ["lam[0]", "lam[1]", "beta[0]", "beta[1]", "w[0]", "w[1]"]
    assert posterior.to_arviz(num_draws=5).posterior["w"].shape == (1, 5, 2)


def test_the_text_of_a_posterior_is_short() -> None:
    assert repr(mean_field()) == "Posterior(LogisticRegression, 3 parameters)"
    assert isinstance(full().eta, FullGaussianEta)
