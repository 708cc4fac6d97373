"""Bayesian linear regression with projection, from two private sums (004 I, Algorithm 2; SPEC 4).

1. Rows are pulled back to assumed public bounds, `|x_j| <= b_j` and `|y| <= b_y`.
2. One private sum, `bounded_squares`, gives the marginal standard deviations.
3. Thresholds `c_j = p_x std_j` and `c_y = p_y std_y`, never above the bounds, come from a grid search on synthetic
   rows, and rows are projected onto them. Less noise is needed for a smaller range; what is cut off is a bias. The
   search weighs one against the other.
4. One private sum, `bounded_moments`, gives `sum x x'` and `sum x y` of the projected rows; the rest is arithmetic.

Sensitivity. In units of its thresholds a row is `(z, u)` with `|z|^2 <= D`, D the number of features, and `|u| <= 1`.
The second sum is that of the outer products of `v = (z, w u)` with a public weight w: positive semi-definite, with
Frobenius norm `|v|^2 <= D + w^2`, so that substitution moves it by at most `sqrt(2) (D + w^2)`. The paper bounds the
upper triangle of `z z'` and `z u` entry by entry, by `D (2 D - 1) + 4 D` squared. Its vector is the part of ours with
`w^2 = 1/2` and smaller entries off the diagonal, so that ours, `2 (D + 1/2)^2 = 2 D^2 + 2 D + 1/2`, is never the larger
one, holds for any thresholds and halves the noise variance off the diagonal. (`sum y^2` comes with it and is not used.)

Where we differ: the posterior knows about the noise (UNCERTAINTY F1, F2) and about the bias of the projection on
synthetic rows; the paper's ignores both. Squares are centred, so that their sum moves less; noisy moments
are shrunk towards their mean and raised to their own noise, where the paper sets negative ones to a constant.
Categories and the intercept keep their bounds: projecting a feature of two values only rescales it. Synthetic rows have
half of the target's variance explained (the paper: d / (d + 1) of it) and thresholds that are wrong by as much as noise
makes them, and the search may decide against projecting. Standard deviations are those around the public typical
values: nothing is centred by rows.

Guarantees:
    - a released moment moves by no more than is priced, and that is at most the paper's bound
    - thresholds depend on public sizes and on the first release only
    - without noise and within the thresholds it is the exact posterior
    - intervals cover where rows are about normal, projected or not
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from silobayes.inference.noisy_statistics import GaussianPosterior, noise_aware_posterior
from silobayes.privacy.clipping import Bounded, clip, clip_places, general, psd, unpack_symmetric

# The paper's grid, in standard deviations, and three points beyond it that hardly project.
_GRID = (*np.linspace(0.1, 2.1, 20).tolist(), 3.0, 4.0, 6.0)
_REPEATS = 10
# Sums over more rows are these rows' sums, scaled.
_SYNTHETIC_ROWS = 2000
_EXPLAINED = 0.5


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a row can hold, as a study declares it.

    Attributes:
        features: The largest |x_j| of each feature.
        target: The largest |y|.
        projected: Which features may be projected: numbers; not categories, not the intercept.
        others_square: The largest sum of squares of the other features, each in units of its bound.
    """

    features: tuple[float, ...]
    target: float
    projected: tuple[bool, ...]
    others_square: float

    @property
    def largest_square(self) -> float:
        """D: the largest |z|^2 of a row in units of its bounds or thresholds."""
        return sum(self.projected) + self.others_square

    @property
    def all(self) -> np.ndarray:
        """Of the features, then of the target."""
        return np.array([*self.features, self.target])

    @property
    def target_weight(self) -> float:
        """How large a target at its threshold counts beside D: w with w^2 = k D.

        The noise of the score `sum z (u - z'b)` has variance `(1 + k)^2 (D / k + D^2 |b|^2)`; this k is its minimum
        where half of the target's variance is explained and thresholds are the same number of stds.
        """
        dim = len(self.features)
        return float(np.sqrt((np.sqrt(1.0 + 4.0 * dim) - 1.0) / (2.0 * dim) * self.largest_square))

    @property
    def moment_norm(self) -> float:
        """The largest norm of a row's term in the second sum."""
        return self.largest_square + self.target_weight**2


def bounded_squares(x: np.ndarray, y: np.ndarray, bounds: Bounds) -> Bounded:
    """The first sum: squares of the projected features and of the target, in units of their bounds, minus one half.

    Entries lie in [-1/2, 1/2], so that substitution moves the sum by at most the root of their number; of squares that
    are only known to be in a ball it would be sqrt(2) times that.
    """
    chosen = [*bounds.projected, True]
    squares = np.square(_in_units(x, y, bounds.all)[:, chosen]) - 0.5
    return clip(general(squares), float(np.sqrt(squares.shape[1])) / 2)


def marginal_stds(released: np.ndarray, noise_std: float, num_rows: int, bounds: Bounds) -> np.ndarray:
    """Standard deviations of the features and of the target around zero, from the first release.

    The noise hits all of them alike, so the features' moments are shrunk towards their mean by as much as noise
    explains their differences (as UNCERTAINTY F2 does). A moment below its own noise is raised to it: a threshold
    that is too wide costs noise, one that is too narrow cuts rows off.
    """
    moments = released / num_rows + 0.5
    noise = noise_std / num_rows
    features, target = moments[:-1], moments[-1]
    floor = noise
    if len(features) > 1:
        signal = max(0.0, float(np.var(features, ddof=1)) - noise**2)
        weight = signal / (signal + noise**2)
        features = features.mean() + weight * (features - features.mean())
        floor = noise * np.sqrt(weight + (1.0 - weight) / len(features))
    roots = np.ones(len(bounds.features) + 1)
    roots[[*bounds.projected, True]] = np.sqrt(np.clip([*np.maximum(features, floor), max(target, noise)], 0.0, 1.0))
    return roots * bounds.all


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Thresholds in standard deviations, and the root mean squared error of a coefficient that they cause.

    `bias` is in units of the thresholds, like the coefficients of projected rows.
    """

    features: float
    target: float
    bias: float


def thresholds(stds: np.ndarray, projection: Projection, bounds: Bounds) -> np.ndarray:
    """The box that rows are projected onto: so many standard deviations of features and target, within the bounds."""
    reach = np.where(bounds.projected, projection.features * stds[:-1], np.inf)
    return np.minimum([*reach, projection.target * stds[-1]], bounds.all)


def choose_projection(
    stds: np.ndarray, first_noise: float, second_noise: float, num_rows: int, bounds: Bounds, prior_stddev: float
) -> Projection:
    """The best projection for a study with these marginal stds and these noises (stds of the noise on the two sums)."""
    scaled = (stds / bounds.all)[[*bounds.projected, True]]
    # std = sqrt(moment), so its relative error is half of that of the moment; the root mean square of all of them.
    std_error = float(np.sqrt(np.mean((first_noise / num_rows / (2 * scaled**2)) ** 2)))
    prior_precision = float(np.mean((stds[-1] / (stds[:-1] * prior_stddev)) ** 2))
    # Rounded to powers of two: few searches for many runs, and the optimum is flat.
    rounded = [float(2.0 ** np.rint(np.log2(value))) for value in (std_error, prior_precision)]
    return search(num_rows, bounds, second_noise, std_error=min(rounded[0], 0.5), prior_precision=rounded[1])


@lru_cache(maxsize=1024)
def search(num_rows: int, bounds: Bounds, noise_std: float, *, std_error: float, prior_precision: float) -> Projection:
    """The projection with the least expected squared error on synthetic rows of this number, dimension and noise.

    `x ~ N(0, I)`, `y = x'b + e` with unit variance. Thresholds are so many stds, each with a relative error of
    `std_error`. The error of the posterior mean, against least squares on the same rows, is that of its projected
    statistics plus that of noise with `noise_std` on the second sum. No row of the study is seen.
    """
    rng = np.random.default_rng(0)
    dim, size = len(bounds.features), min(num_rows, _SYNTHETIC_ROWS)
    grid = np.array(_GRID)
    errors, biases = np.zeros((2, len(grid), len(grid)))
    cross_variance = noise_std**2 / (2 * bounds.target_weight**2)
    for _ in range(_REPEATS):
        x, truth = rng.normal(size=(size, dim)), rng.normal(size=dim)
        truth *= np.sqrt(_EXPLAINED / np.sum(truth**2))
        y = x @ truth + np.sqrt(1.0 - _EXPLAINED) * rng.normal(size=size)
        exact = np.linalg.lstsq(x, y, rcond=None)[0]
        wrong = np.maximum(1.0 + std_error * rng.normal(size=dim + 1), 0.1)
        targets = grid * wrong[-1]
        u = np.clip(y[:, None] / targets, -1.0, 1.0)
        for k, width in enumerate(grid):
            features = width * wrong[:-1]
            z = np.clip(x / features, -1.0, 1.0)
            values, vectors = np.linalg.eigh(num_rows / size * z.T @ z)
            values, cross = values[:, None], vectors.T @ (num_rows / size * z.T @ u)
            scale = targets / features[:, None]  # of coefficients, from units of thresholds to their own
            scale_square = np.mean(scale**2, axis=0)
            bias_square = np.mean((scale * (vectors @ (cross / values)) - exact[:, None]) ** 2, axis=0)
            noise = cross_variance + noise_std**2 / 2 * (1 + 1 / dim) * _EXPLAINED / scale_square
            omega = (1.0 - _EXPLAINED) / targets**2 * values + noise
            shrinkage = values / (values**2 + omega * prior_precision * scale_square)
            answer = scale * (vectors @ (shrinkage * cross))
            errors[k] += np.sum((answer - exact[:, None]) ** 2, axis=0)
            errors[k] += np.sum(shrinkage**2, axis=0) * noise * scale_square
            biases[k] += bias_square / _REPEATS
    best = np.unravel_index(np.argmin(errors), errors.shape)
    features, target = float(grid[best[0]]), float(grid[best[1]])
    return Projection(features=features, target=target, bias=float(np.sqrt(biases[best])) * features / target)


def bounded_moments(x: np.ndarray, y: np.ndarray, box: np.ndarray, bounds: Bounds) -> Bounded:
    """The second sum: outer products of the projected rows, in units of their thresholds `box`."""
    rows = _in_units(x, y, box)
    rows[:, -1] *= bounds.target_weight
    return clip(psd(rows), bounds.moment_norm)


def posterior(
    released: np.ndarray,
    noise_std: float,
    box: np.ndarray,
    bounds: Bounds,
    *,
    bias: float,
    residual_stddev: float,
    prior_stddev: float,
) -> GaussianPosterior:
    """The posterior of the coefficients, in the features' own units, from the second release.

    `bias` is that of the `Projection`, 0 without one: what it bends counts as one more noise on the score.
    """
    moments, weight = unpack_symmetric(released), bounds.target_weight
    average = max(float(np.trace(moments[:-1, :-1])) / len(bounds.features), 0.0)
    return _posterior(
        moments[:-1, :-1],
        moments[:-1, -1] / weight,
        gram_std=noise_std,
        cross_std=float(np.hypot(noise_std / (np.sqrt(2.0) * weight), average * bias)),
        box=box,
        residual_stddev=residual_stddev,
        prior_stddev=prior_stddev,
    )


def bounded_rows(x: np.ndarray, y: np.ndarray, bounds: Bounds) -> Bounded:
    """Input perturbation: each row, in units of its bounds and in a place of its own."""
    return clip_places(general(_in_units(x, y, bounds.all)), float(np.sqrt(bounds.largest_square + 1.0)))


def perturbed_posterior(
    noised: np.ndarray, num_rows: int, noise_std: float, bounds: Bounds, *, residual_stddev: float, prior_stddev: float
) -> GaussianPosterior:
    """The posterior from rows that were noised one by one: n times the noise of a sum, and its square.

    `noised` are the second moments of the noised rows. The noise adds `num_rows noise_std^2 I`, which is subtracted.
    What is left has, for entry (j, k), variance `noise_std^2 (A_jj + A_kk) + num_rows noise_std^4`, twice that on the
    diagonal; A_jj is taken as the average. That the errors of `sum z z'` and `sum z u` go together is ignored.
    """
    size = len(noised)
    moments = noised - num_rows * noise_std**2 * np.eye(size)
    average = max(float(np.trace(moments[:-1, :-1])) / (size - 1), 0.0)
    beyond = num_rows * noise_std**4
    return _posterior(
        moments[:-1, :-1],
        moments[:-1, -1],
        gram_std=float(np.sqrt(4 * noise_std**2 * average + 2 * beyond)),
        cross_std=float(np.sqrt(noise_std**2 * (average + max(moments[-1, -1], 0.0)) + beyond)),
        box=bounds.all,
        residual_stddev=residual_stddev,
        prior_stddev=prior_stddev,
    )


def _posterior(
    gram: np.ndarray,
    cross: np.ndarray,
    *,
    gram_std: float,
    cross_std: float,
    box: np.ndarray,
    residual_stddev: float,
    prior_stddev: float,
) -> GaussianPosterior:
    scale = box[-1] / box[:-1]  # of coefficients, from units of the box to the features' own
    answer = noise_aware_posterior(
        gram,
        cross,
        gram_std=gram_std,
        cross_std=cross_std,
        # A projected target is at most 1, and so is what is left of it.
        residual_variance=min(1.0, (residual_stddev / box[-1]) ** 2),
        prior_precision=(scale / prior_stddev) ** 2,
    )
    return GaussianPosterior(
        mean=answer.mean * scale,
        covariance=answer.covariance * np.outer(scale, scale),
        privacy_share=answer.privacy_share,
    )


def _in_units(x: np.ndarray, y: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Rows `(x, y)` projected onto the box and divided by it; what is not a number stays so, and counts as zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        rows = np.column_stack([np.asarray(x, np.float64), np.asarray(y, np.float64)]) / box
        return np.clip(rows, -1.0, 1.0)
