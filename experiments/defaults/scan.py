"""Which constants of the rules are scanned, and how a factor of one becomes keys of a study."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from experiments.defaults.studies import CORE, NETWORKS

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
# The same noise as a secure sum, without its messages.
_SUM = {"kind": "trusted"}

# Of a method's settings (see silobayes.plans.rules) and a factor: keys of [protocol].
Change = Callable[[Any, float], dict[str, Any]]


def _clip_norm(settings: Any, factor: float) -> dict[str, Any]:
    """Of a perturbing method: the path."""
    norms = [norm * factor for norm in settings.clip_norms]
    return {"clip_norm": norms if len(norms) > 1 else norms[0]}


def _scaled(key: str) -> Change:
    """The rule for the step size follows the others."""

    def change(settings: Any, factor: float) -> dict[str, Any]:
        value = getattr(settings, key) * factor
        return {key: max(1, round(value)) if key in ("rounds", "steps") else value}

    return change


def _rounds_of_one_path(settings: Any, factor: float) -> dict[str, Any]:
    return _scaled("rounds")(settings, factor) | _clip_norm(settings, 1 / factor)


def _damping_of_one_path(settings: Any, factor: float) -> dict[str, Any]:
    """No more than all of a change is taken; the clip norm makes up for the rest."""
    damping = min(1.0, settings.damping * factor)
    return {"damping": damping} | _clip_norm(settings, settings.damping / damping)


def _quadratic(settings: Any, factor: float) -> dict[str, Any]:
    linear, quadratic = settings.clip_norms
    return {"clip_norm": [linear, quadratic * factor]}


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a study says besides, and the constants that are scanned."""

    protocol: dict[str, Any]
    aggregation: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Change]
    is_private: bool = True


_LOOP: dict[str, Change] = {"clip norm": _clip_norm, "step size": _scaled("step_size")}
_BATCHES: dict[str, Change] = {"sample rate": _scaled("sample_rate"), "steps": _scaled("steps")}
_PATH: dict[str, Change] = {
    "path": _clip_norm,
    "rounds, same path": _rounds_of_one_path,
    "damping, same path": _damping_of_one_path,
    "quadratic norm": _quadratic,
}
NOT_PRIVATE = "not private"
METHODS = {
    NOT_PRIVATE: Method(protocol={}, constants={}, is_private=False),
    "DP optimisation": Method(
        protocol={"privatise": "dp_optimisation"},
        constants=_LOOP | {"rounds": _scaled("rounds"), "damping": _scaled("damping")} | _BATCHES,
    ),
    "local averaging": Method(protocol={"privatise": "local_averaging"}, constants=_PATH),
    "virtual clients": Method(protocol={"privatise": "virtual_clients"}, constants=_PATH),
    "virtual clients, sum": Method(protocol={"privatise": "virtual_clients"}, aggregation=_SUM, constants=_PATH),
    "BCM same": Method(protocol={"kind": "bcm", "committee": "same"}, constants=_LOOP | _BATCHES),
    "BCM split": Method(protocol={"kind": "bcm", "committee": "split"}, constants=_LOOP | _BATCHES),
    "global VI, sum": Method(protocol={"kind": "global_vi"}, aggregation=_SUM, constants=_LOOP | _BATCHES),
}


def plan_of(study_name: str) -> dict[str, list[str]]:
    """Method -> constants scanned: what takes long is scanned on a part of the studies only.

    New numbers of steps and batch sizes are compiled anew, global VI exchanges at every step: on the core studies only.
    Networks are not for the perturbing methods, and what a network shows is the step size.
    """
    if study_name in NETWORKS:
        return {
            name: [constant for constant in method.constants if constant in ("clip norm", "step size")]
            for name, method in METHODS.items()
            if method.is_private and method.constants is not _PATH and method.aggregation == {}
        }
    if study_name in CORE:
        return {name: list(method.constants) for name, method in METHODS.items()}
    return {
        name: [constant for constant in method.constants if constant not in _BATCHES]
        for name, method in METHODS.items()
        if name != "global VI, sum"
    }


def rules_of(study_name: str) -> int:
    """The version of the rules in silobayes.defaults; a changed rule is a new version where it matters.

    Results of an older version stay, as the reason for the change; to repeat them takes the sources of that time.
    """
    return 2 if study_name in NETWORKS else 1
