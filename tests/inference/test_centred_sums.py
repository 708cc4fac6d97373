"""What a round asks of rows: how far one changed unit moves it, that weights know no label, and what it is made of."""

import math

import numpy as np
import pytest
from scipy import optimize

from silobayes.inference.centred_sums import Centre, Frame, curvatures, round_sum
from silobayes.privacy.clipping import Bounded, unpack_symmetric
from silobayes.privacy.relation import Relation, Unit
from tests.inference.centred_cases import NUM_FEATURES, SCORES, draw_labels, draw_rows, frame_of, random_centre

RELATIONS = list(Relation)
CAPACITY = 24
LABELS = {"softmax": [0.0, 1.0, 2.0], "logistic": [0.0, 1.0]}


def sum_of(x, y, centre: Centre, frame: Frame, relation=Relation.SUBSTITUTE, capacity=CAPACITY, **units) -> Bounded:
    return round_sum(np.asarray(x, float), np.asarray(y, float), centre, frame, relation, capacity=capacity, **units)


def moved(one: Bounded, other: Bounded) -> float:
    """In units of the priced sensitivity."""
    return float(np.linalg.norm((one.total - other.total) * one.grid))


def moved_by_block(one: Bounded, other: Bounded, frame: Frame) -> dict[str, float]:
    """Of each block, in units of the root of its share."""
    parts = np.split((one.total - other.total) * one.grid, frame.ends)
    return {
        name: float(np.linalg.norm(part)) / math.sqrt(share)
        for part, (name, share) in zip(parts, frame.shares.items(), strict=True)
    }


def hostile_row(rng: np.random.Generator, num_features: int) -> np.ndarray:
    """Ordinary, huge, tiny, sparse, or with large parts that cancel."""
    x = rng.normal(size=num_features) * 10.0 ** rng.uniform(-12, 18)
    kind = rng.integers(5)
    if kind == 0:
        x = np.sign(x) * rng.choice([1e-30, 1.0, 1e30], size=num_features)
    if kind == 1:
        x = x * (rng.random(num_features) < 0.4)
    if kind == 2 and num_features > 1:
        x = rng.choice([0.0, 1.0, 2.0], size=num_features)
        x[rng.permutation(num_features)[:2]] = [2.0**56, -(2.0**56)]
    if kind == 3:
        x[rng.integers(num_features)] = rng.choice([np.nan, np.inf, -np.inf])
    return x


def hostile_label(rng: np.random.Generator) -> float:
    return float(rng.choice([0.0, 1.0, 2.0, -1.0, 1e6, -1e12, 1e300, np.nan, np.inf]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", SCORES)
def test_one_changed_row_moves_the_joint_sum_by_at_most_one(name, relation):
    """Hostile rows beside hostile rows, at centres wide and narrow; the price is 1, but for rounding."""
    rng, score = np.random.default_rng(1), SCORES[name]
    for number in range(60):
        d = int(rng.integers(1, 18))
        frame = frame_of(score, num_features=d, intercept=bool(number % 2))
        mean = np.full(frame.dim, 3.0) if number % 3 == 0 else rng.normal(size=frame.dim)
        centre = Centre(
            mean=mean, covariance=random_centre(rng, frame.dim, width=10.0 ** rng.uniform(-6, 1)).covariance
        )
        n = int(rng.integers(1, CAPACITY))
        x = np.stack([hostile_row(rng, d) for _ in range(n)])
        x[rng.integers(n)] = x[0]
        y = np.array([hostile_label(rng) for _ in range(n)])
        if relation is Relation.SUBSTITUTE:
            place, other_x, other_y = int(rng.integers(n)), x.copy(), y.copy()
            other_x[place] = -x[place] if number % 2 else hostile_row(rng, d)
            other_y[place] = hostile_label(rng)
        else:
            other_x, other_y = x[:-1], y[:-1]
        one, two = (sum_of(*rows, centre, frame, relation) for rows in ((x, y), (other_x, other_y)))
        assert one.sensitivity(relation) == pytest.approx(1.0, abs=1e-4)
        assert moved(one, two) <= one.sensitivity(relation)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SCORES)
def test_a_rows_term_does_not_depend_on_which_rows_are_beside_it(name):
    """Large parts that cancel make whatever they like of the last bit of a sum, and kernels add up in other orders.

    What all rows say is what each says alone, to half a cell of the grid for each.
    """
    rng, score = np.random.default_rng(2), SCORES[name]
    for _ in range(12):
        d = int(rng.integers(8, 33))
        frame = frame_of(score, num_features=d, moments=0.9 * np.eye(d))
        covariance = rng.choice([0.0, 1e-3]) * random_centre(rng, frame.dim).covariance
        centre = Centre(mean=np.full(frame.dim, 3.0), covariance=covariance)
        x = np.tile(rng.choice([0.0, 1.0, 2.0], size=d), (CAPACITY, 1))
        x[:, rng.permutation(d)[:2]] = [2.0**56, -(2.0**56)]
        y = np.ones(CAPACITY)
        whole = sum_of(x, y, centre, frame).total
        alone = [sum_of(x[[m]], y[[m]], centre, frame).total for m in range(2)]
        assert np.array_equal(*alone)
        assert np.abs(whole - CAPACITY * alone[0]).max() <= CAPACITY / 2 + 1


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    "name", [name if name == "logistic" else pytest.param(name, marks=pytest.mark.slow) for name in SCORES]
)
def test_rows_chosen_to_move_the_sum_most_move_it_by_no_more_and_nearly_by_that(name, relation):
    """Each block, and all of them together, by optimisation; the score, which has most of the budget, is tight."""
    rng, score = np.random.default_rng(3), SCORES[name]
    frame = frame_of(score)
    centre = random_centre(rng, frame.dim, width=0.1)
    labels = LABELS.get(name, [-1e6, 0.0, 1e6])
    best = dict.fromkeys((*frame.shares, "all"), 0.0)

    def sums(flat: np.ndarray, label: tuple[float, float]) -> tuple[Bounded, Bounded]:
        rows = flat.reshape(2, NUM_FEATURES)
        one = sum_of(rows[:1], label[:1], centre, frame, relation, capacity=2)
        if relation is Relation.ADD_REMOVE:
            return one, sum_of(rows[:0], label[:0], centre, frame, relation, capacity=2)
        return one, sum_of(rows[1:], label[1:], centre, frame, relation, capacity=2)

    def note(flat: np.ndarray, label: tuple[float, float]) -> float:
        one, two = sums(flat, label)
        found = moved_by_block(one, two, frame) | {"all": moved(one, two)}
        for block, value in found.items():
            best[block] = max(best[block], value)
        return found["all"]

    starts = rng.normal(size=(60, 2 * NUM_FEATURES)) * 10.0 ** rng.uniform(-0.5, 1.5, size=(60, 1))
    starts[::2, NUM_FEATURES:] = -starts[::2, :NUM_FEATURES]
    tried = [(start, (rng.choice(labels), rng.choice(labels))) for start in starts]
    values = [note(start, label) for start, label in tried]
    for number in np.argsort(values)[-2:]:
        start, label = tried[number]
        optimize.minimize(
            lambda flat, label=label: -note(flat, label), start, method="Nelder-Mead", options={"maxfev": 250}
        )
    room = sum_of(np.zeros((0, NUM_FEATURES)), [], centre, frame, relation, capacity=2).sensitivity(relation)
    assert room <= 1.0 + 1e-4
    assert max(best.values()) <= room
    assert best["score"] >= 0.9
    assert best["all"] >= 0.8
    if relation is Relation.ADD_REMOVE:
        assert best["curvature"] >= 0.9


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", SCORES)
def test_all_rows_of_a_person_move_the_joint_sum_by_at_most_one(name, relation):
    """Alike, all different, of many kinds of labels; beside persons with one row."""
    rng, score = np.random.default_rng(4), SCORES[name]
    frame, tight = frame_of(score, rows_per_unit=2.0), 0.0
    labels = LABELS.get(name, [-1e6, 1e6])
    for number in range(40):
        centre = random_centre(rng, frame.dim)
        persons = np.repeat(np.arange(6), [5, 1, 2, 1, 1, 4])
        x = rng.normal(size=(14, NUM_FEATURES)) * 10.0 ** rng.uniform(-1, 3)
        y = rng.choice(labels, size=14)
        other_x, other_y, other_persons = x.copy(), y.copy(), persons
        mine = persons == 0
        if number % 2:
            x[mine], y[mine] = x[0], y[0]
        if relation is Relation.SUBSTITUTE:
            other_x[mine], other_y[mine] = -x[mine], y[mine]
        else:
            other_x, other_y, other_persons = x[~mine], y[~mine], persons[~mine]
        one = sum_of(x, y, centre, frame, relation, unit=Unit.PERSON, persons=persons)
        two = sum_of(other_x, other_y, centre, frame, relation, unit=Unit.PERSON, persons=other_persons)
        assert moved(one, two) <= one.sensitivity(relation)
        tight = max(tight, moved_by_block(one, two, frame)["score"])
    assert tight >= 0.8


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", SCORES)
def test_weights_know_no_label(name, relation):
    """Other labels: the curvature, its trace and products, and what scores should vary by stay to the last bit."""
    rng, score = np.random.default_rng(5), SCORES[name]
    for rows_per_unit in (1.0, 2.0):
        frame = frame_of(score, rows_per_unit=rows_per_unit)
        centre = random_centre(rng, frame.dim)
        x = rng.normal(size=(20, NUM_FEATURES)) * 10.0 ** rng.uniform(-1, 2, size=(20, 1))
        f = rng.normal(size=(20, score.outputs))
        units = {"unit": Unit.PERSON, "persons": np.arange(20) // 2} if rows_per_unit > 1.0 else {}
        one, two = (sum_of(x, draw_labels(rng, score, 3.0 * f), centre, frame, relation, **units) for _ in range(2))
        own, other = (dict(zip(frame.shares, np.split(total.total, frame.ends), strict=True)) for total in (one, two))
        for block in frame.shares:
            assert np.array_equal(own[block], other[block]) == (block not in ("score", "squares", "noise")), block


@pytest.mark.parametrize("name", SCORES)
def test_of_rows_within_the_clip_norms_the_sums_are_what_they_say(name):
    """With weights of one: gradient, curvature, trace and products of the whole model."""
    rng, score = np.random.default_rng(6), SCORES[name]
    frame = frame_of(score, rows_per_unit=20.0)
    k, centre = score.outputs, random_centre(rng, frame.dim, width=0.2)
    x = 0.05 * rng.normal(size=(CAPACITY, NUM_FEATURES))
    x[:, -1] = 1.0
    y = draw_labels(rng, score, rng.normal(size=(CAPACITY, k)))
    bounded = sum_of(x, y, centre, frame)
    sums = dict(zip(frame.shares, bounded.decode(bounded.total), strict=True))
    z = x * frame.stretch
    wide = np.einsum("ni,iajb,nj->nab", z, centre.covariance.reshape(NUM_FEATURES, k, NUM_FEATURES, k), z)
    own = score(z @ centre.mean.reshape(NUM_FEATURES, k), wide, y)
    assert (np.linalg.norm(z, axis=1) * own.bound < frame.clip_norm).all()
    curvature = np.einsum("ni,nab,nj->iajb", z, own.slope, z).reshape(frame.dim, frame.dim)
    near = {"atol": 2e-3 * frame.clip_norm, "rtol": 1e-3}
    np.testing.assert_allclose(sums["score"], (z.T @ own.residual).ravel(), **near)
    np.testing.assert_allclose(unpack_symmetric(sums["curvature"]), curvature, atol=2e-3 * frame.curvature_norm)
    np.testing.assert_allclose(sums["trace"], np.trace(curvature), atol=2e-3 * frame.curvature_norm)
    squares = np.sum(z**2, axis=1)
    np.testing.assert_allclose(
        sums["squares"], np.sum(own.residual**2 * squares[:, None]), atol=0.02 * frame.clip_norm**2
    )
    np.testing.assert_allclose(sums["expected"], own.variance @ squares, atol=0.02 * frame.clip_norm**2)
    if "centre" in sums:
        np.testing.assert_allclose(sums["centre"], curvature @ centre.mean, **near)
    if "intercept" in sums:
        np.testing.assert_allclose(sums["intercept"], curvature @ frame.intercept_direction, **near)
    exact, weighted, _ = curvatures(x, centre, frame)
    np.testing.assert_allclose(exact, curvature, rtol=1e-3)
    np.testing.assert_allclose(weighted, exact, rtol=1e-9)  # nothing was clipped


@pytest.mark.parametrize("name", SCORES)
def test_clipped_scores_have_mean_zero_at_the_truth(name):
    """Clipping biases nothing: over 40,000 labels of rows that are cut to a tenth, within 5 standard errors."""
    rng, score = np.random.default_rng(7), SCORES[name]
    frame = frame_of(score)
    theta = 0.5 * rng.normal(size=(NUM_FEATURES, score.outputs))
    x, y = draw_rows(rng, score, theta, 40_000)
    x[::2] *= 10.0
    y = draw_labels(rng, score, np.clip(x @ theta, -5, 5)) if name != "softmax" else draw_labels(rng, score, x @ theta)
    keep = np.abs(x @ theta).max(axis=1) < 5 if name != "softmax" else np.ones(len(x), bool)
    x, y = x[keep], y[keep]
    centre = Centre(mean=theta.ravel() / frame.units, covariance=np.zeros((frame.dim, frame.dim)))
    bounded = sum_of(x, y, centre, frame, capacity=40_000)
    sums = dict(zip(frame.shares, bounded.decode(bounded.total), strict=True))
    # Coordinates share what scores vary by; no one of them has more than all of it.
    assert np.abs(sums["score"]).max() <= 5.0 * math.sqrt(float(sums["squares"][0]))
    assert float(sums["squares"][0]) == pytest.approx(float(sums["expected"][0]), rel=0.1)


def test_shares_of_a_round_are_all_of_it():
    for score in SCORES.values():
        for intercept in (True, False):
            frame = frame_of(score, intercept=intercept)
            assert sum(frame.shares.values()) == pytest.approx(1.0)
            assert all(share > 0 for share in frame.shares.values())
