"""Zero-concentrated DP (Bun, Steinke 2016): a curve that is a straight line, divergence(order) <= rho * order.

Exact for Gaussian noise, continuous or discrete (Canonne, Kamath, Steinke 2020, Prop. 5); a pure epsilon-DP event costs
rho = epsilon tanh(epsilon / 2) (the divergence of binary randomised response at order 1, which is the steepest chord).
Sampled events do not amplify here, and the Skellam bound is stated for integer orders only: both are refused, use
`rdp`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from scipy.optimize import minimize_scalar

from silobayes.core.errors import InvalidInput
from silobayes.privacy.accounting import rdp
from silobayes.privacy.events import (
    AbstractEvent,
    ApproximateDPEvent,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
)
from silobayes.privacy.relation import Relation

_ROUND_UP = 1.0 + 1e-12


@dataclass(frozen=True, kw_only=True)
class Line:
    """divergence(order) <= rho * order, except with probability `delta` (a black box that fails)."""

    rho: float
    delta: float = 0.0


@singledispatch
def rule(item: AbstractEvent, relation: Relation) -> Line:
    """The line of one run of `item`; the open registry of this accountant."""
    raise _refusal("mechanism", "one that is a straight line in the order", item.mechanism)


def line(events: Iterable[AbstractEvent], *, relation: Relation) -> Line:
    """The line of all events together: rho and delta add under adaptive composition."""
    rho = delta = 0.0
    for times, one in ((item.count, rule(item, relation)) for item in events):
        rho, delta = rho + times * one.rho, delta + times * one.delta
    return Line(rho=rho * _ROUND_UP, delta=delta * _ROUND_UP)


def epsilon(events: Iterable[AbstractEvent], *, relation: Relation, delta: float) -> float:
    """The epsilon for which the events are (epsilon, `delta`)-DP, optimal over all real orders.

    Guarantees:
        - never below the exact epsilon of a Gaussian
        - never above the Renyi accountant by more than rounding
    """
    total = line(events, relation=relation)
    rest = rdp.require_delta(delta) - total.delta
    return epsilon_of(total.rho, rest) if rest > 0.0 else math.inf


def delta(events: Iterable[AbstractEvent], *, relation: Relation, epsilon: float) -> float:
    """The delta for which the events are (`epsilon`, delta)-DP, optimal over all real orders."""
    if not (epsilon >= 0.0 and math.isfinite(epsilon)):
        raise InvalidInput("epsilon", "a number >= 0", epsilon, "Pass the epsilon at which delta is wanted.")
    total = line(events, relation=relation)
    return min(1.0, delta_of(total.rho, epsilon) + total.delta)


def epsilon_of(rho: float, delta: float) -> float:
    """The minimum over order > 1 of rho order + log(1 - 1/order) - log(delta order) / (order - 1), rounded up.

    Any order gives a valid bound, so a search that stops early is loose, never wrong.
    """

    def at(log_excess: float) -> float:
        order = np.array([1.0 + math.exp(log_excess)])
        return float(rdp.improved_epsilons(order, rho * order, delta)[0])

    if rho == 0.0:
        return 0.0
    return max(0.0, _minimum(at, math.log(math.log(1.0 / delta) / rho) / 2.0) * _ROUND_UP + 1e-14)


def delta_of(rho: float, epsilon: float) -> float:
    """The same bound solved for delta."""

    def at(log_excess: float) -> float:
        order = np.array([1.0 + math.exp(log_excess)])
        return float(rdp.improved_log_deltas(order, rho * order, epsilon)[0])

    if rho == 0.0:
        return 0.0
    best = _minimum(at, math.log(max(epsilon - rho, rho * 1e-3) / (2.0 * rho)))
    return min(1.0, math.exp(min(best, 0.0)) * _ROUND_UP)


def _minimum(at: Callable[[float], float], start: float) -> float:
    """Of a function with one valley near `start`, after a coarse look at six decades around it."""
    grid = np.linspace(start - 7.0, start + 7.0, 57)
    lowest = grid[int(np.argmin([at(point) for point in grid]))]
    found = minimize_scalar(at, bounds=(lowest - 0.25, lowest + 0.25), method="bounded", options={"xatol": 1e-10})
    return min(at(float(found.x)), at(lowest))


@rule.register(GaussianEvent)
@rule.register(DiscreteGaussianEvent)
def _gaussian(item: GaussianEvent | DiscreteGaussianEvent, relation: Relation) -> Line:
    _refuse_sampling(item, relation)
    return Line(rho=(item.l2_sensitivity(relation) / item.std) ** 2 / 2.0)


@rule.register
def _laplace(item: LaplaceEvent, relation: Relation) -> Line:
    _refuse_sampling(item, relation)
    return Line(rho=_pure(item.l1_sensitivity(relation) / item.scale))


@rule.register
def _randomised_response(item: RandomisedResponseEvent, relation: Relation) -> Line:
    keep, other = rdp.response_probabilities(item, relation)
    return Line(rho=_pure(math.log(keep / other)))


@rule.register
def _approximate_dp(item: ApproximateDPEvent, relation: Relation) -> Line:
    return Line(rho=_pure(item.epsilon), delta=item.delta)


def _pure(epsilon: float) -> float:
    return epsilon * math.tanh(epsilon / 2.0)


def _refuse_sampling(item: GaussianEvent | DiscreteGaussianEvent | LaplaceEvent, relation: Relation) -> None:
    if rdp.active_sampling(item, relation) is not None or rdp.overflow(item) > 0.0:
        raise _refusal("sampling", "no sampling", item.sampling)


def _refusal(key: str, expected: str, got: object) -> InvalidInput:
    return InvalidInput(key, f"{expected}, for zCDP", got, "Use the rdp or the pld accountant.")
