"""Group privacy and parallel composition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.privacy.accounting import gaussian, groups, rdp
from silobayes.privacy.events import (
    AbstractEvent,
    ApproximateDPEvent,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Relation,
    Sampling,
)


def test_a_group_of_one_costs_what_a_unit_costs() -> None:
    epsilon, delta = groups.group_pair(0.7, 1e-6, size=1)
    assert (epsilon, delta) == pytest.approx((0.7, 1e-6), rel=1e-9)
    (event,) = groups.group_events([GaussianEvent(clip_norm=2.0, std=3.0)], size=1)
    assert event == GaussianEvent(clip_norm=2.0, std=3.0)


def test_group_pair_is_the_geometric_sum() -> None:
    epsilon, delta = groups.group_pair(0.5, 1e-6, size=3)
    assert epsilon == pytest.approx(1.5)
    assert delta == pytest.approx(1e-6 * (1 + math.exp(0.5) + math.exp(1.0)))
    assert groups.group_pair(0.0, 1e-6, size=4) == pytest.approx((0.0, 4e-6))
    assert groups.group_pair(10.0, 1e-6, size=200) == pytest.approx((2000.0, 1.0))


@given(st.floats(0.0, 5.0), st.floats(0.0, 1e-3))
def test_two_units_after_three_units_cost_at_least_what_five_cost(epsilon: float, delta: float) -> None:
    first, second = groups.group_pair(epsilon, delta, size=2), groups.group_pair(epsilon, delta, size=3)
    chained = second[1] + math.exp(second[0]) * first[1]
    assert groups.group_pair(epsilon, delta, size=5)[1] <= min(1.0, chained) * (1 + 1e-9)


def test_never_below_the_exact_profile_of_a_gaussian_group() -> None:
    grouped = groups.group_profile(lambda eps: float(gaussian.delta(0.3, np.asarray(eps))), size=4)
    for epsilon in (0.1, 1.0, 3.0):
        exact = float(gaussian.delta(1.2, np.asarray(epsilon)))
        assert exact <= grouped(epsilon) <= 1.0
    assert grouped(6.0) < 1e-3


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("kind", [GaussianEvent, DiscreteGaussianEvent])
def test_a_gaussian_group_costs_what_size_times_the_sensitivity_costs(kind: type, relation: Relation) -> None:
    direct = rdp.epsilon([kind(sensitivity=6.0 if relation is Relation.SUBSTITUTE else 3.0, std=9.0, count=2)], relation=relation, delta=1e-5)  # fmt: skip  # noqa: E501
    grouped = groups.group_events([kind(clip_norm=1.0, std=9.0, count=2)], size=3)
    assert rdp.epsilon(grouped, relation=relation, delta=1e-5) == pytest.approx(direct)
    by_sensitivity = groups.group_events([kind(sensitivity=2.0, std=9.0, count=2)], size=3)
    assert by_sensitivity == [kind(sensitivity=6.0, std=9.0, count=2)]


def test_other_events_of_a_group() -> None:
    events: list[AbstractEvent] = [
        LaplaceEvent(clip_norm=1.0, scale=9.0),
        RandomisedResponseEvent(categories=3, gamma=0.5, count=2),
        ApproximateDPEvent(epsilon=0.1, delta=0.0),
    ]
    laplace, response, box = groups.group_events(events, size=3)
    assert laplace == LaplaceEvent(clip_norm=3.0, scale=9.0)
    assert response == RandomisedResponseEvent(categories=3, gamma=0.5, count=6)
    assert isinstance(box, ApproximateDPEvent)
    assert (box.epsilon, box.delta) == pytest.approx((0.3, 0.0))


def test_sampled_events_are_refused_because_how_many_of_the_group_are_drawn_is_random() -> None:
    sampled = GaussianEvent(clip_norm=1.0, std=9.0, sampling=Sampling(scheme="poisson", rate=0.5))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="sampling"):
        groups.group_events([sampled], size=2)
    with pytest.raises(InvalidInput, match="size"):
        groups.group_events([], size=0)


def test_parallel_is_the_pointwise_maximum_of_the_parts() -> None:
    together = groups.parallel([lambda eps: 0.1 * math.exp(-eps), lambda eps: 0.05])
    assert together(0.0) == pytest.approx(0.1)
    assert together(5.0) == pytest.approx(0.05)
    assert groups.parallel_pair([(0.5, 1e-6), (1.0, 1e-7)]) == (1.0, 1e-6)
    for empty in (groups.parallel, groups.parallel_pair):
        with pytest.raises(InvalidInput, match="at least one"):
            empty([])
