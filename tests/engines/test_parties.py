"""All silos of a run in one process answer as each of them would alone, where nobody else has rows."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silobayes.data.silo import Silo
from silobayes.engines import parties as module
from silobayes.engines.fitting import read_inputs
from silobayes.engines.local import _prepare
from silobayes.engines.loop import make_visit
from silobayes.engines.parties import LocalParties
from silobayes.inference.layouts import row_slots
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.queries import Message, OpenSum
from silobayes.protocols.roles import AbstractSilo, Plan, Seat
from silobayes.protocols.schedule import Visit
from silobayes.study import AggregationSection
from silobayes.testing import FreeAccount
from tests.engines.centred_cases import CENTRED
from tests.oracle.cases import CASES, Case

BY_NAME = {case.name: case for case in (*CASES, *CENTRED)}
# What compiles most, or compiles what another case has compiled.
SLOW = {
    "none, full",
    "none, masks, softmax",
    "none, asynchronous, unknown noise",
    "dp_optimisation, ordinary, full",
    "dp_optimisation, fixed size",
    "dp_optimisation, person",
    "dp_optimisation, asynchronous, poisson",
    "local_averaging, trusted, sampled",
    "local_averaging, person",
    "virtual_clients, sharing, full",
    "virtual_clients, masks, person",
    "bcm, same",
    "bcm, same, private, masks",
    "bcm, split",
    "global_vi, private, masks, person",
    "streaming_vb",
    "streaming_vb, private",
    "network, none",
    "centred, softmax",
    "centred, negative binomial",
    "centred, linear",
    "centred, unknown noise",
    "centred, masks, sampled",
    "centred, sharing, add_remove",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Ready:
    """A case of the oracle, planned."""

    plan: Plan
    silos: list[Silo]
    section: AggregationSection

    @classmethod
    def of(cls, case: Case, **protocol: Any) -> "Ready":
        case = dataclasses.replace(case, protocol=case.protocol | protocol)
        # Silos of one shape, but where a sum needs more of them.
        silos = case.silos if case.aggregation else dict(list(case.silos.items())[1:])
        inputs = read_inputs(case.study, silos, model=None)
        _, _, plan = _prepare(inputs)
        return cls(plan=plan, silos=list(inputs.silos), section=inputs.study.aggregation)

    def parties(self, case: Case, silos: list[Silo], account: FreeAccount) -> LocalParties:
        """The draws of a silo in a visit are the same, whoever else is asked."""

        def door(silo: int, visit: int) -> Door | None:
            entropy = Entropy.not_private(1000 * visit + silo)
            return None if case.epsilon is None else Door(account, FreshDraws(entropy))

        return LocalParties(self.plan, silos, door, self.section)

    def but_for(self, silo: int) -> list[Silo]:
        """Nobody else has more than one row, which is zero."""
        return [own if m == silo else _empty(own) for m, own in enumerate(self.silos)]


def _empty(silo: Silo) -> Silo:
    persons = None if silo.persons is None else np.zeros(1, dtype=int)
    return Silo(name=silo.name, x=0 * silo.x[:1], y=0 * silo.y[:1], persons=persons)


def account_of(case: Case) -> FreeAccount:
    privacy = case.study.privacy
    return FreeAccount(privacy.relation, privacy.unit)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BY_NAME]
)
def test_batched_is_one_by_one(name):
    """To 1e-6 of a message's norm, and one count of the grid where messages are on one: draws, prices and states too.

    Every visit starts from the states of the batched run: networks would make more and more of a rounding.
    """
    case = BY_NAME[name]
    ready = Ready.of(case)
    plan, server, paid, paid_alone = ready.plan, ready.plan.server, account_of(case), account_of(case)
    together = ready.parties(case, ready.silos, paid)
    alone = [ready.parties(case, ready.but_for(m), paid_alone) for m in range(len(ready.silos))]
    state = server.init()
    for visit in plan.visits:
        query = plan.silos[visit.part].query
        for _ in range(visit.steps):
            down = server.down(state, visit)
            together.ask(visit, down)
            for m, message, own in zip(visit.silos, together._messages, together._pending, strict=True):
                alone[m].states = list(together.states)
                alone[m].ask(dataclasses.replace(visit, silos=(m,)), down)
                unit, allowed = tolerance(query, message)
                assert_close(alone[m]._messages[0].payload * unit, message.payload * unit, allowed)
                assert_close(alone[m]._pending[0], own, allowed)
            merged = server.merge(state, visit, together.total(visit))
            together.settle(visit, merged.counted)
            state = merged.state
    assert Counter(paid_alone.charged) == Counter(paid.charged)


def tolerance(query: Any, message: Message) -> tuple[float, float]:
    """What one number of a payload stands for, and how far such numbers may be apart."""
    is_counts = message.payload.dtype.kind == "i"
    if isinstance(query, OpenSum):
        grid = 2.0**-16 if is_counts else 0.0
        return grid or 1.0, 1e-6 * float(np.linalg.norm(message.value)) + grid
    if not is_counts:
        return 1.0, 1e-6 * float(np.linalg.norm(message.value))
    layout = query.layouts[0]
    said = np.concatenate(layout.decode(message.payload))
    return layout.grid, 1e-6 * float(np.linalg.norm(said)) + layout.grid


def assert_close(one: Any, other: Any, allowed: float) -> None:
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=allowed)


@pytest.mark.parametrize("name", ["global_vi", "global_vi, private"])
def test_steps_in_one_loop_are_steps_one_by_one(name):
    """With next to no noise and all rows in each batch, as their draws come in another order."""
    case = BY_NAME[name]
    ready = Ready.of(case, **({} if case.epsilon is None else {"sample_rate": 1.0}))
    plan = ready.plan
    if case.epsilon is not None:
        seats = tuple(dataclasses.replace(seat, noise_multiplier=1e-9) for seat in plan.seats)
        plan = dataclasses.replace(plan, seats=seats)
    states = []
    for stretch in (plan.stretch, None):
        own = dataclasses.replace(ready, plan=dataclasses.replace(plan, stretch=stretch))
        parties, state = own.parties(case, own.silos, account_of(case)), plan.server.init()
        for visit in plan.visits:
            state = make_visit(own.plan, parties, state, visit)
        states.append(state)
    fused, plain = states
    assert (fused.num_steps, fused.num_visits, fused.num_counted) == (
        plain.num_steps,
        plain.num_visits,
        plain.num_counted,
    )
    for left, right in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6 * np.max(np.abs(right)))


class Told(eqx.Module):
    """What comes down."""

    key: Any


class Echo(eqx.Module):
    """Says what it was given."""

    side_by_side: ClassVar[bool] = True

    def __call__(self, rows, own, down, drawn, key):
        lucky = jax.random.uniform(key)
        return jnp.stack([rows.present.sum(), rows.x[0, 0], rows.y.sum(), own, drawn.sum(), drawn.max(), lucky])


@dataclass(frozen=True, kw_only=True, eq=False)
class EchoingSilo(AbstractSilo[np.ndarray]):
    """Its state and its (ragged) draws are made of its number."""

    query: OpenSum = dataclasses.field(default_factory=OpenSum)
    solve: Echo = dataclasses.field(default_factory=Echo)

    def init(self, seat):
        return np.float64(10 * seat.index)

    def draw(self, door, seat, visit):
        return np.full(seat.index + 1, seat.index, dtype=np.float32)

    def reply(self, door, seat, own, down, found):
        return own, self.query.write(np.array([seat.index, *found]))

    def events(self, seat, num_visits):
        return ()


def test_the_result_does_not_depend_on_how_silos_are_stacked(monkeypatch):
    """Two shapes; subsets in any order; every silo has its own rows, state, draws and key."""
    sizes = (6, 7, 50, 9, 70, 44)
    silos = [
        Silo(name=str(m), x=np.full((size, 2), m, dtype=np.float32), y=np.full(size, m)) for m, size in enumerate(sizes)
    ]
    layouts = row_slots(sizes)
    assert len({layout.shape for layout in layouts}) == 2
    seats = tuple(Seat(index=m, size=size, layout=layouts[m]) for m, size in enumerate(sizes))
    plan = Plan(visits=(), seats=seats, silos=(EchoingSilo(),), server=None, numbers=1)
    parties = LocalParties(plan, silos, lambda silo, visit: None, AggregationSection())
    widths, right = [], module._solve_all

    def spy(solve, rows, own, down, drawn, numbers, **static):
        widths.append(len(numbers))
        return right(solve, rows, own, down, drawn, numbers, **static)

    monkeypatch.setattr(module, "_solve_all", spy)
    key = jax.random.key(3)
    for chosen in ((0, 1, 2, 3, 4, 5), (4,), (5, 0, 3), (3, 2, 1, 0)):
        parties.ask(Visit(silos=chosen), Told(key=key))
        said = np.array([message.payload for message in parties._messages])
        lucky = [float(jax.random.uniform(jax.random.fold_in(key, m))) for m in chosen]
        expected = [
            [m, sizes[m], m, m * sizes[m], 10 * m, m * (m + 1), m, own] for m, own in zip(chosen, lucky, strict=True)
        ]
        np.testing.assert_allclose(said, expected, rtol=1e-6)
        assert parties.total(Visit(silos=chosen)).members == chosen
        np.testing.assert_allclose(parties.total(Visit(silos=chosen)).payload, np.sum(expected, axis=0), rtol=1e-6)
    assert all(width in (1, 2, 3) for width in widths)
