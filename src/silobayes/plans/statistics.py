"""Linear regression from noisy statistics, by themselves or as the start of DP optimisation (hybrid)."""

import dataclasses

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.models.linear_regression import LinearRegression
from silobayes.plans.calibration import least_noise
from silobayes.plans.pvi import optimising_silo, private_refit
from silobayes.plans.situation import Situation
from silobayes.privacy.ledger import Budget
from silobayes.privacy.queries import PrivateSum
from silobayes.protocols import hybrid, statistics
from silobayes.protocols.roles import Plan
from silobayes.protocols.schedule import numbered


def plan(situation: Situation) -> Plan:
    """One release of each silo."""
    if len(situation.visits) != 1:
        fix = "Statistics are released once; more rounds would only cost."
        raise InvalidInput("protocol.rounds", "1 with sufficient_statistics", situation.settings.rounds, fix)
    bounds, query = _bounds(situation), _query(situation, situation.paid)
    return Plan(
        visits=numbered(situation.visits),
        seats=situation.row_seats(),
        silos=(statistics.StatisticsSilo(bounds=bounds, query=query),),
        server=statistics.StatisticsServer(
            model=_model(situation),
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
            hybrid.StartingSilo(then=then, model=_model(situation), bounds=bounds, query=query),
            hybrid.FactoringSilo(part=hybrid.DISTANCES, **factoring),
            hybrid.FactoringSilo(part=hybrid.FACTORS, **factoring),
            then,
        ),
        server=hybrid.HybridServer(
            then=situation.pvi_server(first_start=None, num_visits=len(rounds), had_start=True),
            model=_model(situation),
            bounds=bounds,
            shares=shares,
            statistics=query,
            open=open_sum,
        ),
        numbers=situation.numbers,
    )


def _model(situation: Situation) -> LinearRegression:
    assert isinstance(situation.model, LinearRegression)
    return situation.model


def _bounds(situation: Situation) -> statistics.RowBounds:
    return statistics.RowBounds(x=situation.settings.x_bound, y=situation.settings.y_bound)


def _query(situation: Situation, budget: Budget) -> PrivateSum:
    dim, sums = situation.sizes[0].num_features, situation.sums
    empty = _bounds(situation).bounded(np.zeros((0, dim)), np.zeros(0))
    noise = least_noise(lambda std: sums.mechanism(std).event(empty, budget.relation), budget)
    everybody = situation.num_silos
    return sums.private([empty] * everybody, [noise] * everybody, budget, num_terms=max(situation.rows), num_sums=1)
