"""Linear regression from noisy statistics: exact without noise, honest with it."""

import numpy as np
import pytest
from scipy import stats

from silobayes.inference.noisy_statistics import (
    bounded_statistics,
    noise_aware_posterior,
    pool,
    shrink,
)
from silobayes.privacy.clipping import pack_symmetric, unpack_symmetric
from silobayes.privacy.door import Door
from silobayes.privacy.mechanisms import GaussianMechanism
from silobayes.privacy.relation import Relation, Unit
from silobayes.testing import FreeAccount, check_method, neighbours
from tests.inference.regression_cases import exact_posterior, regression_study

RESIDUAL_VARIANCE, PRIOR = 0.0625, 1.0


def test_without_noise_it_is_the_conjugate_posterior():
    study = regression_study(1)
    x, y = np.concatenate([s.x for s in study.silos]), np.concatenate([s.y for s in study.silos])
    known = {"residual_variance": RESIDUAL_VARIANCE, "prior_precision": PRIOR}
    aware = noise_aware_posterior(x.T @ x, x.T @ y, gram_std=1e-9, cross_std=1e-9, **known)
    exact = exact_posterior(x.T @ x, x.T @ y, **known)
    np.testing.assert_allclose(aware.mean, exact.mean, rtol=1e-5)
    np.testing.assert_allclose(aware.covariance, exact.covariance, rtol=1e-4, atol=1e-9)
    assert np.all(aware.privacy_share < 1e-3)


@pytest.mark.parametrize("noise_multiplier", [2.0, 7.0, 25.0])
def test_intervals_cover_with_noise_and_naive_ones_do_not(noise_multiplier):
    """300 simulated studies x 5 coefficients, truth drawn from the prior; 95 % intervals.

    Coefficients of one study are dependent, so the band is that of 300 trials: below it with probability 1e-6 if the
    true coverage is 95 %. Far above 95 % is allowed at the largest noise (the intervals are mostly prior).
    """
    covered, naive_covered = [], []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        study = regression_study(seed, mean_rows=300)
        truth = rng.normal(size=5) * np.sqrt(1 / PRIOR)
        x = np.concatenate([silo.x for silo in study.silos])
        y = x @ truth + np.sqrt(RESIDUAL_VARIANCE) * rng.normal(size=len(x))
        gram_std, cross_std = noise_multiplier * np.sqrt(10), 1.5 * noise_multiplier * np.sqrt(10)
        gram = unpack_symmetric(pack_symmetric(x.T @ x) + gram_std * rng.normal(size=15))
        cross = x.T @ y + cross_std * rng.normal(size=5)
        known = {"residual_variance": RESIDUAL_VARIANCE, "prior_precision": PRIOR}
        aware = noise_aware_posterior(gram, cross, gram_std=gram_std, cross_std=cross_std, **known)
        naive = exact_posterior(gram, cross, **known)
        covered.append(np.mean(np.abs(aware.mean - truth) < 1.96 * aware.stddev))
        with np.errstate(invalid="ignore"):
            naive_covered.append(np.mean(np.abs(naive.mean - truth) < 1.96 * naive.stddev))
    floor = stats.binom.ppf(1e-6, 300, 0.95) / 300
    assert np.mean(covered) > floor
    assert np.mean(naive_covered) < floor


def test_shrinking_keeps_a_clear_matrix_and_floors_a_noisy_one():
    clear = np.diag([500.0, 300.0, 100.0])
    shrunk, variance = shrink(clear, 0.01)
    np.testing.assert_allclose(shrunk, clear, rtol=1e-5)
    assert variance == pytest.approx(1e-4, rel=1e-3)
    noisy, variance = shrink(np.array([[1.0, 5.0], [5.0, -3.0]]), 100.0)
    assert np.linalg.eigvalsh(noisy).min() > 0
    assert variance == 0.0


def release(door, rows):
    return door.release(GaussianMechanism(noise_multiplier=2.0), bounded_statistics(rows["x"], rows["y"], y_bound=1.5))


def test_pooling_adds_variances():
    study = regression_study(3, num_silos=4, mean_rows=50)
    releases = [
        release(Door.open(FreeAccount(Relation.SUBSTITUTE, Unit.ROW)), {"x": silo.x, "y": silo.y})
        for silo in study.silos
    ]
    gram, cross, gram_std, cross_std = pool(releases)
    assert gram.shape == (5, 5)
    assert cross.shape == (5,)
    assert (gram_std, cross_std) == pytest.approx((2.0 * 2.0, 2.0 * 2.0 * 1.5))


@pytest.mark.parametrize("relation", list(Relation))
def test_the_method_passes_record_replay(relation):
    def make_rows(rng):
        return {"x": rng.normal(size=(20, 3)), "y": rng.normal(size=20)}

    def method(rows, door):
        return release(door, rows).blocks

    assert check_method(method, neighbours(np.random.default_rng(1), make_rows, relation, 200)) == 200


def test_without_noise_the_matrix_of_collinear_features_is_left_alone():
    """A floor that noise does not ask for would bend the answer, whatever the budget."""
    collinear = np.array([[100.0, 99.9], [99.9, 100.0]])
    np.testing.assert_allclose(shrink(collinear, 1e-6)[0], collinear, rtol=1e-6)
    floored, _ = shrink(collinear, 5.0)
    assert np.linalg.eigvalsh(floored).min() > 1.0
