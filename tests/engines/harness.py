"""A method by itself: planned from settings and stepped over silos and doors that a test holds."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from silobayes.engines.loop import make_visit
from silobayes.engines.parties import LocalParties
from silobayes.inference.projection import Bounds
from silobayes.models.base import AbstractModel
from silobayes.plans import METHODS, plan_of
from silobayes.plans.keys import Clipping, PosteriorKind
from silobayes.plans.rules import Limits
from silobayes.plans.situation import Situation, Sizes
from silobayes.posteriors import Posterior
from silobayes.privacy.door import Door
from silobayes.privacy.events import Scheme
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Unit
from silobayes.protocols.bcm import Committee
from silobayes.protocols.roles import Plan
from silobayes.protocols.schedule import Schedule
from silobayes.studies.method import MethodKeys
from silobayes.study import AggregationSection


class ProtocolKind(StrEnum):
    PVI = "pvi"
    BCM = "bcm"
    GLOBAL_VI = "global_vi"
    STREAMING_VB = "streaming_vb"
    LINREG = "linreg"
    CENTRED = "centred"


class Privatise(StrEnum):
    NONE = "none"
    DP_OPTIMISATION = "dp_optimisation"
    PARAMETER_PERTURBATION = "parameter_perturbation"
    LOCAL_AVERAGING = "local_averaging"
    VIRTUAL_CLIENTS = "virtual_clients"
    SUFFICIENT_STATISTICS = "sufficient_statistics"
    HYBRID = "hybrid"
    INPUT_PERTURBATION = "input_perturbation"
    SCORES = "scores"


PERTURBING = (Privatise.PARAMETER_PERTURBATION, Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The filled-in keys of any method, and what else a plan looks at; a method takes the keys that it has."""

    kind: str = ProtocolKind.PVI
    schedule: Schedule = Schedule.SYNCHRONOUS
    privatise: str
    rounds: int
    damping: float
    steps: int
    step_size: float
    clip_norm: float | tuple[float, float] = 1.0
    clip_quantile: float | None = None
    sample_rate: float = 1.0
    shards: int | tuple[int, ...] = 1
    clipping: Clipping = Clipping.LABEL_FREE
    sampler: Scheme = Scheme.POISSON
    posterior: PosteriorKind = PosteriorKind.MEAN_FIELD
    scales: tuple[float, float] = (1.0, 1.0)
    clients_per_round: int | None = None
    committee: Committee = Committee.SAME
    first_share: float = 0.5
    projection: bool = True
    bounds: Bounds | None = None
    x_bound: float = 1.0
    y_bound: float = 1.0
    aggregation: AggregationSection = field(default_factory=AggregationSection)
    rows_per_person: int | None = None

    @property
    def clip_norms(self) -> tuple[float, ...]:
        return self.clip_norm if isinstance(self.clip_norm, tuple) else (self.clip_norm,)

    def situation(self, **facts: Any) -> Situation:
        """For a plan."""
        method = METHODS[str(self.kind), str(self.privatise)]
        names = [one.name for one in dataclasses.fields(method.keys)]
        keys = method.keys(**{name: getattr(self, name) for name in names})
        return Situation(
            method=method,
            settings=keys,
            limits=Limits(x=self.x_bound, y=self.y_bound, bounds=self.bounds, **self._moments(facts)),
            aggregation=self.aggregation,
            rows_per_person=self.rows_per_person,
            **facts,
        )

    @staticmethod
    def _moments(facts: Any) -> dict[str, Any]:
        """As if columns were standardised; the last one may be an intercept."""
        num_features = facts["sizes"][0].num_features
        return {"moments": np.eye(num_features), "intercept": num_features - 1}


# What a method's own keys do not say.
OTHERS: dict[str, Any] = {"damping": 1.0, "steps": 1, "step_size": 0.1}


def plan_for(
    model: AbstractModel,
    silos: Sequence[Any],
    settings: Settings | MethodKeys,
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
    if isinstance(settings, MethodKeys):
        settings = Settings(**{**OTHERS, **{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}})
    return plan_of(settings.situation(model=model, names=names, sizes=tuple(sizes), budget=budget, seed=seed))


class Run:
    """A plan, its parties and the state of its server."""

    def __init__(
        self,
        model: AbstractModel,
        silos: Sequence[Any],
        settings: Settings | MethodKeys,
        budget: Budget | None = None,
        seed: int = 0,
        *,
        doors: Sequence[Door] = (),
        max_rows: Sequence[int] | None = None,
    ) -> None:
        self.plan = plan_for(model, silos, settings, budget, seed, max_rows=max_rows)
        self.doors = list(doors)
        self.parties = LocalParties(
            self.plan, silos, self._door, getattr(settings, "aggregation", AggregationSection())
        )
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
