"""The gate over whole runs: what a study plans and does on the rows of one silo, through a door for each silo.

Nothing is taken apart: on every table the method is planned anew from its public sizes, runs all its visits over the
(secure) sum that it would run over, and all that becomes public is compared. Rows are hostile, so silos are stand-ins
for `Silo`, which would refuse them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from silobayes.engines.loop import AbstractParties, make_visit
from silobayes.engines.parties import LocalParties
from silobayes.models.base import AbstractModel
from silobayes.plans import calibration
from silobayes.privacy import accounting
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent, Scheme
from silobayes.privacy.ledger import Budget
from silobayes.privacy.queries import PrivateSum, Total
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.roles import Merged
from silobayes.protocols.schedule import Visit
from silobayes.study import AggregationKind
from silobayes.testing import Pair, neighbours
from silobayes.testing.neighbours import CANARIES
from tests.engines.harness import PERTURBING, Privatise, Settings, plan_for

MAX_ROWS, FEATURES = 24, 3
ROWS_PER_PERSON, MAX_PERSONS = 3, 10

Rows = dict[str, np.ndarray]


def make_rows(rng: np.random.Generator, *, real_target: bool = False, num_rows: int | None = None) -> Rows:
    num_rows = MAX_ROWS - int(rng.integers(4)) if num_rows is None else num_rows
    x = rng.normal(size=(num_rows, FEATURES)) * 10.0 ** rng.uniform(-1, 1)
    y = rng.normal(size=num_rows).astype(np.float32) if real_target else rng.integers(2, size=num_rows)
    return {"x": x.astype(np.float32), "y": y}


def silo_of(rows: Rows) -> SimpleNamespace:
    y, persons = np.asarray(rows["y"]), rows.get("persons")
    return SimpleNamespace(
        name="a",
        x=rows["x"],
        y=y if y.dtype.kind == "f" else y.astype(np.int32),
        persons=persons,
        num_rows=len(y),
        num_persons=0 if persons is None else len(np.unique(persons)),
        num_features=FEATURES,
    )


def _person(rng: np.random.Generator, name: int, scale: float, canary: Callable | None = None) -> Rows:
    """As many rows as somebody may have; those of a canary are all alike, which is the worst they can do."""
    count = int(rng.integers(1, ROWS_PER_PERSON + 1))
    x, y = scale * rng.normal(size=(count, FEATURES)).astype(np.float32), rng.integers(2, size=count)
    if canary is not None:
        x, y = np.stack([canary(x[0], rng)] * count), np.full(count, y[0])
    return {"x": x, "y": y, "persons": np.full(count, name)}


def _together(persons: list[Rows], seed: int) -> Rows:
    """One table: first everybody's first row, so that places stay, then all others, in an order that is each one's."""
    first = {key: np.stack([own[key][0] for own in persons]) for key in persons[0]}
    rest = {key: np.concatenate([own[key][1:] for own in persons]) for key in persons[0]}
    when = [np.random.default_rng([seed, place]).random(len(own["y"]) - 1) for place, own in enumerate(persons)]
    order = np.argsort(np.concatenate(when))
    return {key: np.concatenate([first[key], rest[key][order]]) for key in first}


def person_pairs(rng: np.random.Generator, relation: Relation, count: int) -> Iterator[Pair]:
    """One person is somebody else, with another id, other rows and another number of them; or the last one is gone."""
    for number in range(count):
        name = list(CANARIES)[number % len(CANARIES)]
        scale, ids = 10.0 ** rng.uniform(-1, 1), rng.choice(2**40, size=MAX_PERSONS, replace=False)
        persons = [_person(rng, who, scale) for who in ids[: MAX_PERSONS - int(rng.integers(3))]]
        changed = len(persons) - 1 if relation is Relation.ADD_REMOVE else int(rng.integers(len(persons)))
        with_canary = list(persons)
        with_canary[changed] = _person(rng, 2**41, scale, CANARIES[name])
        other = persons if relation is Relation.SUBSTITUTE else persons[:-1]
        tables = [_together(table, number) for table in (with_canary, other)]
        yield Pair(rows=tables[0], other=tables[1], changed=changed, relation=relation, name=name)


def silo_pairs(rng: np.random.Generator, relation: Relation, count: int) -> Iterator[Pair]:
    """All rows of the silo are others', or there are none left: it takes part all the same."""
    empty = {"x": np.zeros((0, FEATURES), np.float32), "y": np.zeros(0, np.int64)}
    for _ in range(count):
        other = make_rows(rng, num_rows=MAX_ROWS) if relation is Relation.SUBSTITUTE else empty
        yield Pair(rows=make_rows(rng, num_rows=MAX_ROWS), other=other, changed=0, relation=relation, name="a silo")


def pairs_of(settings: Settings, unit: Unit, relation: Relation, count: int, *, real_target: bool) -> Iterator[Pair]:
    rng = np.random.default_rng(1)
    if unit is Unit.PERSON:
        return person_pairs(rng, relation, count)
    if unit is Unit.CLIENT:
        return silo_pairs(rng, relation, count)

    is_full = settings.sampler is Scheme.WITHOUT_REPLACEMENT or settings.privatise == Privatise.INPUT_PERTURBATION

    def rows(rng: np.random.Generator) -> Rows:
        return make_rows(rng, real_target=real_target, num_rows=MAX_ROWS if is_full else None)

    return neighbours(rng, rows, relation, count)


def others_of(unit: Unit, count: int, *, real_target: bool) -> list[SimpleNamespace]:
    """Silos whose rows never change."""
    rng = np.random.default_rng(9)
    if unit is Unit.PERSON:
        return [silo_of(_together([_person(rng, who, 1.0) for who in range(MAX_PERSONS)], k)) for k in range(count)]
    return [silo_of(make_rows(rng, real_target=real_target)) for _ in range(count)]


def whole_run(
    model: AbstractModel, settings: Settings, budget: Budget, num_silos: int, *, real_target: bool = False
) -> Callable[[Rows, Any], Any]:
    """The first silo's rows and all doors -> everything that becomes public in a run."""
    others = others_of(budget.unit, num_silos - 1, real_target=real_target)
    is_summed = settings.aggregation.kind is not AggregationKind.NONE
    has_private_states = settings.privatise in PERTURBING and (
        is_summed or settings.privatise == Privatise.VIRTUAL_CLIENTS
    )
    by_person = budget.unit is Unit.PERSON and settings.privatise in (Privatise.DP_OPTIMISATION, Privatise.SCORES)
    slots = MAX_PERSONS if by_person else ROWS_PER_PERSON * MAX_PERSONS if budget.unit is Unit.PERSON else MAX_ROWS

    def method(rows: Rows, doors: Any) -> Any:
        doors = doors if isinstance(doors, list) else [doors]
        silos: Any = [silo_of(rows), *others]
        plan = plan_for(model, silos, settings, budget, 0, max_rows=[slots] * num_silos)
        local = LocalParties(plan, silos, lambda silo, visit: doors[silo], settings.aggregation)
        parties = ReplayingParties(local, doors[0])
        state, public = plan.server.init(), []
        for visit in plan.visits:
            state = make_visit(plan, parties, state, visit)
            states = None if has_private_states else local.states
            public.append([state, states, plan.server.info(state)])
        posterior = plan.server.posterior(state)
        return [public, posterior.eta, plan.server.facts(state), plan.total_events]

    return method


class ReplayingParties(AbstractParties):
    """The parties of a run whose totals are fed back on a neighbour: of a secure sum nothing else is ever seen.

    A silo's state may move only in a visit of it that counted.
    """

    def __init__(self, inner: LocalParties, door: Door) -> None:
        self.inner, self.door = inner, door
        self.before: list[Any] = []

    def ask(self, visit: Visit, down: Any) -> None:
        self.before = jax.tree.map(np.array, self.inner.states)
        self.inner.ask(visit, down)

    def total(self, visit: Visit) -> Total:
        total = self.inner.total(visit)
        query = self.inner.plan.silos[visit.part].query
        if not (isinstance(query, PrivateSum) and query.is_shared):
            return total
        return dataclasses.replace(total, payload=self.door.draws.total(total.payload))

    def settle(self, visit: Visit, counted: bool) -> None:
        self.inner.settle(visit, counted)
        for silo, (old, new) in enumerate(zip(self.before, self.inner.states, strict=True)):
            stays = silo not in visit.silos or not counted
            same = jax.tree.map(np.array_equal, old, new)
            assert not stays or all(jax.tree.leaves(same)), f"visit {visit.number} left a trace in silo {silo}"

    def stretch(self, state: Any, visit: Visit) -> Merged | None:
        return self.inner.stretch(state, visit)


@pytest.fixture
def calibrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise for the same event and budget: the gate plans a method hundreds of times."""
    monkeypatch.setattr(calibration, "calibrate", _calibrate_once)


_KNOWN: dict[Any, float] = {}


def _calibrate_once(event_of: Callable[[float], AbstractEvent], **budget: Any) -> AbstractEvent:
    key = (event_of(1.0), *(tuple(value) if isinstance(value, (list, tuple)) else value for value in budget.values()))
    if key not in _KNOWN:
        tried: dict[AbstractEvent, float] = {}

        def at(noise: float) -> AbstractEvent:
            event = event_of(noise)
            tried[event] = noise
            return event

        _KNOWN[key] = tried[accounting.calibrate(at, **budget)]
    return event_of(_KNOWN[key])


def budget_of(relation: Relation, unit: Unit, epsilon: float = 1.0) -> Budget:
    return Budget(epsilon=epsilon, delta=1e-5, relation=relation, unit=unit)
