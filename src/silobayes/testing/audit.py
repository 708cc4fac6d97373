"""A small auditor: lower bounds on epsilon from what a mechanism puts out.

It runs the mechanism on two neighbours, many times each, and looks for a threshold that tells them apart. Half of the
runs choose the threshold, the other half bound its error rates (Clopper-Pearson), so the bound holds with confidence
1 - alpha whatever the mechanism does. A lower bound above the claim refutes the claim; one below it proves nothing.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from silobayes.privacy.accounting import gaussian


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Lower bounds, each valid with probability 1 - alpha.

    `epsilon` needs no assumption. `mu` is the separation of two unit Gaussians that would be told apart this well and
    `gaussian_epsilon` its epsilon at delta: for a mechanism that claims to be at most as telling as a Gaussian.
    """

    epsilon: float
    mu: float
    gaussian_epsilon: float

    def refutes(self, claimed_epsilon: float) -> bool:
        """Whether either bound exceeds the claim."""
        return not max(self.epsilon, self.gaussian_epsilon) <= claimed_epsilon


def audit(scores: np.ndarray, other_scores: np.ndarray, *, delta: float, alpha: float) -> Audit:
    """Bounds from one number per run on each of two neighbours (for noise on a sum: its projection on the change).

    Args:
        scores: One score per run on the first neighbour.
        other_scores: The same on the second.
        delta: The delta of the claim; at 0 only `epsilon` is bounded, no Gaussian claims that.
        alpha: Probability that a bound is wrong; divided over the two directions.

    Guarantees:
        The bound exceeds a true claim with probability at most alpha.
    """
    candidates = []
    for first, second in ((scores, other_scores), (other_scores, scores)):
        for sign in (1.0, -1.0):
            candidates.append(_one_direction(sign * first, sign * second, delta, alpha / 4))
    epsilon = max(0.0, *(candidate[0] for candidate in candidates))
    mu = max(0.0, *(candidate[1] for candidate in candidates))
    return Audit(epsilon=epsilon, mu=mu, gaussian_epsilon=gaussian.epsilon(mu, delta) if mu > 0 < delta else 0.0)


def _one_direction(first: np.ndarray, second: np.ndarray, delta: float, alpha: float) -> tuple[float, float]:
    """Bounds from events {score >= threshold}, more likely under `first`; each threshold is chosen on its own half."""
    half_first, half_second = len(first) // 2, len(second) // 2
    thresholds = np.unique(np.quantile(np.r_[first[:half_first], second[:half_second]], np.linspace(0.0, 1.0, 512)))
    chosen = [
        _bounds(first[:half_first], second[:half_second], threshold, delta, alpha / 2) for threshold in thresholds
    ]
    best_epsilon = thresholds[int(np.argmax([bounds[0] for bounds in chosen]))]
    best_mu = thresholds[int(np.argmax([bounds[1] for bounds in chosen]))]
    epsilon = _bounds(first[half_first:], second[half_second:], best_epsilon, delta, alpha / 2)[0]
    mu = _bounds(first[half_first:], second[half_second:], best_mu, delta, alpha / 2)[1]
    return epsilon, mu


def _bounds(first: np.ndarray, second: np.ndarray, threshold: float, delta: float, alpha: float) -> tuple[float, float]:
    hits, misfires = int(np.sum(first >= threshold)), int(np.sum(second >= threshold))
    hit_rate = stats.beta.ppf(alpha / 2, hits, len(first) - hits + 1) if hits > 0 else 0.0
    misfire_rate = (
        stats.beta.ppf(1 - alpha / 2, misfires + 1, len(second) - misfires) if misfires < len(second) else 1.0
    )
    epsilon = math.log((hit_rate - delta) / misfire_rate) if hit_rate > delta else 0.0
    return epsilon, float(stats.norm.ppf(hit_rate) - stats.norm.ppf(misfire_rate)) if 0 < hit_rate < 1 else 0.0
