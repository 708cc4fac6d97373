"""Linear regression from noisy statistics, by themselves or as the start of DP optimisation (hybrid)."""

import dataclasses
from typing import Any

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.plans.checks import known_noise
from silobayes.plans.keys import (
    HybridKeys,
    RoundKeys,
    check_batches,
    check_schedule,
    one_round,
    only_models,
    only_schedule,
)
from silobayes.plans.pvi import ONE_PASS, optimising_silo, private_refit
from silobayes.plans.rules import PublicFacts, common_rules, optimisation_rules, with_noisy_steps
from silobayes.plans.situation import Situation
from silobayes.privacy.events import DiscreteGaussianEvent, GaussianEvent
from silobayes.privacy.ledger import Budget
from silobayes.privacy.queries import PrivateSum
from silobayes.privacy.relation import Unit
from silobayes.protocols import hybrid, statistics
from silobayes.protocols.roles import Plan
from silobayes.protocols.schedule import Schedule, numbered
from silobayes.studies.method import Intervals, Method
from silobayes.studies.study import ModelKind, Study


def plan(situation: Situation) -> Plan:
    """One release of each silo."""
    known_noise(situation)
    if len(situation.visits) != 1:
        fix = "Statistics are released once; more rounds would only cost."
        raise InvalidInput("protocol.rounds", "1 with sufficient_statistics", situation.settings.rounds, fix)
    bounds, query = _bounds(situation), _query(situation, situation.paid)
    return Plan(
        visits=numbered(situation.visits),
        seats=situation.row_seats(),
        silos=(statistics.StatisticsSilo(bounds=bounds, query=query),),
        server=statistics.StatisticsServer(
            model=known_noise(situation),
            family=situation.family,
            names=situation.names,
            eta_p=situation.eta_p,
            bounds=bounds,
            query=query,
        ),
        numbers=situation.numbers,
    )


def plan_hybrid(situation: Situation) -> Plan:
    """The statistics get a share of epsilon, the loops all that is left of the budget beside them."""
    _check_hybrid(situation)
    settings, budget, bounds = situation.settings, situation.paid, _bounds(situation)
    query = _query(situation, dataclasses.replace(budget, epsilon=settings.first_share * budget.epsilon))
    rounds = situation.visits[1:]
    seats = situation.loop_seats(rounds, besides=(query.event(0),))
    then = optimising_silo(situation, seats, private_refit(situation))
    shares = tuple(rows / sum(situation.rows) for rows in situation.rows)
    open_sum, first = situation.sums.open(), (situation.everybody,)
    factoring = {"family": situation.family, "shares": shares, "query": open_sum}
    return Plan(
        visits=numbered(first, first, first, rounds),
        seats=seats,
        silos=(
            hybrid.StartingSilo(then=then, model=known_noise(situation), bounds=bounds, query=query),
            hybrid.FactoringSilo(part=hybrid.DISTANCES, **factoring),
            hybrid.FactoringSilo(part=hybrid.FACTORS, **factoring),
            then,
        ),
        server=hybrid.HybridServer(
            then=situation.pvi_server(first_start=None, num_visits=len(rounds), had_start=True),
            model=known_noise(situation),
            bounds=bounds,
            shares=shares,
            statistics=query,
            open=open_sum,
        ),
        numbers=situation.numbers,
    )


def _bounds(situation: Situation) -> statistics.RowBounds:
    return statistics.RowBounds(x=situation.limits.x, y=situation.limits.y)


def _query(situation: Situation, budget: Budget) -> PrivateSum:
    empty = _bounds(situation).bounded(np.zeros((0, situation.sizes[0].num_features)), np.zeros(0))
    return situation.sum_once(empty, budget)


def _check_hybrid(situation: Situation) -> None:
    """The start makes one public factor per silo of all silos' own releases."""
    settings = situation.settings
    known_noise(situation)
    if situation.sums.is_used:
        fix = "With a sum over silos nobody could start from a silo's own statistics; use sufficient_statistics."
        raise InvalidInput("aggregation.kind", "none with hybrid", situation.aggregation.kind.value, fix)
    if settings.schedule is not Schedule.SYNCHRONOUS:
        fix = "All silos release their statistics before the first round."
        raise InvalidInput("protocol.schedule", "synchronous with hybrid", settings.schedule.value, fix)
    if settings.rounds < 2:
        fix = "The first round is that of the statistics; use sufficient_statistics to stop there."
        raise InvalidInput("protocol.rounds", "at least 2 with hybrid", settings.rounds, fix)


def _rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    return common_rules(study, facts) | {"rounds": 1, "damping": 1.0}


def _streaming_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    return _rules(study, facts, keys) | ONE_PASS


def _hybrid_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    rules = common_rules(study, facts) | optimisation_rules(study, facts) | {"first_share": 0.5}
    return with_noisy_steps(study, facts, keys, rules)


_LINEAR = only_models(ModelKind.LINEAR_REGRESSION, ModelKind.GAUSSIAN)
_STATISTICS: dict[str, Any] = {
    "privatise": "sufficient_statistics",
    "keys": RoundKeys,
    "plan": plan,
    "releases": "sums of squares and products of the columns, once",
    "models": "linear regression with known noise",
    "units": (Unit.ROW,),
    "leaves": lambda study: "sums of clipped squares and products of its columns, with {noise}, once.",
    "shares": True,
    "intervals": Intervals.HONEST,
}
METHODS = (
    Method(
        **_STATISTICS,
        kind="pvi",
        rules=_rules,
        checks=(check_schedule, _LINEAR),
        summary="linear regression from noisy sufficient statistics",
    ),
    Method(
        kind="pvi",
        privatise="hybrid",
        keys=HybridKeys,
        plan=plan_hybrid,
        rules=_hybrid_rules,
        checks=(check_schedule, check_batches, _LINEAR),
        summary="an analytic start from noisy statistics, then DP optimisation",
        releases="sums of squares and products of the columns, once; then gradients",
        models="linear regression with known noise",
        units=(Unit.ROW,),
        leaves=lambda study: (
            "sums of clipped squares and products of its columns, with noise, once; then the change of its part of the "
            "posterior, found by steps of which each saw the rows only through a sum of clipped gradients with noise."
        ),
        loops=True,
        person_slots=True,
        first_releases=1,
        free_visits=2,
        noise=frozenset({DiscreteGaussianEvent, GaussianEvent}),
    ),
    Method(
        **_STATISTICS,
        kind="streaming_vb",
        rules=_streaming_rules,
        checks=(check_schedule, only_schedule(Schedule.SEQUENTIAL), one_round, _LINEAR),
        summary="one pass of noisy sufficient statistics, silo after silo",
    ),
)
