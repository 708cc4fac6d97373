"""What a study and the reports on it need to know of a method. The methods themselves are in `plans`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from silobayes.core.errors import InvalidInput
from silobayes.privacy.events import AbstractEvent, DiscreteGaussianEvent
from silobayes.privacy.relation import Unit
from silobayes.studies.keys import check_keys


class Intervals(StrEnum):
    """Whether the intervals of a method's posterior include the privacy noise: all of it, some of it, nothing."""

    HONEST = "honest"
    PARTLY = "partly"
    NO = "no"


@dataclass(frozen=True, kw_only=True)
class MethodKeys:
    """[protocol]: `kind`, `privatise` and the keys of one method. None: the method's default rule decides.

    The same class with all keys filled in is the settings of a run.
    """

    kind: str
    privatise: str | None = None

    def __post_init__(self) -> None:
        check_keys(self, "protocol")


@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """All that is particular to a method, besides its roles.

    Attributes:
        kind: `protocol.kind`.
        privatise: `protocol.privatise`.
        plan: From public facts to the roles.
        summary: What it does, in a line.
        releases: What leaves a silo, in a few words.
        models: For which models, in a few words.
        units: Whom it can protect; none without privacy.
        leaves: The rest of the sentence "Each site sends ..."; `{noise}` stands for the noise or a share of it.
        keys: The keys that its section has.
        rules: Values for all keys that a study leaves out, from the study, public facts and the keys that it sets.
        checks: Refuse studies that it cannot run.
        default_for: Whether a study of this kind gets it that does not say `privatise`, by the unit and whether batches
            of persons can be drawn. Where no method says so it is the first that has privacy, or has none, as asked.
        leads: Whether a study gets it that names no method, nor a key that it has not; by the section [model], the
            unit, and whether persons are counted and their rows bounded.
        person_slots: Whether, where it protects persons, these must be counted and their rows bounded.
        shares: Whether, inside a sum, a silo's message is a share that is too little by itself.
        loops: Whether a visit is a loop of `steps` releases on batches.
        first_releases: Releases before the first such loop.
        free_visits: Visits after those and before the first such loop, which release nothing new.
        noise: Kinds of events that a silo pays for where it adds its own noise. `silobayes verify` checks it.
        intervals: Whether those of the posterior include the privacy noise; without privacy there is none to include.
        expects_widths: Whether `silobayes plan` can tell the widths of coefficients.
    """

    kind: str
    privatise: str
    plan: Callable[[Any], Any]
    summary: str
    releases: str
    models: str
    units: tuple[Unit, ...]
    leaves: Callable[[Any], str]
    keys: type[MethodKeys] = MethodKeys
    rules: Callable[[Any, Any, Any], dict[str, Any]] = lambda study, facts, keys: {}
    checks: tuple[Callable[[Any], None], ...] = ()
    default_for: Callable[[Unit | None, bool], bool] = lambda unit, can_sample_persons: False
    leads: Callable[[Any, Unit, bool], bool] = lambda model, unit, can_sample_persons: False
    person_slots: bool = False
    shares: bool = False
    loops: bool = False
    first_releases: int = 0
    free_visits: int = 0
    noise: frozenset[type[AbstractEvent]] = frozenset({DiscreteGaussianEvent})
    intervals: Intervals = Intervals.NO
    expects_widths: bool = False

    @property
    def name(self) -> str:
        """Of the method as `silobayes init --method` takes it."""
        return f"{self.kind}/{self.privatise}"


Methods = Mapping[tuple[str, str], Method]
_REGISTERED: dict[tuple[str, str], Method] = {}


def register(methods: Methods) -> None:
    """Make methods known to studies."""
    _REGISTERED.update(methods)


def registered() -> Methods:
    """All methods that are known."""
    return _REGISTERED


def default_of(methods: Sequence[Method], unit: Unit | None, can_sample_persons: bool) -> Method:
    """What a study gets that names one kind of methods and no `privatise`; `unit` is None without privacy."""
    fitting = [method for method in methods if bool(method.units) == (unit is not None)]
    if not fitting:
        needed, got = ("dp", "none") if unit is None else ("none", "dp")
        raise InvalidInput("privacy.mode", f"{needed} with {methods[0].kind}", got, "Change it, or protocol.kind.")
    return next((method for method in fitting if method.default_for(unit, can_sample_persons)), fitting[0])


def method_of(
    table: Mapping[str, Any], model: Any, unit: Unit | None, can_sample_persons: bool, methods: Methods
) -> Method:
    """The method that [protocol] asks for, or that leads for the model; `unit` is None without privacy."""
    kinds = list(dict.fromkeys(own for own, _ in methods))
    privatise = table.get("privatise")
    if "kind" not in table:
        leading = leading_method(table, model, unit, can_sample_persons, methods)
        if leading is not None:
            return leading
    kind = table.get("kind", next((of for of, own in methods if own == privatise), kinds[0]))
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidInput("protocol.kind", f"one of {', '.join(kinds)}", kind, "Choose a protocol.")
    own = {privatise: method for (of, privatise), method in methods.items() if of == kind}
    if privatise is None:
        return default_of(list(own.values()), unit, can_sample_persons)
    if unit is None and privatise != "none":
        got, fix = privatise, "Remove it or set privacy.mode = dp."
        raise InvalidInput("protocol.privatise", "none with privacy.mode = none", got, fix)
    if unit is not None and privatise == "none":
        fix = "Choose what is noised, or set privacy.mode = none."
        raise InvalidInput("protocol.privatise", "a private method with privacy.mode = dp", "none", fix)
    if not isinstance(privatise, str) or privatise not in own:
        fix = "`silobayes methods` lists the methods of each protocol."
        raise InvalidInput("protocol.privatise", f"one of {', '.join(own)} with {kind}", privatise, fix)
    return own[privatise]


def leading_method(
    table: Mapping[str, Any], model: Any, unit: Unit | None, can_sample_persons: bool, methods: Methods
) -> Method | None:
    """What a private study gets whose [protocol] has keys of that method only."""
    for method in methods.values():
        known = {field.name for field in dataclasses.fields(method.keys)} - {"privatise"}
        if unit is not None and method.leads(model, unit, can_sample_persons) and known.issuperset(table):
            return method
    return None
