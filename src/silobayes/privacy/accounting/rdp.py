"""Renyi differential privacy: one rule per event, sums of curves, two conversions to (epsilon, delta).

A `Curve` holds the divergence at each order of a grid and, beside it, what a divergence cannot hold: the delta of
black boxes and the chance that a sampler cut a batch. Both are paid when the curve is converted (SPEC 8):
delta_total(eps) = delta_curve(eps) + delta + (1 + e^eps) overflow.

`epsilon` converts by Canonne, Kamath, Steinke 2020, Prop. 12 (= Balle et al. 2020, Thm. 21); `moments_epsilon` is the
analytical moments accountant of VIPS (002 section 2.3.2: WBK19 and the classic conversion, integer orders), which is
looser and kept to reproduce published numbers.

New mechanisms register a rule: `@rule.register`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from typing import TypeAlias

import numpy as np

from silobayes.core.errors import InvalidInput, require_number
from silobayes.privacy.accounting import renyi
from silobayes.privacy.accounting.renyi import Floats
from silobayes.privacy.events import (
    AbstractEvent,
    AbstractSumEvent,
    ApproximateDPEvent,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Sampling,
    Scheme,
    SkellamEvent,
)
from silobayes.privacy.relation import Relation

_HIGH = [round(256 * 2 ** (step / 16)) for step in range(1, 97)]
ORDERS = np.array(sorted({*(1.0 + 2 ** (step / 16) for step in range(-128, 56)), *range(2, 257), *_HIGH}), dtype=float)
"""Dense near 1 (high epsilon), every integer to 256, then 16 steps per octave to 2^14 (tiny epsilon)."""
INTEGER_ORDERS = np.array(sorted({*range(2, 1025), *(order for order in _HIGH if order > 1024)}), dtype=float)
"""For the moments accountant: every integer where the published settings have their optimum."""
Conversion: TypeAlias = Callable[[Floats, Floats, float], Floats]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a list of events costs: divergence per order, black-box delta, probability of a cut batch."""

    rdp: Floats
    delta: float = 0.0
    overflow: float = 0.0

    def __add__(self, other: "Curve") -> "Curve":
        """Adaptive composition: everything adds."""
        return Curve(rdp=self.rdp + other.rdp, delta=self.delta + other.delta, overflow=self.overflow + other.overflow)

    def __rmul__(self, times: int) -> "Curve":
        """`times`-fold adaptive composition."""
        return Curve(rdp=times * self.rdp, delta=times * self.delta, overflow=times * self.overflow)


@singledispatch
def rule(item: AbstractEvent, relation: Relation, orders: Floats) -> Curve:
    """The curve of one run of `item`; the open registry of this accountant."""
    raise InvalidInput(
        "mechanism", "one with a Renyi rule", item.mechanism, "Register a rule for it or use another accountant."
    )


def curve(events: Iterable[AbstractEvent], *, relation: Relation, orders: Floats = ORDERS) -> Curve:
    """The curve of all events together.

    Guarantees:
        - k repeats of an event cost what one event with count k costs
        - the order of events does not matter
    """
    total = Curve(rdp=np.zeros_like(orders))
    for item in events:
        total = total + item.count * _one(dataclasses.replace(item, count=1), relation, orders.tobytes())
    return dataclasses.replace(total, rdp=np.where(np.isnan(total.rdp), np.inf, total.rdp))


@lru_cache(maxsize=64)
def _one(item: AbstractEvent, relation: Relation, orders: bytes) -> Curve:
    """`rule`, remembered: a ledger and a calibration ask for the same event again and again."""
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow becomes infinity or nan, and nan infinity
        return rule(item, relation, np.frombuffer(orders))


def epsilon(events: Iterable[AbstractEvent], *, relation: Relation, delta: float) -> float:
    """The epsilon for which the events are (epsilon, `delta`)-DP; infinite if black boxes alone exceed `delta`.

    Guarantees:
        - never below the exact epsilon of a Gaussian
        - delta(events, epsilon=epsilon(events, delta=d)) <= d
    """
    events = list(events)
    coarse, order = _epsilon(events, relation, ORDERS, improved_epsilons, delta)
    fine, _ = _epsilon(events, relation, _around(order), improved_epsilons, delta)
    return min(coarse, fine)


def delta(events: Iterable[AbstractEvent], *, relation: Relation, epsilon: float) -> float:
    """The delta for which the events are (`epsilon`, delta)-DP."""
    events = list(events)
    coarse, order = _delta(events, relation, ORDERS, improved_log_deltas, epsilon)
    fine, _ = _delta(events, relation, _around(order), improved_log_deltas, epsilon)
    return min(coarse, fine)


def moments_epsilon(events: Iterable[AbstractEvent], *, relation: Relation, delta: float) -> float:
    """`epsilon` by the analytical moments accountant: integer orders and the classic conversion.

    Guarantees:
        - reproduces the published epsilon of VIPS
        - never below `epsilon`
    """
    return _epsilon(events, relation, INTEGER_ORDERS, classic_epsilons, delta)[0]


def moments_delta(events: Iterable[AbstractEvent], *, relation: Relation, epsilon: float) -> float:
    """`delta` by the analytical moments accountant."""
    return _delta(events, relation, INTEGER_ORDERS, classic_log_deltas, epsilon)[0]


def classic_epsilons(orders: Floats, rdp: Floats, delta: float) -> Floats:
    """At each order rdp + log(1/delta) / (order - 1) (Mironov 2017, Prop. 3)."""
    return rdp - math.log(delta) / (orders - 1.0)


def classic_log_deltas(orders: Floats, rdp: Floats, epsilon: float) -> Floats:
    """At each order (order - 1) (rdp - epsilon) (Mironov 2017, Prop. 3)."""
    return (orders - 1.0) * (rdp - epsilon)


def improved_epsilons(orders: Floats, rdp: Floats, delta: float) -> Floats:
    """At each order, Canonne, Kamath, Steinke 2020, Prop. 12; 0 where the total variation alone is below `delta`."""
    each = rdp + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
    return np.where(_log_total_variation(rdp) + 1e-12 <= math.log(delta), 0.0, each)


def improved_log_deltas(orders: Floats, rdp: Floats, epsilon: float) -> Floats:
    """At each order, Canonne, Kamath, Steinke 2020, Prop. 12; never above the total variation."""
    each = (orders - 1.0) * (rdp - epsilon + np.log1p(-1.0 / orders)) - np.log(orders)
    return np.minimum(each, _log_total_variation(rdp))


def with_overflow(epsilon_at: Callable[[float], float], *, delta: float, overflow: float) -> float:
    """The least fixed point of eps = epsilon_at(delta - (1 + e^eps) overflow), rounded up; infinite if none.

    `epsilon_at` falls with its argument, so iteration from below climbs to the least solution.
    """
    found = 0.0
    for _ in range(200):
        left = delta - (1.0 + math.exp(min(found, 700.0))) * overflow
        if not left > 0.0:
            return math.inf
        step = epsilon_at(left)
        if overflow == 0.0 or not math.isfinite(step) or step <= found:
            return step if overflow == 0.0 else max(step, found)
        found = step * (1.0 + 1e-9)  # past the limit after a few steps, so that the iteration ends on the safe side
    return math.inf


def require_delta(delta: float) -> float:
    """`delta` if it lies in (0, 1)."""
    number = require_number("delta", delta, above=0.0, fix="Pass a probability well below 1 / rows.")
    if not number < 1.0:
        raise InvalidInput("delta", "a number in (0, 1)", delta, "Pass a probability well below 1 / rows.")
    return number


def _epsilon(
    events: Iterable[AbstractEvent], relation: Relation, orders: Floats, convert: Conversion, delta: float
) -> tuple[float, float]:
    """The least epsilon over `orders`, rounded up, and the order that gives it."""
    left = require_delta(delta)
    total = curve(events, relation=relation, orders=orders)
    best = [orders[0]]

    def at(rest: float) -> float:
        each = convert(orders, total.rdp, rest)
        best[0] = orders[np.argmin(each)]
        return max(0.0, float(np.min(each)) * (1.0 + 1e-12) + 1e-14)

    return with_overflow(at, delta=left - total.delta * (1.0 + 1e-12), overflow=total.overflow), best[0]


def _delta(
    events: Iterable[AbstractEvent], relation: Relation, orders: Floats, convert: Conversion, epsilon: float
) -> tuple[float, float]:
    """The least delta over `orders`, rounded up, and the order that gives it."""
    if not (epsilon >= 0.0 and math.isfinite(epsilon)):
        raise InvalidInput("epsilon", "a number >= 0", epsilon, "Pass the epsilon at which delta is wanted.")
    total = curve(events, relation=relation, orders=orders)
    log_each = convert(orders, total.rdp, epsilon)
    cut = (1.0 + math.exp(min(epsilon, 700.0))) * total.overflow
    found = math.exp(min(0.0, float(np.min(log_each)))) + total.delta + cut
    return min(1.0, found * (1.0 + 1e-12)), orders[np.argmin(log_each)]


def _around(order: float) -> Floats:
    """A fine grid between the neighbours of `order` in `ORDERS`: what a coarse grid loses there is below 1e-5."""
    index = int(np.searchsorted(ORDERS, order))
    low, high = ORDERS[max(index - 1, 0)], ORDERS[min(index + 1, len(ORDERS) - 1)]
    return np.linspace(low, high, 33)


def _log_total_variation(rdp: Floats) -> Floats:
    """sqrt(1 - e^-KL) bounds it (Bretagnolle, Huber 1979), and no divergence of order > 1 is below KL."""
    return 0.5 * np.log(np.maximum(-np.expm1(-rdp), 1e-300))


@rule.register
def _gaussian(item: GaussianEvent, relation: Relation, orders: Floats) -> Curve:
    shift = noise_ratio(item.l2_sensitivity(relation), item.std)
    if (sampling := active_sampling(item, relation)) is None or math.isinf(shift):
        rdp = renyi.gaussian(orders, shift)
    elif sampling.scheme is Scheme.WITHOUT_REPLACEMENT:
        rdp = renyi.without_replacement_gaussian(orders, sampling.rate, shift)
    elif relation is Relation.ADD_REMOVE:
        rdp = renyi.poisson_gaussian(orders, sampling.rate, shift)
    else:
        rdp = renyi.poisson_gaussian_opposite(orders, sampling.rate, noise_ratio(required_clip_norm(item), item.std))
    return Curve(rdp=rdp, overflow=overflow(item))


@rule.register
def _discrete_gaussian(item: DiscreteGaussianEvent, relation: Relation, orders: Floats) -> Curve:
    shift = noise_ratio(item.l2_sensitivity(relation), item.std)
    return _sampled(item, relation, orders, shift, lambda order: renyi.gaussian(order, shift))


@rule.register
def _skellam(item: SkellamEvent, relation: Relation, orders: Floats) -> Curve:
    l2 = item.l2_sensitivity(relation) / item.grid
    l1 = l2 * min(l2, math.sqrt(item.dimension) if item.dimension else math.inf)  # integers: |x| <= x^2
    shift = noise_ratio(l2, item.std / item.grid)
    variance = (l2 / shift) ** 2
    return _sampled(item, relation, orders, shift, lambda order: renyi.skellam(order, l1, l2, variance))


@rule.register
def _laplace(item: LaplaceEvent, relation: Relation, orders: Floats) -> Curve:
    ratio = noise_ratio(item.l1_sensitivity(relation), item.scale)
    return _sampled(item, relation, orders, ratio, lambda order: renyi.laplace(order, ratio), pure_epsilon=ratio)


@rule.register
def _randomised_response(item: RandomisedResponseEvent, relation: Relation, orders: Floats) -> Curve:
    keep, other = response_probabilities(item, relation)
    return Curve(rdp=renyi.randomised_response(orders, keep, other))


@rule.register
def _approximate_dp(item: ApproximateDPEvent, relation: Relation, orders: Floats) -> Curve:
    """An (eps, delta) box is no worse than one that fails openly with probability delta and else is eps-DP."""
    return Curve(rdp=renyi.pure(orders, item.epsilon), delta=item.delta)


def _sampled(
    item: AbstractSumEvent,
    relation: Relation,
    orders: Floats,
    ratio: float,
    unsampled: renyi.IntegerCurve,
    pure_epsilon: float = math.inf,
) -> Curve:
    """Bounds that need only the unsampled curve and noise symmetric about 0, for any sampling."""
    if math.isinf(ratio):
        rdp = np.full_like(orders, math.inf)
    elif (sampling := active_sampling(item, relation)) is None:
        rdp = unsampled(orders)
    elif relation is Relation.ADD_REMOVE:
        rdp = renyi.poisson(orders, sampling.rate, unsampled)
    else:
        if sampling.scheme is Scheme.POISSON:
            required_clip_norm(item)  # two terms differ by no less than one term from none, so `unsampled` covers both
        rdp = renyi.mixture_from_curve(orders, sampling.rate, unsampled, pure_epsilon)
    return Curve(rdp=rdp, overflow=overflow(item))


def noise_ratio(sensitivity: float, noise: float) -> float:
    """Sensitivity / noise, rounded up to what doubles can square: to 1e-9 from below, to infinity from 1e9."""
    ratio = max(sensitivity / noise, 1e-9)
    return ratio if ratio <= 1e9 else math.inf


def overflow(item: AbstractSumEvent) -> float:
    """The probability that one draw's batch was cut."""
    return 0.0 if item.sampling is None else item.sampling.overflow


def active_sampling(item: AbstractSumEvent, relation: Relation) -> Sampling | None:
    """The sampling that amplifies; none at rate 1, where every unit is in the batch."""
    sampling = item.sampling
    if sampling is None or sampling.rate == 1.0:
        return None
    if sampling.scheme is Scheme.WITHOUT_REPLACEMENT and relation is Relation.ADD_REMOVE:
        raise InvalidInput(
            "relation",
            "substitute for sampling without replacement",
            relation.value,
            "Batches of fixed size have no add/remove neighbours: use substitute, or Poisson sampling.",
        )
    return sampling


def required_clip_norm(item: AbstractSumEvent) -> float:
    """The norm of one term, which Poisson sampling under substitution cannot do without."""
    if item.clip_norm is None:
        fix = "Pass clip_norm: under Poisson sampling the distance to the absent term matters as well."
        raise InvalidInput("sensitivity", "clip_norm with poisson sampling and substitute", item.sensitivity, fix)
    return item.clip_norm


def response_probabilities(item: RandomisedResponseEvent, relation: Relation) -> tuple[float, float]:
    """Probability of the true answer, and of each other one."""
    if relation is not Relation.SUBSTITUTE:
        raise InvalidInput(
            "relation", "substitute for randomised_response", relation.value, "A unit that is absent gives no answer."
        )
    other = item.gamma / item.categories
    return 1.0 - item.gamma + other, other
