"""The gate (PITFALLS) for every privatised variant, over several rounds with carried state."""

import dataclasses
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from silobayes.data.silo import Silo
from silobayes.defaults import Settings
from silobayes.engines.aggregation import Aggregator
from silobayes.engines.buckets import Buckets
from silobayes.engines.planning import build_method, shard_buckets
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.mlp import BinaryMLP
from silobayes.privacy.door import Door
from silobayes.privacy.events import Scheme
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols import dp_pvi, pvi
from silobayes.protocols.bcm import Committee
from silobayes.secure.sums import PlainSum
from silobayes.study import (
    PERTURBING,
    AggregationKind,
    AggregationSection,
    Clipping,
    PosteriorKind,
    Privatise,
    ProtocolKind,
)
from silobayes.testing import FreeAccount, Pair, PrivacyViolation, check_method, neighbours

MAX_ROWS, FEATURES, PAIRS = 24, 3, 104
MODEL = LogisticRegression(num_features=FEATURES)
REGRESSION = LinearRegression(num_features=FEATURES, noise_stddev=0.5)
NETWORK = BinaryMLP(num_features=FEATURES, hidden=(2,))
PUBLIC_ROWS = {
    "x": np.random.default_rng(9).normal(size=(20, FEATURES)).astype(np.float32),
    "y": np.random.default_rng(9).integers(2, size=20),
}
SETTINGS = {
    "dp_optimisation": Settings(
        privatise=Privatise.DP_OPTIMISATION, rounds=3, damping=0.5, steps=6, step_size=0.1, sample_rate=0.5
    ),
    "dp_optimisation, ordinary clipping, full": Settings(
        privatise=Privatise.DP_OPTIMISATION,
        rounds=2,
        damping=0.5,
        steps=6,
        step_size=0.1,
        sample_rate=0.5,
        clipping=Clipping.ORDINARY,
        posterior=PosteriorKind.FULL,
    ),
    "bcm": Settings(
        kind=ProtocolKind.BCM,
        privatise=Privatise.DP_OPTIMISATION,
        rounds=1,
        damping=1.0,
        steps=6,
        step_size=0.1,
        sample_rate=0.5,
        committee=Committee.SPLIT,
    ),
    "global_vi": Settings(
        kind=ProtocolKind.GLOBAL_VI,
        privatise=Privatise.DP_OPTIMISATION,
        rounds=3,
        damping=1.0,
        steps=4,
        step_size=0.1,
        sample_rate=0.5,
    ),
    "sufficient_statistics": Settings(
        privatise=Privatise.SUFFICIENT_STATISTICS, rounds=1, damping=1.0, steps=1, step_size=0.1, x_bound=1.7
    ),
    "parameter_perturbation": Settings(
        privatise=Privatise.PARAMETER_PERTURBATION, rounds=3, damping=0.5, steps=8, step_size=0.1, clip_norm=0.3
    ),
    "local_averaging": Settings(
        privatise=Privatise.LOCAL_AVERAGING,
        rounds=4,
        damping=0.5,
        steps=8,
        step_size=0.1,
        clip_norm=0.3,
        shards=4,
        scales=(1.0, 0.3),
    ),
    "virtual_clients": Settings(
        privatise=Privatise.VIRTUAL_CLIENTS, rounds=4, damping=0.5, steps=8, step_size=0.1, clip_norm=0.3, shards=4
    ),
    "virtual_clients, parts": Settings(
        privatise=Privatise.VIRTUAL_CLIENTS,
        rounds=4,
        damping=0.5,
        steps=8,
        step_size=0.1,
        clip_norm=(0.3, 0.05),
        shards=4,
        scales=(2.0, 0.5),
    ),
    "local_averaging, parts, full": Settings(
        privatise=Privatise.LOCAL_AVERAGING,
        rounds=3,
        damping=0.5,
        steps=8,
        step_size=0.1,
        clip_norm=(0.3, 0.1),
        shards=4,
        posterior=PosteriorKind.FULL,
    ),
    "virtual_clients, exact": Settings(
        privatise=Privatise.VIRTUAL_CLIENTS, rounds=4, damping=0.5, steps=1, step_size=0.1, clip_norm=5.0, shards=4
    ),
    "virtual_clients, full": Settings(
        privatise=Privatise.VIRTUAL_CLIENTS,
        rounds=3,
        damping=0.5,
        steps=8,
        step_size=0.1,
        clip_norm=0.3,
        shards=4,
        posterior=PosteriorKind.FULL,
    ),
    "local_averaging, network": Settings(
        privatise=Privatise.LOCAL_AVERAGING,
        rounds=3,
        damping=0.5,
        steps=1,
        step_size=0.1,
        clip_norm=(2.0, 0.5),
        shards=4,
    ),
    "virtual_clients, network": Settings(
        privatise=Privatise.VIRTUAL_CLIENTS,
        rounds=3,
        damping=0.5,
        steps=1,
        step_size=0.1,
        clip_norm=(2.0, 0.5),
        shards=4,
    ),
}


SUM = AggregationSection(kind=AggregationKind.SECRET_SHARING)
SETTINGS |= {
    f"{name}, summed": dataclasses.replace(SETTINGS[name], aggregation=SUM)
    for name in (
        "local_averaging",
        "local_averaging, network",
        "virtual_clients",
        "virtual_clients, exact",
        "parameter_perturbation",
        "sufficient_statistics",
        "global_vi",
    )
}


def make_rows(rng):
    num_rows = MAX_ROWS - int(rng.integers(4))
    x = rng.normal(size=(num_rows, FEATURES)) * 10.0 ** rng.uniform(-1, 1)
    return {"x": x.astype(np.float32), "y": rng.integers(2, size=num_rows)}


def silo_of(rows) -> SimpleNamespace:
    """Hostile rows, which a `Silo` would refuse, must be harmless here too."""
    return SimpleNamespace(
        name="a",
        x=rows["x"],
        y=np.asarray(rows["y"], dtype=np.int32),
        persons=None,
        num_rows=len(rows["y"]),
        num_features=FEATURES,
    )


@cache
def planned(name: str, relation: Relation):
    """The method on any rows; its noise is calibrated once."""
    settings = SETTINGS[name]
    # Where the solver is exact, a shard's change follows its cavity; little noise keeps it off the clip norm.
    is_exact = name.removesuffix(", summed") in ("sufficient_statistics", "virtual_clients, exact")
    budget = Budget(epsilon=50.0 if is_exact else 1.0, delta=1e-5, relation=relation, unit=Unit.ROW)
    is_loop = settings.privatise is Privatise.DP_OPTIMISATION and settings.aggregation != SUM
    silos = [silo_of(PUBLIC_ROWS)] * (1 if is_loop else 2)
    model = REGRESSION if is_exact else NETWORK if "network" in name else MODEL
    return build_method(model, silos, settings, budget, 0, max_rows=[MAX_ROWS] * len(silos))


def method_of(name: str, relation: Relation):
    """Rows of one silo through all rounds; perturbing methods have a second silo whose rows never change."""
    template = planned(name, relation)

    def method(rows, door):
        silos = [silo_of(rows), silo_of(PUBLIC_ROWS)]
        is_summed = SETTINGS[name].aggregation == SUM
        # In a sum the other silo draws what it likes: only the total is released.
        doors = [door, Door.open(FreeAccount(relation, Unit.ROW)) if is_summed else door]
        if SETTINGS[name].kind is ProtocolKind.GLOBAL_VI and is_summed:
            parts = [(silo.x, silo.y) for silo in silos]
            ready = dataclasses.replace(template, buckets=Buckets(parts, [MAX_ROWS, MAX_ROWS]))
        elif SETTINGS[name].privatise is Privatise.DP_OPTIMISATION:
            ready = dataclasses.replace(template, buckets=Buckets([(silos[0].x, silos[0].y)], [MAX_ROWS]))
            doors = [door]
        elif SETTINGS[name].privatise is Privatise.SUFFICIENT_STATISTICS:
            arrays = tuple((silo.x.astype(np.float64), silo.y.astype(np.float64)) for silo in silos)
            ready = dataclasses.replace(template, rows=arrays)
        else:
            buckets = shard_buckets(silos, SETTINGS[name].shards_of(2), [MAX_ROWS, MAX_ROWS], 0)
            ready = dataclasses.replace(template, shards=buckets)
        ready = dataclasses.replace(ready, aggregator=reusable(template.aggregator))
        state = ready.init()
        public = []
        while state.step < len(ready.visits):
            state = ready.step(state, doors)
            public.append(state.server.eta_q)
            has_private_factors = SETTINGS[name].privatise in PERTURBING and is_summed
            if SETTINGS[name].privatise is not Privatise.VIRTUAL_CLIENTS and not has_private_factors:
                public.append(state.clients)  # factors are sums of releases, so they may be public
        return [public, ready.eta(state)]

    return method


def reusable(aggregator: Aggregator | None) -> Aggregator | None:
    """A sum refuses a sum index it has seen, and the method here runs many times: the plain one remembers nothing."""
    return None if aggregator is None else dataclasses.replace(aggregator, sums=PlainSum(num_clients=2, colluding=0))


QUICK = {
    "local_averaging, summed": Relation.SUBSTITUTE,
    "virtual_clients, exact, summed": Relation.SUBSTITUTE,
    "global_vi, summed": Relation.SUBSTITUTE,
    "sufficient_statistics, summed": Relation.ADD_REMOVE,
    "dp_optimisation": Relation.SUBSTITUTE,
    "bcm": Relation.SUBSTITUTE,
    "global_vi": Relation.SUBSTITUTE,
    "sufficient_statistics": Relation.SUBSTITUTE,
    "parameter_perturbation": Relation.SUBSTITUTE,
    "local_averaging": Relation.ADD_REMOVE,
    "virtual_clients": Relation.SUBSTITUTE,
    "virtual_clients, parts": Relation.SUBSTITUTE,
    "virtual_clients, exact": Relation.ADD_REMOVE,
    "virtual_clients, network": Relation.SUBSTITUTE,
    "local_averaging, network, summed": Relation.SUBSTITUTE,
}
CASES = [
    pytest.param(name, relation, marks=() if QUICK.get(name) is relation else pytest.mark.slow)
    for name in SETTINGS
    for relation in Relation
]


@pytest.mark.parametrize(("name", "relation"), CASES)
def test_one_changed_row_moves_each_released_sum_by_no_more_than_is_priced_in_every_round(name, relation):
    pairs = neighbours(np.random.default_rng(1), make_rows, relation, PAIRS)
    assert check_method(method_of(name, relation), pairs) == PAIRS


@pytest.mark.slow
def test_fixed_size_batches_pass():
    settings = dataclasses.replace(SETTINGS["dp_optimisation"], sampler=Scheme.WITHOUT_REPLACEMENT, rounds=2)
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    template = build_method(MODEL, [silo_of(PUBLIC_ROWS)], settings, budget, 0)

    def method(rows, door):
        ready = dataclasses.replace(template, buckets=Buckets([(rows["x"], rows["y"].astype(np.int32))], [20]))
        state = ready.init()
        while state.step < len(ready.visits):
            state = ready.step(state, [door])
        return state.server.eta_q

    def full_rows(rng):
        return {"x": rng.normal(size=(20, FEATURES)).astype(np.float32), "y": rng.integers(2, size=20)}

    check_method(method, neighbours(np.random.default_rng(1), full_rows, Relation.SUBSTITUTE, 40))


def test_noise_in_a_shards_factor_is_caught(monkeypatch):
    """What the public code does: the released (noisy) change goes into every shard's factor (SPEC 0)."""

    def noisy_step(clients, *args, **public):
        state, total = right_step(clients, *args, **public)
        clean = state.eta_t - clients.eta_t
        noise = total.d_eta - jax.tree.map(lambda leaf: leaf.sum(axis=0), clean)
        return pvi.ClientState(eta_t=state.eta_t + noise), total

    right_step = dp_pvi.shard_factors_step
    monkeypatch.setattr(dp_pvi, "shard_factors_step", noisy_step)
    pairs = neighbours(np.random.default_rng(2), make_rows, Relation.SUBSTITUTE, PAIRS)
    with pytest.raises(PrivacyViolation):
        check_method(method_of("virtual_clients, exact", Relation.SUBSTITUTE), pairs)


def test_a_state_that_depends_on_an_unreleased_share_is_caught(monkeypatch):
    """Inside a secure sum a silo's own noisy message is nobody's to see; factors made of it would change unseen."""
    seen = []

    def greedy_share(self, mechanism, bounded):
        share = right_share(self, mechanism, bounded)
        seen.append(bounded.decode(share.counts)[0])
        return share

    def greedy_step(clients, down, refit, ball, release, *, owners, damping, **public):
        state, total = right_step(clients, down, refit, ball, release, owners=owners, damping=damping, **public)
        own = ball.unflatten([np.stack(seen[-2:])[owners]], state.eta_t)
        return pvi.ClientState(eta_t=clients.eta_t + damping * own), total

    right_share, right_step = Door.share, dp_pvi.shard_factors_step
    monkeypatch.setattr(Door, "share", greedy_share)
    monkeypatch.setattr(dp_pvi, "shard_factors_step", greedy_step)
    pairs = neighbours(np.random.default_rng(2), make_rows, Relation.SUBSTITUTE, PAIRS)
    with pytest.raises(PrivacyViolation):
        check_method(method_of("virtual_clients, exact, summed", Relation.SUBSTITUTE), pairs)


def test_shards_that_share_rows_are_caught():
    """All shards see all rows: one changed row moves every term."""

    def method(rows, door):
        silos = [silo_of(rows), silo_of(PUBLIC_ROWS)]
        template = planned("local_averaging", Relation.SUBSTITUTE)
        parts = [(silo.x, silo.y) for silo in silos for _ in range(4)]
        ready = dataclasses.replace(template, shards=Buckets(parts, [MAX_ROWS] * 8))
        state = ready.init()
        while state.step < len(ready.visits):
            state = ready.step(state, [door, door])
        return state.server.eta_q

    pairs = neighbours(np.random.default_rng(2), make_rows, Relation.SUBSTITUTE, PAIRS)
    with pytest.raises(PrivacyViolation):
        check_method(method, pairs)


def person_pairs(rng, relation: Relation, count: int):
    """One person of several leaves; under substitution another one, with other rows and as many as they like, comes."""
    for _ in range(count):
        ids = rng.choice(2**40, size=8, replace=False)
        persons = rng.choice(ids, size=16)
        x = (rng.normal(size=(16, FEATURES)) * 10.0 ** rng.uniform(-1, 1)).astype(np.float32)
        rows = {"x": x, "y": rng.integers(2, size=16), "persons": persons}
        stay = persons != persons[0]
        other = {key: column[stay] for key, column in rows.items()}
        if relation is Relation.SUBSTITUTE:
            new = int(rng.integers(1, 5))
            coming = {
                "x": (10 * rng.normal(size=(new, FEATURES))).astype(np.float32),
                "y": rng.integers(2, size=new),
                "persons": np.full(new, 2**41),
            }
            other = {key: np.concatenate([coming[key], column]) for key, column in other.items()}
        yield Pair(rows=rows, other=other, changed=0, relation=relation, name="a person")


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("name", ["local_averaging", "virtual_clients"])
def test_one_changed_person_moves_each_released_sum_by_no_more_than_is_priced(name, relation):
    settings = dataclasses.replace(SETTINGS[name], shards=3, rounds=3)
    budget = Budget(epsilon=1.0, delta=1e-5, relation=relation, unit=Unit.PERSON)

    def silo(rows):
        return Silo(name="a", x=rows["x"], y=rows["y"].astype(np.int32), persons=rows["persons"])

    first = next(person_pairs(np.random.default_rng(0), relation, 1)).rows
    template = build_method(MODEL, [silo(first)], settings, budget, 0)

    def method(rows, door):
        ready = dataclasses.replace(template, shards=shard_buckets([silo(rows)], [3], [MAX_ROWS], 0))
        state = ready.init()
        while state.step < len(ready.visits):
            state = ready.step(state, [door])
        return state.server.eta_q

    pairs = person_pairs(np.random.default_rng(1), relation, 40)
    assert check_method(method, pairs, unit=Unit.PERSON) == 40
