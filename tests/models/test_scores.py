"""Centred scores against exact sums over labels and quadrature: each guarantee of the module has its test."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from silobayes.models.scores import (
    NOISE_BOUND,
    NOISE_SLOPE,
    NOISE_VARIANCE,
    AbstractCentredScore,
    CountScore,
    LinearScore,
    LogisticScore,
    Score,
    SoftmaxScore,
    UnitNoiseScore,
)

POISSON = CountScore(concentration=math.inf, typical_rate=1.0)
SMALL, LARGE = (CountScore(concentration=alpha, typical_rate=2.0) for alpha in (0.3, 50.0))
SCORES = {
    "logistic": LogisticScore(),
    "linear": LinearScore(noise_stddev=0.7),
    "linear, unit noise": UnitNoiseScore(),
    "poisson": POISSON,
    "negative binomial, small": SMALL,
    "negative binomial, large": LARGE,
    "softmax": SoftmaxScore(outputs=3),
}
COUNTS = ("poisson", "negative binomial, small", "negative binomial, large")
RATES = 10.0 ** np.arange(-8, 9)


def at(score: AbstractCentredScore, mean: float | np.ndarray, variance: float, y: np.ndarray) -> Score:
    """Of rows that differ in their labels only, at predictors of such a mean, each of such a variance."""
    y = np.asarray(y, float)
    means = np.broadcast_to(np.asarray(mean, float), (len(y), score.outputs))
    covariance = np.broadcast_to(variance * np.eye(score.outputs), (len(y), score.outputs, score.outputs))
    return score(means, covariance, y)


def labels_of(score: AbstractCentredScore, predictor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels (or nodes of a quadrature) and their probabilities, all but 1e-13, given the true predictors."""
    if isinstance(score, LogisticScore):
        p = special.expit(predictor[0])
        return np.arange(2), np.array([1 - p, p])
    if isinstance(score, SoftmaxScore):
        return np.arange(score.outputs), special.softmax(predictor)
    if isinstance(score, LinearScore):
        reach = 12.0 * score.noise_stddev
        y = predictor[0] + np.linspace(-reach, reach, 200_001)
        density = stats.norm.pdf(y, predictor[0], score.noise_stddev)
        return y, density / density.sum()
    law = law_of(score, math.exp(predictor[0]))
    y = np.arange(law.ppf(1e-15), law.isf(1e-15) + 1)
    return y, law.pmf(y)


def law_of(score: CountScore, rate: float):
    if math.isinf(score.concentration):
        return stats.poisson(rate)
    return stats.nbinom(score.concentration, score.concentration / (score.concentration + rate))


def expected(score: AbstractCentredScore, true: np.ndarray, mean: np.ndarray, variance: float) -> np.ndarray:
    """E[r | f*], exactly."""
    y, probability = labels_of(score, true)
    return probability @ at(score, mean, variance, y).residual


PREDICTORS = {"softmax": ([0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [6.0, 0.0, -1.0])}
NARROW = [
    pytest.param(name, np.array(mean), id=f"{name}, {mean}")
    for name in SCORES
    for mean in PREDICTORS.get(name, ([-3.0], [0.0], [0.4], [2.5], [6.0]))
]


@pytest.mark.parametrize(("name", "mean"), NARROW)
def test_a_score_has_mean_zero_under_the_model_at_the_centre(name, mean):
    score = SCORES[name]
    bound = at(score, mean, 0.0, np.zeros(1)).bound[0]
    assert np.abs(expected(score, mean, mean, 0.0)).max() <= 1e-9 * bound


@pytest.mark.parametrize(("name", "mean"), NARROW)
def test_variances_are_those_of_the_score(name, mean):
    score = SCORES[name]
    y, probability = labels_of(score, mean)
    found = at(score, mean, 0.0, y)
    assert probability @ np.sum(found.residual**2, axis=1) == pytest.approx(found.variance[0], rel=1e-6, abs=1e-15)


@pytest.mark.parametrize(("name", "mean"), NARROW)
def test_slopes_are_those_of_the_expected_score(name, mean):
    """By central differences in the true predictor."""
    score, step = SCORES[name], 1e-4
    slope = at(score, mean, 0.0, np.zeros(1)).slope[0]
    ends = [[expected(score, mean + s * step * unit, mean, 0.0) for s in (1, -1)] for unit in np.eye(score.outputs)]
    found = np.stack([(up - down) / (2 * step) for up, down in ends], axis=1)
    np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-6 * np.abs(slope).max())


@pytest.mark.parametrize("stddev", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("mean", [-2.0, 0.0, 1.0])
def test_with_a_wide_q_slopes_of_a_logistic_row_are_averages_and_its_mean_is_zero(stddev, mean):
    """The label's probability is E[p] and the slope E[p (1 - p)], by quadrature, right to 2e-4."""
    own = at(LogisticScore(), mean, stddev**2, np.array([0.0, 1.0]))

    def average(of) -> float:
        weight = stats.norm(mean, stddev).pdf
        value, _ = integrate.quad(lambda f: of(f) * weight(f), mean - 9 * stddev, mean + 9 * stddev, limit=200)
        return value

    p = average(special.expit)
    assert abs((1 - p) * own.residual[0, 0] + p * own.residual[1, 0]) <= 2e-4
    assert own.slope[0, 0, 0] == pytest.approx(average(lambda f: special.expit(f) * special.expit(-f)), abs=1e-3)


@pytest.mark.parametrize("variance", [0.0, 0.5, 30.0])
def test_with_a_wide_q_the_score_of_a_linear_row_is_that_of_what_q_and_noise_leave_open(variance):
    """Exact for any width: y - m is normal with both variances, and the slope is how often it is not pulled back."""
    score = SCORES["linear"]
    spread = math.sqrt(0.7**2 + variance)
    y = 0.3 + spread * np.linspace(-12, 12, 200_001)
    weights = stats.norm.pdf(y, 0.3, spread)
    weights /= weights.sum()
    own = at(score, 0.3, variance, y)
    assert abs(weights @ own.residual[:, 0]) <= 1e-9
    assert weights @ own.residual[:, 0] ** 2 == pytest.approx(own.variance[0], rel=1e-6)
    # By Stein's lemma: E[r (f* - m)] / Var[f*] where f* is given as much by y as by its variance's share.
    stein = weights @ (own.residual[:, 0] * (y - 0.3)) / spread**2
    assert own.slope[0, 0, 0] == pytest.approx(stein, rel=1e-6)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("variance", [0.0, 2.0])
def test_what_a_row_says_of_the_noise_has_mean_zero_its_bound_its_slope_and_its_variance(variance):
    """Of normal residuals whose scale is right, or off by a little; and of any label."""
    score = UnitNoiseScore()
    standard = np.linspace(-12, 12, 200_001)
    weights = stats.norm.pdf(standard)
    weights /= weights.sum()

    def told(y: np.ndarray) -> np.ndarray:
        shape = (len(y), 1)
        return score.noise_residual(np.full(shape, 0.3), np.full((*shape, 1), variance), y)

    def average(log_scale: float) -> float:
        return float(weights @ told(0.3 + math.exp(log_scale) * math.sqrt(1.0 + variance) * standard))

    right = told(0.3 + math.sqrt(1.0 + variance) * standard)
    assert abs(weights @ right) <= 1e-6
    assert weights @ right**2 == pytest.approx(NOISE_VARIANCE, rel=1e-6)
    assert (average(1e-3) - average(-1e-3)) / 2e-3 == pytest.approx(NOISE_SLOPE, rel=1e-3)
    hostile = told(np.array([0.3, 0.0, 1e9, -1e300]))
    assert np.isfinite(hostile).all()
    assert (np.abs(hostile) <= NOISE_BOUND).all()


@pytest.mark.parametrize("variance", [0.1, 1.0, 4.0])
def test_with_a_wide_q_the_score_of_a_softmax_row_is_nearly_an_average(variance):
    """Its few points have the right mean and covariance: slopes err by a tenth at a standard deviation of 1.

    Against 200,000 draws of q.
    """
    score, mean = SCORES["softmax"], np.array([0.5, -1.0, 0.2])
    own = at(score, mean, variance, np.arange(3))
    p = special.softmax(mean + math.sqrt(variance) * np.random.default_rng(0).normal(size=(200_000, 3)), axis=1)
    average = p.mean(axis=0)
    assert np.abs(average @ own.residual).max() <= 0.03
    right = np.diag(average) - p.T @ p / len(p)
    assert np.linalg.norm(own.slope[0] - right) <= (0.1 if variance <= 1.0 else 0.25) * np.linalg.norm(right)


wild = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([0.0, 1e3, -1e3, 40.0, -40.0, 1e-300]))


@pytest.mark.parametrize("name", SCORES)
@given(st.lists(wild, min_size=3, max_size=3), st.floats(0.0, 1e6), st.integers(0, 10**6))
@settings(max_examples=60)
def test_no_label_has_a_score_larger_than_the_bound(name, predictors, variance, seed):
    """Labels of the model, and of models far from it; a wide q; predictors up to 1e3, where nothing is NaN."""
    score, rng = SCORES[name], np.random.default_rng(seed)
    labels = {"logistic": [0, 1], "softmax": [0, 1, 2]}.get(name, [0, 1, 2, 7, 1e3, 1e9, 1e300])
    if name.startswith("linear"):
        labels = [*labels, -1.0, -1e300, *rng.normal(size=3)]
    root = rng.normal(size=(3, 3))[: score.outputs, : score.outputs] * math.sqrt(variance)
    y = np.array(labels, float)
    own = score(
        np.broadcast_to(np.array(predictors)[: score.outputs], (len(y), score.outputs)),
        np.broadcast_to(root @ root.T, (len(y), score.outputs, score.outputs)),
        y,
    )
    for part in (own.residual, own.bound, own.slope, own.variance):
        assert np.isfinite(part).all()
    assert (np.linalg.norm(own.residual, axis=1) <= own.bound * (1 + 1e-12)).all()
    assert (own.bound > 0.0).all()
    # A score is at most its bound, so its variance is at most the square.
    assert (own.variance >= 0.0).all()
    assert (own.variance <= own.bound**2 * (1 + 1e-9)).all()
    assert np.ptp(own.bound) == np.ptp(own.variance) == np.ptp(own.slope, axis=0).max() == 0.0  # know no label
    # To rounding of a matrix's own size: what is clipped as PSD may not be indefinite, however small it is.
    assert np.array_equal(own.slope, np.swapaxes(own.slope, 1, 2))
    largest = np.abs(own.slope).max(axis=(1, 2), keepdims=True)
    assert (np.linalg.eigvalsh(own.slope / np.where(largest > 0.0, largest, 1.0)) >= -1e-12).all()


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("rate", RATES)
def test_count_scores_are_right_from_rare_to_huge_rates(name, rate):
    """Mean zero and the slope by the exact law, where a sum over counts is short; finite and positive elsewhere."""
    score, mean = SCORES[name], np.array([math.log(rate)])
    own = at(score, mean, 0.0, np.array([0.0, 1.0, rate, 10 * rate]))
    assert np.isfinite(own.residual).all()
    assert (own.slope > 0.0).all()
    assert (own.variance > 0.0).all()
    if rate <= (100.0 if score is SMALL else 1e4):
        y, probability = labels_of(score, mean)
        found = at(score, mean, 0.0, y)
        assert abs(probability @ found.residual[:, 0]) <= 1e-9 * own.bound[0]
        assert probability @ found.residual[:, 0] ** 2 == pytest.approx(own.variance[0], rel=1e-6)
        # d log p(y) / d log rate = weight (y - rate), so that the slope is E[r] times it.
        weight = 1.0 / (1.0 + rate / score.concentration)
        slope = probability @ (found.residual[:, 0] * weight * (y - rate))
        assert slope == pytest.approx(own.slope[0, 0, 0], rel=1e-6)


@pytest.mark.parametrize("rate", [1e6, 1e8])
def test_a_huge_poisson_rate_is_a_normal_one(rate):
    """r / sd is a normal pulled back to the reach: the same numbers as those of a linear row."""
    own = at(POISSON, math.log(rate), 0.0, np.array([rate]))
    linear = at(LinearScore(noise_stddev=1.0), 0.0, 0.0, np.zeros(1))
    assert own.slope[0, 0, 0] / rate == pytest.approx(linear.slope[0, 0, 0], rel=1e-3)
    assert own.variance[0] / rate == pytest.approx(linear.variance[0], rel=1e-3)
    assert own.bound[0] / math.sqrt(rate) == pytest.approx(linear.bound[0], rel=1e-3)


@pytest.mark.parametrize("rate", [1e-8, 1e-3, 0.7, 5.0, 300.0])
def test_a_large_concentration_is_the_poisson_limit(rate):
    y = np.array([0.0, 1.0, 2.0, math.floor(rate), 50.0])
    poisson = at(POISSON, math.log(rate), 0.2, y)
    errors = []
    for concentration in (1e4, 1e6, 1e8):
        own = at(CountScore(concentration=concentration, typical_rate=1.0), math.log(rate), 0.2, y)
        parts = [
            np.abs(getattr(own, part) - getattr(poisson, part)).max() / np.abs(getattr(poisson, part)).max()
            for part in ("residual", "bound", "slope", "variance")
        ]
        errors.append(max(parts))
    assert errors[-1] <= 1e-5
    assert errors[-1] <= max(errors[0], 1e-9)


def test_softmax_of_two_classes_is_logistic():
    """A score of classes is (-r, r) for the logistic row whose predictor is the difference; narrow q."""
    difference = np.array([-30.0, -2.0, 0.0, 0.3, 4.0])
    means = np.stack([np.zeros(5), difference], axis=1)
    for label in (0.0, 1.0):
        y = np.full(5, label)
        two = SoftmaxScore(outputs=2)(means, np.zeros((5, 2, 2)), y)
        one = LogisticScore()(difference[:, None], np.zeros((5, 1, 1)), y)
        np.testing.assert_allclose(two.residual, one.residual * [[-1.0, 1.0]], atol=1e-12)
        np.testing.assert_allclose(two.slope, one.slope * [[1.0, -1.0], [-1.0, 1.0]], atol=1e-12)
        np.testing.assert_allclose(two.bound, math.sqrt(2.0) * one.bound, rtol=1e-9)
        np.testing.assert_allclose(two.variance, 2.0 * one.variance, atol=1e-12)


@pytest.mark.parametrize("name", SCORES)
def test_typical_slopes_and_bounds_are_those_of_a_typical_row(name):
    """What units are made of; a bound of classes is that of a typical label."""
    score = SCORES[name]
    own = at(score, score.typical_predictor, 0.0, np.zeros(1))
    np.testing.assert_allclose(score.typical_slope, own.slope[0], rtol=1e-6, atol=1e-12)
    assert 0.4 * own.bound[0] <= score.typical_bound <= 2.0 * own.bound[0]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("hostile", [math.nan, math.inf, -math.inf, 1e300])
def test_a_hostile_row_stops_nothing_and_moves_no_other_row(name, hostile):
    """Whoever may fail on a row tells that it is there."""
    score, rng = SCORES[name], np.random.default_rng(0)
    k = score.outputs
    mean, root, y = rng.normal(size=(3, k)), rng.normal(size=(3, k, k)), np.array([0.0, 1.0, 1.0])
    right = score(mean, root @ np.swapaxes(root, 1, 2), y)
    for where in ("predictor", "spread", "label"):
        means, covariance, labels = mean.copy(), root @ np.swapaxes(root, 1, 2), y.copy()
        if where == "label":
            labels[1] = hostile
        else:
            (means if where == "predictor" else covariance)[1] = hostile
        with np.errstate(all="ignore"):
            own = score(means, covariance, labels)
        for part in ("residual", "bound", "slope", "variance"):
            others = np.delete(getattr(own, part), 1, axis=0)
            assert np.array_equal(others, np.delete(getattr(right, part), 1, axis=0))
