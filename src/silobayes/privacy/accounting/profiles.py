"""One rule per event: what a single run costs, as a Gaussian, as a pair, or both (SPEC 0 and 8).

`rule` is open: a new event registers with `@rule.register`.

Sampling. With rate w and the profiles of the unsampled mechanism:

- Poisson, add_remove: `((1-w)Q + wP, Q)` for the pair (P, Q) of "unit present, unit absent" (Zhu, Dong, Wang 2022,
  Theorem 11), in both directions. Exact for Gaussian noise.
- Poisson, substitute, Gaussian noise: `(1-w)N(0) + wN(C)` against `(1-w)N(0) + wN(-C)` for all kinds of terms. That
  opposite rows of full norm are the worst case was checked numerically (both directions, over angles, shorter rows,
  rates and eps: a slow test repeats it); it is not proved. Non-negative and PSD terms have no opposite rows, so for
  them it is an upper bound only; the lower bound belongs to two terms of full norm at right angles.
- Poisson, substitute, other noise: advanced joint convexity (Balle, Barthe, Gaboardi 2018, Theorem 2), with the
  distance to the absent term and the distance of the two terms:
  `delta(eps') <= w ((1-b) d_add_remove(eps) + b d_substitute(eps))`, `eps = ln(1 + (e^eps' - 1)/w)`,
  `b = e^(eps' - eps)`.
- Without replacement, substitute: `w d(ln(1 + (e^eps - 1)/w))`, symmetric (Zhu, Dong, Wang 2022, Proposition 30).
- Without replacement, add_remove is refused: the size of a batch is a share of a number of rows that then differs.

A rate of 1 is no sampling. `overflow` is charged where events are composed.

Lower bounds belong to neighbours that exist. Under Poisson sampling: an added or removed row (a row whose term is zero
does as much), or two terms as said above. Without replacement Zhu et al.'s symmetric pair only dominates; real
neighbours in which every other row is like the old one attain `((1-w)Q + wP, Q)`, the pair of an added row, at the
distance of a substituted one.

Laplace noise is priced as if the whole L1 distance lay in one coordinate, which dominates: with losses bounded by
a <= b in two coordinates, `E[(1 - e^((eps - L_a - b)/2))+] <= (1 - e^((eps - a - b)/2))+` because `L_a <= a`;
merge pairwise. General terms attain that; non-negative and PSD ones attain half of it in each of two coordinates.

Guarantees:
    - sampling never raises a price
    - epsilon_lower is at most what the worst real neighbours cost
    - a relation that a mechanism cannot be priced under is refused
"""

import math
from functools import lru_cache, partial, singledispatch

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
    Terms,
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
        mu, rate = item.clip_norm / item.std, item.sampling.rate
        pair = Pair(forward=partial(opposite_pair_delta, mu, rate))
        if item.terms is Terms.GENERAL:
            return Rule(pair=pair, overflow=_overflow(item))
        lower = Rule(pair=Pair(forward=partial(right_angled_pair_delta, mu, rate)))
        return Rule(pair=pair, overflow=_overflow(item), lower=lower)
    base = Pair(forward=partial(gaussian.delta, item.l2_sensitivity(relation) / item.std))
    return sampled_rule(item, relation, base)


@rule.register
def _laplace(item: LaplaceEvent, relation: Relation) -> Rule:
    base = laplace_pair(item.l1_sensitivity(relation) / item.scale)
    attained = base
    if item.terms is not Terms.GENERAL and relation is Relation.SUBSTITUTE:
        assert item.clip_norm is not None
        attained = laplace_plane_pair(item.clip_norm / item.scale)
    scheme = effective_scheme(item, relation)
    if scheme is None:
        lower = None if attained is base else Rule(pair=attained)
        return Rule(pair=base, overflow=_overflow(item), lower=lower)
    if scheme is Scheme.POISSON and relation is Relation.SUBSTITUTE:
        absent = laplace_pair(item.l1_sensitivity(Relation.ADD_REMOVE) / item.scale)
        # Joint convexity is not the profile of a pair. A row with a zero term is: it can only be added or removed.
        return sampled_rule(item, relation, base, absent=absent, attained=absent)
    return sampled_rule(item, relation, base, attained=attained)


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


def laplace_plane_pair(loss: float) -> Pair:
    """Laplace noise on two coordinates, each moved by `loss` scales: `laplace_pair(loss)` twice, integrated."""

    def forward(epsilon: np.ndarray) -> np.ndarray:
        below = np.minimum(epsilon - 2.0 * loss, 0.0)
        return np.maximum(0.0, -np.expm1(0.5 * below) + 0.25 * below * np.exp(0.5 * below))

    return Pair(forward=forward, atom=2.0 * loss)


def sampled_rule(
    item: AbstractSumEvent, relation: Relation, base: Pair, *, absent: Pair | None = None, attained: Pair | None = None
) -> Rule:
    """The rule of a sampled event.

    Args:
        item: With sampling.
        relation: Which data sets are neighbours.
        base: The pair of the unsampled mechanism, or one that dominates it.
        absent: The pair to the absent term (Poisson, substitute).
        attained: An unsampled pair of real neighbours, one of which sampling turns into the other: the lower bound.
    """
    assert item.sampling is not None
    upper, real = amplify(item, relation, base, absent), added_pair(item.sampling.rate, attained or base)
    exact = attained is None and relation is Relation.ADD_REMOVE
    return Rule(pair=upper, overflow=_overflow(item), lower=None if exact else Rule(pair=real))


def added_pair(rate: float, base: Pair) -> Pair:
    """`((1-w)Q + wP, Q)` for the pair (P, Q)."""
    return Pair(
        forward=partial(_present, rate, base.forward), backward=partial(_absent, rate, base.backward or base.forward)
    )


def amplify(item: AbstractSumEvent, relation: Relation, base: Pair, absent: Pair | None = None) -> Pair:
    """The sampled pair from the unsampled one; `absent` is the pair to the absent term (Poisson, substitute)."""
    assert item.sampling is not None
    rate, scheme = item.sampling.rate, effective_scheme(item, relation)
    if scheme is Scheme.WITHOUT_REPLACEMENT:
        profiles = [base.forward] if base.backward is None else [base.forward, base.backward]
        return Pair(forward=lambda eps: np.max([_present(rate, h, eps) for h in profiles], axis=0))
    if relation is Relation.ADD_REMOVE:
        return added_pair(rate, base)
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


_LONGEST = 30.0
_NODES = 2000


def right_angled_pair_delta(mu: float, rate: float, epsilon: np.ndarray) -> np.ndarray:
    """(1-w)N(0,I) + wN(mu e1,I) from (1-w)N(0,I) + wN(mu e2,I), eps >= 0, from below.

    It is convex in e^eps, so its tangents lie below it, and the best of them is the profile of a real pair too: that of
    the loss rounded to the points where they touch. Terms longer than 30 standard deviations are taken as so long.
    """
    nodes, heights, slopes = _right_angled_tangents(min(mu, _LONGEST), rate)
    epsilon = np.asarray(epsilon, dtype=float)
    after = np.clip(np.searchsorted(nodes, epsilon, side="right"), 1, len(nodes) - 1)
    tangents = [
        heights[at] - slopes[at] * np.expm1(np.minimum(epsilon - nodes[at], 700.0)) for at in (after - 1, after)
    ]
    return (1.0 - 1e-9) * np.maximum(0.0, np.max(tangents, axis=0))


@lru_cache(maxsize=64)
def _right_angled_tangents(mu: float, rate: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points eps, the profile h there, and minus its derivative in e^eps times e^eps.

    Given y, the loss passes eps where `e^(mu x) = e^(mu X) = e^(eps + mu y) + ((1-w)/w) e^(mu^2/2) (e^eps - 1)`; the
    integral over x is then that of a Gaussian pair: `h(eps) = w E_y[delta_mu(mu X - mu^2/2)]` with y standard normal.
    The trapezoidal rule is exact to rounding: the integrand is Gaussian in y and has no singularity within pi / mu of
    the line.
    """
    from scipy.special import log_ndtr

    step = min(0.25, 0.5 / mu)
    y = np.arange(-12.0, 12.0, step)
    weights = step * np.exp(-0.5 * y**2) / math.sqrt(2.0 * math.pi)
    # The loss at x = mu + 12, y = -12: beyond, there is nothing to see.
    top = np.logaddexp(math.log1p(-rate), math.log(rate) + 0.5 * mu**2 + 12.0 * mu) - math.log1p(-rate)
    nodes = np.append(0.0, np.geomspace(1e-5, 1.0, _NODES) * min(float(top), mu * (mu + 24.0)))
    eps = nodes[:, None]
    with np.errstate(divide="ignore"):
        log_absent = math.log1p(-rate) - math.log(rate) + eps + np.log(-np.expm1(-eps))
    inner = np.logaddexp(log_absent, eps + mu * y - 0.5 * mu**2)
    x = inner / mu + 0.5 * mu
    away = np.abs(inner)
    positive = gaussian.delta(mu, away)
    heights = rate * np.where(inner >= 0.0, positive, -np.expm1(-away) + np.exp(-away) * positive) @ weights
    there = np.logaddexp(math.log1p(-rate), math.log(rate) + mu * y - 0.5 * mu**2)
    slopes = np.exp(eps + there + log_ndtr(-x)) @ weights
    return nodes, heights, slopes
