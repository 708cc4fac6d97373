"""Linear regression with projection (004 I), without it, and by input perturbation."""

import dataclasses
from typing import Any

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.inference import projection
from silobayes.models.linear_regression import LinearRegression
from silobayes.plans.calibration import least_noise
from silobayes.plans.situation import Situation
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.ledger import Budget
from silobayes.privacy.queries import OpenSum, PrivateSum
from silobayes.privacy.relation import Relation
from silobayes.protocols import linreg
from silobayes.protocols.roles import AbstractSilo, Plan
from silobayes.protocols.schedule import numbered
from silobayes.study import AggregationKind


def plan(situation: Situation) -> Plan:
    """One sum or two over silos."""
    settings, budget, bounds = situation.settings, situation.paid, _bounds(situation)
    _check_rounds(situation, 2 if settings.projection else 1)
    x, y = np.zeros((0, len(bounds.features))), np.zeros(0)
    first: PrivateSum | None = None
    paid: tuple[AbstractEvent, ...] = ()
    if settings.projection:
        share = dataclasses.replace(budget, epsilon=settings.first_share * budget.epsilon)
        first = _query(situation, projection.bounded_squares(x, y, bounds), share)
        paid = (first.event(0),)
    second = _query(situation, projection.bounded_moments(x, y, bounds.all, bounds), budget, paid)
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
    settings, budget, bounds = situation.settings, situation.paid, _bounds(situation)
    _check_rounds(situation, 1)
    if settings.aggregation.kind is not AggregationKind.NONE:
        fix = "Rows that are noised one by one need nobody to add them up."
        raise InvalidInput("aggregation.kind", "none", settings.aggregation.kind.value, fix)
    if budget.relation is not Relation.SUBSTITUTE:
        fix = "A row that publishes itself shows that it is there: only its values can be protected."
        raise InvalidInput("privacy.relation", "substitute", budget.relation.value, fix)
    layouts = [projection.bounded_rows(np.zeros((n, len(bounds.features))), np.zeros(n), bounds) for n in situation.rows]
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


def _query(
    situation: Situation, empty: Bounded, budget: Budget, besides: tuple[AbstractEvent, ...] = ()
) -> PrivateSum:
    sums, everybody = situation.sums, situation.num_silos
    noise = least_noise(lambda std: sums.mechanism(std).event(empty, budget.relation), budget, besides=besides)
    return sums.private([empty] * everybody, [noise] * everybody, budget, num_terms=max(situation.rows), num_sums=1)


def _common(situation: Situation) -> dict[str, Any]:
    assert isinstance(situation.model, LinearRegression)
    return {
        "model": situation.model,
        "family": situation.family,
        "names": situation.names,
        "eta_p": situation.eta_p,
        "bounds": _bounds(situation),
        "num_rows": sum(situation.rows),
    }


def _bounds(situation: Situation) -> projection.Bounds:
    bounds, num_features = situation.settings.bounds, situation.sizes[0].num_features
    if bounds is None or len(bounds.features) != num_features:
        fix = "Pass the bounds of all features, as a study's encoding has them."
        raise InvalidInput("settings.bounds", f"bounds of {num_features} features", "others", fix)
    return bounds


def _check_rounds(situation: Situation, rounds: int) -> None:
    if situation.settings.rounds != rounds:
        fix = "Remove the key."
        raise InvalidInput("protocol.rounds", f"{rounds}: one for each sum", situation.settings.rounds, fix)
