"""Answers of rounds: closed forms without noise, shares that add up, and warnings that come when they should."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.inference.centred import Answer, Rounds, answer, expected, next_centre, warnings, weights_of_rounds
from silobayes.inference.centred_sums import Centre, Frame
from silobayes.models.scores import CountScore
from silobayes.privacy.clipping import pack_symmetric
from tests.inference.centred_cases import SCORES, draw_labels, draw_rows, frame_of, run_rounds

# Gaussian-DP parameters of epsilon 0.1, 1 and 10 at delta 1e-5, roughly.
SMALL, USUAL, LARGE = 0.03, 0.27, 2.0
NOTHING = 1e-3


def psd(rng: np.random.Generator, dim: int) -> np.ndarray:
    root = rng.normal(size=(dim, 3 * dim))
    return 20.0 * root @ root.T / dim


def rounds_of(frame: Frame, j, g, centre, *, rows_share=1.3, noise=NOTHING, num_rounds=4) -> Rounds:
    """The same in each round, as if nothing but the score had noise worth mentioning."""
    trace = float(np.trace(j))
    parts = {
        "score": g,
        "curvature": pack_symmetric(j),
        "trace": [trace],
        "squares": [rows_share * trace],
        "expected": [rows_share * trace],
        "centre": j @ centre,
        "intercept": j @ frame.intercept_direction,
        "noise": [0.0],
    }
    stddevs = [math.sqrt(num_rounds - num_rounds // 2) * noise if name == "score" else NOTHING for name in frame.shares]
    return Rounds(
        sums=np.tile(np.concatenate([parts[name] for name in frame.shares]), (num_rounds, 1)),
        stddevs=np.tile(stddevs, (num_rounds, 1)),
        centres=np.tile(centre, (num_rounds, 1)),
        noises=np.ones(num_rounds),
    )


@pytest.mark.parametrize("noise", [NOTHING, 3.0, 100.0])
@pytest.mark.parametrize("name", SCORES)
def test_an_answer_is_the_posterior_of_a_gaussian_linear_model(name, noise):
    """g ~ N(J (theta - m), F + s^2 I), theta ~ N(0, L0^-1): conditioned as any two normal vectors."""
    rng, frame = np.random.default_rng(0), frame_of(SCORES[name])
    j, g, centre = psd(rng, frame.dim), 5.0 * rng.normal(size=frame.dim), rng.normal(size=frame.dim)
    if name == "softmax":
        j = frame.moments * 40.0  # nothing is known along a shift of all classes
    reached = answer(rounds_of(frame, j, g, centre, noise=noise), frame)
    prior = np.diag(1.0 / frame.prior_precision)
    omega = 1.3 * j + noise**2 * np.eye(frame.dim)
    gain = prior @ j @ np.linalg.pinv(j @ prior @ j + omega, rcond=1e-12)
    covariance = prior - gain @ j @ prior
    near = {"rtol": 1e-3, "atol": 1e-3 * math.sqrt(np.diag(covariance).max())}
    np.testing.assert_allclose(reached.covariance, covariance, rtol=1e-3, atol=1e-3 * np.diag(covariance).max())
    if name != "softmax":
        np.testing.assert_allclose(reached.mean, gain @ (g + j @ centre), **near)


@pytest.mark.parametrize("noise", [NOTHING, 3.0, 100.0])
def test_shares_of_a_variance_add_up(noise):
    """Privacy, rows and prior are all of it; each is what it says."""
    rng, frame = np.random.default_rng(1), frame_of(SCORES["logistic"])
    j, g, centre = psd(rng, frame.dim), rng.normal(size=frame.dim), rng.normal(size=frame.dim)
    reached = answer(rounds_of(frame, j, g, centre, noise=noise), frame)
    weights = reached.covariance @ j @ np.linalg.inv(1.3 * j + noise**2 * np.eye(frame.dim))
    rows = np.diag(weights @ (1.3 * j) @ weights.T) / np.diag(reached.covariance)
    np.testing.assert_allclose(reached.privacy_share + reached.prior_share + rows, 1.0, rtol=1e-3)
    if noise == NOTHING:
        assert reached.privacy_share.max() <= 1e-4


@given(st.integers(0, 10**6), st.floats(0.01, 30.0), st.integers(1, 6), st.sampled_from(sorted(SCORES)))
@settings(max_examples=40)
def test_any_release_has_a_proper_answer(seed, size, num_rounds, name):
    """Whatever noise does: finite, positive definite, no wider than the prior, shares in [0, 1]."""
    rng, frame = np.random.default_rng(seed), frame_of(SCORES[name])
    width = frame.ends[-1] + (1 if list(frame.shares)[-1] in ("expected", "noise") else frame.dim)
    rounds = Rounds(
        sums=size * rng.normal(size=(num_rounds, width)) * 10.0 ** rng.uniform(-2, 4),
        stddevs=np.tile(size * rng.uniform(0.3, 3.0, size=len(frame.shares)), (num_rounds, 1)),
        centres=rng.normal(size=(num_rounds, frame.dim)),
        noises=rng.uniform(0.3, 3.0, size=num_rounds),
    )
    reached = answer(rounds, frame)
    assert np.isfinite(reached.mean).all()
    np.testing.assert_allclose(reached.covariance, reached.covariance.T)
    prior = np.diag(1.0 / frame.prior_precision)
    values = np.linalg.eigvalsh(reached.covariance)
    assert values[0] > 0.0
    assert np.linalg.eigvalsh(prior - reached.covariance)[0] >= -1e-9 * prior.max()
    for share in (reached.privacy_share, reached.prior_share):
        assert (share >= -1e-9).all()
        assert (share <= 1.0 + 1e-9).all()
    assert (reached.privacy_share + reached.prior_share <= 1.0 + 1e-6).all()
    assert 0.0 <= reached.surprise <= 1.0
    assert all(isinstance(text, str) for text in warnings(reached, frame, tuple("abcdefghijkl"[: frame.dim])))


def test_rounds_are_averaged_by_their_noise():
    weights = weights_of_rounds(np.array([[5.0], [3.0], [2.0], [1.0]]))
    np.testing.assert_allclose(weights, [0.2, 0.8])
    assert weights_of_rounds(np.array([[3.0]])).tolist() == [1.0]


@pytest.mark.parametrize("name", SCORES)
def test_without_noise_rounds_find_the_truth(name):
    """All coefficients (of classes: their differences) within 4.5 posterior sds, which are about what rows alone leave.

    Widths are those of scores that vary alike in all directions, and so right to about a sixth for each of them.
    """
    rng, score = np.random.default_rng(2), SCORES[name]
    frame, k = frame_of(score), score.outputs
    theta = rng.uniform(-0.8, 0.8, size=(4, k))
    x, y = draw_rows(rng, score, theta, 20_000)
    start = np.zeros(frame.dim)
    start[-k:] = score.typical_predictor
    reached = run_rounds(rng, frame, x, y, mu=math.inf, start=start)
    contrast = np.eye(k)[:1] - np.eye(k)[1:] if k > 1 else np.eye(1)
    into = np.kron(np.eye(4), contrast)
    miss = into @ (reached.mean * frame.units - theta.ravel())
    units = np.outer(frame.units, frame.units)
    stddev = np.sqrt(np.diag(into @ (reached.covariance * units) @ into.T))
    assert np.abs(miss / stddev).max() <= 4.5
    at_truth = expected(x, theta.ravel(), frame, num_rows=len(x), noise_variance=0.0)
    right = np.sqrt(np.diag(into @ at_truth.not_private @ into.T))
    assert (stddev >= 0.84 * right).all()
    assert (stddev <= 1.6 * right).all()
    assert reached.privacy_share.max() <= 1e-3


@pytest.mark.parametrize("name", ["logistic", "poisson", "linear"])
def test_expected_widths_are_those_of_an_answer(name):
    """What a plan promises from made-up rows is what rounds over such rows reach, to a quarter."""
    rng, score = np.random.default_rng(3), SCORES[name]
    frame, theta = frame_of(score), np.array([[0.3], [-0.3], [0.2], [score.typical_predictor]])
    x, y = draw_rows(rng, score, theta, 4000)
    reached = run_rounds(rng, frame, x, y, mu=USUAL, start=theta.ravel())
    growth = 1.3 ** np.arange(10)
    norm = 2.0 * frame.clip_norm / math.sqrt(frame.shares["score"])
    variance = norm**2 / USUAL**2 / (growth[5:].sum() / growth.sum())
    promised = expected(x[:500], theta.ravel(), frame, num_rows=4000, noise_variance=variance)
    ratio = np.sqrt(np.diag(promised.private)) / (np.sqrt(np.diag(reached.covariance)) * frame.units)
    assert (np.abs(np.log(ratio)) <= 0.25).all()
    assert np.abs(promised.privacy_share - reached.privacy_share).max() <= 0.2
    assert (np.diag(promised.private) >= np.diag(promised.not_private)).all()


@given(st.integers(0, 10**6), st.floats(0.0, 100.0))
@settings(max_examples=30)
def test_a_round_does_not_move_far_at_once(seed, far):
    """Nor away from the answer: what it moves by is a share of the way there."""
    rng, frame = np.random.default_rng(seed), frame_of(SCORES["logistic"])
    last = Centre(mean=rng.normal(size=4), covariance=np.eye(4))
    reached = answer(rounds_of(frame, psd(rng, 4), rng.normal(size=4), last.mean), frame)
    reached = dataclasses.replace(reached, mean=last.mean + far * rng.normal(size=4))
    then = next_centre(last, reached, frame)
    way, moved = reached.mean - last.mean, then.mean - last.mean
    size = math.sqrt(moved @ frame.predictors @ moved)
    assert size <= max(0.7, 0.5 * math.sqrt(last.mean @ frame.predictors @ last.mean)) + 1e-9
    np.testing.assert_allclose(moved * np.linalg.norm(way), way * np.linalg.norm(moved), atol=1e-6)
    assert then.covariance is reached.covariance


NAMES = ("a", "b", "c", "intercept")
TOLD = {
    "settled": "had not settled",
    "hidden": "noise hides",
    "prior": "The prior does not expect",
    "excess": "vary more than the model says",
    "mostly prior": "Mostly prior",
}


def told(reached: Answer, frame: Frame, names: tuple[str, ...] = NAMES) -> set[str]:
    found = warnings(reached, frame, names)
    kinds = {kind for kind, text in TOLD.items() if any(text in warning for warning in found)}
    assert len(kinds) == len(found)
    return kinds


@pytest.mark.parametrize(
    "name",
    ["logistic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linear", "poisson", "negative binomial"))],
)
def test_good_situations_rarely_warn(name):
    """24 simulated studies of each model, at most one of them (under 5 %) with any warning; keys are fixed."""
    score, warned = SCORES[name], 0
    frame = frame_of(score, prior_stddev=1.0)
    for number in range(24):
        rng = np.random.default_rng([4, number])
        theta = 0.5 * rng.normal(size=(4, 1)) + [[0.0], [0.0], [0.0], [score.typical_predictor]]
        x, y = draw_rows(rng, score, theta, 3000)
        start = np.array([0.0, 0.0, 0.0, score.typical_predictor])
        warned += bool(told(run_rounds(rng, frame, x, y, mu=2.0 * USUAL, start=start), frame))
    assert warned <= 1


def test_columns_that_go_together_are_told():
    rng, score = np.random.default_rng(5), SCORES["logistic"]
    moments = np.eye(7) / 9.0
    moments[-1, -1] = 1.0
    frame = frame_of(score, num_features=7, moments=moments)
    x, y = draw_rows(rng, score, np.full((7, 1), 0.3), 1500)
    x[:, 1:6] = x[:, :1] + 0.01 * x[:, 1:6]
    names = (*"abcdef", "intercept")
    assert "hidden" in told(run_rounds(rng, frame, x, y, mu=USUAL), frame, names)


def test_rounds_that_have_not_settled_are_told():
    """Two rounds, far from a truth that rows know well."""
    rng, score = np.random.default_rng(6), SCORES["logistic"]
    frame = frame_of(score, prior_stddev=10.0)
    x, y = draw_rows(rng, score, np.array([[4.0], [-4.0], [3.0], [1.0]]), 20_000)
    assert "settled" in told(run_rounds(rng, frame, x, y, mu=LARGE, num_rounds=2), frame)
    assert "settled" not in told(run_rounds(rng, frame, x, y, mu=LARGE, num_rounds=30), frame)


def test_a_prior_that_does_not_expect_the_truth_is_told():
    rng, score = np.random.default_rng(7), SCORES["logistic"]
    x, y = draw_rows(rng, score, np.array([[2.0], [-2.0], [1.0], [0.5]]), 20_000)
    for prior_stddev, is_told in ((0.1, True), (2.0, False)):
        frame = frame_of(score, prior_stddev=prior_stddev)
        assert ("prior" in told(run_rounds(rng, frame, x, y, mu=LARGE), frame)) is is_told


def test_targets_that_vary_too_much_are_told():
    """Counts of a negative binomial law under a Poisson model; numbers with twice the noise."""
    rng, theta = np.random.default_rng(8), np.array([[0.3], [-0.3], [0.2], [1.0]])
    for name, source in (
        ("poisson", CountScore(concentration=0.7, typical_rate=2.0)),
        ("linear", dataclasses.replace(SCORES["linear"], noise_stddev=2.0)),
    ):
        frame = frame_of(SCORES[name])
        x, y = draw_rows(rng, source, theta, 10_000)
        reached = run_rounds(rng, frame, x, y, mu=LARGE, start=theta.ravel())
        assert "excess" in told(reached, frame)
        assert reached.excess > 1.5


def test_coefficients_that_are_mostly_prior_are_told_by_name():
    rng, score = np.random.default_rng(9), SCORES["logistic"]
    frame = frame_of(score, prior_stddev=0.2)
    x, y = draw_rows(rng, score, np.zeros((4, 1)), 300)
    reached = run_rounds(rng, frame, x, y, mu=SMALL)
    found = warnings(reached, frame, NAMES)
    (text,) = (text for text in found if "Mostly prior" in text)
    assert all(name in text for name in NAMES)
    assert (reached.prior_share > 0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("mu", [USUAL, LARGE])
@pytest.mark.parametrize("name", ["logistic", "linear", "poisson", "negative binomial"])
def test_intervals_cover(name, mu):
    """300 studies of 4 coefficients from the prior: 95 % intervals cover .93 to .975, those of 50 % .45 to .57.

    Whoever forgets the noise covers less: intervals of the rows' and the prior's share alone miss more often.
    """
    score = SCORES[name]
    frame, scaled, forgetful = frame_of(score, prior_stddev=0.5), [], []
    for number in range(300):
        rng = np.random.default_rng([10, number])
        theta = 0.5 * rng.normal(size=(4, 1))
        f = rng.uniform(-1, 1, size=(4000, 4))
        f[:, -1] = 1.0
        y = draw_labels(rng, score, f @ theta)
        reached = run_rounds(rng, frame, f, y, mu=mu)
        stddev = np.sqrt(np.diag(reached.covariance)) * frame.units
        miss = np.abs(reached.mean * frame.units - theta[:, 0])
        scaled.append(miss / stddev)
        forgetful.append(miss / (stddev * np.sqrt(np.maximum(1.0 - reached.privacy_share, 1e-9))))
    covers = np.mean(np.array(scaled) < 1.96)
    assert 0.93 <= covers <= 0.975
    assert 0.45 <= np.mean(np.array(scaled) < 0.6745) <= 0.57
    if mu == USUAL:
        assert np.mean(np.array(forgetful) < 1.96) < covers - 0.02
