"""Linear regression with projection (004 I), without it, and by input perturbation."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.inference import projection
from silobayes.plans import pvi
from silobayes.plans.calibration import least_noise
from silobayes.plans.checks import known_noise
from silobayes.plans.keys import (
    LARGEST_FIRST_SHARE,
    PosteriorKind,
    RoundKeys,
    check_schedule,
    only_models,
    only_schedule,
)
from silobayes.plans.rules import PublicFacts, common_rules
from silobayes.plans.situation import Situation
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.queries import OpenSum, PrivateSum
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols import linreg
from silobayes.protocols.roles import AbstractSilo, Plan
from silobayes.protocols.schedule import Schedule, numbered
from silobayes.studies.keys import flag, key, number
from silobayes.studies.method import Intervals, Method
from silobayes.studies.study import AggregationKind, ModelKind, Study


@dataclass(frozen=True, kw_only=True)
class SumsKeys(RoundKeys):
    """Of regression from sums."""

    first_share: float | None = key(
        number(LARGEST_FIRST_SHARE), "of epsilon, for the sum that the projection follows from", "0.3"
    )
    projection: bool | None = key(flag, "narrow the ranges of the columns before the second release", "true")


def plan(situation: Situation) -> Plan:
    """One sum or two over silos."""
    settings, budget, bounds = situation.settings, situation.paid, _bounds(situation)
    known_noise(situation)
    _check_rounds(situation, 2 if settings.projection else 1)
    x, y = np.zeros((0, len(bounds.features))), np.zeros(0)
    first: PrivateSum | None = None
    paid: tuple[AbstractEvent, ...] = ()
    if settings.projection:
        share = dataclasses.replace(budget, epsilon=settings.first_share * budget.epsilon)
        first = situation.sum_once(projection.bounded_squares(x, y, bounds), share)
        paid = (first.event(0),)
    second = situation.sum_once(projection.bounded_moments(x, y, bounds.all, bounds), budget, paid)
    (noise,) = second.noise_of(range(situation.num_silos))
    moments = linreg.MomentsSilo(bounds=bounds, query=second)
    silos: tuple[AbstractSilo, ...] = (moments,)
    visits = numbered((situation.everybody,))
    if first is not None:
        silos = (linreg.SquaresSilo(bounds=bounds, query=first), moments)
        visits = numbered((situation.everybody,), (situation.everybody,))
    return Plan(
        visits=visits,
        seats=situation.row_seats(),
        silos=silos,
        server=linreg.ProjectionServer(**_common(situation), squares=first, moments=second, moments_noise=noise),
        numbers=situation.numbers,
    )


def plan_input_perturbation(situation: Situation) -> Plan:
    """Every row by itself."""
    budget, bounds = situation.paid, _bounds(situation)
    known_noise(situation)
    _check_rounds(situation, 1)
    if situation.aggregation.kind is not AggregationKind.NONE:
        fix = "Rows that are noised one by one need nobody to add them up."
        raise InvalidInput("aggregation.kind", "none", situation.aggregation.kind.value, fix)
    if budget.relation is not Relation.SUBSTITUTE:
        fix = "A row that publishes itself shows that it is there: only its values can be protected."
        raise InvalidInput("privacy.relation", "substitute", budget.relation.value, fix)
    layouts = [
        projection.bounded_rows(np.zeros((n, len(bounds.features))), np.zeros(n), bounds) for n in situation.rows
    ]
    # The number of rows enters the price through the grid's rounding alone: take the largest silo's.
    largest = max(layouts, key=lambda own: own.total.size)
    noise = least_noise(lambda std: situation.sums.mechanism(std).event(largest, budget.relation), budget)
    rows = situation.sums.private(layouts, [noise] * len(layouts), budget, num_terms=1, num_sums=1)
    (noise_std,) = rows.noise_of([0])
    query = OpenSum()
    return Plan(
        visits=numbered((situation.everybody,)),
        seats=situation.row_seats(),
        silos=(linreg.RowsSilo(bounds=bounds, rows=rows, query=query),),
        server=linreg.InputServer(**_common(situation), query=query, noise_std=noise_std),
        numbers=situation.numbers,
    )


def _common(situation: Situation) -> dict[str, Any]:
    return {
        "model": known_noise(situation),
        "family": situation.family,
        "names": situation.names,
        "eta_p": situation.eta_p,
        "bounds": _bounds(situation),
        "num_rows": sum(situation.rows),
    }


def _bounds(situation: Situation) -> projection.Bounds:
    bounds, num_features = situation.limits.bounds, situation.sizes[0].num_features
    if bounds is None or len(bounds.features) != num_features:
        fix = "Pass the bounds of all features, as a study's encoding has them."
        raise InvalidInput("limits.bounds", f"bounds of {num_features} features", "others", fix)
    return bounds


def _check_rounds(situation: Situation, rounds: int) -> None:
    if situation.settings.rounds != rounds:
        fix = "Remove the key."
        raise InvalidInput("protocol.rounds", f"{rounds}: one for each sum", situation.settings.rounds, fix)


def _check_share(study: Study) -> None:
    keys: Any = study.protocol
    if keys.first_share is not None and keys.projection is False:
        expected = "no value without projection"
        raise InvalidInput("protocol.first_share", expected, keys.first_share, "Remove the key.")


def _rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    """One visit for each sum. The share is the paper's (004 I)."""
    projects = getattr(keys, "projection", False) is not False
    return common_rules(study, facts) | {
        "rounds": 2 if projects else 1,
        "damping": 1.0,
        "steps": 1,
        "posterior": PosteriorKind.FULL,
        "first_share": 0.3,
        "projection": True,
    }


def _leaves(study: Study) -> str:
    if study.protocol.projection is False:  # type: ignore[attr-defined]
        return "sums of clipped squares and products of its columns, with {noise}, once."
    return (
        "sums of clipped squares of its columns, with {noise}, once; then sums of squares and products of its "
        "columns, clipped to ranges that follow from the first sums, with {noise}, once."
    )


def _open(situation: Situation) -> Plan:
    """Without privacy it is one exact round of PVI."""
    known_noise(situation)
    return pvi.plan(situation)


_CHECKS = (check_schedule, only_schedule(Schedule.SYNCHRONOUS), only_models(ModelKind.LINEAR_REGRESSION))
_COMMON: dict[str, Any] = {"kind": "linreg", "rules": _rules, "models": "linear regression with known noise"}
_PRIVATE: dict[str, Any] = {"units": (Unit.ROW,)}
METHODS = (
    Method(
        **_COMMON,
        privatise="none",
        keys=pvi.StepKeys,
        plan=_open,
        checks=_CHECKS,
        summary="exact linear regression without privacy",
        releases="exact results",
        units=(),
        leaves=lambda study: "exact results computed from its rows. Nothing protects them.",
        expects_widths=True,
    ),
    Method(
        **_COMMON,
        **_PRIVATE,
        privatise="sufficient_statistics",
        keys=SumsKeys,
        plan=plan,
        checks=(*_CHECKS, _check_share),
        summary="linear regression with projection, from two private sums",
        releases="sums of squares, then of squares and products of the columns, once each",
        leaves=_leaves,
        # What the projection cuts off pulls the intercept, by more than its bias on synthetic rows says.
        intervals=Intervals.PARTLY,
        shares=True,
    ),
    Method(
        **_COMMON,
        **_PRIVATE,
        privatise="input_perturbation",
        keys=RoundKeys,
        plan=plan_input_perturbation,
        checks=_CHECKS,
        summary="linear regression from rows that are noised one by one",
        releases="every row, once",
        leaves=lambda study: "every row by itself, clipped and with noise, once.",
        intervals=Intervals.HONEST,
    ),
)
