"""The families under test, each with a way to build proper parameters from plain numbers in [-1, 1]."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from silobayes import families as fam

FLOOR = 0.1
DTYPES = ["float32", "float64"]


def precision(dtype: str):
    """Context in which JAX computes in `dtype`."""
    return jax.enable_x64(dtype == "float64")


def _triangle(u):
    """A well-conditioned lower triangular matrix from d (d + 1) / 2 numbers."""
    d = int((math.isqrt(8 * u.shape[0] + 1) - 1) // 2)
    lower = jnp.zeros((d, d), u.dtype).at[jnp.tril_indices(d)].set(u)
    return jnp.tril(lower, -1) + jnp.diag(jnp.exp(jnp.diagonal(lower)))


def _spd(u):
    factor = _triangle(u)
    return factor @ factor.T


@dataclass(frozen=True)
class Case:
    name: str
    family: Any
    size: int  # how many numbers `standard` needs
    standard: Callable[[Any], dict]  # numbers in [-1, 1] -> keywords of from_standard
    log_base: float  # log of the constant base measure
    broken: tuple[tuple[str, float], ...]  # (leaf, value): each puts a finite eta outside the proper cone
    margin: Callable[[Any, Any], Any] | None  # (family, eta) -> distance that `project` floors
    point: Callable[[Any], Any]  # numbers in [-1, 1] -> one event (drawing one takes seconds to compile)

    def build(self, u):
        return self.family.from_standard(**self.standard(u))

    def break_(self, eta, leaf, value):
        """`eta` with one entry of a leaf replaced (for a matrix: an entry of its diagonal)."""

        def where(e):
            for step in leaf.split("."):
                e = e[step] if isinstance(e, fam.IndependentEta) else getattr(e, step)
            return e

        return eqx.tree_at(where, eta, where(eta).at[(0,) * where(eta).ndim].set(value))


def _min_eig(matrix):
    return jnp.min(jnp.linalg.eigvalsh(matrix))


def _nig_margin(family, eta):
    s = family.to_standard(eta)
    return jnp.minimum(_min_eig(s.scaled_precision), jnp.minimum(s.shape, s.scale))


def _nw_margin(family, eta):
    s = family.to_standard(eta)
    excess = s.degrees - (family.dimension - 1)
    return jnp.minimum(_min_eig(jnp.linalg.inv(s.scale)), jnp.minimum(s.strength, excess))


def _smallest(family, eta):
    return jnp.min(ravel_pytree(family.to_standard(eta))[0])


_PRODUCT = fam.independent(weights=fam.MeanFieldGaussian(event_shape=(2,)), noise=fam.Gamma(event_shape=()))

CASES = [
    Case(
        name="mean_field_gaussian",
        family=fam.MeanFieldGaussian(event_shape=(3,)),
        size=6,
        standard=lambda u: {"mean": 3 * u[:3], "stddev": jnp.exp(u[3:])},
        log_base=-1.5 * math.log(2 * math.pi),
        broken=(("quadratic", 0.5), ("quadratic", 0.0)),
        margin=lambda family, eta: jnp.min(-2 * eta.quadratic),
        point=lambda u: 4 * u[:3],
    ),
    Case(
        name="full_gaussian",
        family=fam.FullGaussian(dimension=3),
        size=9,
        standard=lambda u: {"mean": 3 * u[:3], "covariance": _spd(u[3:])},
        log_base=-1.5 * math.log(2 * math.pi),
        broken=(("quadratic", 0.5), ("quadratic", 0.0)),
        margin=lambda family, eta: _min_eig(-2 * eta.quadratic),
        point=lambda u: 4 * u[:3],
    ),
    Case(
        name="gamma",
        family=fam.Gamma(event_shape=(2,)),
        size=4,
        standard=lambda u: {"shape": jnp.exp(2 * u[:2]), "rate": jnp.exp(2 * u[2:])},
        log_base=0.0,
        broken=(("log", -1.0), ("log", -1.5), ("linear", 0.0), ("linear", 2.0)),
        margin=_smallest,
        point=lambda u: jnp.exp(3 * u[:2]),
    ),
    Case(
        name="beta",
        family=fam.Beta(event_shape=(2,)),
        size=4,
        standard=lambda u: {"alpha": jnp.exp(2 * u[:2]), "beta": jnp.exp(2 * u[2:])},
        log_base=0.0,
        broken=(("log", -1.5), ("log_complement", -1.0), ("log_complement", -2.5)),
        margin=_smallest,
        point=lambda u: jax.nn.sigmoid(4 * u[:2]),
    ),
    Case(
        name="dirichlet",
        family=fam.Dirichlet(event_shape=(2, 3)),
        size=6,
        standard=lambda u: {"concentration": jnp.exp(2 * u).reshape(2, 3)},
        log_base=0.0,
        broken=(("log", -1.0), ("log", -1.5)),
        margin=_smallest,
        point=lambda u: jax.nn.softmax(4 * u.reshape(2, 3)),
    ),
    Case(
        name="bernoulli",
        family=fam.Bernoulli(event_shape=(3,)),
        size=3,
        standard=lambda u: {"probability": jax.nn.sigmoid(3 * u)},
        log_base=0.0,
        broken=(),
        margin=None,
        point=lambda u: (u > 0).astype(int),
    ),
    Case(
        name="categorical",
        family=fam.Categorical(event_shape=(2,), categories=3),
        size=6,
        standard=lambda u: {"probabilities": jax.nn.softmax(3 * u.reshape(2, 3))},
        log_base=0.0,
        broken=(),
        margin=None,
        point=lambda u: jnp.argmax(u.reshape(2, 3), axis=-1),
    ),
    Case(
        name="normal_inverse_gamma",
        family=fam.NormalInverseGamma(dimension=2),
        size=7,
        standard=lambda u: {
            "location": 2 * u[:2],
            "scaled_precision": _spd(u[2:5]),
            "shape": jnp.exp(2 * u[5]),
            "scale": jnp.exp(2 * u[6]),
        },
        log_base=-math.log(2 * math.pi),
        broken=(("quadratic", 0.5), ("inverse_variance", 0.5), ("log_variance", -2.0), ("log_variance", -1.5)),
        margin=_nig_margin,
        point=lambda u: fam.CoefficientsVariance(coefficients=3 * u[:2], variance=jnp.exp(2 * u[2])),
    ),
    Case(
        name="normal_wishart",
        family=fam.NormalWishart(dimension=2),
        size=7,
        standard=lambda u: {
            "location": 2 * u[:2],
            "scale": _spd(u[2:5]),
            "strength": jnp.exp(2 * u[5]),
            "degrees": 1 + jnp.exp(2 * u[6]),
        },
        log_base=-math.log(2 * math.pi),
        broken=(("quadratic", 0.5), ("quadratic", 0.0), ("precision", 0.5), ("log_det", -0.5), ("log_det", -1.0)),
        margin=_nw_margin,
        point=lambda u: fam.MeanPrecision(mean=3 * u[:2], precision=_spd(u[2:5])),
    ),
    Case(
        name="independent",
        family=_PRODUCT,
        size=6,
        standard=lambda u: {
            "weights": {"mean": 3 * u[:2], "stddev": jnp.exp(u[2:4])},
            "noise": {"shape": jnp.exp(2 * u[4]), "rate": jnp.exp(2 * u[5])},
        },
        log_base=-math.log(2 * math.pi),
        broken=(("weights.quadratic", 0.5), ("noise.log", -1.5)),
        margin=lambda family, eta: jnp.minimum(
            jnp.min(-2 * eta["weights"].quadratic), jnp.minimum(eta["noise"].log + 1, -eta["noise"].linear)
        ),
        point=lambda u: {"weights": 4 * u[:2], "noise": jnp.exp(3 * u[2])},
    ),
]
BY_NAME = {case.name: case for case in CASES}


def inner(a, b):
    """<a, b> over all leaves."""
    return sum(jnp.sum(x * y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def flat(tree):
    """All numbers of a pytree as one NumPy vector."""
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])


@cache
def compiled(name: str) -> Callable[..., dict]:
    """Everything the laws look at, compiled once per family and dtype."""
    case = BY_NAME[name]
    family = case.family

    @jax.jit
    def look(q, p, x):
        standard = family.to_standard(q)
        as_dict = standard if isinstance(standard, dict) else standard._asdict()
        t = family.sufficient_statistics(x)
        mean = family.mean_parameters(q)
        projected = family.project(q, 1e-5)
        return {
            "eta_q": q,
            "eta_p": p,
            "standard_q": standard,
            "standard_p": family.to_standard(p),
            "eta_back": family.from_standard(**as_dict),
            "mean": mean,
            "gradient": jax.grad(family.log_partition)(q),
            "entropy": family.entropy(q),
            "entropy_identity": family.log_partition(q) - inner(q, mean) - case.log_base,
            "kl": family.kl(q, p),
            "kl_self": family.kl(q, q),
            "bregman": family.log_partition(p) - family.log_partition(q) - inner(p - q, mean),
            "log_prob": family.log_prob(q, x),
            "log_prob_identity": inner(q, t) - family.log_partition(q) + case.log_base,
            "proper": family.is_proper(q),
            "projected": projected,
            "projected_is_proper": family.is_proper(projected),
            "log_partition": family.log_partition(q),
        }

    return look


@cache
def compiled_build(name: str) -> Callable[..., tuple]:
    """Numbers in [-1, 1] -> textbook parameters, eta, one event."""
    case = BY_NAME[name]
    return jax.jit(lambda u: (case.standard(u), case.build(u), case.point(u)))


@cache
def compiled_projection(name: str) -> Callable[..., dict]:
    """Projection of arbitrary, mostly improper parameters."""
    case = BY_NAME[name]
    family = case.family

    @jax.jit
    def look(raw):
        eta = ravel_pytree(family.zeros(raw.dtype))[1](raw)
        once = family.project(eta, FLOOR)
        return {
            "eta": eta,
            "once": once,
            "twice": family.project(once, FLOOR),
            "proper": family.is_proper(once),
            "margin": jnp.inf if case.margin is None else case.margin(family, once),
        }

    return look


@cache
def compiled_draws(name: str, count: int) -> Callable[..., tuple]:
    """Draws, their statistics and, for reparameterised families, the derivative of those along `d_eta`."""
    family = BY_NAME[name].family

    def draw(key, eta):
        x = family.sample(key, eta, (count,))
        return jax.vmap(lambda one: ravel_pytree(family.sufficient_statistics(one))[0])(x), x

    @jax.jit
    def look(key, eta, d_eta):
        if not family.is_reparameterised:
            return draw(key, eta)
        statistics, slope, x = jax.jvp(lambda e: draw(key, e), (eta,), (d_eta,), has_aux=True)
        return statistics, x, slope

    return look


def raw_size(case: Case) -> int:
    return ravel_pytree(case.family.zeros())[0].shape[0]
