"""Guarantees for groups of units, and for parts of the data that do not overlap.

Group privacy asks what a guarantee for one unit says about `size` units at once (a family, a ward). Parallel
composition asks what several releases cost that each read another part of the data. A profile is any function
epsilon -> delta.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import singledispatch
from typing import TypeAlias, TypeVar

from silobayes.core.errors import InvalidInput, require_count
from silobayes.privacy.events import AbstractEvent, AbstractSumEvent, ApproximateDPEvent, RandomisedResponseEvent

Profile: TypeAlias = Callable[[float], float]
Part = TypeVar("Part")
_ROUND_UP = 1.0 + 1e-12


def group_pair(epsilon: float, delta: float, *, size: int) -> tuple[float, float]:
    """From (epsilon, delta) for one unit to `size` units (Dwork, Roth 2014, Thm. 2.2 and Vadhan 2017, Lemma 2.2).

    Guarantees:
        - a group of one costs what a unit costs
        - two units after three units cost at least what five cost
    """
    _require_size(size)
    return size * epsilon * _ROUND_UP, min(1.0, delta * _geometric_sum(epsilon, size) * _ROUND_UP)


def group_profile(profile: Profile, *, size: int) -> Profile:
    """The profile of `size` units, each link of the chain of neighbours being given the same share of epsilon.

    Guarantees:
        - never below the exact profile of a Gaussian group
    """
    _require_size(size)

    def grouped(epsilon: float) -> float:
        return group_pair(epsilon / size, profile(epsilon / size), size=size)[1]

    return grouped


@singledispatch
def group_event(item: AbstractEvent, size: int) -> AbstractEvent:
    """An event that costs one unit what `item` costs `size` units; the open registry of exact group rules."""
    raise InvalidInput(
        "mechanism", "one with a group rule", item.mechanism, "Use group_profile on its privacy profile."
    )


def group_events(events: Iterable[AbstractEvent], *, size: int) -> list[AbstractEvent]:
    """Events whose price for one unit is the price of `events` for a group of `size` units.

    Guarantees:
        - a Gaussian group costs what `size` times the sensitivity costs
        - sampled events are refused: how many of the group are drawn is random
    """
    _require_size(size)
    return [group_event(item, size) for item in events]


def parallel(profiles: Iterable[Profile]) -> Profile:
    """The profile of releases from disjoint parts of the data: the pointwise maximum (McSherry 2009, Thm. 4).

    It holds if a neighbouring change touches one part only. So the parts are fixed independently of the values in the
    rows (by hospital, by a shuffle drawn before reading); under add_remove one unit enters or leaves one part; under
    substitute the new unit must fall into the part of the old one. If values decide the part (by age, by diagnosis),
    a substitution touches two parts: compose those two, do not take the maximum. All rows of one unit are in one part.

    Guarantees:
        - the pointwise maximum of the parts
    """
    parts = _require_some("profiles", profiles)
    return lambda epsilon: max(profile(epsilon) for profile in parts)


def parallel_pair(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The same for (epsilon, delta) pairs: the largest of each."""
    epsilons, deltas = zip(*_require_some("pairs", pairs), strict=True)
    return max(epsilons), max(deltas)


@group_event.register
def _sum(item: AbstractSumEvent, size: int) -> AbstractEvent:
    """`size` terms of norm <= C have a sum of norm <= size C, and non-negative or PSD ones stay so."""
    if item.sampling is not None and item.sampling.rate < 1.0:
        raise InvalidInput(
            "sampling", "no sampling, for an exact group rule", item.sampling, "Use group_profile on its profile."
        )
    if item.clip_norm is not None:
        return dataclasses.replace(item, clip_norm=size * item.clip_norm)
    assert item.sensitivity is not None
    return dataclasses.replace(item, sensitivity=size * item.sensitivity)


@group_event.register
def _randomised_response(item: RandomisedResponseEvent, size: int) -> AbstractEvent:
    """Each unit answers for itself, so a group changes `size` independent answers."""
    return dataclasses.replace(item, count=size * item.count)


@group_event.register
def _approximate_dp(item: ApproximateDPEvent, size: int) -> AbstractEvent:
    epsilon, delta = group_pair(item.epsilon, item.delta, size=size)
    return dataclasses.replace(item, epsilon=epsilon, delta=delta)


def _geometric_sum(epsilon: float, size: int) -> float:
    """1 + e^eps + ... + e^((size-1) eps), infinite where it overflows."""
    if epsilon == 0.0:
        return float(size)
    if size * epsilon > 700.0:
        return math.inf
    return math.expm1(size * epsilon) / math.expm1(epsilon)


def _require_some(key: str, parts: Iterable[Part]) -> list[Part]:
    parts = list(parts)
    if not parts:
        raise InvalidInput(key, "at least one part", parts, "Leave out a composition of nothing.")
    return parts


def _require_size(size: int) -> None:
    require_count("size", size, at_least=1, fix="Pass the number of units in the group.")
