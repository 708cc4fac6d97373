"""What a study and the reports on it need to know of a method. The methods themselves are in `plans`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from silobayes.core.errors import InvalidInput
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.relation import Unit
from silobayes.studies.keys import check_keys


@dataclass(frozen=True, kw_only=True)
class MethodKeys:
    """[protocol]: `kind`, `privatise` and the keys of one method. None: the method's default rule decides.

    The same class with all keys filled in is the settings of a run.
    """

    kind: str = "pvi"
    privatise: str | None = None

    def __post_init__(self) -> None:
        check_keys(self, "protocol")


@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """All that is particular to a method, besides its roles.

    Attributes:
        kind: `protocol.kind`.
        privatise: `protocol.privatise`.
        keys: The keys that its section has.
        plan: From public facts to the roles.
        rules: Values for all keys that a study leaves out, from the study, public facts and the keys that it sets.
        checks: Refuse studies that it cannot run.
        default_for: Whether it is what a study of this kind gets that does not say `privatise`, by the unit (None: mode
            none) and whether batches of persons can be drawn.
        summary: What it does, in a line.
        releases: What leaves a silo, in a few words.
        models: For which models, in a few words.
        units: Whom it can protect; none without privacy.
        leaves: The rest of the sentence "Each site sends ..."; `{noise}` stands for the noise or a share of it.
        shares: Whether, inside a sum, a silo's message is a share that is too little by itself.
        loops: Whether a visit is a loop of `steps` releases on batches.
        first_releases: Releases before the first such loop.
        free_visits: Visits after those and before the first such loop, which release nothing new.
        noise: Kinds of events that a silo pays for where it adds its own noise.
        knows_noise: Whether the posterior includes the privacy noise.
        expects_widths: Whether `silobayes plan` can tell the widths of coefficients.
    """

    kind: str
    privatise: str
    keys: type[MethodKeys]
    plan: Callable[[Any], Any]
    rules: Callable[[Any, Any, Any], dict[str, Any]]
    checks: tuple[Callable[[Any], None], ...] = ()
    default_for: Callable[[Unit | None, bool], bool]
    summary: str
    releases: str
    models: str
    units: tuple[Unit, ...]
    leaves: Callable[[Any], str]
    shares: bool = False
    loops: bool = False
    first_releases: int = 0
    free_visits: int = 0
    noise: frozenset[type[AbstractEvent]] = frozenset()
    knows_noise: bool = False
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


def method_of(table: Mapping[str, Any], unit: Unit | None, can_sample_persons: bool, methods: Methods) -> Method:
    """The method that [protocol] asks for; `unit` is None without privacy."""
    kind = table.get("kind", "pvi")
    kinds = list(dict.fromkeys(own for own, _ in methods))
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidInput("protocol.kind", f"one of {', '.join(kinds)}", kind, "Choose a protocol.")
    own = {privatise: method for (of, privatise), method in methods.items() if of == kind}
    privatise = table.get("privatise")
    if privatise is None:
        return next(method for method in own.values() if method.default_for(unit, can_sample_persons))
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
