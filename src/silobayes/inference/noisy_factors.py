"""The posterior that a noisy sum of factors stands for (UNCERTAINTY F1 at t = 0; F2 for matrices).

Perturbing methods release the sum of the silos' factors with noise of a known law. Read as they are, the natural
parameters of a rarely seen coefficient are mostly noise, and a mean `linear / precision` with a precision near zero
runs away. Read as an observation, `linear = precision theta + error`, whose error has

    the rows' own variance (the precision, in a well-specified model), that of the noise on `linear`, and that of the
    noise on `precision` times E[theta^2],

the posterior is closed-form given E[theta^2], and the two are iterated. Where the noise on `linear` is large it is the
prior. Where that on `precision` dominates, its mean is the prior's but it is too narrow: a small theta explains any
product with a noisy precision, so that E[theta^2] shrinks together with the answer.
"""

import dataclasses

import numpy as np

from silobayes.families import FullGaussianEta
from silobayes.inference.noisy_statistics import noise_aware_posterior
from silobayes.models.base import GaussianEta

# As in `noisy_statistics`: the damped fixed point is reached well within this many steps.
_ITERATIONS = 40
_STEP_SIZE = 0.7
_TINY = 1e-12


def noise_aware(eta: GaussianEta, eta_p: GaussianEta, *, linear_std: float, quadratic_std: float) -> GaussianEta:
    """A proper posterior from a raw sum of prior and factors, all as host arrays.

    Args:
        eta: Prior and factors, with noise.
        eta_p: The prior, proper.
        linear_std: Of the noise on each entry of the linear part.
        quadratic_std: The same of the (packed) quadratic part.

    Guarantees:
        - without noise it is `eta`
        - where noise on the linear part is large it is the prior
    """
    linear_p, quadratic_p = (np.asarray(leaf, dtype=np.float64) for leaf in (eta_p.linear, eta_p.quadratic))
    cross, curvature = np.asarray(eta.linear) - linear_p, -2 * (np.asarray(eta.quadratic) - quadratic_p)
    prior, curvature_std = -2 * quadratic_p, 2 * quadratic_std
    if isinstance(eta, FullGaussianEta):
        answer = noise_aware_posterior(
            curvature,
            cross,
            gram_std=curvature_std,
            cross_std=linear_std,
            residual_variance=1.0,
            prior_precision=prior,
            prior_linear=linear_p,
        )
        precision = np.linalg.inv(answer.covariance)
        return dataclasses.replace(eta, linear=precision @ answer.mean, quadratic=-0.5 * precision)
    # A curvature below its own noise says nothing.
    curvature = np.maximum(curvature, max(curvature_std, _TINY))
    mean, variance = linear_p / prior, 1.0 / (prior + curvature)
    for _ in range(_ITERATIONS):
        error = curvature + linear_std**2 + curvature_std**2 * (mean**2 + variance)
        new_variance = 1.0 / (curvature**2 / error + prior)
        new_mean = new_variance * (curvature / error * cross + linear_p)
        mean = mean + _STEP_SIZE * (new_mean - mean)
        variance = variance + _STEP_SIZE * (new_variance - variance)
    return dataclasses.replace(eta, linear=mean / variance, quadratic=-0.5 / variance)
