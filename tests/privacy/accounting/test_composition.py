"""Basic, advanced and optimal composition of (epsilon, delta) boxes."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.accounting import composition, gaussian
from silobayes.privacy.events import (
    AbstractEvent,
    ApproximateDPEvent,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Relation,
    Sampling,
    SkellamEvent,
)

REFERENCE = Path(__file__).resolve().parents[4] / "shared" / "reference" / "accounting.json"
SUBSTITUTE, ADD_REMOVE = Relation.SUBSTITUTE, Relation.ADD_REMOVE
EPSILONS = [composition.basic_epsilon, composition.advanced_epsilon, composition.optimal_epsilon]


def box(epsilon: float, delta: float = 0.0, count: int = 1) -> ApproximateDPEvent:
    return ApproximateDPEvent(epsilon=epsilon, delta=delta, count=count)


def poisson(rate: float, overflow: float = 0.0) -> Sampling:
    return Sampling(scheme="poisson", rate=rate, overflow=overflow)  # type: ignore[arg-type]


EVENTS: list[tuple[AbstractEvent, Relation]] = [
    (box(0.1, 1e-9), SUBSTITUTE),
    (LaplaceEvent(clip_norm=1.0, scale=20.0), SUBSTITUTE),
    (LaplaceEvent(clip_norm=1.0, scale=5.0, sampling=poisson(0.1)), ADD_REMOVE),
    (RandomisedResponseEvent(categories=5, gamma=0.98), SUBSTITUTE),
    (GaussianEvent(clip_norm=1.0, std=30.0), SUBSTITUTE),
    (GaussianEvent(clip_norm=1.0, std=4.0, sampling=poisson(0.01, 1e-12)), SUBSTITUTE),
    (GaussianEvent(clip_norm=1.0, std=4.0, sampling=poisson(0.01)), ADD_REMOVE),
    (DiscreteGaussianEvent(clip_norm=1.0, std=30.0), ADD_REMOVE),
    (SkellamEvent(clip_norm=1.0, std=30.0, dimension=2), SUBSTITUTE),
]
EVERY_EVENT = pytest.mark.parametrize(("item", "relation"), EVENTS, ids=[item.mechanism for item, _ in EVENTS])


def test_basic_is_the_sum_of_the_epsilons_for_boxes() -> None:
    events = [box(0.1, 1e-9, 50), box(0.03, 0.0, 20)]
    assert composition.basic_epsilon(events, relation=SUBSTITUTE, delta=1e-6) == pytest.approx(5.6)
    assert composition.basic_epsilon(events, relation=SUBSTITUTE, delta=4.9e-8) == math.inf
    assert composition.basic_epsilon(events, relation=SUBSTITUTE, delta=5.1e-8) == pytest.approx(5.6)


def test_advanced_is_finite_for_any_finite_epsilon_and_count() -> None:
    found = composition.advanced_epsilon([box(1.0, 0.0, 1000)], relation=SUBSTITUTE, delta=1e-6)
    mean, spread = 1000 * math.tanh(0.5), math.sqrt(2000 * math.log(1e6))
    assert found == pytest.approx(mean + spread)
    for epsilon, count in ((1e-8, 10**9), (50.0, 10**6), (1000.0, 3)):
        found = composition.advanced_epsilon([box(epsilon, 0.0, count)], relation=SUBSTITUTE, delta=1e-6)
        assert 0.0 < found <= epsilon * count * (1 + 1e-9)


def test_optimal_equals_the_exact_binomial_for_equal_boxes() -> None:
    found = composition.optimal_epsilon([box(0.1, 0.0, 50)], relation=SUBSTITUTE, delta=1e-6)
    assert found == pytest.approx(3.1729027340188716, rel=1e-9)
    assert found >= 3.1729027340188716
    keep = 1 / (1 + math.exp(-0.1))
    exact = sum(
        math.comb(50, j) * keep**j * (1 - keep) ** (50 - j) * max(0.0, -math.expm1(1.7 - (2 * j - 50) * 0.1))
        for j in range(51)
    )
    failing = 1 - (1 - 1e-5) ** 50 * (1 - exact)
    found = composition.optimal_epsilon([box(0.1, 1e-5, 50)], relation=SUBSTITUTE, delta=failing)
    assert 1.7 <= found <= 1.7 + 1e-7


def test_reference_optimal_composition() -> None:
    if not REFERENCE.exists():
        pytest.skip("shared/reference/accounting.json is not beside the repository")
    rows = next(
        row for row in json.loads(REFERENCE.read_text()) if row["setting"].startswith("optimal composition k=50")
    )
    best = min(row["value"] for row in rows["values"])
    found = composition.optimal_epsilon([box(0.1, 0.0, 50)], relation=SUBSTITUTE, delta=1e-6)
    assert best <= found <= best * (1 + 1e-9)


def brute_force(boxes: list[tuple[float, float]], epsilon: float) -> float:
    """The delta of all 2^n outcomes of n different responses that each fail openly with their own delta."""
    total = 0.0
    for answers in itertools.product((1, -1), repeat=len(boxes)):
        loss = sum(sign * eps for sign, (eps, _) in zip(answers, boxes, strict=True))
        mass = math.prod(1 / (1 + math.exp(-sign * eps)) for sign, (eps, _) in zip(answers, boxes, strict=True))
        total += mass * max(0.0, -math.expm1(epsilon - loss))
    return 1.0 - math.prod(1.0 - delta for _, delta in boxes) * (1.0 - total)


@given(st.lists(st.tuples(st.floats(0.01, 2.0), st.sampled_from([0.0, 1e-9, 1e-4])), min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_optimal_is_never_below_the_exact_profile_of_different_boxes(boxes: list[tuple[float, float]]) -> None:
    target = 1e-3
    found = composition.optimal_epsilon([box(*one) for one in boxes], relation=SUBSTITUTE, delta=target)
    assert brute_force(boxes, found) <= target * (1 + 1e-9)
    if found > 0.0:
        assert brute_force(boxes, found * (1 - 1e-6)) >= target * (1 - 1e-9)


def test_the_grid_is_on_the_safe_side_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [box(0.1, 1e-9, 50), box(0.0333, 0.0, 200), box(0.07123, 0.0, 30)]
    exact = composition.optimal_epsilon(events, relation=SUBSTITUTE, delta=1e-6)
    monkeypatch.setattr(composition, "_MAX_LISTED", 10)
    on_grid = composition.optimal_epsilon(events, relation=SUBSTITUTE, delta=1e-6)
    assert exact <= on_grid <= exact * 1.005
    assert on_grid < composition.advanced_epsilon(events, relation=SUBSTITUTE, delta=1e-6)


def test_left_out_tails_are_counted() -> None:
    losses, masses, missing = composition._composed_responses(Counter({0.001: 10**6, 0.5: 3}))
    assert len(losses) == len(masses) < 4 * 20_000
    assert 1.0 - 1e-9 <= float(np.sum(masses)) + missing <= 1.0 + 1e-7


@EVERY_EVENT
def test_never_below_the_optimal_composition(item: AbstractEvent, relation: Relation) -> None:
    events = [dataclasses.replace(item, count=40)]
    basic, advanced, optimal = (at(events, relation=relation, delta=1e-6) for at in EPSILONS)
    assert 0.0 < optimal <= advanced * (1 + 1e-9)
    assert math.isfinite(basic)


@EVERY_EVENT
@pytest.mark.parametrize("at", EPSILONS)
def test_k_repeats_of_an_event_cost_what_one_event_with_count_k_costs(item, relation, at) -> None:
    repeated = at([item] * 6, relation=relation, delta=1e-6)
    assert repeated == pytest.approx(at([dataclasses.replace(item, count=6)], relation=relation, delta=1e-6), rel=1e-9)
    assert repeated > at([item], relation=relation, delta=1e-6)


@pytest.mark.parametrize("at", EPSILONS)
def test_the_order_of_events_does_not_matter(at) -> None:
    events = [item for item, relation in EVENTS if relation is SUBSTITUTE]
    forward = at(events, relation=SUBSTITUTE, delta=1e-6)
    assert forward == pytest.approx(at(events[::-1], relation=SUBSTITUTE, delta=1e-6), rel=1e-9)


def test_a_single_gaussian_is_its_own_profile() -> None:
    found = composition.basic_epsilon([GaussianEvent(sensitivity=1.0, std=2.0)], relation=SUBSTITUTE, delta=1e-5)
    assert found == pytest.approx(1.9930914044151198, rel=1e-8)
    for at in EPSILONS:
        assert at([GaussianEvent(sensitivity=1.0, std=2.0)], relation=SUBSTITUTE, delta=1e-5) >= 1.9930914044


def test_sampling_amplifies_the_box() -> None:
    sampled = GaussianEvent(clip_norm=1.0, std=2.0, sampling=poisson(0.1))
    inner = gaussian.epsilon(0.5, 1e-4)
    expected = math.log1p(0.1 * math.expm1(inner))
    found = composition.basic_epsilon([sampled], relation=ADD_REMOVE, delta=1e-5)
    assert found == pytest.approx(expected, rel=1e-8)


def test_overflow_is_charged() -> None:
    cut = [LaplaceEvent(clip_norm=1.0, scale=5.0, count=50, sampling=poisson(0.1, 1e-9))]
    whole = [LaplaceEvent(clip_norm=1.0, scale=5.0, count=50, sampling=poisson(0.1))]
    found = composition.optimal_epsilon(cut, relation=ADD_REMOVE, delta=1e-6)
    left = 1e-6 - 50 * (1 + math.exp(found)) * 1e-9
    assert found >= composition.optimal_epsilon(whole, relation=ADD_REMOVE, delta=left) * (1 - 1e-12)
    assert found > composition.optimal_epsilon(whole, relation=ADD_REMOVE, delta=1e-6)
    assert composition.optimal_epsilon(cut, relation=ADD_REMOVE, delta=9e-8) == math.inf


@pytest.mark.parametrize("at", EPSILONS)
def test_a_box_that_always_fails_has_no_price(at) -> None:
    assert at([box(0.1, 1.0)], relation=SUBSTITUTE, delta=0.5) == math.inf
    with pytest.raises(InvalidInput, match="delta"):
        at([box(0.1)], relation=SUBSTITUTE, delta=0.0)


@pytest.mark.parametrize(("relation", "distance"), [(Relation.ADD_REMOVE, 1.0), (Relation.SUBSTITUTE, 2.0)])
def test_a_box_has_the_sensitivity_of_its_relation(relation, distance):
    """Laplace noise is pure: its epsilon is the distance over the scale. Gaussian noise has its own profile."""
    laplace = LaplaceEvent(clip_norm=1.0, scale=4.0, count=3)
    spent = accounting.price([laplace], relation=relation, delta=1e-6, accountant="basic").epsilon
    assert 3 * distance / 4.0 <= spent <= 3 * distance / 4.0 * (1 + 1e-9)
    for event in (GaussianEvent(clip_norm=1.0, std=4.0), DiscreteGaussianEvent(clip_norm=1.0, std=4.0)):
        spent = accounting.price([event], relation=relation, delta=1e-6, accountant="basic").epsilon
        exact = gaussian.epsilon(distance / 4.0, 1e-6)
        assert exact * 0.99 <= spent <= exact * 1.3
