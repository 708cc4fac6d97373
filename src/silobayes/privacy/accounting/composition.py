"""Composition of (epsilon, delta) boxes: basic, advanced and optimal.

These theorems know nothing of a mechanism but one point of its profile. An event with a whole profile is therefore
turned into a box first: a share of the total delta (the best of `_SHARES`) is split equally over all runs of such
events, and each run gets the epsilon that its own profile has there. Sampling amplifies boxes by Balle, Barthe,
Gaboardi 2018, Thm. 2: eps' = log(1 + w (e^eps - 1)), delta' = w delta.

- basic: epsilons add, deltas add.
- advanced: Kairouz, Oh, Viswanath 2015, Thm. 3.5, for different boxes; with tanh in place of (e^eps - 1)/(e^eps + 1),
  which overflows.
- optimal: the exact profile of composed randomised responses (Kairouz et al., Thm. 3.3; Murtagh, Vadhan 2016, Thm.
  1.5). Exact while the sums of losses can be listed, otherwise epsilons are rounded up to a common grid (Murtagh,
  Vadhan, Thm. 1.7, on the safe side).

New mechanisms register how they become a box: `@box.register`.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from scipy.special import gammaln

from silobayes.core.errors import InvalidInput
from silobayes.privacy.accounting import gaussian, rdp
from silobayes.privacy.accounting.renyi import Floats
from silobayes.privacy.events import (
    AbstractEvent,
    AbstractGaussianLikeEvent,
    AbstractSumEvent,
    ApproximateDPEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Scheme,
)
from silobayes.privacy.relation import Relation

_SHARES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
_MAX_LISTED = 2_000_000
_LATTICE = 1 << 16
_ROUND_UP = 1.0 + 1e-12
_LOG_TAIL = -90.0
"""Outcomes of a binomial rarer than this are counted as certain failures (8e-40 each)."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """An (epsilon, delta) guarantee of one run."""

    epsilon: float
    delta: float


Boxes = Counter[Box]
Rule = Callable[[Boxes, float], float]


@singledispatch
def box(item: AbstractEvent, relation: Relation, delta: float) -> Box:
    """One run of `item` as a box whose delta is at most `delta` if it can be chosen."""
    raise InvalidInput(
        "mechanism", "one with an (epsilon, delta) rule", item.mechanism, "Register a rule or use another accountant."
    )


def basic_epsilon(events: Iterable[AbstractEvent], *, relation: Relation, delta: float) -> float:
    """Epsilons add; all of delta goes to the boxes.

    Guarantees:
        - the sum of the epsilons, for boxes
    """
    return _compose(_basic, events, relation, delta, shares=(1.0 - 1e-12,))


def advanced_epsilon(events: Iterable[AbstractEvent], *, relation: Relation, delta: float) -> float:
    """Advanced composition.

    Guarantees:
        - finite for any finite epsilon and count
        - never below the optimal composition
    """
    return _compose(_advanced, events, relation, delta, shares=_SHARES)


def optimal_epsilon(events: Iterable[AbstractEvent], *, relation: Relation, delta: float) -> float:
    """Optimal composition.

    Guarantees:
        - equals the exact binomial for equal boxes
        - never below the exact profile of different boxes
        - the grid is on the safe side and close
    """
    return _compose(_optimal, events, relation, delta, shares=_SHARES)


def _compose(
    compose: Rule, events: Iterable[AbstractEvent], relation: Relation, delta: float, shares: tuple[float, ...]
) -> float:
    """The best over the shares of delta that go to the runs with a choice."""
    total = rdp.require_delta(delta)
    runs: Counter[AbstractEvent] = Counter()
    for item in events:
        runs[dataclasses.replace(item, count=1)] += item.count
    without_choice = {item: box(item, relation, 0.0) for item in runs}
    fixed = sum(times * without_choice[item].delta for item, times in runs.items())
    choosing = sum(times for item, times in runs.items() if math.isinf(without_choice[item].epsilon))
    overflow = sum(times * rdp.overflow(item) for item, times in runs.items() if isinstance(item, AbstractSumEvent))

    def at(rest: float) -> float:
        best = math.inf
        for share in shares if choosing else shares[:1]:
            each = share * max(rest - fixed, 0.0) / max(choosing, 1)
            boxes: Boxes = Counter()
            for item, times in runs.items():
                boxes[box(item, relation, each)] += times
            best = min(best, compose(boxes, rest))
        return best

    return rdp.with_overflow(at, delta=total, overflow=overflow)


def _basic(boxes: Boxes, delta: float) -> float:
    if not sum(times * one.delta for one, times in boxes.items()) <= delta:
        return math.inf
    return sum(times * one.epsilon for one, times in boxes.items()) * _ROUND_UP


def _advanced(boxes: Boxes, delta: float) -> float:
    plain, slack = _basic(boxes, delta), _slack(boxes, delta)
    if not (slack > 0.0 and math.isfinite(plain)):
        return plain
    mean = sum(times * one.epsilon * math.tanh(one.epsilon / 2.0) for one, times in boxes.items())
    square = sum(times * one.epsilon**2 for one, times in boxes.items())
    log_factor = min(math.log(1.0 / slack), math.log(math.e + math.sqrt(square) / slack))
    return min(plain, (mean + math.sqrt(2.0 * square * log_factor)) * _ROUND_UP)


def _optimal(boxes: Boxes, delta: float) -> float:
    """`_advanced` and `_basic` are valid for the same boxes, so a coarse grid can never make us worse than they are."""
    ceiling, slack = _advanced(boxes, delta), _slack(boxes, delta)
    pure: Counter[float] = Counter()
    for one, times in boxes.items():
        pure[one.epsilon] += times
    del pure[0.0]
    if not (slack > 0.0 and math.isfinite(ceiling) and pure):
        return ceiling
    losses, masses, missing = _composed_responses(pure)

    def upper(epsilon: float) -> float:
        above = losses > epsilon
        return float(np.sum(masses[above] * -np.expm1(epsilon - losses[above]))) * (1.0 + 1e-9) + missing

    low, high = 0.0, ceiling
    if upper(0.0) <= slack:
        return 0.0
    while high - low > 1e-13 * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if upper(middle) <= slack else (middle, high)
    return min(ceiling, high * _ROUND_UP)


def _slack(boxes: Boxes, delta: float) -> float:
    """What composition itself may fail with: 1 - delta = (1 - slack) prod (1 - delta_i), rounded down."""
    log_kept = sum(times * _log1m(one.delta) for one, times in boxes.items())
    return -math.expm1(math.log1p(-delta) - log_kept) - 1e-15 * delta if math.isfinite(log_kept) else 0.0


def _log1m(delta: float) -> float:
    return math.log1p(-delta) if delta < 1.0 else -math.inf


def _composed_responses(pure: Counter[float]) -> tuple[Floats, Floats, float]:
    """Losses of composed binary randomised responses, their probabilities, and the mass that was left out."""
    groups = [(epsilon, *_binomial(epsilon, times)) for epsilon, times in sorted(pure.items())]
    missing = sum(2.0 * math.exp(_LOG_TAIL) for _ in groups)
    if math.prod(len(masses) for _, _, masses in groups) <= _MAX_LISTED:
        losses, masses = np.zeros(1), np.ones(1)
        for epsilon, steps, weights in groups:
            losses = np.add.outer(losses, epsilon * steps).ravel()
            masses = np.multiply.outer(masses, weights).ravel()
        return losses, masses, missing
    spacing = _spacing([(epsilon, 2.0 * len(masses), pure[epsilon]) for epsilon, _, masses in groups])
    lattice, lowest = np.ones(1), 0
    for epsilon, steps, weights in groups:
        stride = math.ceil(epsilon / spacing)  # a larger epsilon is a worse response, so this is the safe side
        longer = np.zeros(len(lattice) + stride * int(steps[-1] - steps[0]))
        for step, weight in zip((steps - steps[0]).astype(int).tolist(), weights.tolist(), strict=True):
            longer[stride * step : stride * step + len(lattice)] += weight * lattice
        lattice, lowest = longer, lowest + stride * int(steps[0])
    return spacing * np.arange(lowest, lowest + len(lattice), dtype=np.float64), lattice, missing


def _binomial(epsilon: float, times: int) -> tuple[Floats, Floats]:
    """Loss of `times` binary responses in units of epsilon, and its probabilities, without both far tails.

    Hoeffding: the number of true answers is further than t from its mean with probability <= 2 exp(-2 t^2 / times).
    """
    log_lie = -epsilon - math.log1p(math.exp(-epsilon))
    mean, reach = times * -math.expm1(log_lie), math.sqrt(-_LOG_TAIL / 2.0 * times)
    truths = np.arange(max(0, math.floor(mean - reach)), min(times, math.ceil(mean + reach)) + 1, dtype=float)
    lies = times - truths
    log_mass = gammaln(times + 1.0) - gammaln(truths + 1.0) - gammaln(lies + 1.0) + lies * log_lie
    log_mass += truths * -math.log1p(math.exp(-epsilon))
    return truths - lies, np.exp(log_mass + 8e-16 * float(gammaln(times + 1.0)))


def _spacing(groups: list[tuple[float, float, int]]) -> float:
    """A grid of at most `_LATTICE` points for the sum of losses, on which rounding the epsilons up costs least."""
    least = sum(epsilon * width for epsilon, width, _ in groups) / _LATTICE
    candidates = [
        epsilon / max(1, math.floor(epsilon / least / cut)) for epsilon, _, _ in groups for cut in (1, 1.2, 1.5)
    ]
    candidates = [least, *(spacing for spacing in candidates if spacing >= least)]
    return min(candidates, key=lambda h: sum(times * (math.ceil(eps / h) * h - eps) for eps, _, times in groups))


@box.register
def _approximate_dp(item: ApproximateDPEvent, relation: Relation, delta: float) -> Box:
    return Box(epsilon=item.epsilon, delta=item.delta)


@box.register
def _randomised_response(item: RandomisedResponseEvent, relation: Relation, delta: float) -> Box:
    keep, other = rdp.response_probabilities(item, relation)
    return Box(epsilon=math.log(keep / other) * _ROUND_UP, delta=0.0)


@box.register
def _laplace(item: LaplaceEvent, relation: Relation, delta: float) -> Box:
    rate = _rate(item, relation)
    return _amplified(item.l1_sensitivity(relation) / item.scale * _ROUND_UP, 0.0, rate)


@box.register
def _gaussian_like(item: AbstractGaussianLikeEvent, relation: Relation, delta: float) -> Box:
    rate = _rate(item, relation)
    inner = min(delta / rate, 0.5)
    if not inner > 0.0:
        return Box(epsilon=math.inf, delta=0.0)
    if isinstance(item, GaussianEvent):
        epsilon = gaussian.epsilon(item.l2_sensitivity(relation) / item.std, inner)
    else:
        epsilon = rdp.epsilon([dataclasses.replace(item, sampling=None)], relation=relation, delta=inner)
    return _amplified(epsilon, inner, rate)


def _rate(item: AbstractSumEvent, relation: Relation) -> float:
    sampling = rdp.active_sampling(item, relation)
    if sampling is None:
        return 1.0
    if sampling.scheme is Scheme.POISSON and relation is Relation.SUBSTITUTE:
        rdp.required_clip_norm(item)
    return sampling.rate


def _amplified(epsilon: float, delta: float, rate: float) -> Box:
    """Of (1-w) R + w P against (1-w) R + w Q, if P is (epsilon, delta)-close to both R and Q; w = `rate`."""
    if rate == 1.0 or not epsilon < 30.0:
        inside = epsilon + math.log(rate) + math.exp(-30.0) / rate if rate < 1.0 else epsilon
        return Box(epsilon=min(inside, epsilon), delta=rate * delta)
    return Box(epsilon=math.log1p(rate * math.expm1(epsilon)) * _ROUND_UP, delta=rate * delta)
