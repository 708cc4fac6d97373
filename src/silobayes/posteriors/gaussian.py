"""The answer of a study: a posterior with names, draws, predictions and its provenance, and no rows (DESIGN 3).

The posterior is Gaussian in the model's unconstrained parameters. `covariance` replaces the family's own where a
method knows better how uncertain the mean is (UNCERTAINTY F1): then summaries and draws use it, while `eta` stays what
the protocol reached.

Predictions of generalised linear models are integrals over the Gaussian linear predictor, exact to about 1e-4 however
wide the posterior is. Those of other models average over draws whose seed is fixed. So the same posterior predicts the
same twice.

Guarantees:
    An improper eta is refused.
    The summary is that of the family: mean, standard deviation, central interval.
    Coefficients per unit of a column are those that rows in the columns' own units have.
    A contrast's variance is that of the weighted sum.
    The interval of a prediction contains what its share of the draws predicts.
    A NumPyro model is summarised on the scale of its own sites.
    A given covariance replaces the family's in summaries and draws.
    Predictions of generalised linear models are those of very many draws.
    Predictive probabilities sum to one and average over the draws.
    The log-likelihood is the log of the average density, not the average of the log.
    Rows and targets that do not fit the model are refused, and no cell is quoted.
    What is saved is loaded equal, without pickle.
    A damaged or exchanged file is refused.
"""

import dataclasses
import hashlib
import importlib
import io
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float
from scipy import special

from silobayes.core.errors import InvalidInput, require_count
from silobayes.data.encoding import INTERCEPT
from silobayes.families import (
    FullGaussian,
    FullGaussianEta,
    MeanCovariance,
    MeanFieldGaussian,
    MeanFieldGaussianEta,
    MeanStddev,
)
from silobayes.models.base import AbstractGLM, AbstractModel, GaussianEta, GaussianFamily
from silobayes.models.numpyro_model import NumpyroModel
from silobayes.posteriors.base import AbstractPosterior
from silobayes.posteriors.regression import (
    Contrast,
    check_units,
    coefficient_units,
    half_width,
    ratio_name,
    weights_of,
)

if TYPE_CHECKING:
    import pandas as pd

ARRAYS, DESCRIPTION = "posterior.npz", "posterior.json"
_FORMAT = 1
_CATALOGUE = "silobayes.models."
_DRAWS, _SUMMARY_DRAWS = 1000, 4000
_RATIO = ("ratio", "lower", "upper")


@dataclass(frozen=True, kw_only=True, eq=False)
class Posterior(AbstractPosterior):
    """One posterior over the parameters of a model.

    Attributes:
        family: Mean-field or full Gaussian over the model's flat `theta`.
        eta: Its natural parameters; proper.
        names: A name for each parameter, in the order of `theta`.
        model: What the parameters mean; None after loading a model that has no description (NumPyro functions).
        provenance: JSON-able facts about where it came from: study hash, certificate.
        covariance: (dim, dim) to be used instead of the family's own.
        privacy_share: Of each parameter's variance, what the privacy noise added; None where a method does not know.
        prior_share: Of each parameter's variance, what the prior leaves; what rows leave is the rest.
        units: Of regressions, how far one unit of its column (a year) moves each coefficient's feature, NaN for other
            parameters; None where the encoding is not known.
        warnings: What a reader should know of this answer, from released numbers only, and what to do.
    """

    family: GaussianFamily
    eta: GaussianEta
    names: tuple[str, ...]
    model: AbstractModel | None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    covariance: np.ndarray | None = None
    privacy_share: np.ndarray | None = None
    prior_share: np.ndarray | None = None
    units: np.ndarray | None = None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        dim = self._dim
        if not bool(self.family.is_proper(self.eta)):  # type: ignore[arg-type]
            fix = "Pass family.project(eta, floor)."
            raise InvalidInput("eta", "finite natural parameters of a proper posterior", "others", fix)
        object.__setattr__(self, "names", tuple(str(name) for name in self.names))
        if len(self.names) != dim or len(set(self.names)) != dim:
            fix = "Pass the model's parameter_names(...)."
            raise InvalidInput("names", f"{dim} different names", len(set(self.names)), fix)
        if self.model is not None and self.model.dim != dim:
            raise InvalidInput("model", f"a model of {dim} parameters", self.model.dim, "Pass the model of this eta.")
        if self.covariance is not None:
            object.__setattr__(self, "covariance", _check_covariance(self.covariance, dim))
        object.__setattr__(self, "warnings", tuple(self.warnings))
        if self.units is not None:
            object.__setattr__(self, "units", check_units(self.units, dim))
        for name, shares in self._shares.items():
            if shares.shape != (dim,) or not np.all((shares >= 0) & (shares <= 1)):
                raise InvalidInput(name, f"{dim} shares from 0 to 1", shares.shape, "Pass one for each parameter.")

    def __repr__(self) -> str:
        kind = "unknown model" if self.model is None else type(self.model).__name__
        return f"Posterior({kind}, {self._dim} parameters)"

    @property
    def _dim(self) -> int:
        return self.family.dimension if isinstance(self.family, FullGaussian) else int(np.prod(self.family.event_shape))

    @property
    def _shares(self) -> dict[str, np.ndarray]:
        """Those that are known."""
        both = {"privacy_share": self.privacy_share, "prior_share": self.prior_share}
        return {name: np.asarray(shares, float) for name, shares in both.items() if shares is not None}

    @property
    def mean(self) -> np.ndarray:
        """Posterior mean of each parameter."""
        return np.asarray(self._standard.mean, float).reshape(-1)

    @property
    def stddev(self) -> np.ndarray:
        """Posterior standard deviation of each parameter."""
        if self.covariance is not None:
            return np.sqrt(np.diag(self.covariance))
        standard = self._standard
        if isinstance(standard, MeanCovariance):
            return np.sqrt(np.diag(np.asarray(standard.covariance, float)))
        return np.asarray(standard.stddev, float).reshape(-1)

    @property
    def _standard(self) -> MeanCovariance | MeanStddev:
        return self.family.to_standard(self.eta)  # type: ignore[arg-type] (the family refuses another's eta)

    def summary(self, level: float = 0.95) -> "pd.DataFrame":
        """Mean, sd and the central interval of probability `level`, a row per name; shares of the variance if known.

        A NumPyro model is summarised on the scale of its own sites, from 4000 draws; once loaded without its function
        only the unconstrained coordinates are known, and the names say so.
        """
        import pandas as pd

        width = half_width(level)
        if isinstance(self.model, NumpyroModel):
            names, draws = _by_site(self.sample_sites(_SUMMARY_DRAWS))
            lower, upper = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
            columns = {"mean": draws.mean(axis=0), "sd": draws.std(axis=0), "lower": lower, "upper": upper}
        else:
            names = self.names if self.model is not None else tuple(f"{name} (unconstrained)" for name in self.names)
            mean, stddev = self.mean, self.stddev
            half = width * stddev
            columns = {"mean": mean, "sd": stddev, "lower": mean - half, "upper": mean + half, **self._shares}
        return pd.DataFrame(columns, index=pd.Index(names, name="parameter"))

    def per_unit(self, level: float = 0.95) -> "pd.DataFrame":
        """Coefficients of a regression per unit of their column: mean, sd, interval, and the unit in encoded units."""
        units, is_coefficient = self._known_units()
        table = self.summary(level).loc[is_coefficient, ["mean", "sd", "lower", "upper"]]
        return table.mul(units[is_coefficient], axis=0).assign(unit=units[is_coefficient])

    def ratios(self, level: float = 0.95) -> "pd.DataFrame":
        """Odds or rate ratios: median and interval per unit of the column, and (`encoded_`) per unit of the feature.

        The intercept has none: e to its power is the odds, or the rate, of a row whose features are zero.
        """
        units, is_coefficient = self._known_units()
        if self.ratio is None:
            fix = "Read the coefficients: summary and per_unit."
            raise InvalidInput("model", "a logistic, Poisson or negative binomial regression", repr(self), fix)
        shown = is_coefficient & (np.array(self.names) != INTERCEPT)
        encoded = self.summary(level).loc[shown, ["mean", "lower", "upper"]].set_axis([*_RATIO], axis="columns")
        with np.errstate(over="ignore"):
            table = np.exp(encoded.mul(units[shown], axis=0))
            return table.assign(**{f"encoded_{name}": np.exp(encoded[name]) for name in _RATIO})

    @property
    def ratio(self) -> str | None:
        """What e to the power of a coefficient is: an odds ratio, a rate ratio, or nothing that has a name."""
        return ratio_name(self.model)

    def contrast(self, weights: Mapping[str, float] | ArrayLike, level: float = 0.95) -> Contrast:
        """A weighted sum of parameters, by name or all of them: two categories compared, one more of two columns.

        A mean-field posterior knows no correlations: sums of parameters that go together may be more or less certain.
        """
        vector = weights_of(weights, self.names)  # type: ignore[arg-type]
        mean, sd = float(vector @ self.mean), float(np.sqrt(self._variance_of(vector[None])[0]))
        half = half_width(level) * sd
        return Contrast(mean=mean, sd=sd, lower=mean - half, upper=mean + half, level=level)

    def _known_units(self) -> tuple[np.ndarray, np.ndarray]:
        """Units of all parameters, and which of them are coefficients."""
        if self.units is None:
            expected = "a regression whose encoding is known"
            fix = "Pass it: posterior.with_units(study.encoding.feature_units)."
            raise InvalidInput("units", expected, repr(self), fix)
        return self.units, ~np.isnan(self.units)

    def share_below(self, theta: ArrayLike) -> np.ndarray:
        """Of each parameter, the posterior probability that it is less than in `theta` (unconstrained, as `names`)."""
        return special.ndtr((np.asarray(theta, float) - self.mean) / self.stddev)

    def with_provenance(self, provenance: Mapping[str, Any]) -> "Posterior":
        """See `AbstractPosterior`."""
        return dataclasses.replace(self, provenance=provenance)

    def with_units(self, feature_units: Sequence[float]) -> "Posterior":
        """See `AbstractPosterior`."""
        return dataclasses.replace(self, units=coefficient_units(self.model, feature_units))

    def sample(self, num_draws: int = _DRAWS, *, seed: int = 0) -> np.ndarray:
        """(num_draws, dim) independent draws of theta; the same seed gives the same draws."""
        require_count("num_draws", num_draws, at_least=1, fix="Pass the number of draws, and seed= for others.")
        key = jax.random.key(require_count("seed", seed, at_least=0, fix="Pass a whole number."))
        if self.covariance is not None:
            factor = jnp.asarray(np.linalg.cholesky(self.covariance), jnp.float32)
            mean = jnp.asarray(self.mean, jnp.float32)
            return np.asarray(mean + jax.random.normal(key, (num_draws, self._dim)) @ factor.T)
        draws = self.family.sample(key, self.eta, (num_draws,))  # type: ignore[arg-type]
        return np.asarray(draws).reshape(num_draws, self._dim)

    def sample_sites(self, num_draws: int = _DRAWS, *, seed: int = 0) -> dict[str, np.ndarray]:
        """The same by site: latent and derived sites of a NumPyro model on their own scale, otherwise `theta`."""
        thetas = self.sample(num_draws, seed=seed)
        if not isinstance(self.model, NumpyroModel):
            return {"theta": thetas}
        values = _constrained(self.model, jnp.asarray(thetas))
        names = (*(site.name for site in self.model.sites), *self.model.derived)
        return {name: np.asarray(values[name]) for name in names}

    def predict(self, x: ArrayLike, *, num_draws: int = _DRAWS, seed: int = 0) -> np.ndarray:
        """Real and count targets: the predictive mean of each encoded row. Classes: the most probable label.

        Generalised linear models need no draws and ignore their number and seed, here and below.
        """
        if self._model.target in ("binary", "classes"):
            return self.predict_proba(x, num_draws=num_draws, seed=seed).argmax(axis=1)
        return self._average_prediction(x, num_draws, seed)

    def predict_proba(self, x: ArrayLike, *, num_draws: int = _DRAWS, seed: int = 0) -> np.ndarray:
        """(rows, classes) predictive probabilities of encoded rows."""
        if self._model.target not in ("binary", "classes"):
            fix = "Use predict for means."
            raise InvalidInput("model", "a model of classes", self._model.target, fix)
        return self._average_prediction(x, num_draws, seed)

    def predict_interval(
        self, x: ArrayLike, level: float = 0.95, *, num_draws: int = _DRAWS, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Central interval of what each encoded row's mean is (of classes, of each probability): (lower, upper).

        It says how sure the mean is, not how far targets are from it. Of generalised linear models it is that of the
        linear predictor, through the link; of others, that of the draws.
        """
        model, rows, width = self._model, self._rows(x), half_width(level)
        if not isinstance(model, AbstractGLM):
            thetas = jnp.asarray(self.sample(num_draws, seed=seed))
            means = np.asarray(jax.lax.map(lambda theta: model.predict(theta, jnp.asarray(rows)), thetas))
            lower, upper = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
            return lower, upper
        mean, variance = (np.asarray(part) for part in self._linear_predictor(rows))
        ends = [mean - width * np.sqrt(variance), mean + width * np.sqrt(variance)]
        # Through the link: the prediction of a row that has only this predictor. A class's own end may be the other.
        means = np.stack([np.asarray(model.predict(jnp.ones(1), jnp.asarray(end[:, None]))) for end in ends])
        return means.min(axis=0), means.max(axis=0)

    def log_likelihood(self, x: ArrayLike, y: ArrayLike, *, num_draws: int = _DRAWS, seed: int = 0) -> np.ndarray:
        """Log predictive density of each row's target: log of the average over the posterior of `p(y | x, theta)`."""
        model, rows = self._model, self._rows(x)
        targets = jnp.asarray(_targets(model, y, rows))
        if isinstance(model, AbstractGLM):
            return np.asarray(_log_expected_likelihood(model, *self._linear_predictor(rows), targets))
        thetas = jnp.asarray(self.sample(num_draws, seed=seed))
        return np.asarray(_log_mean_density(model, thetas, jnp.asarray(rows), targets))

    def to_arviz(self, *, num_draws: int = 1000, seed: int = 0) -> Any:
        """Draws by site for ArviZ: `InferenceData` with version 0.x, an xarray `DataTree` with 1.x."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # 0.23 announces 1.0 at import
            import arviz
        draws = {name: values[None] for name, values in self.sample_sites(num_draws, seed=seed).items()}
        labels: dict[str, Any] = {}
        if not isinstance(self.model, NumpyroModel):
            labels = {"coords": {"parameter": list(self.names)}, "dims": {"theta": ["parameter"]}}
        if int(arviz.__version__.split(".")[0]) >= 1:
            return arviz.from_dict({"posterior": draws}, **labels)
        return arviz.from_dict(posterior=draws, **labels)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `posterior.npz` and `posterior.json`; no rows, no pickle."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        arrays = {"linear": np.asarray(self.eta.linear), "quadratic": np.asarray(self.eta.quadratic)}
        if self.covariance is not None:
            arrays["covariance"] = self.covariance
        arrays |= self._shares
        if self.units is not None:
            arrays["units"] = self.units
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        text = {
            "format": _FORMAT,
            "family": "full" if isinstance(self.family, FullGaussian) else "mean_field",
            "names": list(self.names),
            "model": None if self.model is None else _describe(self.model),
            "provenance": dict(self.provenance),
            "warnings": list(self.warnings),
            "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        }
        try:
            content = json.dumps(text, indent=1, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            fix = "Pass texts, finite numbers, lists and tables."
            raise InvalidInput("provenance", "what JSON can hold", str(error), fix) from None
        _replace(directory / ARRAYS, buffer.getvalue())
        _replace(directory / DESCRIPTION, content)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], model: AbstractModel | None = None) -> "Posterior":
        """Read what `save` wrote; `model` is needed, to predict, for models that have no description."""
        directory = Path(directory)
        fix = "Pass the directory that Posterior.save or `silobayes run` wrote; restore it from a copy if it changed."
        try:
            text = json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
            raw = (directory / ARRAYS).read_bytes()
            if text["format"] != _FORMAT or text["sha256"] != hashlib.sha256(raw).hexdigest():
                raise ValueError("another format or other arrays than were saved")
            with np.load(io.BytesIO(raw), allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            linear, quadratic = jnp.asarray(arrays["linear"]), jnp.asarray(arrays["quadratic"])
            names, family_name, provenance = tuple(text["names"]), text["family"], dict(text["provenance"])
            told = tuple(text.get("warnings", ()))  # earlier versions wrote none
            known = None if text["model"] is None else _restore(text["model"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise InvalidInput("posterior", "the files of a posterior", f"{directory} ({error})", fix) from None
        if family_name == "full":
            family, eta = FullGaussian(dimension=len(names)), FullGaussianEta(linear=linear, quadratic=quadratic)
        else:
            family = MeanFieldGaussian(event_shape=linear.shape)
            eta = MeanFieldGaussianEta(linear=linear, quadratic=quadratic)
        return cls(
            family=family,
            eta=eta,
            names=names,
            model=known if model is None else model,
            provenance=provenance,
            covariance=arrays.get("covariance"),
            privacy_share=arrays.get("privacy_share"),
            prior_share=arrays.get("prior_share"),
            units=arrays.get("units"),
            warnings=told,
        )

    @property
    def _model(self) -> AbstractModel:
        if self.model is None:
            fix = "Pass it: Posterior.load(directory, model=...)."
            raise InvalidInput("model", "a model to predict with", "none in the saved posterior", fix)
        return self.model

    def _rows(self, x: ArrayLike) -> np.ndarray:
        return _matrix(x, self._model.num_features)

    def _average_prediction(self, x: ArrayLike, num_draws: int, seed: int) -> np.ndarray:
        model, rows = self._model, self._rows(x)
        if isinstance(model, AbstractGLM):
            return np.asarray(_expected_prediction(model, *self._linear_predictor(rows)))
        return np.asarray(_mean_prediction(model, jnp.asarray(self.sample(num_draws, seed=seed)), jnp.asarray(rows)))

    def _linear_predictor(self, rows: np.ndarray) -> tuple[Array, Array]:
        """Mean and variance of `x @ theta` for each row."""
        return jnp.asarray(rows @ self.mean, jnp.float32), jnp.asarray(self._variance_of(rows), jnp.float32)

    def _variance_of(self, rows: np.ndarray) -> np.ndarray:
        covariance, standard = self.covariance, self._standard
        if covariance is None and isinstance(standard, MeanCovariance):
            covariance = np.asarray(standard.covariance, float)
        if covariance is None:
            return rows**2 @ self.stddev**2
        return np.maximum(((rows @ covariance) * rows).sum(axis=1), 0.0)


@eqx.filter_jit
def _constrained(model: NumpyroModel, thetas: Float[Array, "draws dim"]) -> dict[str, Array]:
    return jax.vmap(model.constrain)(thetas)


@eqx.filter_jit
def _log_expected_likelihood(model: AbstractGLM, mean: Array, variance: Array, y: Array) -> Array:
    return model.log_expected_likelihood(mean, variance, y)


@eqx.filter_jit
def _expected_prediction(model: AbstractGLM, mean: Array, variance: Array) -> Array:
    return model.expected_prediction(mean, variance)


@eqx.filter_jit
def _mean_prediction(model: AbstractModel, thetas: Float[Array, "draws dim"], x: Float[Array, "n d"]) -> Array:
    """Average over draws one at a time, so that memory grows with rows only."""
    first = model.predict(thetas[0], x)
    total, _ = jax.lax.scan(lambda total, theta: (total + model.predict(theta, x), None), first, thetas[1:])
    return total / thetas.shape[0]


@eqx.filter_jit
def _log_mean_density(model: AbstractModel, thetas: Float[Array, "draws dim"], x: Array, y: Array) -> Array:
    first = model.log_predictive(thetas[0], x, y)
    total, _ = jax.lax.scan(
        lambda total, theta: (jnp.logaddexp(total, model.log_predictive(theta, x, y)), None), first, thetas[1:]
    )
    return total - jnp.log(thetas.shape[0])


def _describe(model: AbstractModel) -> dict[str, Any] | None:
    """A model of the catalogue as JSON: its class and its settings, which are texts, numbers and tuples of them."""
    module = type(model).__module__
    settings = {item.name: getattr(model, item.name) for item in dataclasses.fields(model)}
    if not module.startswith(_CATALOGUE) or not all(_is_plain(value) for value in settings.values()):
        return None
    return {"file": module.removeprefix(_CATALOGUE), "class": type(model).__name__, "settings": settings}


def _restore(description: Mapping[str, Any]) -> AbstractModel:
    """The model of `_describe`. Only classes of the catalogue are built, whatever the file names."""
    file, name = description["file"], description["class"]
    if not re.fullmatch(r"[a-z_]+", file):
        raise ValueError("a model outside the catalogue")
    kind = getattr(importlib.import_module(_CATALOGUE + file), name)
    if not (isinstance(kind, type) and issubclass(kind, AbstractModel) and kind.__module__ == _CATALOGUE + file):
        raise ValueError("a model outside the catalogue")
    return kind(**{key: _as_tuple(value) for key, value in description["settings"].items()})


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, (str, bool, int, float))


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(entry) for entry in value) if isinstance(value, list) else value


def _by_site(sites: Mapping[str, np.ndarray]) -> tuple[tuple[str, ...], np.ndarray]:
    """Names `site` or `site[i,j]`, and the draws as (draws, names)."""
    names = tuple(
        site + (f"[{','.join(map(str, index))}]" if index else "")
        for site, values in sites.items()
        for index in np.ndindex(*values.shape[1:])
    )
    return names, np.concatenate([values.reshape(len(values), -1) for values in sites.values()], axis=1).astype(float)


def _matrix(x: ArrayLike, num_features: int) -> np.ndarray:
    """Encoded rows as float32; no error quotes a cell."""
    fix = "Pass study.encoding.encode_features(frame)."
    if hasattr(x, "columns"):
        # Even if all its columns are numbers: they would be taken for encoded ones.
        raise InvalidInput("x", "encoded rows", "a table", fix)
    matrix = _numbers("x", x, fix)
    if matrix.ndim != 2 or matrix.shape[1] != num_features:
        raise InvalidInput("x", f"a matrix of {num_features} columns, one per feature", matrix.shape, fix)
    if not np.isfinite(matrix).all():
        raise InvalidInput("x", "finite numbers", "others", "Fill, correct or drop those rows beforehand.")
    return matrix


def _targets(model: AbstractModel, y: ArrayLike, rows: np.ndarray) -> np.ndarray:
    """One target per row, as the model means it; no error quotes a cell."""
    fix = "Pass what study.encoding.encode gives: classes are numbered in the order of data.classes."
    targets = _numbers("y", y, fix)
    if targets.shape != rows.shape[:1]:
        raise InvalidInput("y", f"{rows.shape[0]} targets", targets.shape, "Pass one target per row.")
    if not np.isfinite(targets).all():
        raise InvalidInput("y", "finite numbers", "others", fix)
    if model.target in ("binary", "classes"):
        classes = jax.eval_shape(model.predict, jnp.zeros(model.dim), jnp.zeros((1, rows.shape[1]))).shape[1]
        if not np.isin(targets, np.arange(classes)).all():
            raise InvalidInput("y", f"labels 0 to {classes - 1}", "others", fix)
        return targets.astype(np.int32)
    if model.target == "count" and not np.all((targets >= 0) & (targets == np.rint(targets))):
        raise InvalidInput("y", "whole numbers >= 0", "others", fix)
    return targets


def _numbers(key: str, values: ArrayLike, fix: str) -> np.ndarray:
    """As float32; texts, even of digits, dates and ragged lists are refused."""
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        raise InvalidInput(key, "an array of numbers", "something else", fix) from None
    if array.dtype.kind not in "fiub":
        raise InvalidInput(key, "an array of numbers", f"one of type {array.dtype}", fix)
    return array.astype(np.float32)


def _check_covariance(covariance: np.ndarray, dim: int) -> np.ndarray:
    covariance = np.asarray(covariance, float)
    fix = "Pass the noise-aware covariance of theta."
    if covariance.shape != (dim, dim) or not np.isfinite(covariance).all():
        raise InvalidInput("covariance", f"a finite matrix of shape {(dim, dim)}", covariance.shape, fix)
    symmetric = (covariance + covariance.T) / 2
    if not np.allclose(symmetric, covariance, rtol=1e-5, atol=0.0):
        raise InvalidInput("covariance", "a symmetric matrix", "another one", fix)
    try:
        np.linalg.cholesky(symmetric)
    except np.linalg.LinAlgError:
        raise InvalidInput("covariance", "a positive definite matrix", "another one", fix) from None
    return symmetric


def _replace(path: Path, content: bytes) -> None:
    """Write whole or not at all."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_bytes(content)
    os.replace(scratch, path)
