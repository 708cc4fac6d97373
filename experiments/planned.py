"""Studies planned and run as `silobayes.fit` does it, without run directories.

Thousands of fits would mostly write ledgers. Noise comes from seeds, so that numbers can be repeated: it protects
nobody.
"""

from collections.abc import Sequence

from silobayes.data.silo import Silo
from silobayes.engines.parties import LocalParties
from silobayes.plans import plan_of
from silobayes.plans.situation import Situation, Sizes
from silobayes.posteriors import Posterior
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Budget
from silobayes.privacy.queries import Total
from silobayes.protocols.roles import Plan
from silobayes.studies.models import build_model
from silobayes.study import Study
from silobayes.testing import FreeAccount


def plan_for(study: Study, rows: Sequence[int]) -> Plan:
    """The plan for silos of so many rows: its noise depends on their numbers only, so one serves many repetitions."""
    names = tuple(study.encoding.feature_names)
    sizes = tuple(Sizes(rows=count, num_features=len(names)) for count in rows)
    model = build_model(study, len(names))
    return plan_of(Situation.of(study, model, model.parameter_names(names), sizes))


def run(study: Study, plan: Plan, silos: Sequence[Silo], doors: Sequence[Door]) -> tuple[Posterior, Total]:
    """The posterior after all visits, and what was released in the last one; without privacy there are no doors."""
    parties = LocalParties(
        plan, silos, lambda silo, visit: doors[silo] if doors else None, study.aggregation, study.hash
    )
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
