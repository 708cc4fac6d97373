"""The exact factor of a linear regression against float64 algebra and against the optimiser."""

import jax
import numpy as np
import pytest

from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.conjugate import full_factor, mean_field_factor
from silobayes.inference.rows import Rows, pad
from silobayes.inference.vi import maximise
from silobayes.models.linear_regression import LinearRegression
from tests.inference.oracles import assert_close

DIM = 4
MODEL = LinearRegression(num_features=DIM, noise_stddev=0.5, prior_stddev=2.0)
FULL, FIELD = FullGaussian(dimension=DIM), MeanFieldGaussian(event_shape=(DIM,))


def simulate(num_rows: int = 60):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, DIM)) @ (np.eye(DIM) + 0.3)
    return x.astype(np.float32), (x @ [1.0, -1.0, 0.5, 0.0] + 0.5 * rng.normal(size=num_rows)).astype(np.float32)


@pytest.mark.parametrize("num_silos", [1, 3, 10])
def test_prior_times_factors_is_the_exact_posterior_whatever_the_split_into_silos(num_silos):
    x, y = simulate()
    eta = MODEL.prior_eta(FULL)
    for rows in np.array_split(np.arange(len(x)), num_silos):
        eta = eta + full_factor(MODEL, pad(x[rows], y[rows], 64))
    precision = x.T.astype(float) @ x / 0.25 + np.eye(DIM) / 4
    mean, covariance = FULL.to_standard(eta)
    np.testing.assert_allclose(mean, np.linalg.solve(precision, x.T.astype(float) @ y / 0.25), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(covariance, np.linalg.inv(precision), rtol=1e-4, atol=1e-7)


def test_the_factor_is_that_of_the_optimised_free_energy():
    rows = pad(*simulate(), 64)
    key = jax.random.key(0)
    for family, factor in ((FULL, full_factor(MODEL, rows)), (FIELD, None)):
        cavity = 0.5 * MODEL.prior_eta(family)
        exact = cavity + (mean_field_factor(MODEL, rows, cavity) if factor is None else factor)
        start = MODEL.prior_eta(family)
        solved = maximise(MODEL, family, key, cavity, start, rows, tempering=1.0, num_steps=1500, step_size=0.05)
        assert_close(solved, exact, rtol=1e-3, atol=1e-2)


def test_padding_rows_change_nothing():
    x, y = simulate()
    padded = pad(x, y, 64)
    garbage = Rows(x=padded.x.at[60:].set(np.nan), y=padded.y.at[60:].set(np.inf), present=padded.present)
    for rows in (padded, garbage):
        assert_close(full_factor(MODEL, rows), full_factor(MODEL, pad(x, y, 60)), rtol=1e-5, atol=1e-4)
