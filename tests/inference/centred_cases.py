"""Frames, centres and rows for tests of centred scores."""

import math

import numpy as np

from silobayes.inference.centred import Answer, Rounds, answer, next_centre
from silobayes.inference.centred_sums import Centre, Frame, round_sum
from silobayes.models.scores import AbstractCentredScore, CountScore, LinearScore, LogisticScore, SoftmaxScore
from silobayes.privacy.relation import Relation

SCORES: dict[str, AbstractCentredScore] = {
    "logistic": LogisticScore(),
    "linear": LinearScore(noise_stddev=0.7),
    "poisson": CountScore(concentration=math.inf, typical_rate=2.0),
    "negative binomial": CountScore(concentration=0.5, typical_rate=2.0),
    "softmax": SoftmaxScore(outputs=3),
}
NUM_FEATURES = 4


def frame_of(
    score: AbstractCentredScore,
    *,
    num_features: int = NUM_FEATURES,
    intercept: bool = True,
    rows_per_unit: float = 1.0,
    prior_stddev: float = 2.0,
    moments: np.ndarray | None = None,
) -> Frame:
    """Of numeric columns within [-1, 1] and an intercept, which is the last one."""
    if moments is None:
        moments = np.eye(num_features) / 9.0
        if intercept:
            moments[-1, -1] = 1.0
    return Frame.of(
        moments,
        score,
        prior_stddev=prior_stddev,
        intercept=num_features - 1 if intercept else None,
        rows_per_unit=rows_per_unit,
    )


def draw_rows(
    rng: np.random.Generator, score: AbstractCentredScore, theta: np.ndarray, num_rows: int, *, rho: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows in [-1, 1] with an intercept, and labels of the model; `theta` is (d, k)."""
    d = len(theta)
    common = rng.uniform(-1, 1, size=(num_rows, 1))
    x = math.sqrt(1 - rho) * rng.uniform(-1, 1, size=(num_rows, d)) + math.sqrt(rho) * common
    x[:, -1] = 1.0
    return x, draw_labels(rng, score, x @ theta)


def draw_labels(rng: np.random.Generator, score: AbstractCentredScore, f: np.ndarray) -> np.ndarray:
    """Of the model at these predictors (n, k)."""
    if isinstance(score, LogisticScore):
        return (rng.random(len(f)) < 1 / (1 + np.exp(-f[:, 0]))).astype(float)
    if isinstance(score, LinearScore):
        return f[:, 0] + score.noise_stddev * rng.normal(size=len(f))
    if isinstance(score, SoftmaxScore):
        return (f + rng.gumbel(size=f.shape)).argmax(axis=1).astype(float)
    assert isinstance(score, CountScore)
    rate = np.exp(f[:, 0])
    if math.isfinite(score.concentration):
        rate = rate * rng.gamma(score.concentration, size=len(f)) / score.concentration
    return rng.poisson(rate).astype(float)


def random_centre(rng: np.random.Generator, dim: int, *, width: float = 0.3) -> Centre:
    root = rng.normal(size=(dim, dim)) * width / math.sqrt(dim)
    return Centre(mean=rng.normal(size=dim), covariance=root @ root.T)


def run_rounds(
    rng: np.random.Generator,
    frame: Frame,
    x: np.ndarray,
    y: np.ndarray,
    *,
    mu: float,
    num_rounds: int = 10,
    start: np.ndarray | None = None,
) -> Answer:
    """What a server reaches with all rows in one silo and noise worth `mu` in all; infinite: next to none."""
    growth = 1.3 ** np.arange(num_rounds)
    sums, stddevs, centres = [], [], []
    mean = np.zeros(frame.dim) if start is None else start / frame.units
    centre = Centre(mean=mean, covariance=np.diag(1.0 / frame.prior_precision))
    for share in growth / growth.sum():
        bounded = round_sum(x, y, centre, frame, Relation.SUBSTITUTE, capacity=len(x))
        multiplier = max(1.0 / (mu * math.sqrt(share)), 1e-3)
        noises = [multiplier * block.clip_norm for block in bounded.blocks]
        parts = bounded.decode(bounded.total)
        noisy = [part + std * rng.normal(size=part.shape) for part, std in zip(parts, noises, strict=True)]
        sums.append(np.concatenate(noisy))
        stddevs.append(noises)
        centres.append(centre.mean)
        rounds = Rounds(sums=np.array(sums), stddevs=np.array(stddevs), centres=np.array(centres))
        reached = answer(rounds, frame)
        centre = next_centre(centre, reached, frame)
    return reached
