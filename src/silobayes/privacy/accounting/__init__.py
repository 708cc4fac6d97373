"""What events cost: prices, profiles and calibration, each an upper bound (SPEC 8).

`price`, `delta_at`, `profile` and `calibrate` take events and a relation that has no default. Identical events are
merged by adding their counts and sorted before anything else happens, so k repeats are a count of k and the order of
events is irrelevant, bit for bit. Unsampled Gaussian noise of every kind composes in closed form (gaussian.py); the
rest by privacy-loss distributions (pld.py) from one rule per event (profiles.py, grid.py).

The exact epsilon of the worst neighbours lies in [epsilon_lower, epsilon]: `epsilon_lower` belongs to neighbours that
exist. Where they are the pair of laws that is priced, the two differ by the numerics only; where the price is a bound
(joint convexity, replaced grid noise, non-negative and PSD terms under Poisson sampling, Zhu et al.'s dominating pair
for sampling without replacement), profiles.py and grid.py say which neighbours they are. Events know of their terms
what `terms` says: blocks of several kinds that are priced as general terms have the general terms' bracket.

Guarantees:
    - k repeats cost what a count of k costs
    - the order of events is irrelevant
    - delta_at(price(delta).epsilon) <= delta
    - epsilon_lower is at most what the worst real neighbours cost
    - a delta outside [DELTA_FLOOR, 1) is refused
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from silobayes.core.errors import InvalidInput, require_member, require_number
from silobayes.privacy.events import AbstractEvent, AbstractGridEvent, EventT, canonical
from silobayes.privacy.relation import Relation

if TYPE_CHECKING:
    import numpy as np

    from silobayes.privacy.accounting.pld import Total

DELTA_FLOOR = 1e-15
"""Below this the tails that one run may truncate (1e-28, for up to 1e9 runs) would no longer be negligible."""

# Bounds by other methods: a module of this package, its function for epsilon and, where it has one, for delta.
_OTHER: dict[str, tuple[str, str, str | None]] = {
    "rdp": ("rdp", "epsilon", "delta"),
    "moments": ("rdp", "moments_epsilon", "moments_delta"),
    "basic": ("composition", "basic_epsilon", None),
    "advanced": ("composition", "advanced_epsilon", None),
    "optimal": ("composition", "optimal_epsilon", None),
}
ACCOUNTANTS = ("pld", *_OTHER)


@dataclass(frozen=True, kw_only=True)
class Price:
    """An epsilon that is paid at `delta` under `relation`; `epsilon_lower` is known for the pld accountant only."""

    epsilon: float
    epsilon_lower: float
    delta: float
    relation: Relation
    accountant: str


def merge(events: Iterable[AbstractEvent]) -> tuple[AbstractEvent, ...]:
    """Identical events with their counts added, in an order that does not depend on the input's."""
    counts: dict[AbstractEvent, int] = {}
    for item in events:
        if not isinstance(item, AbstractEvent):
            raise InvalidInput("events", "events", item, "Build them with silobayes.privacy.events.")
        one = dataclasses.replace(item, count=1)
        counts[one] = counts.get(one, 0) + item.count
    return tuple(dataclasses.replace(one, count=counts[one]) for one in sorted(counts, key=canonical))


def price(events: Iterable[AbstractEvent], *, relation: Relation, delta: float, accountant: str = "pld") -> Price:
    """The epsilon that all events together cost at `delta`, as an upper bound.

    Args:
        events: what happened, in any order.
        relation: which data sets are neighbours.
        delta: in [DELTA_FLOOR, 1).
        accountant: one of `ACCOUNTANTS`.

    Returns:
        The price; epsilon is infinite when no finite one holds at this delta.
    """
    merged, relation, delta = merge(events), _require_relation(relation), require_delta(delta)
    if accountant == "pld":
        epsilon, lower = _pld_epsilons(merged, relation, delta)
    else:
        epsilon, lower = float(_other(accountant)[0](merged, relation=relation, delta=delta)), 0.0
    return Price(
        epsilon=epsilon, epsilon_lower=min(lower, epsilon), delta=delta, relation=relation, accountant=accountant
    )


def delta_at(events: Iterable[AbstractEvent], *, relation: Relation, epsilon: float, accountant: str = "pld") -> float:
    """An upper bound of the delta that all events together cost at `epsilon`: what a ledger compares."""
    merged, relation, epsilon = merge(events), _require_relation(relation), _require_epsilon(epsilon)
    if accountant == "pld":
        return _pld_delta(merged, relation, epsilon)
    at, direct = _other(accountant)
    if direct is not None:
        return float(direct(merged, relation=relation, epsilon=epsilon))
    # The smallest delta at which this epsilon is enough, by bisection from above.
    low, high = DELTA_FLOOR, 1.0
    while high / low > 1.0 + 1e-6:
        middle = math.sqrt(low * high)
        enough = at(merged, relation=relation, delta=middle) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return high


def profile(events: Iterable[AbstractEvent], *, relation: Relation, epsilons: Sequence[float]) -> "np.ndarray":
    """Upper bounds of delta at every epsilon."""
    import numpy as np

    merged, relation = merge(events), _require_relation(relation)
    return np.array([_pld_delta(merged, relation, _require_epsilon(float(epsilon))) for epsilon in epsilons])


def calibrate(
    event_factory: Callable[[float], EventT],
    *,
    relation: Relation,
    epsilon: float,
    delta: float,
    besides: Sequence[AbstractEvent] = (),
) -> EventT:
    """The event with the least noise that, with what is paid `besides`, costs at most (epsilon, delta)."""
    from silobayes.privacy.accounting.calibration import least_noise

    require_number("epsilon", epsilon, above=0.0, fix="Pass the budget.")
    relation, delta = _require_relation(relation), require_delta(delta)
    budget = {"relation": relation, "epsilon": float(epsilon), "delta": delta}
    return least_noise(event_factory, **budget, besides=tuple(besides))


def require_delta(delta: object) -> float:
    """`delta` if it is a number in [DELTA_FLOOR, 1); otherwise `InvalidInput`."""
    usable = isinstance(delta, (int, float)) and not isinstance(delta, bool) and DELTA_FLOOR <= delta < 1.0
    if not usable:
        fix = (
            "A smaller delta is below what double precision can certify; delta 0 is pure DP, which is not priced here."
        )
        raise InvalidInput("delta", f"a number in [{DELTA_FLOOR:g}, 1)", delta, fix)
    return float(delta)  # type: ignore[arg-type]


def _require_relation(relation: object) -> Relation:
    return require_member("relation", relation, Relation, "Say which data sets are neighbours: the factor is up to 2.")


def _require_epsilon(epsilon: object) -> float:
    usable = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool) and 0.0 <= epsilon < math.inf
    if not usable:
        raise InvalidInput("epsilon", "a finite number >= 0", epsilon, "Pass the epsilon of the budget.")
    return float(epsilon)  # type: ignore[arg-type]


def _is_coarse(merged: tuple[AbstractEvent, ...]) -> bool:
    """Whether noise on a coarse grid is among the events: replacing it (grid.py) can cost more than RDP's slack."""
    return any(isinstance(item, AbstractGridEvent) and item.std <= 5000.0 * item.grid for item in merged)


# Hundreds of silos with ledgers of their own have a handful of different bills.
@lru_cache(maxsize=64)
def _pld_epsilons(merged: tuple[AbstractEvent, ...], relation: Relation, delta: float) -> tuple[float, float]:
    """Upper and lower bound."""
    total = _total(merged, relation)
    epsilon, lower = total.epsilon(delta), total.epsilon_lower(delta)
    if _is_coarse(merged):
        epsilon = min(epsilon, _or_infinite(lambda: _other("rdp")[0](merged, relation=relation, delta=delta)))
    return epsilon, lower


@lru_cache(maxsize=64)
def _pld_delta(merged: tuple[AbstractEvent, ...], relation: Relation, epsilon: float) -> float:
    spent = _total(merged, relation).delta(epsilon)
    if not _is_coarse(merged):
        return spent
    return min(spent, _or_infinite(lambda: delta_at(merged, relation=relation, epsilon=epsilon, accountant="rdp")))


def _or_infinite(bound: Callable[[], float]) -> float:
    """A second opinion, which need not exist for every mix of events."""
    try:
        return float(bound())
    except InvalidInput:
        return math.inf


def _other(accountant: str) -> tuple[Callable[..., float], Callable[..., float] | None]:
    if accountant not in _OTHER:
        raise InvalidInput("accountant", "one of " + ", ".join(ACCOUNTANTS), accountant, "Name a known accountant.")
    name, of_delta, of_epsilon = _OTHER[accountant]
    module = import_module(f"{__name__}.{name}")
    return getattr(module, of_delta), None if of_epsilon is None else getattr(module, of_epsilon)


def compose(merged: Iterable[AbstractEvent], relation: Relation, *, max_bins: int = 2**18) -> "Total":
    """All events under `relation` as one composition; the only line of the pld accountant that knows a count."""
    from silobayes.privacy.accounting import grid, profiles  # noqa: F401 (grid registers its rules)
    from silobayes.privacy.accounting.pld import Total

    return Total([(profiles.rule(item, relation), item.count) for item in merged], max_bins=max_bins)


@lru_cache(maxsize=8)
def _total(merged: tuple[AbstractEvent, ...], relation: Relation) -> "Total":
    return compose(merged, relation)


__all__ = [
    "ACCOUNTANTS",
    "DELTA_FLOOR",
    "Price",
    "calibrate",
    "compose",
    "delta_at",
    "merge",
    "price",
    "profile",
    "require_delta",
]
