"""A noisy sum of factors read as an observation."""

from typing import Any

import numpy as np
import pytest

from silobayes.families import FullGaussianEta, MeanFieldGaussianEta
from silobayes.inference.noisy_factors import noise_aware

DIM = 4


def eta(kind: Any, linear: np.ndarray, precision: np.ndarray) -> Any:
    return kind(linear=np.asarray(linear, float), quadratic=-0.5 * np.asarray(precision, float))


def prior_of(kind: Any) -> Any:
    precision = np.array([1.0, 2.0, 0.5, 1.0])
    return eta(kind, [0.0, 1.0, 0.0, -0.3], precision if kind is MeanFieldGaussianEta else np.diag(precision))


def factor_of(kind: Any, size: float) -> Any:
    rng = np.random.default_rng(0)
    precision = size * rng.uniform(0.5, 2.0, size=DIM)
    if kind is FullGaussianEta:
        root = rng.normal(size=(DIM, 2 * DIM))
        precision = size * root @ root.T / DIM
    return eta(kind, size * rng.normal(size=DIM), precision)


KINDS = pytest.mark.parametrize("kind", [MeanFieldGaussianEta, FullGaussianEta])


@KINDS
@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_without_noise_it_is_the_sum_itself(kind, size):
    raw = prior_of(kind) + factor_of(kind, size)
    answer = noise_aware(raw, prior_of(kind), linear_std=0.0, quadratic_std=0.0)
    np.testing.assert_allclose(answer.linear, raw.linear, rtol=1e-6, atol=1e-6 * (1 + size))
    np.testing.assert_allclose(answer.quadratic, raw.quadratic, rtol=1e-6, atol=1e-6 * (1 + size))


@KINDS
def test_where_noise_on_the_linear_part_is_large_it_is_the_prior(kind):
    prior = prior_of(kind)
    raw = prior + factor_of(kind, 1.0)
    answer = noise_aware(raw, prior, linear_std=1e5, quadratic_std=1e-3)
    np.testing.assert_allclose(answer.linear, prior.linear, atol=1e-3)
    np.testing.assert_allclose(answer.quadratic, prior.quadratic, rtol=1e-3, atol=1e-3)


@KINDS
def test_a_negative_precision_does_not_run_away(kind):
    prior = prior_of(kind)
    precision = -30.0 * np.ones(DIM) if kind is MeanFieldGaussianEta else -30.0 * np.eye(DIM)
    raw = prior + eta(kind, [60.0, -60.0, 60.0, 0.0], precision)
    answer = noise_aware(raw, prior, linear_std=30.0, quadratic_std=15.0)
    matrix = -2 * answer.quadratic
    mean = answer.linear / matrix if matrix.ndim == 1 else np.linalg.solve(matrix, answer.linear)
    widths = np.sqrt(1 / matrix if matrix.ndim == 1 else np.diag(np.linalg.inv(matrix)))
    assert np.all(np.abs(mean) < 3.0)
    assert np.all((widths > 0) & (widths < 1.5))


@pytest.mark.parametrize("linear_std", [0.0, 5.0, 40.0])
@pytest.mark.parametrize("quadratic_std", [0.0, 5.0])
def test_intervals_of_independent_coefficients_cover(linear_std, quadratic_std):
    """4,000 coefficients: the standard error of a coverage of .95 is .0034; false alarm below 1e-4 at 4 of these."""
    rng = np.random.default_rng(1)
    count = 4000
    theta = rng.normal(size=count)
    precision = rng.uniform(20.0, 400.0, size=count)
    linear = precision * theta + np.sqrt(precision) * rng.normal(size=count) + linear_std * rng.normal(size=count)
    noisy = precision + 2 * quadratic_std * rng.normal(size=count)
    prior = eta(MeanFieldGaussianEta, np.zeros(count), np.ones(count))
    raw = prior + eta(MeanFieldGaussianEta, linear, noisy)
    answer = noise_aware(raw, prior, linear_std=linear_std, quadratic_std=quadratic_std)
    variance = -0.5 / answer.quadratic
    covered = np.abs(answer.linear * variance - theta) < 1.96 * np.sqrt(variance)
    assert abs(covered.mean() - 0.95) < 4 * 0.0034 + 0.01  # the curvature's noise is not Gaussian once multiplied
