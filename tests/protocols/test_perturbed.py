"""Where a shard's change is clipped: one norm or one for each part, in public units."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.families import FullGaussian, FullGaussianEta, MeanFieldGaussian
from silobayes.families.mean_field_gaussian import MeanFieldGaussianEta
from silobayes.privacy.ledger import Budget
from silobayes.privacy.mechanisms import GaussianMechanism
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.ball import Ball, no_change
from silobayes.protocols.perturbed import PerturbedServer, ShardedSilo
from tests.engines.cases import MODEL, make_silos
from tests.engines.harness import Privatise, Settings, plan_for

SHARDS, DIM = 6, 3
BUDGET = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
BALLS = [
    Ball(clip_norms=(0.7,)),
    Ball(clip_norms=(0.7,), scales=(4.0, 0.5)),
    Ball(clip_norms=(0.7, 0.2)),
    Ball(clip_norms=(0.7, 0.2), scales=(4.0, 0.5)),
]
CENTER = np.array([1.0, -2.0, 0.5])
balls = pytest.mark.parametrize("ball", BALLS, ids=lambda ball: f"{ball.clip_norms}, {ball.scales}")


def eta(kind: Any, linear: np.ndarray, quadratic: np.ndarray) -> Any:
    """Natural parameters as the host arrays that states hold."""
    return kind(linear=linear, quadratic=quadratic)


def change_of(seed: int, is_full: bool, size: float = 1.0):
    rng = np.random.default_rng(seed)
    linear = size * rng.normal(size=(SHARDS, DIM))
    if not is_full:
        return eta(MeanFieldGaussianEta, linear, size * rng.normal(size=(SHARDS, DIM)))
    root = rng.normal(size=(SHARDS, DIM, DIM))
    return eta(FullGaussianEta, linear, size * (root + np.swapaxes(root, 1, 2)))


def part_norms(change, ball: Ball) -> np.ndarray:
    """Norms of the scaled parts of each shard, the matrix by its Frobenius norm."""
    linear = np.linalg.norm(change.linear, axis=-1) / ball.scales[0]
    quadratic = np.linalg.norm(change.quadratic.reshape(SHARDS, -1), axis=-1) / ball.scales[1]
    return np.stack([linear, quadratic])


@balls
@pytest.mark.parametrize("is_full", [False, True])
def test_a_shards_clipped_change_keeps_its_direction_and_its_norms(ball, is_full):
    change = change_of(0, is_full)
    before, after = part_norms(change, ball), part_norms(ball.clip_each(change), ball)
    if len(ball.clip_norms) == 1:
        before, after = (np.linalg.norm(norms, axis=0, keepdims=True) for norms in (before, after))
    clip_norms = np.array(ball.clip_norms)[:, None]
    np.testing.assert_allclose(after, np.minimum(before, clip_norms), rtol=1e-12)
    assert (before > clip_norms).any()
    clipped = ball.clip_each(change)
    cosines = np.sum(clipped.linear * change.linear, axis=-1) / (
        np.linalg.norm(clipped.linear, axis=-1) * np.linalg.norm(change.linear, axis=-1)
    )
    np.testing.assert_allclose(cosines, 1.0, rtol=1e-12)


@balls
@pytest.mark.parametrize("is_full", [False, True])
@given(seed=st.integers(0, 1000), size=st.sampled_from([1e-3, 1.0, 1e6]))
def test_the_sum_for_the_door_is_that_of_the_clipped_changes(ball, is_full, seed, size):
    change = change_of(seed, is_full, size)
    bounded = ball.bounded_sum(change)
    like = type(change)(linear=change.linear[0], quadratic=change.quadratic[0])
    total = ball.unflatten(bounded.decode(bounded.total), like)
    clipped = ball.clip_each(change)
    limits = SHARDS * bounded.grid * max(ball.clip_norms) * max(ball.scales)
    np.testing.assert_allclose(total.linear, clipped.linear.sum(axis=0), atol=limits)
    np.testing.assert_allclose(total.quadratic, clipped.quadratic.sum(axis=0), atol=limits)


@balls
def test_a_shards_clipped_change_depends_on_its_own_change_only(ball):
    change = change_of(1, is_full=False)
    other = change_of(2, is_full=False)
    mixed = eta(
        type(change),
        np.concatenate([change.linear[:1], other.linear[1:]]),
        np.concatenate([change.quadratic[:1], other.quadratic[1:]]),
    )
    np.testing.assert_array_equal(ball.clip_each(mixed).linear[0], ball.clip_each(change).linear[0])
    np.testing.assert_array_equal(ball.clip_each(mixed).quadratic[0], ball.clip_each(change).quadratic[0])


@pytest.mark.parametrize("family", [MeanFieldGaussian(event_shape=(DIM,)), FullGaussian(dimension=DIM)])
def test_two_parts_are_priced_as_one_mechanism_of_root_two(family):
    """Both parts at their norms, in units of these: a term of norm sqrt(2); noise per part follows its own norm."""
    one, two = (no_change(Ball(clip_norms=norms), family) for norms in ((1.0,), (5.0, 0.1)))
    mechanism = GaussianMechanism(noise_multiplier=3.0)
    prices = [mechanism.event(bounded, Relation.SUBSTITUTE) for bounded in (one, two)]
    assert [price.std for price in prices] == [3.0, 3.0]
    sensitivities = [price.l2_sensitivity(Relation.SUBSTITUTE) for price in prices]
    assert sensitivities == pytest.approx([2.0, 2.0 * 2**0.5], rel=1e-4)
    assert min(sensitivities[0] / 2.0, sensitivities[1] / 2.0**1.5) >= 1.0  # rounded against ourselves
    assert mechanism.stddevs(two) == pytest.approx((15.0, 0.3))


def test_clipping_parts_in_scaled_units_is_clipping_them_in_units_of_their_own():
    """Scales only matter where one norm holds for both parts."""
    change = change_of(3, is_full=False)
    scaled = Ball(clip_norms=(0.7, 0.2), scales=(4.0, 0.5)).clip_each(change)
    plain = Ball(clip_norms=(2.8, 0.1)).clip_each(change)
    np.testing.assert_allclose(scaled.linear, plain.linear, rtol=1e-12)
    np.testing.assert_allclose(scaled.quadratic, plain.quadratic, rtol=1e-12)
    joint = Ball(clip_norms=(0.7,), scales=(4.0, 0.5)).clip_each(change)
    assert not np.allclose(joint.linear, Ball(clip_norms=(0.7,)).clip_each(change).linear)


def test_settings_reach_the_ball():
    settings = Settings(
        privatise=Privatise.VIRTUAL_CLIENTS, rounds=2, damping=0.5, steps=3, step_size=0.1, shards=3,
        clip_norm=(0.7, 0.2), scales=(4.0, 0.5),
    )  # fmt: skip
    plan = plan_for(MODEL, make_silos(), settings, BUDGET)
    (silo,), server = plan.silos, plan.server
    assert isinstance(silo, ShardedSilo)
    assert isinstance(server, PerturbedServer)
    assert silo.ball == server.ball == Ball(clip_norms=(0.7, 0.2), scales=(4.0, 0.5))


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("clip_norms", {"clip_norms": ()}),
        ("clip_norms", {"clip_norms": (1.0, 1.0, 1.0)}),
        ("clip_norms", {"clip_norms": (1.0, 0.0)}),
        ("scales", {"clip_norms": (1.0,), "scales": (1.0, float("nan"))}),
    ],
)
def test_balls_that_promise_nothing_are_refused(key, given):
    with pytest.raises(InvalidInput) as refusal:
        Ball(**given)
    assert refusal.value.key == key


def test_only_perturbing_methods_clip_parts():
    settings = Settings(
        privatise=Privatise.DP_OPTIMISATION, rounds=1, damping=1.0, steps=1, step_size=0.1, clip_norm=(1.0, 2.0)
    )
    with pytest.raises(InvalidInput, match=r"protocol\.clip_norm"):
        plan_for(MODEL, make_silos(), settings, BUDGET)


@balls
@pytest.mark.parametrize("is_full", [False, True])
def test_around_a_center_a_change_is_clipped_by_its_slope_there(ball, is_full):
    """With theta = center + u the linear part in u is the derivative at the center."""
    centered = dataclasses.replace(ball, center=CENTER)
    change = change_of(3, is_full)
    product = change.quadratic @ CENTER if is_full else change.quadratic * CENTER
    moved = dataclasses.replace(change, linear=change.linear + 2 * product)
    for ours, oracle in zip(centered.flatten(change), ball.flatten(moved), strict=True):
        np.testing.assert_allclose(ours, oracle)
    back = centered.unflatten(centered.flatten(change), change)
    np.testing.assert_allclose(back.linear, change.linear)
    np.testing.assert_allclose(back.quadratic, change.quadratic)


def test_around_the_mean_clipping_the_precision_leaves_the_mean():
    """At t = 0 a change that only lowers a precision by less than it should would pull the mean towards 0."""
    precision, mean = 400.0, CENTER
    change = eta(MeanFieldGaussianEta, -precision * mean[None], np.full((1, DIM), 0.5 * precision))  # away with it
    q = eta(MeanFieldGaussianEta, precision * mean, np.full(DIM, -0.5 * precision))
    clipped = Ball(clip_norms=(1.0, 1.0), center=mean).clip_each(change)
    after = eta(MeanFieldGaussianEta, q.linear + clipped.linear[0], q.quadratic + clipped.quadratic[0])
    np.testing.assert_allclose(after.linear / (-2 * after.quadratic), mean, rtol=1e-9)
