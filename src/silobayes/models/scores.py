"""Centred scores of regressions: what a row says of its linear predictors, with mean zero whatever its label is.

A row's linear predictors f (one, or one for each class) are Gaussian under the present q, with mean m and variance v.
A score is a bounded function r(y) minus its mean under the model and q, so that clipping by its bound over all labels
(never by the label that a row has) leaves it unbiased (UNCERTAINTY F7). With f* the row's true predictors,

    E[r | f*] is about slope (f* - m),    Var[r | f*] is at most about variance

Slopes are averages over q: of all linear functions of f* theirs is the closest to E[r | f*] on average over q
(statistical linearisation), so that a wide q takes long steps and a curve that bends does not bias them.

Everything in float64 on the host: rows are those of one silo.

Guarantees:
    - a score has mean zero under the model at the centre
    - no label has a score larger than the bound
    - slopes are those of the expected score
    - variances are those of the score
"""

import abc
import math
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

# Of a standard normal; the logistic curve is averaged right to 1e-4 up to a standard deviation of 2.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(12)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
# Residuals beyond so many standard deviations are pulled back.
_REACH = 2.0
# Rates are exponentials: averaged over a wide q they are those of its farthest end, and a step from there is noise.
_WIDEST_LOG_RATE = 1.0
_LARGEST_LOG_RATE = 20.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """Of n rows with k predictors.

    Attributes:
        residual: (n, k) scores.
        bound: (n,) the largest norm of a row's score over all labels.
        slope: (n, k, k) PSD.
        variance: (n,) sum of the variances of the k scores.
    """

    residual: np.ndarray
    bound: np.ndarray
    slope: np.ndarray
    variance: np.ndarray


class AbstractCentredScore(abc.ABC):
    """Of one model: `outputs` predictors a row; `saturates` if slopes vanish far out: J is then small along theta.

    `finds_noise`: targets and coefficients come in units of a noise that rounds find out.
    """

    outputs: int
    saturates: bool
    finds_noise: bool = False

    @abc.abstractmethod
    def __call__(self, mean: np.ndarray, covariance: np.ndarray, y: np.ndarray) -> Score:
        """Of rows whose predictors have such means (n, k) and covariances (n, k, k) under q."""

    @property
    @abc.abstractmethod
    def typical_bound(self) -> float:
        """A score's bound where nothing is known of the row: what clip norms are in units of."""

    @property
    @abc.abstractmethod
    def typical_slope(self) -> np.ndarray:
        """(k, k): slopes there."""

    @property
    def typical_predictor(self) -> float:
        """Where the intercept starts."""
        return 0.0


def _single(residual: np.ndarray, bound: np.ndarray, slope: np.ndarray, variance: np.ndarray) -> Score:
    return Score(residual=residual[:, None], bound=bound, slope=slope[:, None, None], variance=variance)


@dataclass(frozen=True)
class LogisticScore(AbstractCentredScore):
    """`y - E[p]`."""

    outputs = 1
    saturates = True

    def __call__(self, mean: np.ndarray, covariance: np.ndarray, y: np.ndarray) -> Score:
        """See `AbstractCentredScore`."""
        f = mean + np.sqrt(covariance[:, 0]) * _NODES
        p = special.expit(f)
        slope = np.sum(p * (1 - p) * _WEIGHTS, axis=1)
        p = np.sum(p * _WEIGHTS, axis=1)
        return _single(y - p, np.maximum(p, 1 - p), slope, p * (1 - p))

    @property
    def typical_bound(self) -> float:
        """See `AbstractCentredScore`."""
        return 1.0

    @property
    def typical_slope(self) -> np.ndarray:
        """See `AbstractCentredScore`."""
        return np.array([[0.25]])


@dataclass(frozen=True)
class LinearScore(AbstractCentredScore):
    """The residual over the noise variance, pulled back to two standard deviations of what q and noise leave open."""

    noise_stddev: float
    outputs = 1
    saturates = False

    def __call__(self, mean: np.ndarray, covariance: np.ndarray, y: np.ndarray) -> Score:
        """See `AbstractCentredScore`."""
        precision = self.noise_stddev**-2
        stddev = np.sqrt(self.noise_stddev**2 + covariance[:, 0, 0])
        reach = _REACH * stddev
        residual = np.clip(y - mean[:, 0], -reach, reach)
        slope = np.full(len(y), precision * _INSIDE)
        return _single(residual * precision, reach * precision, slope, _CLIPPED_SQUARE * (stddev * precision) ** 2)

    @property
    def typical_bound(self) -> float:
        """See `AbstractCentredScore`."""
        return _REACH / self.noise_stddev

    @property
    def typical_slope(self) -> np.ndarray:
        """See `AbstractCentredScore`."""
        return np.array([[_INSIDE * self.noise_stddev**-2]])


# Of Z ~ N(0, 1) pulled back to the reach: how often it is not, and its mean square.
_INSIDE = float(2 * stats.norm.cdf(_REACH) - 1)
_CLIPPED_SQUARE = float(_INSIDE - 2 * _REACH * stats.norm.pdf(_REACH) + _REACH**2 * (1 - _INSIDE))


@dataclass(frozen=True)
class UnitNoiseScore(LinearScore):
    """The same where targets and coefficients are in units of the noise that is thought to be there.

    Squared residuals, pulled back likewise and centred, say how far off that noise is: their mean is about
    `NOISE_SLOPE` times its logarithm's error.
    """

    noise_stddev: float = 1.0
    finds_noise = True

    def noise_residual(self, mean: np.ndarray, covariance: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Of each row; at most `NOISE_BOUND`, whatever its label."""
        variance = 1.0 + covariance[:, 0, 0]
        return np.minimum((y - mean[:, 0]) ** 2 / variance, _REACH**2) - _CLIPPED_SQUARE


NOISE_BOUND = _REACH**2
# Of min(Z^2, reach^2): the derivative of its mean by the logarithm of Z's scale, and its variance.
_FOURTH = float(stats.norm.expect(lambda z: z**4, lb=-_REACH, ub=_REACH)) + _REACH**4 * (1 - _INSIDE)
NOISE_SLOPE = 2.0 * (_CLIPPED_SQUARE - _REACH**2 * (1 - _INSIDE))
NOISE_VARIANCE = _FOURTH - _CLIPPED_SQUARE**2


@dataclass(frozen=True)
class CountScore(AbstractCentredScore):
    """`y - rate`, pulled back to two standard deviations, minus its mean, times d log-likelihood / d rate.

    Poisson: `concentration` is infinite. Negative binomial: the variance is `rate + rate^2 / concentration`, and the
    score is divided by `1 + rate / concentration`, as that of the likelihood is.
    """

    concentration: float
    typical_rate: float
    outputs = 1
    saturates = False

    def __call__(self, mean: np.ndarray, covariance: np.ndarray, y: np.ndarray) -> Score:
        """See `AbstractCentredScore`."""
        spread = np.minimum(covariance[:, 0, 0], _WIDEST_LOG_RATE)
        rate = np.exp(np.clip(mean[:, 0] + spread / 2, -_LARGEST_LOG_RATE, _LARGEST_LOG_RATE))
        weight = 1.0 / (1.0 + rate / self.concentration)
        reach = np.maximum(1.0, _REACH * np.sqrt(rate / weight))
        moments = self._moments(rate, reach)
        residual = np.clip(y - rate, -reach, reach) - moments.mean
        # d E[r] / d log rate is E[r (y - rate)] times the weight of the score.
        return _single(
            weight * residual,
            weight * (reach + np.abs(moments.mean)),
            weight**2 * moments.product,
            weight**2 * np.maximum(moments.square - moments.mean**2, 0.0),
        )

    @property
    def typical_bound(self) -> float:
        """See `AbstractCentredScore`."""
        weight = 1.0 / (1.0 + self.typical_rate / self.concentration)
        return weight * max(1.0, _REACH * math.sqrt(self.typical_rate / weight))

    @property
    def typical_predictor(self) -> float:
        """See `AbstractCentredScore`."""
        return math.log(self.typical_rate)

    @property
    def typical_slope(self) -> np.ndarray:
        """See `AbstractCentredScore`."""
        rate = np.array([self.typical_rate])
        score = self(np.log(rate)[:, None], np.zeros((1, 1, 1)), rate)
        return score.slope[0]

    def _moments(self, rate: np.ndarray, reach: np.ndarray) -> "_Moments":
        """Of the pulled back residual: exact, by the distribution's own recursion y p(y) ~ p(y - 1)."""
        first, last = np.ceil(rate - reach), np.floor(rate + reach)
        inside = [self._below(last - j, rate, j) - self._below(first - 1 - j, rate, j) for j in range(3)]
        above = [1.0 - self._below(last - j, rate, j) for j in range(2)]
        below = [self._below(first - 1 - j, rate, j) for j in range(2)]
        # E[y 1], E[y (y - 1) 1] are rates times probabilities of shifted laws.
        shape = 1.0 + 1.0 / self.concentration
        mean, factorial = rate * inside[1], shape * rate**2 * inside[2]
        square = factorial + mean - 2 * rate * mean + rate**2 * inside[0]
        return _Moments(
            mean=mean - rate * inside[0] + reach * (above[0] - below[0]),
            square=square + reach**2 * (above[0] + below[0]),
            product=square + reach * rate * ((above[1] - above[0]) - (below[1] - below[0])),
        )

    def _below(self, count: np.ndarray, rate: np.ndarray, shift: int) -> np.ndarray:
        """P(Y <= count) for the law that is y (y - 1) ... p(y), `shift` factors, moved down by as many."""
        count = np.where(count < 0, -1.0, count)
        if np.isinf(self.concentration):
            probability = special.pdtr(np.maximum(count, 0.0), rate)
        else:
            success = self.concentration / (self.concentration + rate)
            probability = special.betainc(self.concentration + shift, np.maximum(count, 0.0) + 1.0, success)
        return np.where(count < 0, 0.0, probability)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Moments:
    """E[r], E[r^2] and E[r (y - rate)] of the pulled back residual r."""

    mean: np.ndarray
    square: np.ndarray
    product: np.ndarray


@dataclass(frozen=True)
class SoftmaxScore(AbstractCentredScore):
    """The label's indicator minus class probabilities; averages are over 2 k points with the moments of q."""

    outputs: int
    saturates = True

    def __call__(self, mean: np.ndarray, covariance: np.ndarray, y: np.ndarray) -> Score:
        """See `AbstractCentredScore`."""
        k = self.outputs
        # Whoever fails on a row that is not finite tells that it is there; its mean is NaN, so that it counts nothing.
        covariance = np.where(np.isfinite(covariance).all(axis=(1, 2), keepdims=True), covariance, 0.0)
        values, vectors = np.linalg.eigh(covariance)
        steps = np.swapaxes(vectors * np.sqrt(np.maximum(values, 0.0) * k)[:, None, :], 1, 2)
        points = np.concatenate([mean[:, None] + steps, mean[:, None] - steps], axis=1)
        p = special.softmax(points, axis=2)
        average = p.mean(axis=1)
        # diag(p) - p p', made of what it is off the diagonal: PSD to rounding of its own size, however small it is.
        beside = np.einsum("nsk,nsl->nkl", p, p) / (2 * k) * (1.0 - np.eye(k))
        slope = beside.sum(axis=2)[:, :, None] * np.eye(k) - beside
        square = np.sum(average**2, axis=1)
        # |e_y - p|^2 = 1 - 2 p_y + |p|^2 is largest for the least probable class.
        bound = np.sqrt(1.0 - 2.0 * average.min(axis=1) + square)
        residual = (y[:, None] == np.arange(k)) - average
        return Score(residual=residual, bound=bound, slope=slope, variance=1.0 - square)

    @property
    def typical_bound(self) -> float:
        """See `AbstractCentredScore`."""
        return 1.0

    @property
    def typical_slope(self) -> np.ndarray:
        """See `AbstractCentredScore`."""
        k = self.outputs
        return (np.eye(k) - 1.0 / k) / k
