"""Linear regressions planned and run as `silobayes.fit` does it, without run directories.

Thousands of fits would mostly write ledgers. Noise comes from seeds, so that numbers can be repeated: it protects
nobody.
"""

from collections.abc import Sequence

from silobayes.data.silo import Silo
from silobayes.defaults import Settings
from silobayes.engines.parties import LocalParties
from silobayes.models.linear_regression import LinearRegression
from silobayes.plans import plan_of
from silobayes.plans.situation import Situation, Sizes
from silobayes.posterior import Posterior
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Budget
from silobayes.privacy.queries import Total
from silobayes.protocols.roles import Plan
from silobayes.study import AggregationSection
from silobayes.testing import FreeAccount


def plan_for(model: LinearRegression, rows: Sequence[int], settings: Settings, budget: Budget | None) -> Plan:
    """The plan for silos of so many rows: its noise depends on their numbers only, so one serves many repetitions."""
    sizes = tuple(Sizes(rows=count, num_features=model.num_features) for count in rows)
    names = tuple(f"theta{k}" for k in range(model.dim))
    return plan_of(Situation(model=model, names=names, sizes=sizes, settings=settings, budget=budget, seed=0))


def run(
    plan: Plan, silos: Sequence[Silo], doors: Sequence[Door], section: AggregationSection
) -> tuple[Posterior, Total]:
    """The posterior after all visits, and what was released in the last one; without privacy there are no doors."""
    parties = LocalParties(plan, silos, lambda silo, visit: doors[silo] if doors else None, section)
    server, state, total = plan.server, plan.server.init(), None
    for visit in plan.visits:
        parties.ask(visit, server.down(state, visit))
        total = parties.total(visit)
        merged = server.merge(state, visit, total)
        parties.settle(visit, merged.counted)
        state = merged.state
    assert total is not None
    return server.posterior(state), total


def open_door(budget: Budget, seed: int) -> Door:
    """A door with noise from a seed and an account that only writes down: noise is calibrated beforehand."""
    return Door(FreeAccount(budget.relation, budget.unit), FreshDraws(Entropy.not_private(seed)))
