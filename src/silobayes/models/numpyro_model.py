"""Any NumPyro model with one plate over the rows, as a model of this library.

    def shrinkage(x, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)

    model = from_numpyro(shrinkage, x_row_example, y_row_example)

Priors, constraints and names are the function's own. Latent values are mapped to unconstrained numbers by NumPyro's
`biject_to` and laid out in one flat vector in the order in which the function samples them. A prior that is not
Gaussian in these coordinates takes part in inference as a factor of its own (`inference.vi.maximise_prior`). Sites made
by `numpyro.deterministic` are reported beside the latents if they depend on these alone, not on rows.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from silobayes.core.errors import InvalidInput
from silobayes.models.base import (
    AbstractModel,
    GaussianEta,
    GaussianFamily,
    Target,
    binary_probabilities,
    isotropic_eta,
)

# Median and spread of this many prior draws make the Gaussian that stands in for a prior which is not one.
_PRIOR_DRAWS = 4096


class Site(NamedTuple):
    """A latent site: its name and the shape of its unconstrained coordinates."""

    name: str
    flat_shape: tuple[int, ...]


class NumpyroModel(AbstractModel):
    """Made by `from_numpyro`.

    Guarantees:
        - log prior plus log-likelihoods is NumPyro's own log density
        - names and constraints are the function's own
    """

    function: Callable[..., Any] = eqx.field(static=True, kw_only=True)
    sites: tuple[Site, ...] = eqx.field(static=True, kw_only=True)
    observed: str = eqx.field(static=True, kw_only=True)
    plate: str = eqx.field(static=True, kw_only=True)
    kind: Target = eqx.field(static=True, kw_only=True)
    example: tuple[float, ...] = eqx.field(static=True, kw_only=True)
    gaussian_prior: tuple[tuple[float, ...], tuple[float, ...]] | None = eqx.field(static=True, kw_only=True)
    worst: tuple[float, ...] | None = eqx.field(static=True, kw_only=True)
    num_features: int = eqx.field(static=True, kw_only=True)
    has_global_factor: bool = eqx.field(static=True, kw_only=True)
    derived: tuple[str, ...] = eqx.field(static=True, kw_only=True)

    @property
    def dim(self) -> int:
        """Unconstrained numbers of all latent sites."""
        return sum(math.prod(site.flat_shape) for site in self.sites)

    @property
    def target(self) -> Target:
        """From the distribution of the observed site."""
        return self.kind

    @property
    def worst_labels(self) -> tuple[float, ...] | None:
        """As told to `from_numpyro`."""
        return self.worst

    def parameter_names(self, feature_names: tuple[str, ...]) -> tuple[str, ...]:
        """`site` or `site[i,j]`, of the unconstrained coordinates; features have no names of their own here."""
        return tuple(
            site.name + (f"[{','.join(map(str, index))}]" if index else "")
            for site in self.sites
            for index in np.ndindex(*site.flat_shape)
        )

    def constrain(self, theta: Float[Array, " dim"]) -> dict[str, Array]:
        """Values of the latent sites in their own constrained space, and of the derived sites, by name."""
        return self._run(theta, self._example_rows(1), None)[0]

    def log_prior(self, theta: Float[Array, " dim"]) -> Float[Array, ""]:
        """Log density of the latent sites in unconstrained coordinates, with the Jacobian."""
        return self._run(theta, self._example_rows(1), None)[1]

    def log_likelihood(self, theta: Float[Array, " dim"], x_row: Float[Array, " d"], y_row: Num[Array, ""]) -> Array:
        """Log density of the sites in the plate, with one row in it."""
        return self._run(theta, x_row[None], y_row[None])[2]

    def predict(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Float[Array, "n *classes"]:
        """Mean of the observed site, or its probabilities."""
        observed = self._run(theta, x, None)[3]
        if self.kind == "binary":
            return binary_probabilities(observed.mean)
        return _base(observed).probs if self.kind == "classes" else observed.mean

    @property
    def prior_is_gaussian(self) -> bool:
        """Whether every latent site is Normal with fixed parameters."""
        return self.gaussian_prior is not None

    def prior_eta(self, family: GaussianFamily) -> GaussianEta:
        """The prior if it is Gaussian; otherwise the median and half the 16-84 % range of draws from it."""
        if self.gaussian_prior is not None:
            mean, stddev = self.gaussian_prior
            return isotropic_eta(family, jnp.asarray(mean), jnp.asarray(stddev))
        low, median, high = _prior_quantiles(self)
        return isotropic_eta(family, median, 0.5 * (high - low))

    def start_eta(self, family: GaussianFamily, key: PRNGKeyArray) -> GaussianEta:
        """The Gaussian stand-in for the prior."""
        return self.prior_eta(family)

    def draw_prior(self, key: PRNGKeyArray) -> Float[Array, " dim"]:
        """The function's own latents, unconstrained; a factor besides the sites has no part in it, so it is refused."""
        if self.has_global_factor:
            fix = "Pass a point instead of drawing from the prior."
            raise InvalidInput("model", "a prior made of sample sites", "a factor outside the row plate", fix)
        return self._prior_draw(key)

    def draw_rows(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "n d"], Num[Array, " n"]]:
        """The observed site's own draws."""
        return x, self._run(theta, x, None)[3].sample(key)

    def _example_rows(self, num_rows: int) -> Float[Array, "n d"]:
        return jnp.tile(jnp.asarray(self.example), (num_rows, 1))

    def _prior_draw(self, key: PRNGKeyArray) -> Float[Array, " dim"]:
        from numpyro import distributions as dist
        from numpyro import handlers

        trace = handlers.trace(handlers.seed(self.function, key)).get_trace(self._example_rows(1), None)
        return jnp.concatenate(
            [
                dist.biject_to(trace[site.name]["fn"].support).inv(trace[site.name]["value"]).ravel()
                for site in self.sites
            ]
        )

    def _run(
        self, theta: Float[Array, " dim"], x: Float[Array, "n d"], y: Num[Array, " n"] | None
    ) -> tuple[dict[str, Array], Array, Array, Any]:
        """Run the function at theta: latent and derived values, log prior, log-likelihood, law of the observed site."""
        from numpyro import distributions as dist
        from numpyro import handlers
        from numpyro.primitives import Messenger

        values: dict[str, Array] = {}
        log_prior = log_likelihood = jnp.zeros(())
        observed: Any = None
        parts = dict(zip((site.name for site in self.sites), self._split(theta), strict=True))

        class Substitute(Messenger):
            """Latent values from theta, mapped as their supports, which may depend on other sites, ask for."""

            def process_message(self, msg: dict) -> None:
                nonlocal log_prior
                if msg["type"] == "sample" and msg["name"] in parts:
                    transform = dist.biject_to(msg["fn"].support)
                    coordinates = parts[msg["name"]]
                    msg["value"] = values[msg["name"]] = transform(coordinates)
                    jacobian = transform.log_abs_det_jacobian(coordinates, msg["value"])
                    log_prior = log_prior + jnp.sum(msg["fn"].log_prob(msg["value"])) + jnp.sum(jacobian)

        with handlers.seed(rng_seed=0), handlers.trace() as trace, Substitute():
            self.function(x, y)
        for name, message in trace.items():
            if message["type"] == "deterministic" and name in self.derived:
                values[name] = message["value"]
            if name in parts or message["type"] != "sample":
                continue
            if name == self.observed:
                observed = message["fn"]
            log_density = jnp.sum(message["fn"].log_prob(message["value"]))
            if any(frame.name == self.plate for frame in message["cond_indep_stack"]):
                log_likelihood = log_likelihood + log_density
            else:
                log_prior = log_prior + log_density
        return values, log_prior, log_likelihood, observed

    def _split(self, theta: Float[Array, " dim"]) -> list[Array]:
        parts, start = [], 0
        for site in self.sites:
            size = math.prod(site.flat_shape)
            parts.append(theta[start : start + size].reshape(site.flat_shape))
            start += size
        return parts


@jax.jit
def _prior_quantiles(model: NumpyroModel) -> Float[Array, "3 dim"]:
    keys = jax.random.split(jax.random.key(0), _PRIOR_DRAWS)
    return jnp.quantile(jax.vmap(model._prior_draw)(keys), jnp.array([0.16, 0.5, 0.84]), axis=0)


def from_numpyro(
    function: Callable[..., Any],
    x_row_example: Float[Array, " d"],
    y_row_example: Num[Array, ""],
    *,
    worst_labels: tuple[float, ...] | None = None,
) -> NumpyroModel:
    """A model of `function(x, y)`, which samples its latents, then all rows inside one plate of size `x.shape[0]`.

    Args:
        function: Called with x of shape (n, d) and y of shape (n,), or with y None.
        x_row_example: Any row of features; made up, not taken from a silo: it becomes part of the public model.
        y_row_example: Any target.
        worst_labels: Labels among which the gradient's norm is largest for every x and theta, such as all classes;
            with them clipping does not bias (UNCERTAINTY F7).
    """
    x_row, y_row = np.asarray(x_row_example, dtype=np.float32), np.asarray(y_row_example)
    one, three = (_inspect(function, np.tile(x_row, (rows, 1)), np.tile(y_row, rows)) for rows in (1, 3))
    plate = _row_plate(one, three)
    latents = [note for note in one if not note.is_observed]
    for note in latents:
        _check_latent(note, plate)
    observed = [note for note in one if note.is_observed and plate in note.plates and not note.is_factor]
    if len(observed) != 1:
        names = [note.name for note in observed]
        raise InvalidInput("function", "one site observed in the row plate", names, "Pass obs=y to exactly one site.")
    is_normal = all(note.is_normal for note in latents)
    has_global_factor = any(note.is_observed and plate not in note.plates for note in one)
    return NumpyroModel(
        function=function,
        sites=tuple(Site(name=note.name, flat_shape=note.flat_shape) for note in latents),
        observed=observed[0].name,
        plate=plate,
        kind=observed[0].target,
        example=tuple(x_row.tolist()),
        gaussian_prior=_fixed_normals(function, x_row, y_row) if is_normal and not has_global_factor else None,
        worst=worst_labels,
        num_features=len(x_row),
        has_global_factor=has_global_factor,
        derived=_derived(function, x_row, y_row),
    )


class _Note(NamedTuple):
    """What one run of the function shows of a sample site."""

    name: str
    is_observed: bool
    plates: dict[str, int]
    flat_shape: tuple[int, ...]
    is_discrete: bool
    is_normal: bool
    is_factor: bool
    target: Target


def _trace(function: Callable[..., Any], key: PRNGKeyArray, x: np.ndarray, y: np.ndarray) -> list[dict]:
    from numpyro import handlers

    trace = handlers.trace(handlers.seed(function, key)).get_trace(jnp.asarray(x), jnp.asarray(y))
    return [site for site in trace.values() if site["type"] == "sample"]


def _inspect(function: Callable[..., Any], x: np.ndarray, y: np.ndarray) -> list[_Note]:
    """The sample sites, from an abstract run that computes nothing."""
    from numpyro import distributions as dist

    notes: list[_Note] = []

    def run(key: PRNGKeyArray) -> None:
        for site in _trace(function, key, x, y):
            base, is_discrete = _base(site["fn"]), site["fn"].support.is_discrete
            free = site["is_observed"] or is_discrete
            shape = jnp.shape(site["value"])
            notes.append(
                _Note(
                    name=site["name"],
                    is_observed=site["is_observed"],
                    plates={frame.name: frame.size for frame in site["cond_indep_stack"]},
                    flat_shape=shape if free else dist.biject_to(site["fn"].support).inverse_shape(shape),
                    is_discrete=is_discrete,
                    is_normal=isinstance(base, dist.Normal),
                    is_factor=isinstance(base, dist.Unit),
                    target=_target(base),
                )
            )

    jax.eval_shape(run, jax.random.key(0))
    return notes


def _base(distribution: Any) -> Any:
    """The distribution below expansions and event dimensions."""
    from numpyro.distributions.distribution import ExpandedDistribution, Independent

    while isinstance(distribution, (ExpandedDistribution, Independent)):
        distribution = distribution.base_dist
    return distribution


def _row_plate(one: list[_Note], three: list[_Note]) -> str:
    """The plate whose size is the number of rows."""
    sizes = [{name: size for note in notes for name, size in note.plates.items()} for notes in (one, three)]
    plates = [name for name, size in sizes[0].items() if size == 1 and sizes[1].get(name) == 3]
    if len(plates) != 1:
        raise InvalidInput(
            "function", "one plate over the rows", plates or "none", "Use `with numpyro.plate('rows', x.shape[0]):`."
        )
    return plates[0]


def _check_latent(note: _Note, plate: str) -> None:
    if plate in note.plates:
        raise InvalidInput(
            note.name, "a latent outside the row plate", "one per row", "Integrate it out of the likelihood."
        )
    if note.is_discrete:
        raise InvalidInput(note.name, "a continuous latent", "a discrete one", "Marginalise it.")


def _target(base: Any) -> Target:
    from numpyro import distributions as dist

    if isinstance(base, (dist.BernoulliLogits, dist.BernoulliProbs)):
        return "binary"
    if isinstance(base, (dist.CategoricalLogits, dist.CategoricalProbs)):
        return "classes"
    return "count" if base.support.is_discrete else "real"


def _derived(function: Callable[..., Any], x_row: np.ndarray, y_row: np.ndarray) -> tuple[str, ...]:
    """`deterministic` sites that are functions of the latents alone: other rows, and more of them, change nothing."""
    from numpyro import handlers

    @partial(jax.jit, static_argnums=1)
    def values(x_row: Array, num_rows: int) -> dict[str, Array]:
        x, y = jnp.tile(x_row, (num_rows, 1)), jnp.tile(jnp.asarray(y_row), num_rows)
        trace = handlers.trace(handlers.seed(function, jax.random.key(0))).get_trace(x, y)
        return {name: jnp.asarray(site["value"]) for name, site in trace.items() if site["type"] == "deterministic"}

    one, others = values(jnp.asarray(x_row), 1), values(jnp.asarray(x_row) + 1.0, 3)
    # Compiled for another shape, the same function may differ in its last digit.
    return tuple(
        name
        for name, value in one.items()
        if name in others and value.shape == others[name].shape and np.allclose(value, others[name], rtol=1e-5, atol=0)
    )


def _fixed_normals(
    function: Callable[..., Any], x_row: np.ndarray, y_row: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Means and deviations of Normal latents, unless they change from one prior draw to another."""

    @jax.jit
    def parameters(key: PRNGKeyArray) -> tuple[Array, Array]:
        latents = [site for site in _trace(function, key, x_row[None], y_row[None]) if not site["is_observed"]]
        parts = [
            [jnp.broadcast_to(value, jnp.shape(site["value"])).ravel() for value in (base.loc, base.scale)]
            for site in latents
            for base in [_base(site["fn"])]
        ]
        means, stddevs = zip(*parts, strict=True)
        return jnp.concatenate(means), jnp.concatenate(stddevs)

    first, second = (jax.tree.map(np.asarray, parameters(jax.random.key(seed))) for seed in (0, 1))
    if not all(np.array_equal(left, right) for left, right in zip(first, second, strict=True)):
        return None
    return tuple(first[0].tolist()), tuple(first[1].tolist())
