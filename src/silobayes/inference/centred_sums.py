"""What a round of centred scores asks of rows: one joint sum at a public Gaussian q of the coefficients (UNCERTAINTY).

In units z = P x that make columns alike, with a score r of slope h (`models.scores`), and for a row of weight w,

    g = sum w r z        J = sum w h z z'       sum w h (z'm) z, and sum w h z where there is an intercept
    trace J              sum w^2 |r|^2 |z|^2 (what scores really vary by)      sum w^2 Var(r) |z|^2 (what they should)

Sensitivity. With the score's bound b, weights are `min(1, C / (|z| b), K / (trace(h) |z|^2))` and know no label. So
|w r z| <= C, |w h z z'| <= w trace(h) |z|^2 <= K, w^2 |r|^2 |z|^2 <= C^2, and Var(r) <= b^2 likewise. The products are
cut at norms that a logistic row never reaches: w h |z'm| |z| <= C max_f p (1 - p) |f| / max(p, 1 - p) < .2785 C where
q is narrow, and C / 2 with 1 for z'm. Of a person the sum over rows takes the place of |z| b and trace(h) |z|^2. What
`privacy.products` clips again is clipped for safety only: no price depends on these weights.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import equinox as eqx
import numpy as np

from silobayes.inference.noisy_curvature import Guess
from silobayes.models.scores import NOISE_BOUND, AbstractCentredScore, UnitNoiseScore
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.products import AbstractProducts, Matrices, Numbers, Vectors, clip_products
from silobayes.privacy.relation import Relation, Terms, Unit, l2_sensitivity

# A column's typical square counts at least so much: rare categories would have large units.
_LEAST_SQUARE = 0.1
# Clip norms, of a typical row's.
_SCORE_SHARE, _CURVATURE_SHARE = 0.4, 0.8
# Norms of the products, of a score's: a logistic row's largest.
_PRODUCT_SHARE, _INTERCEPT_SHARE = 0.2785, 0.5
# Of a round's budget: score, curvature, its trace, squares of scores as they are and as they should be, products.
_SHARES = {"score": 0.73, "curvature": 0.2, "trace": 0.01, "squares": 0.01, "expected": 0.005}
_PRODUCT_BUDGET, _NOISE_BUDGET = 0.025, 0.03
# By which power of the noise blocks are divided where they are in units of it.
POWERS = {"score": 1, "curvature": 2, "trace": 2, "squares": 2, "expected": 2}
_ROWS_AT_ONCE = 8192
# So many steps in 1, of z up to the largest, and of the largest covariance: 400 products add up to less than 2^53.
_LARGEST_Z, _WHOLE_Z, _WHOLE_COVARIANCE = 2.0**10, 2.0**12, 2.0**22


@dataclass(frozen=True, kw_only=True, eq=False)
class Frame:
    """Public units: everything is in them, coefficients of k outputs side by side for each column.

    Attributes:
        stretch: (d,) z = stretch x.
        moments: (D, D) typical second moments of z, times typical slopes: what J is thought to look like.
        predictors: (D, D) of the mean squared linear predictor.
        spread: (D, D) how large entries of J may be.
        clip_norm: Of scores.
        curvature_norm: Of curvatures.
        intercept: Whose column is 1, or None.
        prior_precision: (D,) of the coefficients of z.
        score: Of the model.
    """

    stretch: np.ndarray = field(repr=False)
    moments: np.ndarray = field(repr=False)
    predictors: np.ndarray = field(repr=False)
    spread: np.ndarray = field(repr=False)
    clip_norm: float
    curvature_norm: float
    intercept: int | None
    prior_precision: np.ndarray = field(repr=False)
    score: AbstractCentredScore

    @classmethod
    def of(
        cls,
        typical_moments: np.ndarray,
        score: AbstractCentredScore,
        *,
        prior_stddev: float,
        intercept: int | None,
        rows_per_unit: float,
    ) -> "Frame":
        """Units that follow from a public guess of E[x x']; a unit typically has so many rows."""
        slope, k = score.typical_slope, score.outputs
        squares = np.diag(typical_moments)
        stretch = (squares + _LEAST_SQUARE) ** -0.5
        moments = typical_moments * np.outer(stretch, stretch)
        spread = np.outer(stretch, stretch) * np.minimum.outer(squares, squares)
        size = float(np.trace(moments))
        roots = np.sqrt(np.diag(slope))
        return cls(
            stretch=stretch,
            moments=np.kron(moments, slope),
            predictors=np.kron(moments, np.eye(k)) / k,
            spread=np.kron(spread, np.outer(roots, roots)),
            clip_norm=_SCORE_SHARE * np.sqrt(size) * score.typical_bound * rows_per_unit,
            curvature_norm=_CURVATURE_SHARE * size * float(np.trace(slope)) * rows_per_unit,
            intercept=intercept,
            prior_precision=np.repeat(stretch / prior_stddev, k) ** 2,
            score=score,
        )

    @property
    def dim(self) -> int:
        """Numbers in the coefficients."""
        return len(self.moments)

    @property
    def units(self) -> np.ndarray:
        """(D,) of the coefficients: theta = units coefficients."""
        return np.repeat(self.stretch, self.score.outputs)

    @cached_property
    def shares(self) -> dict[str, float]:
        """Of a round's budget, for each block of its sum, in order."""
        shares = dict(_SHARES)
        if self.score.saturates:
            shares["centre"] = _PRODUCT_BUDGET
            if self.score.outputs == 1 and self.intercept is not None:
                shares["intercept"] = _PRODUCT_BUDGET
        if self.score.finds_noise:
            shares["noise"] = _NOISE_BUDGET
        whole = sum(shares.values())
        return {name: share / whole for name, share in shares.items()}

    @cached_property
    def norms(self) -> dict[str, float]:
        """Of a unit's term in each block."""
        return {
            "score": self.clip_norm,
            "curvature": self.curvature_norm,
            "trace": self.curvature_norm,
            "squares": self.clip_norm**2,
            "expected": self.clip_norm**2,
            "centre": _PRODUCT_SHARE * self.clip_norm,
            "intercept": _INTERCEPT_SHARE * self.clip_norm,
            "noise": NOISE_BOUND,
        }

    @cached_property
    def ends(self) -> list[int]:
        """Where the blocks of a round's sum end, but for the last."""
        sizes = {"score": self.dim, "curvature": self.dim * (self.dim + 1) // 2, "centre": self.dim}
        sizes["intercept"] = self.dim
        return np.cumsum([sizes.get(name, 1) for name in self.shares])[:-1].tolist()

    @cached_property
    def guess(self) -> Guess:
        """What J is thought to look like, for a trace of 1."""
        trace = float(np.trace(self.moments))
        return Guess(matrix=self.moments / trace, spread=self.spread / trace)

    @cached_property
    def intercept_direction(self) -> np.ndarray:
        """A linear predictor of 1 for every row; zero where there is no intercept."""
        unit = np.zeros(self.dim)
        if self.intercept is not None and self.score.outputs == 1:
            unit[self.intercept] = 1.0 / self.stretch[self.intercept]
        return unit


class Centre(eqx.Module):
    """The public Gaussian q that a round asks at, in the frame's units, and the noise that is thought to be there."""

    mean: np.ndarray
    covariance: np.ndarray
    noise: float | np.ndarray = 1.0

    def in_units_of_noise(self) -> "Centre":
        """The same for targets that are divided by the noise."""
        return Centre(mean=self.mean / self.noise, covariance=self.covariance / self.noise**2)


def round_sum(
    x: np.ndarray,
    y: np.ndarray,
    centre: Centre,
    frame: Frame,
    relation: Relation,
    *,
    capacity: int,
    unit: Unit = Unit.ROW,
    persons: np.ndarray | None = None,
) -> Bounded:
    """What a silo's rows say at a centre: one joint sum in which each statistic has its share of the budget.

    `capacity` is a public bound on the number of rows, `persons` numbers the person of each row.

    Guarantees:
        - weights know no label
        - the joint sum moves by at most 1 in its own units, but for rounding
    """
    k = frame.score.outputs
    z = x * frame.stretch
    y, centre = y / centre.noise, centre.in_units_of_noise()
    predictors, spread = _predictors(z, centre, k)
    score = frame.score(predictors, spread, y)
    squares, traces = np.sum(z**2, axis=1), np.trace(score.slope, axis1=1, axis2=2)
    weights = _weights(np.sqrt(squares) * score.bound, traces * squares, frame, persons)
    slope = score.slope * weights[:, None, None]
    twice = weights**2 * squares

    def of(name: str, kind: Terms) -> dict[str, Any]:
        norm = frame.norms[name]
        scale = l2_sensitivity(norm, kind, relation) / math.sqrt(frame.shares[name])
        return {"clip_norm": norm, "scale": scale}

    statistics: dict[str, AbstractProducts] = {
        "score": Vectors(x=z, factors=score.residual * weights[:, None], **of("score", Terms.GENERAL)),
        "curvature": Matrices(x=z, factors=slope, **of("curvature", Terms.PSD)),
        "trace": Numbers(values=weights * traces * squares, **of("trace", Terms.NON_NEGATIVE)),
        "squares": Numbers(values=twice * np.sum(score.residual**2, axis=1), **of("squares", Terms.NON_NEGATIVE)),
        "expected": Numbers(values=twice * score.variance, **of("expected", Terms.NON_NEGATIVE)),
    }
    if "centre" in frame.shares:
        steepest = np.einsum("nab,nb->na", slope, predictors)
        statistics["centre"] = Vectors(x=z, factors=steepest, **of("centre", Terms.GENERAL))
    if "intercept" in frame.shares:
        statistics["intercept"] = Vectors(x=z, factors=slope[:, :, 0], **of("intercept", Terms.GENERAL))
    if isinstance(frame.score, UnitNoiseScore):
        told = frame.score.noise_residual(predictors, spread, y)
        share = np.ones(len(x)) if persons is None else 1.0 / np.bincount(persons)[persons]
        statistics["noise"] = Vectors(x=share[:, None], factors=told[:, None], **of("noise", Terms.GENERAL))
    return clip_products(list(statistics.values()), capacity=capacity, unit=unit, units=persons)


def curvatures(x: np.ndarray, centre: Centre, frame: Frame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exact, without noise: of the likelihood, of weighted scores, and the covariance of weighted scores."""
    z, k = x * frame.stretch, frame.score.outputs
    predictors, spread = _predictors(z, centre, k)
    score = frame.score(predictors, spread, np.zeros(len(x)))
    squares, traces = np.sum(z**2, axis=1), np.trace(score.slope, axis1=1, axis2=2)
    weights = _weights(np.sqrt(squares) * score.bound, traces * squares, frame, None)
    ratio = score.variance / traces

    def summed(factors: np.ndarray) -> np.ndarray:
        whole = np.einsum("ni,nab,nj->iajb", z, score.slope * factors[:, None, None], z, optimize=True)
        return whole.reshape(frame.dim, frame.dim)

    return summed(np.ones(len(x))), summed(weights), summed(weights**2 * ratio)


def _predictors(z: np.ndarray, centre: Centre, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Means (n, k) and covariances (n, k, k) of the rows' linear predictors.

    Each is its row's own to the last bit. Those of a matrix product are not: they depend on which rows are beside, and
    a row that is large enough makes as much of its last bits as it likes. Sums along a row are its own, and so are
    products of whole numbers below 2^53, which are exact: variances are those of a q and of rows that are rounded.
    """
    n, d = z.shape
    mean = np.stack([np.sum(z * part, axis=1) for part in centre.mean.reshape(d, k).T], axis=1)
    largest = float(np.abs(centre.covariance).max(initial=0.0)) or 1.0
    blocks = np.rint(centre.covariance * (_WHOLE_COVARIANCE / largest)).reshape(d, k, d, k)
    covariance = np.empty((n, k, k))
    for start in range(0, n, _ROWS_AT_ONCE):
        part = np.rint(np.clip(z[start : start + _ROWS_AT_ONCE], -_LARGEST_Z, _LARGEST_Z) * _WHOLE_Z)
        for a in range(k):
            for b in range(a, k):
                along = np.sum((part @ blocks[:, a, :, b]) * part, axis=1)
                along = np.maximum(along, 0.0) if a == b else along  # a q that is nearly singular, rounded
                covariance[start : start + _ROWS_AT_ONCE, a, b] = along
                covariance[start : start + _ROWS_AT_ONCE, b, a] = along
    return mean, covariance * (largest / _WHOLE_COVARIANCE / _WHOLE_Z**2)


def _weights(scores: np.ndarray, curvatures: np.ndarray, frame: Frame, persons: np.ndarray | None) -> np.ndarray:
    """Of rows whose scores and curvatures have such norms at the most; rows of a person have one weight."""
    with np.errstate(all="ignore"):
        sizes = np.maximum(scores / frame.clip_norm, curvatures / frame.curvature_norm)
        if persons is not None:
            totals = [np.bincount(persons, weights=part)[persons] for part in (scores, curvatures)]
            sizes = np.maximum(totals[0] / frame.clip_norm, totals[1] / frame.curvature_norm)
        return 1.0 / np.maximum(1.0, sizes)
