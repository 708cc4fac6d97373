"""Regressions from centred scores and a shrunk curvature: intervals that include the privacy noise (UNCERTAINTY).

Rows have weights that know no label (`centred_sums`), so E[g] = J (theta - m) on average over q whatever clipping does,
and g has covariance F + s^2 I with F = (sum w^2 |r|^2 |z|^2 / trace J) J and the known noise variance s^2. With prior
N(0, L0^-1) that is a Gaussian linear model, and the posterior is

    Omega = F + s^2 I,    S = (J Omega^-1 J + L0)^-1,    mean = S J Omega^-1 (g + J m)

Of S, the parts S J Omega^-1 s^2 Omega^-1 J S, S J Omega^-1 F Omega^-1 J S and S L0 S are due to the privacy noise, to
rows being finitely many, and to the prior: they add up to S. J is what `noisy_curvature` makes of the released one.

Rounds are averaged: the last half of them, by their share of the budget; scores and products at the average centre.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from silobayes.inference.centred_sums import POWERS, Centre, Frame, curvatures
from silobayes.inference.noisy_curvature import NOTHING, Positive, Products, Scores, condition, positive, shrink
from silobayes.models.scores import NOISE_SLOPE, NOISE_VARIANCE
from silobayes.privacy.clipping import unpack_symmetric

# How far a round may move a typical linear predictor, or of its present size.
_LONGEST_MOVE, _RELATIVE_MOVE = 0.7, 0.5
# Of warnings: posterior standard deviations that the last rounds moved, directions, probability, and shares.
_FAR, _HIDDEN_SHARE, _SURPRISE, _EXCESS, _PRIOR_SHARE = 1.5, 0.25, 1e-3, 1.5, 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """What was released: sums (rounds, size), the noise on each of their blocks (rounds, blocks), and the centres.

    `noises` are those that sums are in units of: the model's own, as it was thought to be.
    `repeats` is 1 where every round is of all rows; of samples of silos, what the variance of a weighted sum over
    rounds is of that over all rows.
    """

    sums: np.ndarray = field(repr=False)
    stddevs: np.ndarray = field(repr=False)
    centres: np.ndarray = field(repr=False)
    noises: np.ndarray | float = field(default=1.0, repr=False)
    repeats: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "noises", np.broadcast_to(self.noises, len(self.sums)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A posterior in the frame's units, what its variances are due to, and what says whether to trust it.

    `moved` is how far the mean is from the average centre, in posterior standard deviations; `surprise` the probability
    of what was released under the prior; `excess` how much more scores vary than the model says.
    """

    mean: np.ndarray
    covariance: np.ndarray
    privacy_share: np.ndarray
    prior_share: np.ndarray
    moved: float
    num_hidden: int
    surprise: float
    excess: float


def weights_of_rounds(stddevs: np.ndarray) -> np.ndarray:
    """Of the last half of the rounds, by the noise on their scores."""
    last = stddevs[len(stddevs) // 2 :, 0] ** -2.0
    return last / last.sum()


def answer(rounds: Rounds, frame: Frame) -> Answer:
    """The posterior of the coefficients given what was released."""
    shares = weights_of_rounds(rounds.stddevs)
    first = len(rounds.sums) - len(shares)
    units = np.array([np.asarray(rounds.noises)[first:] ** -float(POWERS.get(name, 0)) for name in frame.shares])
    blocks = zip(units, np.split(rounds.sums[first:], frame.ends, axis=1), strict=True)
    sums = dict(zip(frame.shares, [(shares * unit) @ block for unit, block in blocks], strict=True))
    noise = np.sqrt(np.sum((shares * units * rounds.stddevs[first:].T) ** 2, axis=1))
    stddevs = dict(zip(frame.shares, noise.tolist(), strict=True))
    centre = shares @ rounds.centres[first:]
    trace = max(float(sums["trace"][0]), 2.0 * stddevs["trace"])
    squares = max(float(sums["squares"][0]), stddevs["squares"])
    scores = Scores(
        noise_variance=stddevs["score"] ** 2,
        rows_share=rounds.repeats * squares / trace,
        prior_covariance=np.diag(1.0 / frame.prior_precision),
    )
    curvature = _curvature(sums, stddevs, centre, trace, scores, frame)
    j, score = curvature.matrix, sums["score"]
    rows = scores.rows_share * j
    noise = max(scores.noise_variance, NOTHING * float(np.trace(rows))) * np.eye(frame.dim)
    gain = np.linalg.solve(rows + noise, j)
    covariance = np.linalg.inv(j @ gain + np.diag(frame.prior_precision))
    covariance = (covariance + covariance.T) / 2
    seen = score + j @ centre
    mean = covariance @ (gain.T @ seen)
    weights, variance = covariance @ gain.T, np.diag(covariance)
    moved = mean - centre
    predicted = j @ (j / frame.prior_precision).T + rows + noise
    surprise = seen @ np.linalg.solve(predicted, seen)
    expected = max(float(sums["expected"][0]), stddevs["expected"])
    return Answer(
        mean=mean,
        covariance=covariance,
        privacy_share=scores.noise_variance * np.sum(weights**2, axis=1) / variance,
        prior_share=(covariance**2 @ frame.prior_precision) / variance,
        moved=float(np.sqrt(moved @ np.linalg.solve(covariance, moved) / frame.dim)),
        num_hidden=curvature.num_hidden,
        surprise=float(stats.chi2.sf(surprise, frame.dim)),
        excess=(squares - 2.0 * stddevs["squares"]) / (expected + 2.0 * stddevs["expected"]),
    )


def _curvature(
    sums: dict[str, np.ndarray],
    stddevs: dict[str, float],
    centre: np.ndarray,
    trace: float,
    scores: Scores,
    frame: Frame,
) -> Positive:
    guess = frame.guess.of_trace(trace)
    shrunk = shrink(unpack_symmetric(sums["curvature"]), stddevs["curvature"] ** 2, guess)
    named = {"centre": centre, "intercept": frame.intercept_direction}
    asked = [name for name in named if name in sums]
    if not asked:
        return positive(shrunk.matrix, shrunk.variance, guess, scores, None)
    products = Products(
        directions=np.stack([named[name] for name in asked], axis=1),
        values=np.stack([sums[name] for name in asked], axis=1),
        variances=np.array([stddevs[name] ** 2 for name in asked]),
    )
    return positive(condition(shrunk, products, guess), shrunk.variance, guess, scores, products)


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """Covariances of the coefficients of x without and with privacy, and what share of the latter privacy makes."""

    not_private: np.ndarray = field(repr=False)
    private: np.ndarray = field(repr=False)
    privacy_share: np.ndarray = field(repr=False)


def expected(x: np.ndarray, start: np.ndarray, frame: Frame, *, num_rows: int, noise_variance: float) -> Expected:
    """Of so many rows like `x` whose coefficients are near the start, with such noise on scores."""
    dim, scale = frame.dim, num_rows / len(x)
    centre = Centre(mean=start / frame.units, covariance=np.zeros((dim, dim)))
    exact, weighted, rows = (scale * part for part in curvatures(x, centre, frame))
    prior, back = np.diag(frame.prior_precision), np.outer(frame.units, frame.units)
    gain = np.linalg.solve(rows + noise_variance * np.eye(dim), weighted)
    covariance = np.linalg.inv(weighted @ gain + prior)
    share = noise_variance * np.sum((covariance @ gain.T) ** 2, axis=1) / np.diag(covariance)
    return Expected(not_private=np.linalg.inv(exact + prior) * back, private=covariance * back, privacy_share=share)


def next_centre(last: Centre, reached: Answer, frame: Frame) -> Centre:
    """Where to ask next: at the answer, but not too far at once, or a chain that noise leads astray would run away."""
    move = reached.mean - last.mean
    far, size = (float(np.sqrt(v @ frame.predictors @ v)) for v in (move, last.mean))
    longest = max(_LONGEST_MOVE * float(last.noise), _RELATIVE_MOVE * size)
    mean = last.mean + move * min(1.0, longest / max(far, 1e-12))
    return Centre(mean=mean, covariance=reached.covariance, noise=last.noise)


def log_noise(
    rounds: Rounds, frame: Frame, *, num_units: int, prior_stddev: float
) -> tuple[float, float, float, float]:
    """Mean and variance of the logarithm of a model's noise, and the shares of privacy and of the prior in the latter.

    So many units have a weight of 1 each, those of persons' rows together.
    """
    shares = weights_of_rounds(rounds.stddevs)
    first = len(rounds.sums) - len(shares)
    slope = num_units * NOISE_SLOPE
    seen = shares @ (rounds.sums[first:, -1] + slope * np.log(np.asarray(rounds.noises)[first:]))
    private = float(shares**2 @ rounds.stddevs[first:, -1] ** 2)
    variance = rounds.repeats * num_units * NOISE_VARIANCE + private
    posterior = 1.0 / (slope**2 / variance + prior_stddev**-2)
    mean = posterior * slope * float(seen) / variance
    return mean, posterior, posterior * slope**2 * private / variance**2, posterior / prior_stddev**2


def warnings(reached: Answer, frame: Frame, names: tuple[str, ...]) -> tuple[str, ...]:
    """What a reader should know of an answer, from released numbers only, and what to do."""
    told = []
    if reached.moved > _FAR:
        told.append(
            "The rounds had not settled: the last ones still disagreed by more than their noise. Take more rounds, a "
            "larger epsilon, or a narrower prior."
        )
    if reached.num_hidden > _HIDDEN_SHARE * frame.dim:
        told.append(
            f"In {reached.num_hidden} of {frame.dim} directions noise hides what rows say: columns go together, or the "
            "budget is small. Intervals there are cautious. Declare spreads and shares, drop columns that others "
            "tell, or take a larger epsilon."
        )
    if reached.surprise < _SURPRISE:
        told.append(
            "The prior does not expect what was released: some coefficient may lie far outside of it, and its interval "
            "is then pulled in too far. Set a larger model.options.prior_stddev."
        )
    if reached.excess > _EXCESS:
        told.append(
            "Targets vary more than the model says. Intervals include it, but another model may fit: for counts a "
            "negative binomial regression, for numbers a larger noise_stddev."
        )
    mostly_prior = [name for name, share in zip(names, reached.prior_share, strict=True) if share > _PRIOR_SHARE]
    if mostly_prior and frame.score.outputs == 1:
        shown = ", ".join(mostly_prior[:5]) + (", ..." if len(mostly_prior) > 5 else "")
        told.append(
            f"Mostly prior ({len(mostly_prior)} of {len(names)}): {shown}. Rows say little of these at this budget."
        )
    return tuple(told)
