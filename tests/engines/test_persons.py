"""DP optimisation that protects persons: batches of whole persons, each clipped as one."""

import dataclasses
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.engines.buckets import Buckets
from silobayes.engines.planning import build_method
from silobayes.inference import row_gradients
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import Scheme
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Relation, Unit
from silobayes.study import ProtocolKind
from silobayes.testing import FreeAccount, Pair, PrivacyViolation, check_method
from silobayes.testing.neighbours import CANARIES
from tests.engines.test_record_replay import SETTINGS, SUM, reusable

FEATURES, ROWS_PER_PERSON, MAX_PERSONS, PAIRS = 3, 4, 12, 40
MODEL = LogisticRegression(num_features=FEATURES)
GATE = {
    name: dataclasses.replace(SETTINGS[name], rows_per_person=ROWS_PER_PERSON)
    for name in ("dp_optimisation", "dp_optimisation, ordinary clipping, full", "bcm", "global_vi", "global_vi, summed")
}
GATE |= {f"{name}, summed": dataclasses.replace(GATE[name], aggregation=SUM) for name in ("dp_optimisation", "bcm")}
QUICK = {
    ("dp_optimisation", Relation.SUBSTITUTE),
    ("dp_optimisation", Relation.ADD_REMOVE),
    ("bcm", Relation.SUBSTITUTE),
    ("global_vi", Relation.SUBSTITUTE),
    ("global_vi, summed", Relation.SUBSTITUTE),
}
CASES = [
    pytest.param(name, relation, marks=() if (name, relation) in QUICK else pytest.mark.slow)
    for name in GATE
    for relation in Relation
]


def rows_of(rng, person: int, scale: float = 1.0, canary=None) -> dict[str, np.ndarray]:
    """As many rows as somebody may have; of one canary they are all alike, which is the worst they can do."""
    count = int(rng.integers(1, ROWS_PER_PERSON + 1))
    x = scale * rng.normal(size=(count, FEATURES)).astype(np.float32)
    y = rng.integers(2, size=count)
    if canary is not None:
        x, y = np.stack([canary(x[0], rng)] * count), np.full(count, y[0])
    return {"x": x, "y": y, "persons": np.full(count, person)}


def together(persons: list[dict[str, np.ndarray]], seed: int) -> dict[str, np.ndarray]:
    """One table: first everybody's first row, so that places stay, then all others, in an order that is each one's."""
    first = {key: np.stack([own[key][0] for own in persons]) for key in persons[0]}
    rest = {key: np.concatenate([own[key][1:] for own in persons]) for key in persons[0]}
    when = [np.random.default_rng([seed, place]).random(len(own["y"]) - 1) for place, own in enumerate(persons)]
    order = np.argsort(np.concatenate(when))
    return {key: np.concatenate([first[key], rest[key][order]]) for key in first}


def person_pairs(rng, relation: Relation, count: int):
    """One person is somebody else, with other rows and another number of them; or the last one is gone."""
    for number in range(count):
        name = list(CANARIES)[number % len(CANARIES)]
        scale, ids = 10.0 ** rng.uniform(-1, 1), rng.choice(2**40, size=MAX_PERSONS, replace=False)
        persons = [rows_of(rng, who, scale) for who in ids[: MAX_PERSONS - int(rng.integers(4))]]
        changed = len(persons) - 1 if relation is Relation.ADD_REMOVE else int(rng.integers(len(persons)))
        with_canary = list(persons)
        with_canary[changed] = rows_of(rng, 2**41, canary=CANARIES[name])
        other = persons if relation is Relation.SUBSTITUTE else persons[:-1]
        rows = [together(table, number) for table in (with_canary, other)]
        yield Pair(rows=rows[0], other=rows[1], changed=changed, relation=relation, name=name)


def silo_of(rows) -> SimpleNamespace:
    """Hostile rows, which a `Silo` would refuse, must be harmless here too."""
    sizes = {"num_rows": len(rows["y"]), "num_features": FEATURES, "num_persons": len(np.unique(rows["persons"]))}
    return SimpleNamespace(name="a", x=rows["x"], y=np.asarray(rows["y"], np.int32), persons=rows["persons"], **sizes)


PUBLIC_ROWS = together([rows_of(np.random.default_rng(who), who) for who in range(MAX_PERSONS)], 0)


def buckets_of(*tables) -> Buckets:
    return Buckets(
        [(rows["x"], rows["y"].astype(np.int32)) for rows in tables],
        [MAX_PERSONS] * len(tables),
        persons=[rows["persons"] for rows in tables],
        rows_per_unit=ROWS_PER_PERSON,
    )


@cache
def planned(name: str, relation: Relation):
    """The method on any rows; its noise is calibrated once."""
    budget = Budget(epsilon=1.0, delta=1e-5, relation=relation, unit=Unit.PERSON)
    silos = [silo_of(PUBLIC_ROWS)] * (2 if GATE[name].aggregation == SUM else 1)
    return build_method(MODEL, silos, GATE[name], budget, 0, max_rows=[MAX_PERSONS] * len(silos))


def method_of(name: str, relation: Relation):
    """One silo's persons through all rounds; in a sum there is a second silo whose rows never change."""
    template, is_summed = planned(name, relation), GATE[name].aggregation == SUM

    def method(rows, door):
        tables, doors = ([rows, PUBLIC_ROWS], [door, door]) if is_summed else ([rows], [door])
        if GATE[name].kind is ProtocolKind.GLOBAL_VI and is_summed:
            doors[1] = Door.open(FreeAccount(relation, Unit.PERSON))  # only the total is released
        aggregator = reusable(template.aggregator)
        ready = dataclasses.replace(template, buckets=buckets_of(*tables), aggregator=aggregator)
        state, public = ready.init(), []
        while state.step < len(ready.visits):
            state = ready.step(state, doors)
            public += [state.server.eta_q, state.clients]  # factors are sums of releases, so they may be public
        return [public, ready.eta(state)]

    return method


@pytest.mark.parametrize(("name", "relation"), CASES)
def test_one_changed_person_moves_each_released_sum_by_no_more_than_is_priced_in_every_round(name, relation):
    pairs = person_pairs(np.random.default_rng(1), relation, PAIRS)
    assert check_method(method_of(name, relation), pairs, unit=Unit.PERSON) == PAIRS


@pytest.mark.slow
def test_fixed_size_batches_of_persons_pass():
    settings = dataclasses.replace(GATE["dp_optimisation"], sampler=Scheme.WITHOUT_REPLACEMENT, rounds=2)
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.PERSON)
    template = build_method(MODEL, [silo_of(PUBLIC_ROWS)], settings, budget, 0)

    def method(rows, door):
        ready = dataclasses.replace(template, buckets=buckets_of(rows))
        state = ready.init()
        while state.step < len(ready.visits):
            state = ready.step(state, [door])
        return state.server.eta_q

    pairs = person_pairs(np.random.default_rng(1), Relation.SUBSTITUTE, 40)
    assert check_method(method, pairs, unit=Unit.PERSON) == 40


@pytest.mark.parametrize("name", ["dp_optimisation", "global_vi, summed"])
def test_clipping_rows_instead_of_persons_is_caught(monkeypatch, name):
    """Each row within the clip norm, each person with as many clip norms as rows."""

    def of_rows(gradients, mask, clip_norm, clipping, rows_per_unit):
        return right(gradients, mask, clip_norm, clipping)

    right = row_gradients.clipped_gradient
    monkeypatch.setattr(row_gradients, "clipped_gradient", of_rows)
    jax.clear_caches()  # what was compiled before is right
    try:
        pairs = person_pairs(np.random.default_rng(1), Relation.SUBSTITUTE, PAIRS)
        with pytest.raises(PrivacyViolation, match="Clip each unit"):
            check_method(method_of(name, Relation.SUBSTITUTE), pairs, unit=Unit.PERSON)
    finally:
        jax.clear_caches()


@pytest.mark.parametrize("name", ["dp_optimisation", "bcm", "global_vi", "global_vi, summed"])
def test_one_row_per_person_is_the_method_for_rows(name):
    """The same plan, the same draws, the same answer, to the last bit."""
    rng = np.random.default_rng(3)
    sizes = (20, 17)
    silos = [
        Silo(
            name=f"silo-{k}",
            x=rng.normal(size=(size, FEATURES)),
            y=rng.integers(2, size=size),
            persons=rng.permutation(size),
        )
        for k, size in enumerate(sizes)
    ]
    settings = dataclasses.replace(SETTINGS[name], rounds=1 if name == "bcm" else 2, rows_per_person=1)
    answers, events = [], []
    for unit in (Unit.ROW, Unit.PERSON):
        budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=unit)
        method = build_method(MODEL, silos, settings, budget, 0)
        doors = [Door(FreeAccount(Relation.SUBSTITUTE, unit), FreshDraws(Entropy.not_private(k))) for k in range(2)]
        state = method.init()
        while state.step < len(method.visits):
            state = method.step(state, doors)
        answers.append(method.eta(state))
        events.append(method.total_events())
    assert events[0] == events[1]
    jax.tree.map(np.testing.assert_array_equal, *answers)


def test_an_unused_place_of_a_person_changes_nothing():
    """A larger public bound is more padding; batches and noise are the same."""
    persons = np.arange(40) // 2
    rng = np.random.default_rng(4)
    silo = Silo(name="a", x=rng.normal(size=(40, FEATURES)), y=rng.integers(2, size=40), persons=persons)
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.PERSON)
    answers = []
    for bound in (2, 5):
        settings = dataclasses.replace(GATE["dp_optimisation"], rows_per_person=bound)
        method = build_method(MODEL, [silo], settings, budget, 0)
        door = Door(FreeAccount(Relation.SUBSTITUTE, Unit.PERSON), FreshDraws(Entropy.not_private(0)))
        answers.append(method.eta(method.step(method.init(), [door])))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5), *answers)


def test_a_person_has_slots_of_their_own_whoever_else_is_there():
    x = np.arange(6, dtype=np.float32)[:, None]
    persons = np.array([70, 5, 70, 9, 5, 70])
    buckets = Buckets([(x, np.zeros(6, np.int32))], [4], persons=[persons], rows_per_unit=3)
    (bucket,) = buckets.buckets
    assert buckets.slots.tolist() == [4]
    assert np.asarray(bucket.rows.x)[0, :, 0].tolist() == [0, 2, 5, 1, 4, 0, 3, 0, 0, 0, 0, 0]
    present = np.array([1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0], dtype=bool)
    np.testing.assert_array_equal(bucket.rows.present[0], present)


def test_a_person_with_more_rows_than_rows_per_unit_is_refused():
    part = (np.zeros((4, 1), np.float32), np.zeros(4, np.int32))
    with pytest.raises(InvalidInput, match="rows_per_person"):
        Buckets([part], [4], persons=[np.array([1, 2, 1, 1])], rows_per_unit=2)
    with pytest.raises(InvalidInput, match="max_rows"):
        Buckets([part], [2], persons=[np.array([1, 2, 3, 1])], rows_per_unit=2)


def test_missing_keys_are_refused_before_anything_is_planned():
    silo = Silo(name="a", x=np.ones((4, FEATURES)), y=np.arange(4) % 2, persons=np.arange(4))
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.PERSON)
    with pytest.raises(InvalidInput, match=r"data\.rows_per_person"):
        build_method(MODEL, [silo], SETTINGS["dp_optimisation"], budget, 0)
    with pytest.raises(InvalidInput, match=r"data\.unit"):
        build_method(MODEL, [dataclasses.replace(silo, persons=None)], GATE["dp_optimisation"], budget, 0)
