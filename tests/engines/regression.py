"""A conjugate regression, for which the exact posterior is known, and a door without noise."""

from types import SimpleNamespace

import numpy as np

from silobayes.data.silo import Silo, concatenate
from silobayes.models.linear_regression import LinearRegression
from tests.engines.harness import Privatise, Settings

PLAIN = Settings(privatise=Privatise.NONE, rounds=1, damping=1.0, steps=10, step_size=0.05)
DIM, NOISE = 4, 0.5
REGRESSION = LinearRegression(num_features=DIM, noise_stddev=NOISE, prior_stddev=2.0)


def regression_silos(sizes) -> list[Silo]:
    rng = np.random.default_rng(5)
    silos = []
    for k, size in enumerate(sizes):
        x = rng.normal(size=(size, DIM))
        silos.append(Silo(name=str(k), x=x, y=x @ np.array([1.0, -2.0, 0.5, 0.0]) + NOISE * rng.normal(size=size)))
    return silos


def exact_regression(silos):
    whole = concatenate("all", silos)
    x, y = whole.x.astype(float), whole.y.astype(float)
    covariance = np.linalg.inv(x.T @ x / NOISE**2 + np.eye(DIM) / 2.0**2)
    return covariance @ x.T @ y / NOISE**2, covariance


class ExactDoor:
    """Lets the bounded sum out without noise: what a method does when privacy costs nothing."""

    def release(self, mechanism, bounded):
        return SimpleNamespace(blocks=bounded.decode(bounded.total), stddevs=(1e-9, 1e-9))
