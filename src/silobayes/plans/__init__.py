"""A method in one place: how it is planned from public facts alone, and the registry of methods."""

from importlib import import_module

from silobayes.core.errors import InvalidInput
from silobayes.plans.checks import check
from silobayes.plans.situation import Situation
from silobayes.protocols.roles import Plan
from silobayes.study import Privatise, ProtocolKind

# (protocol.kind, protocol.privatise) -> module of this package, and its function.
_PERTURBING = ("perturbing", "plan")
REGISTRY: dict[tuple[ProtocolKind, Privatise], tuple[str, str]] = {
    (ProtocolKind.PVI, Privatise.NONE): ("pvi", "plan"),
    (ProtocolKind.PVI, Privatise.DP_OPTIMISATION): ("pvi", "plan_optimisation"),
    (ProtocolKind.PVI, Privatise.PARAMETER_PERTURBATION): _PERTURBING,
    (ProtocolKind.PVI, Privatise.LOCAL_AVERAGING): _PERTURBING,
    (ProtocolKind.PVI, Privatise.VIRTUAL_CLIENTS): _PERTURBING,
    (ProtocolKind.PVI, Privatise.SUFFICIENT_STATISTICS): ("statistics", "plan"),
    (ProtocolKind.PVI, Privatise.HYBRID): ("statistics", "plan_hybrid"),
    (ProtocolKind.BCM, Privatise.NONE): ("pvi", "plan_committee"),
    (ProtocolKind.BCM, Privatise.DP_OPTIMISATION): ("pvi", "plan_committee"),
    (ProtocolKind.GLOBAL_VI, Privatise.NONE): ("global_vi", "plan"),
    (ProtocolKind.GLOBAL_VI, Privatise.DP_OPTIMISATION): ("global_vi", "plan"),
    (ProtocolKind.LINREG, Privatise.NONE): ("pvi", "plan"),
    (ProtocolKind.LINREG, Privatise.SUFFICIENT_STATISTICS): ("linreg", "plan"),
    (ProtocolKind.LINREG, Privatise.INPUT_PERTURBATION): ("linreg", "plan_input_perturbation"),
}


def plan_of(situation: Situation) -> Plan:
    """The method that a study asks for, worked out; everything is checked and priced before anything is spent."""
    check(situation)
    settings = situation.settings
    key = settings.kind, settings.privatise
    if key not in REGISTRY:
        fix = "Use another method, or protocol.kind = pvi."
        raise InvalidInput("protocol.privatise", f"a method of {key[0].value}", key[1].value, fix)
    module, name = REGISTRY[key]
    return getattr(import_module(f"{__name__}.{module}"), name)(situation)
