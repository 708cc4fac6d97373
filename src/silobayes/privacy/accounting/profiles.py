"""One rule per event: what a single run costs, as a Gaussian, as a pair, or both (SPEC 0 and 8).

`rule` is open: a new event registers with `@rule.register`.

Sampling. With rate w and the profiles of the unsampled mechanism:

- Poisson, add_remove: `((1-w)Q + wP, Q)` for the pair (P, Q) of "unit present, unit absent" (Zhu, Dong, Wang 2022,
  Theorem 11), in both directions. Exact for Gaussian noise.
- Poisson, substitute, Gaussian noise: `(1-w)N(0) + wN(C)` against `(1-w)N(0) + wN(-C)` for all kinds of terms. That
  opposite rows of full norm are the worst case was checked numerically (both directions, over angles, shorter rows,
  rates and eps: a slow test repeats it); it is not proved.
- Poisson, substitute, other noise: advanced joint convexity (Balle, Barthe, Gaboardi 2018, Theorem 2), with the
  distance to the absent term and the distance of the two terms:
  `delta(eps') <= w ((1-b) d_add_remove(eps) + b d_substitute(eps))`, `eps = ln(1 + (e^eps' - 1)/w)`,
  `b = e^(eps' - eps)`.
- Without replacement, substitute: `w d(ln(1 + (e^eps - 1)/w))`, symmetric (Zhu, Dong, Wang 2022, Proposition 30).
- Without replacement, add_remove is refused: the size of a batch is a share of a number of rows that then differs.

A rate of 1 is no sampling. `overflow` is charged where events are composed.

Laplace noise is priced as if the whole L1 distance lay in one coordinate, which dominates: with losses bounded by
a <= b in two coordinates, `E[(1 - e^((eps - L_a - b)/2))+] <= (1 - e^((eps - a - b)/2))+` because `L_a <= a`;
merge pairwise.

Guarantees:
    - sampling never raises a price
    - a relation that a mechanism cannot be priced under is refused
"""

import math
from functools import partial, singledispatch

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.privacy.accounting import gaussian
from silobayes.privacy.accounting.pld import Pair, Profile, Rule
from silobayes.privacy.events import (
    AbstractEvent,
    AbstractSumEvent,
    ApproximateDPEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Relation,
    Scheme,
)


@singledispatch
def rule(item: AbstractEvent, relation: Relation) -> Rule:
    """The cost of one run of `item` under `relation`, as an upper bound."""
    raise InvalidInput("mechanism", "a mechanism with a pld price", item.mechanism, "Use another accountant.")


@rule.register
def _gaussian(item: GaussianEvent, relation: Relation) -> Rule:
    scheme = effective_scheme(item, relation)
    if scheme is None:
        return Rule(mu=item.l2_sensitivity(relation) / item.std, overflow=_overflow(item))
    if scheme is Scheme.POISSON and relation is Relation.SUBSTITUTE:
        assert item.clip_norm is not None
        assert item.sampling is not None
        pair = Pair(forward=partial(opposite_pair_delta, item.clip_norm / item.std, item.sampling.rate))
        return Rule(pair=pair, overflow=_overflow(item))
    base = Pair(forward=partial(gaussian.delta, item.l2_sensitivity(relation) / item.std))
    return Rule(pair=amplify(item, relation, base), overflow=_overflow(item))


@rule.register
def _laplace(item: LaplaceEvent, relation: Relation) -> Rule:
    base = laplace_pair(item.l1_sensitivity(relation) / item.scale)
    scheme = effective_scheme(item, relation)
    if scheme is None:
        return Rule(pair=base, overflow=_overflow(item))
    if scheme is Scheme.POISSON and relation is Relation.SUBSTITUTE:
        absent = laplace_pair(item.l1_sensitivity(Relation.ADD_REMOVE) / item.scale)
        # Joint convexity is not the profile of a pair. A row with a zero term is: it can only be added or removed.
        lower = Rule(pair=amplify(item, Relation.ADD_REMOVE, absent))
        return Rule(pair=amplify(item, relation, base, absent), overflow=_overflow(item), lower=lower)
    return Rule(pair=amplify(item, relation, base), overflow=_overflow(item))


@rule.register
def _randomised_response(item: RandomisedResponseEvent, relation: Relation) -> Rule:
    if relation is Relation.ADD_REMOVE:
        fix = "Use substitute: adding or removing a unit changes the number of answers, which is visible."
        raise InvalidInput("relation", "substitute for randomised_response", relation.value, fix)
    other = item.gamma / item.categories
    loss = math.log1p((1.0 - item.gamma) / other)
    if loss == 0.0:
        return Rule()

    def forward(epsilon: np.ndarray) -> np.ndarray:
        return other * np.maximum(0.0, np.expm1(loss - np.minimum(epsilon, loss))) * np.exp(np.minimum(epsilon, loss))

    return Rule(pair=Pair(forward=forward, atom=loss, exact=True))


@rule.register
def _approximate_dp(item: ApproximateDPEvent, relation: Relation) -> Rule:
    """Kairouz, Oh, Viswanath 2015: every (eps, delta)-DP mechanism is dominated by this pair."""
    del relation
    top, infinite = item.epsilon, item.delta

    def forward(epsilon: np.ndarray) -> np.ndarray:
        # (e^top - e^eps) / (1 + e^top), without overflow.
        rest = -np.expm1(np.minimum(epsilon - top, 0.0)) / (1.0 + math.exp(-top))
        return infinite + (1.0 - infinite) * rest

    return Rule(pair=Pair(forward=forward, atom=top or None, exact=True))


def effective_scheme(item: AbstractSumEvent, relation: Relation) -> Scheme | None:
    """The sampling that is priced: none at rate 1; what cannot be priced under `relation` is refused."""
    sampling = item.sampling
    if sampling is None or sampling.rate == 1.0:
        return None
    if sampling.scheme is Scheme.WITHOUT_REPLACEMENT and relation is Relation.ADD_REMOVE:
        fix = "Use substitute: adding or removing a row changes the size of a batch that is a share of the rows."
        raise InvalidInput("relation", "substitute with sampling without_replacement", relation.value, fix)
    if sampling.scheme is Scheme.POISSON and relation is Relation.SUBSTITUTE and item.clip_norm is None:
        fix = "Pass clip_norm: under Poisson sampling the distance to the absent term matters as well."
        raise InvalidInput("sensitivity", "clip_norm with poisson sampling and substitute", item.sensitivity, fix)
    return sampling.scheme


def _overflow(item: AbstractSumEvent) -> float:
    return 0.0 if item.sampling is None else item.sampling.overflow


def laplace_pair(loss: float) -> Pair:
    """Laplace noise whose centre moves by `loss` scales: delta(eps) = (1 - e^((eps - loss)/2))+."""

    def forward(epsilon: np.ndarray) -> np.ndarray:
        return -np.expm1(0.5 * np.minimum(epsilon - loss, 0.0))

    return Pair(forward=forward, atom=loss)


def amplify(item: AbstractSumEvent, relation: Relation, base: Pair, absent: Pair | None = None) -> Pair:
    """The sampled pair from the unsampled one; `absent` is the pair to the absent term (Poisson, substitute)."""
    assert item.sampling is not None
    rate, scheme = item.sampling.rate, effective_scheme(item, relation)
    if scheme is Scheme.WITHOUT_REPLACEMENT:
        profiles = [base.forward] if base.backward is None else [base.forward, base.backward]
        return Pair(forward=lambda eps: np.max([_present(rate, h, eps) for h in profiles], axis=0))
    if relation is Relation.ADD_REMOVE:
        backward = base.backward or base.forward
        return Pair(forward=partial(_present, rate, base.forward), backward=partial(_absent, rate, backward))
    assert absent is not None
    assert absent.backward is None
    assert base.backward is None
    return Pair(forward=partial(_jointly_convex, rate, absent.forward, base.forward))


def shrunk_epsilon(rate: float, epsilon: np.ndarray) -> np.ndarray:
    """ln(1 + (e^eps - 1) / rate) for eps >= 0."""
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / rate)
    return np.where(epsilon <= 1.0, small, epsilon - math.log(rate) + np.log1p(-(1.0 - rate) * np.exp(-epsilon)))


def _present(rate: float, profile: Profile, epsilon: np.ndarray) -> np.ndarray:
    return rate * profile(shrunk_epsilon(rate, epsilon))


def _absent(rate: float, profile: Profile, epsilon: np.ndarray) -> np.ndarray:
    """Q against (1-w)Q + wP: (1 - e^eps (1-w))+ h*(ln(w e^eps / (1 - e^eps (1-w))))."""
    end = -math.log1p(-rate)
    inside = np.minimum(epsilon, end)
    weight = np.maximum(rate - (1.0 - rate) * np.expm1(inside), 0.0)
    with np.errstate(divide="ignore"):
        stretched = math.log(rate) + inside - np.log(weight)
    return np.where(weight > 0.0, weight * profile(np.where(weight > 0.0, np.maximum(stretched, 0.0), 0.0)), 0.0)


def _jointly_convex(rate: float, absent: Profile, present: Profile, epsilon: np.ndarray) -> np.ndarray:
    inner = shrunk_epsilon(rate, epsilon)
    share = np.exp(epsilon - inner)
    return np.minimum(rate * ((1.0 - share) * absent(inner) + share * present(inner)), present(epsilon))


def opposite_pair_delta(mu: float, rate: float, epsilon: np.ndarray) -> np.ndarray:
    """(1-w)N(0,1) + wN(mu,1) from (1-w)N(0,1) + wN(-mu,1), eps >= 0.

    The loss grows with x and crosses eps at `mu x = eps/2 + asinh(((1-w)/w) e^(mu^2/2) sinh(eps/2))`.
    """
    from scipy.special import log_ndtr, ndtr

    half = 0.5 * epsilon
    log_odds = math.log1p(-rate) - math.log(rate) + 0.5 * mu * mu
    # ln sinh(eps/2), then asinh(e^y) = ln(e^y + sqrt(1 + e^2y)); both stay finite for any eps.
    with np.errstate(divide="ignore"):
        y = log_odds + half + np.log(-np.expm1(-epsilon)) - math.log(2.0)
    arc = np.where(y < 20.0, np.arcsinh(np.exp(np.minimum(y, 20.0))), y + math.log(2.0))
    x = (half + arc) / mu
    with np.errstate(over="ignore"):
        gap = np.exp(np.log(np.maximum(np.expm1(np.minimum(epsilon, 700.0)), 0.0) + 1e-320) + log_ndtr(-x))
    second = np.exp(epsilon + log_ndtr(-mu - x))
    return np.maximum(0.0, rate * (ndtr(mu - x) - second) - (1.0 - rate) * gap)
