"""A method in one place: its keys, checks, default rules, visits, noise, words and roles. No row is read here."""

from importlib import import_module

from silobayes.plans.checks import check
from silobayes.plans.situation import Situation
from silobayes.protocols.roles import Plan
from silobayes.studies.method import Method

# A new method is a module of this package and its name here.
_MODULES = ("pvi", "centred", "global_vi", "perturbing", "statistics", "linreg")

METHODS: dict[tuple[str, str], Method] = {
    (method.kind, method.privatise): method
    for name in _MODULES
    for method in import_module(f"{__name__}.{name}").METHODS
}


def plan_of(situation: Situation) -> Plan:
    """The method that a study asks for, worked out; everything is checked and priced before anything is spent."""
    check(situation)
    return situation.method.plan(situation)
