"""zCDP: closed forms, exact Gaussian below, Renyi accountant beside it."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.privacy.accounting import rdp, renyi, zcdp
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

SUBSTITUTE, ADD_REMOVE = Relation.SUBSTITUTE, Relation.ADD_REMOVE


def test_rho_of_gaussians_is_half_the_squared_ratio_and_adds() -> None:
    events = [
        GaussianEvent(clip_norm=1.0, std=4.0, count=3),
        DiscreteGaussianEvent(clip_norm=1.0, std=2.0, terms="psd"),  # type: ignore[arg-type]
    ]
    assert zcdp.line(events, relation=SUBSTITUTE).rho == pytest.approx(3 * 0.25 / 2 + 0.5 / 2)
    assert zcdp.line(events, relation=ADD_REMOVE).rho == pytest.approx(3 / 32 + 1 / 8)


@given(st.floats(0.05, 20.0), st.floats(1e-12, 1e-2))
@settings(max_examples=40, deadline=None)
def test_epsilon_is_never_below_the_exact_epsilon_of_a_gaussian(shift: float, target: float) -> None:
    found = zcdp.epsilon([GaussianEvent(sensitivity=shift, std=1.0)], relation=SUBSTITUTE, delta=target)
    with mpmath.workdps(40):
        mu, eps = mpmath.mpf(shift), mpmath.mpf(found)
        exact = mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)
    assert exact <= target


@given(st.floats(1e-3, 1e3), st.floats(1e-12, 1e-2))
@settings(max_examples=60, deadline=None)
def test_epsilon_is_never_above_the_renyi_accountant_by_more_than_rounding(shift: float, target: float) -> None:
    events = [GaussianEvent(sensitivity=shift, std=1.0)]
    by_orders = rdp.epsilon(events, relation=SUBSTITUTE, delta=target)
    found = zcdp.epsilon(events, relation=SUBSTITUTE, delta=target)
    assert found <= by_orders * (1 + 1e-9) + 1e-12
    if 0.05 < shift < 20:  # inside the grid of orders both search the same valley
        assert found >= by_orders * (1 - 1e-4)


@given(st.floats(1e-3, 30.0), st.floats(1e-10, 1e-2))
@settings(max_examples=40, deadline=None)
def test_delta_inverts_epsilon(shift: float, target: float) -> None:
    events = [GaussianEvent(sensitivity=shift, std=1.0)]
    found = zcdp.epsilon(events, relation=SUBSTITUTE, delta=target)
    back = zcdp.delta(events, relation=SUBSTITUTE, epsilon=found)
    assert back <= target * (1 + 1e-8)
    if found > 0.0:
        assert back >= target * (1 - 1e-6)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 3.0, 20.0])
def test_pure_dp_lies_under_its_line_at_every_order(epsilon: float) -> None:
    orders = 1.0 + np.geomspace(1e-4, 1e4, 200)
    rho = zcdp.line([ApproximateDPEvent(epsilon=epsilon, delta=0.0)], relation=SUBSTITUTE).rho
    divergence = renyi.pure(orders, epsilon)
    assert np.all(divergence <= rho * orders * (1 + 1e-8))
    assert divergence[0] >= rho * 0.999  # tight at order 1, so no smaller rho would do


def test_laplace_and_response_are_priced_as_pure_dp() -> None:
    laplace = LaplaceEvent(sensitivity=1.0, scale=2.0, count=3)
    response = RandomisedResponseEvent(categories=2, gamma=2 / (1 + math.exp(0.5)))
    box = ApproximateDPEvent(epsilon=0.5, delta=0.0)
    rho = zcdp.line([box], relation=SUBSTITUTE).rho
    assert zcdp.line([laplace], relation=SUBSTITUTE).rho == pytest.approx(3 * rho)
    assert zcdp.line([response], relation=SUBSTITUTE).rho == pytest.approx(rho)


def test_black_box_delta_is_paid() -> None:
    boxes = [ApproximateDPEvent(epsilon=0.1, delta=1e-8, count=50)]
    pure = [ApproximateDPEvent(epsilon=0.1, delta=0.0, count=50)]
    expected = zcdp.epsilon(pure, relation=SUBSTITUTE, delta=5e-7)
    assert zcdp.epsilon(boxes, relation=SUBSTITUTE, delta=1e-6) == pytest.approx(expected, rel=1e-9)
    assert zcdp.epsilon(boxes, relation=SUBSTITUTE, delta=5e-7) == math.inf
    assert zcdp.delta(boxes, relation=SUBSTITUTE, epsilon=100.0) == pytest.approx(5e-7)


@pytest.mark.parametrize(
    "event",
    [
        SkellamEvent(sensitivity=1.0, std=5.0),
        GaussianEvent(clip_norm=1.0, std=5.0, sampling=Sampling(scheme="poisson", rate=0.1)),  # type: ignore[arg-type]
        LaplaceEvent(clip_norm=1.0, scale=5.0, sampling=Sampling(scheme="poisson", rate=1.0, overflow=0.1)),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_straight_line_is_refused(event: AbstractEvent) -> None:
    with pytest.raises(InvalidInput, match="zCDP"):
        zcdp.epsilon([event], relation=ADD_REMOVE, delta=1e-5)
