"""Events: what a mechanism did, as frozen data with a JSON form (DESIGN 8).

An event says everything that its price depends on except the relation, which belongs to the budget that pays.
Defaults are left out of the JSON that ledgers store, so a default must never change: that would re-price the past. The
registry is open: a new mechanism adds a class here or elsewhere with `@event("its_name")` and registers its price
rules with the accountants.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, ClassVar, TypeVar

from silobayes.core.errors import (
    InvalidInput,
    refuse_unknown_keys,
    require_count,
    require_member,
    require_number,
)
from silobayes.privacy.relation import Relation, Terms, Unit, l1_sensitivity, l2_sensitivity


class Scheme(StrEnum):
    """How a batch was drawn. Shuffled epochs are not here on purpose: nobody can price them as either."""

    POISSON = "poisson"
    WITHOUT_REPLACEMENT = "without_replacement"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The law of one batch; written by the sampler that drew it.

    `overflow` bounds the probability that a draw was cut to fit a padded batch; it is charged to delta.
    """

    scheme: Scheme
    rate: float
    overflow: float = 0.0

    def __post_init__(self) -> None:
        scheme = require_member("sampling.scheme", self.scheme, Scheme, "Name the sampler that drew the batch.")
        rate = require_number("sampling.rate", self.rate, above=0.0, at_most=1.0, fix="Pass batch size / rows.")
        if self.overflow != 0.0:
            require_number("sampling.overflow", self.overflow, above=0.0, at_most=1.0, fix="Pass a probability.")
        object.__setattr__(self, "scheme", scheme)
        object.__setattr__(self, "rate", rate)
        object.__setattr__(self, "overflow", float(self.overflow))


@dataclass(frozen=True, kw_only=True)
class AbstractEvent:
    """One mechanism, run `count` times."""

    mechanism: ClassVar[str]
    count: int = 1

    def __post_init__(self) -> None:
        fix = "Leave out an event that did not happen; more runs than that are not priced."
        require_count("count", self.count, at_least=1, at_most=LARGEST_COUNT, fix=fix)


LARGEST_COUNT = 10**9
"""The tails that the accountant cuts off are negligible up to so many runs."""

# One event, or several that are priced together.
EventT = TypeVar("EventT", bound="AbstractEvent | tuple[AbstractEvent, ...]")

_REGISTRY: dict[str, type[AbstractEvent]] = {}
Class = TypeVar("Class", bound=type[AbstractEvent])


def event(name: str) -> Callable[[Class], Class]:
    """Class decorator: make `{"mechanism": name, ...}` readable as this event."""

    def register(cls: Class) -> Class:
        cls.mechanism = name
        _REGISTRY[name] = cls
        return cls

    return register


@dataclass(frozen=True, kw_only=True)
class AbstractSumEvent(AbstractEvent):
    """A sum over units plus noise: either `clip_norm` (bound of one unit's term) or `sensitivity` (of the query).

    `sensitivity` is for the relation under which the event is priced; it is for queries that are not sums.
    """

    clip_norm: float | None = None
    sensitivity: float | None = None
    terms: Terms = Terms.GENERAL
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        terms = require_member("terms", self.terms, Terms, "Use general unless each term is non-negative or PSD.")
        object.__setattr__(self, "terms", terms)
        given = [key for key in ("clip_norm", "sensitivity") if getattr(self, key) is not None]
        if len(given) != 1:
            raise InvalidInput(
                "clip_norm",
                "exactly one of clip_norm and sensitivity",
                " and ".join(given) or None,
                "Pass clip_norm, the norm bound of one unit's term in the sum.",
            )
        number = require_number(given[0], getattr(self, given[0]), above=0.0, fix="Pass a norm bound.")
        object.__setattr__(self, given[0], number)
        if self.sensitivity is not None and terms is not Terms.GENERAL:
            raise InvalidInput("terms", "general with sensitivity", terms.value, "Pass clip_norm instead.")


@dataclass(frozen=True, kw_only=True)
class AbstractGaussianLikeEvent(AbstractSumEvent):
    """L2-bounded sum plus noise of standard deviation `std` on every coordinate."""

    std: float

    def __post_init__(self) -> None:
        super().__post_init__()
        std = require_number("std", self.std, above=0.0, fix="Pass the standard deviation of the noise.")
        object.__setattr__(self, "std", std)

    def l2_sensitivity(self, relation: Relation) -> float:
        """Distance of the two unsampled sums on neighbours under `relation`."""
        if self.sensitivity is not None:
            return self.sensitivity
        assert self.clip_norm is not None
        return l2_sensitivity(self.clip_norm, self.terms, relation)


@event("gaussian")
@dataclass(frozen=True, kw_only=True)
class GaussianEvent(AbstractGaussianLikeEvent):
    """Continuous Gaussian noise (in floats: accepted inside compiled loops only, and said so in the certificate)."""


@dataclass(frozen=True, kw_only=True)
class AbstractGridEvent(AbstractGaussianLikeEvent):
    """Integer noise on a grid of spacing `grid`; `std` and norms are in real units, after rounding to the grid.

    `dimension` is the number of coordinates of the query; without it the price holds for any number.
    """

    grid: float = 1.0
    dimension: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        grid = require_number("grid", self.grid, above=0.0, fix="Pass the spacing of the noise grid.")
        object.__setattr__(self, "grid", grid)
        if self.dimension is not None:
            fix = "Pass the number of coordinates."
            require_count("dimension", self.dimension, at_least=1, at_most=LARGEST_COUNT, fix=fix)


@event("discrete_gaussian")
@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianEvent(AbstractGridEvent):
    """Discrete Gaussian noise (Canonne, Kamath, Steinke 2020); `std` is its scale parameter."""


@event("skellam")
@dataclass(frozen=True, kw_only=True)
class SkellamEvent(AbstractGridEvent):
    """Skellam noise with variance `std`^2: the difference of two Poisson draws, closed under sums over silos."""


@event("laplace")
@dataclass(frozen=True, kw_only=True)
class LaplaceEvent(AbstractSumEvent):
    """L1-bounded sum plus Laplace noise of the given `scale` on every coordinate."""

    scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scale", require_number("scale", self.scale, above=0.0, fix="Pass b."))

    def l1_sensitivity(self, relation: Relation) -> float:
        """L1 distance of the two unsampled sums on neighbours under `relation`."""
        if self.sensitivity is not None:
            return self.sensitivity
        assert self.clip_norm is not None
        return l1_sensitivity(self.clip_norm, relation)


@event("randomised_response")
@dataclass(frozen=True, kw_only=True)
class RandomisedResponseEvent(AbstractEvent):
    """One unit's category, replaced with probability `gamma` by one drawn uniformly from all `categories`."""

    categories: int
    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "Pass the number of possible answers."
        require_count("categories", self.categories, at_least=2, at_most=LARGEST_COUNT, fix=fix)
        gamma = require_number("gamma", self.gamma, above=0.0, at_most=1.0, fix="Pass a probability.")
        object.__setattr__(self, "gamma", gamma)


@event("approximate_dp")
@dataclass(frozen=True, kw_only=True)
class ApproximateDPEvent(AbstractEvent):
    """A black box that is (epsilon, delta)-DP for the stated relation."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon != 0.0:
            require_number("epsilon", self.epsilon, above=0.0, fix="Or pass 0 for delta alone.")
        if self.delta != 0.0:
            require_number("delta", self.delta, above=0.0, at_most=1.0, fix="Or pass 0 for pure epsilon.")
        object.__setattr__(self, "epsilon", float(self.epsilon))
        object.__setattr__(self, "delta", float(self.delta))


def to_json(item: AbstractEvent) -> dict[str, Any]:
    """The JSON object of an event: `mechanism`, then every field that is not at its default."""
    out: dict[str, Any] = {"mechanism": item.mechanism}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value == field.default:
            continue
        if isinstance(value, Sampling):
            value = {"scheme": value.scheme.value, "rate": value.rate} | (
                {"overflow": value.overflow} if value.overflow else {}
            )
        out[field.name] = value.value if isinstance(value, Enum) else value
    return out


def from_json(data: object) -> AbstractEvent:
    """Read one event; an unknown mechanism or key, or a bad value, raises `InvalidInput` naming the key."""
    if not isinstance(data, Mapping):
        raise InvalidInput("events", "a list of objects", data, 'Write {"mechanism": "gaussian", ...}.')
    fields = {str(key): value for key, value in data.items()}
    name = fields.pop("mechanism", None)
    if not isinstance(name, str) or name not in _REGISTRY:
        raise InvalidInput("mechanism", "one of " + ", ".join(sorted(_REGISTRY)), name, "Name a known mechanism.")
    cls = _REGISTRY[name]
    known = dataclasses.fields(cls)
    refuse_unknown_keys(fields, [field.name for field in known], f"mechanism {name}")
    for field in known:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in fields:
            raise InvalidInput(field.name, f"a value (mechanism {name} needs it)", None, f"Add {field.name!r}.")
    if "sampling" in fields and fields["sampling"] is not None:
        fields["sampling"] = _sampling_from_json(fields["sampling"])
    return cls(**fields)


def _sampling_from_json(data: object) -> Sampling:
    if not isinstance(data, Mapping):
        raise InvalidInput("sampling", "an object with scheme and rate", data, 'E.g. {"scheme": "poisson", ...}.')
    refuse_unknown_keys(data, ["scheme", "rate", "overflow"], "sampling")
    for key in ("scheme", "rate"):
        if key not in data:
            raise InvalidInput(f"sampling.{key}", "a value", None, f"Add {key!r}.")
    return Sampling(**data)


def canonical(item: AbstractEvent) -> str:
    """One line of JSON with sorted keys: what the ledger stores and hashes."""
    return json.dumps(to_json(item), sort_keys=True, separators=(",", ":"), allow_nan=False)


__all__ = [
    "AbstractEvent",
    "AbstractGaussianLikeEvent",
    "AbstractGridEvent",
    "AbstractSumEvent",
    "ApproximateDPEvent",
    "DiscreteGaussianEvent",
    "EventT",
    "GaussianEvent",
    "LaplaceEvent",
    "RandomisedResponseEvent",
    "Relation",
    "Sampling",
    "Scheme",
    "SkellamEvent",
    "Terms",
    "Unit",
    "canonical",
    "event",
    "from_json",
    "to_json",
]
