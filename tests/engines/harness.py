"""A method by itself: planned from settings and stepped over silos and doors that a test holds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from silobayes.defaults import Settings
from silobayes.engines.loop import make_visit
from silobayes.engines.parties import LocalParties
from silobayes.models.base import AbstractModel
from silobayes.plans import plan_of
from silobayes.plans.situation import Situation, Sizes
from silobayes.posterior import Posterior
from silobayes.privacy.door import Door
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Unit
from silobayes.protocols.roles import Plan


def plan_for(
    model: AbstractModel,
    silos: Sequence[Any],
    settings: Settings,
    budget: Budget | None,
    seed: int = 0,
    *,
    max_rows: Sequence[int] | None = None,
) -> Plan:
    """The plan for silos of these sizes; `max_rows` are the public ones (of persons where batches are of persons)."""
    sizes = []
    for number, silo in enumerate(silos):
        units = None if max_rows is None else max_rows[number]
        persons = None
        if silo.persons is not None and budget is not None and budget.unit is Unit.PERSON:
            persons = len(np.unique(silo.persons)) if units is None else units
        rows = len(silo.y) if units is None else units
        sizes.append(
            Sizes(rows=rows, persons=persons, has_persons=silo.persons is not None, num_features=silo.x.shape[1])
        )
    names = tuple(f"theta{k}" for k in range(model.dim))
    return plan_of(
        Situation(model=model, names=names, sizes=tuple(sizes), settings=settings, budget=budget, seed=seed)
    )


class Run:
    """A plan, its parties and the state of its server."""

    def __init__(
        self,
        model: AbstractModel,
        silos: Sequence[Any],
        settings: Settings,
        budget: Budget | None = None,
        seed: int = 0,
        *,
        doors: Sequence[Door] = (),
        max_rows: Sequence[int] | None = None,
    ) -> None:
        self.plan = plan_for(model, silos, settings, budget, seed, max_rows=max_rows)
        self.doors = list(doors)
        self.parties = LocalParties(self.plan, silos, self._door, settings.aggregation)
        self.state = self.plan.server.init()
        self.step_number = 0

    def _door(self, silo: int, visit: int) -> Door | None:
        return self.doors[silo] if self.doors else None

    def step(self) -> "Run":
        """One visit more."""
        self.state = make_visit(self.plan, self.parties, self.state, self.plan.visits[self.step_number])
        self.step_number += 1
        return self

    def finish(self) -> "Run":
        """All visits."""
        while self.step_number < len(self.plan.visits):
            self.step()
        return self

    @property
    def posterior(self) -> Posterior:
        """What the present state stands for."""
        return self.plan.server.posterior(self.state)

    @property
    def standard(self) -> Any:
        """Mean and spread of the posterior, as its family has them."""
        return self.posterior.family.to_standard(self.posterior.eta)  # type: ignore[arg-type]
