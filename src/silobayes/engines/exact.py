"""The Gaussian posterior of a generalised linear model without privacy: what private ones are compared to."""

import equinox as eqx
import jax
import jax.numpy as jnp

from silobayes.families import FullGaussian, FullGaussianEta
from silobayes.inference.newton import maximise_glm
from silobayes.inference.rows import Rows
from silobayes.models.base import AbstractGLM
from silobayes.posteriors import Posterior
from silobayes.runs import claims


def without_privacy(model: AbstractGLM, names: tuple[str, ...], rows: Rows) -> Posterior:
    """The best Gaussian with all correlations, given the rows that are present; it protects nobody."""
    provenance = {"is_private": False, "stamp": claims.NO_PRIVACY}
    family = FullGaussian(dimension=model.dim)
    return Posterior(family=family, eta=_exact(model, rows), names=names, model=model, provenance=provenance)


@eqx.filter_jit
def _exact(model: AbstractGLM, rows: Rows) -> FullGaussianEta:
    family = FullGaussian(dimension=model.dim)
    eta_p, start = model.prior_eta(family), model.start_eta(family, jax.random.key(0))
    eta = maximise_glm(model, family, eta_p, start, rows, jnp.ones(()))
    assert isinstance(eta, FullGaussianEta)
    return eta
