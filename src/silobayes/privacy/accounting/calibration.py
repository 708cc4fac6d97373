"""The least noise within a budget: coarse first, then certified on the fine grid (PERFORMANCE 10).

The search compares `delta` at the budget's epsilon, which is smooth in the logarithm of the noise parameter (std, scale
or gamma), instead of epsilon itself. A coarse composition brings it within a per mille; a few steps on the fine one end
on a parameter that was itself priced, so the answer is safe even if every estimate on the way was not.

Guarantees:
    - the calibrated event costs at most epsilon and at most delta
    - noise smaller by one in ten thousand costs more than the budget
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from silobayes.core.errors import InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.events import AbstractEvent, EventT
from silobayes.privacy.relation import Relation

_COARSE_BINS = 2**12
_COARSE_TOLERANCE = 1e-3
_TOLERANCE = 1e-6
_NONE = 700.0


def least_noise(
    event_factory: Callable[[float], EventT],
    *,
    relation: Relation,
    epsilon: float,
    delta: float,
    besides: tuple[AbstractEvent, ...] = (),
) -> EventT:
    """The event, or events, with the smallest parameter whose price is at most (epsilon, delta), to 1e-6 relative.

    Args:
        event_factory: the event, or several, of a noise parameter; more must mean more privacy, and 1 must be allowed.
        relation: which data sets are neighbours.
        epsilon: the budget, > 0.
        delta: the budget, in [DELTA_FLOOR, 1).
        besides: what else the budget has to pay for.

    Returns:
        The event; `price([*besides, event], relation=relation, delta=delta).epsilon <= epsilon`.

    Raises:
        InvalidInput: if no amount of noise is enough.
    """
    search = _Search(event_factory=event_factory, besides=besides, relation=relation, epsilon=epsilon, delta=delta)
    low, high = search.bracket()
    low, high = search.narrow(search.coarse, low, high, _COARSE_TOLERANCE)
    low, high = search.widen(low, high)
    _, high = search.narrow(search.fine, low, high, _TOLERANCE)
    for _ in range(50):
        item = event_factory(high)
        spent = accounting.price([*besides, *_several(item)], relation=relation, delta=delta).epsilon
        if spent <= epsilon and search.fine(high) <= 0.0:
            return item
        high *= 1.0 + _TOLERANCE
    raise search.impossible()


def _several(item: AbstractEvent | tuple[AbstractEvent, ...]) -> tuple[AbstractEvent, ...]:
    return item if isinstance(item, tuple) else (item,)


@dataclass(frozen=True, kw_only=True)
class _Search:
    event_factory: Callable[[float], AbstractEvent | tuple[AbstractEvent, ...]]
    besides: tuple[AbstractEvent, ...]
    relation: Relation
    epsilon: float
    delta: float

    def coarse(self, value: float) -> float:
        return self._height(lambda items: accounting.compose(items, self.relation, max_bins=_COARSE_BINS).delta, value)

    def fine(self, value: float) -> float:
        return self._height(
            lambda items: lambda epsilon: accounting.delta_at(items, relation=self.relation, epsilon=epsilon), value
        )

    def _height(self, delta_of: Callable[[list[AbstractEvent]], Callable[[float], float]], value: float) -> float:
        """Ln of delta over the budget's: positive is too dear."""
        try:
            spent = delta_of([*self.besides, *_several(self.event_factory(value))])(self.epsilon)
        except InvalidInput as error:
            if error.key != "std":
                raise
            return _NONE  # Too little noise for its grid: dearer than any budget.
        return max(math.log(spent / self.delta), -_NONE) if spent > 0.0 else -_NONE

    def bracket(self) -> tuple[float, float]:
        """(too dear, affordable), a factor 2 apart, on the coarse grid."""
        value = 1.0
        if self.coarse(value) <= 0.0:
            while self.coarse(value / 2.0) <= 0.0:
                value /= 2.0
                if value < 1e-300:
                    raise self.impossible()
            return value / 2.0, value
        while self.coarse(2.0 * value) > 0.0:
            value *= 2.0
            if value > 1e15:
                raise self.impossible()
        return value, 2.0 * value

    def widen(self, low: float, high: float) -> tuple[float, float]:
        """Move both ends of a coarse bracket until they hold on the fine grid."""
        step = _COARSE_TOLERANCE
        while self.fine(high) > 0.0:
            low, high, step = high, high * (1.0 + step), 4.0 * step
            if high > 1e16:
                raise self.impossible()
        while self.fine(low) <= 0.0:
            low, high, step = low / (1.0 + step), low, 4.0 * step
        return low, high

    def narrow(
        self, height: Callable[[float], float], low: float, high: float, tolerance: float
    ) -> tuple[float, float]:
        """Close in on the crossing; `high` stays affordable and `low` too dear."""
        g_low, g_high = height(low), height(high)
        for iteration in range(100):
            if high / low - 1.0 <= tolerance:
                break
            middle = math.sqrt(low * high)
            if iteration % 3 < 2 and max(g_low, -g_high) < _NONE:
                # False position in the logarithm, a hair to either side in turn so that both ends move.
                share = g_low / (g_low - g_high)
                hair = 0.4 * tolerance / math.log(high / low)
                share = share + hair if iteration % 3 == 0 else share - hair
                middle = low * (high / low) ** min(max(share, 0.001), 0.999)
            g = height(middle)
            low, g_low, high, g_high = (low, g_low, middle, g) if g <= 0.0 else (middle, g, high, g_high)
        return low, high

    def impossible(self) -> InvalidInput:
        fix = "No amount of noise keeps this budget: raise epsilon or delta, or lower sampling.overflow."
        return InvalidInput("epsilon", "a budget that noise can keep", self.epsilon, fix)
