"""The gate (PITFALLS) for every method, aggregation and unit: whole runs over several rounds with carried state."""

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from silobayes.engines.parties import LocalParties
from silobayes.inference.layouts import ShardSlots
from silobayes.inference.projection import Bounds
from silobayes.inference.rows import stack
from silobayes.models.base import AbstractModel
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.mlp import BinaryMLP
from silobayes.models.negative_binomial_regression import NegativeBinomialRegression
from silobayes.models.poisson_regression import PoissonRegression
from silobayes.models.softmax_regression import SoftmaxRegression
from silobayes.plans.keys import Clipping, PosteriorKind
from silobayes.privacy.events import Scheme
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols import pvi
from silobayes.protocols.bcm import Committee
from silobayes.protocols.perturbed import AveragingSilo, ShardedSilo
from silobayes.protocols.schedule import Schedule
from silobayes.study import AggregationKind, AggregationSection
from silobayes.testing import PrivacyViolation, check_method
from tests.engines import gate
from tests.engines.gate import FEATURES, ROWS_PER_PERSON, budget_of, calibrated_once, pairs_of, whole_run
from tests.engines.harness import Privatise, ProtocolKind, Settings

pytestmark = pytest.mark.usefixtures("calibrated_once")
__all__ = ["calibrated_once"]  # a fixture

MODEL = LogisticRegression(num_features=FEATURES)
REGRESSION = LinearRegression(num_features=FEATURES, noise_stddev=0.5)
NETWORK = BinaryMLP(num_features=FEATURES, hidden=(2,))
BOUNDS = Bounds(features=(1.5, 1.0, 1.0), target=2.0, projected=(True, True, False), others_square=1.0)
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
SETTINGS["dp_optimisation, fixed size"] = dataclasses.replace(
    SETTINGS["dp_optimisation"], sampler=Scheme.WITHOUT_REPLACEMENT, rounds=2
)
SETTINGS["dp_optimisation, sequential"] = dataclasses.replace(
    SETTINGS["dp_optimisation"], schedule=Schedule.SEQUENTIAL, rounds=1, damping=1.0
)
SETTINGS["dp_optimisation, asynchronous"] = dataclasses.replace(
    SETTINGS["dp_optimisation"], schedule=Schedule.ASYNCHRONOUS, rounds=2
)
SETTINGS["local_averaging, sampled"] = dataclasses.replace(
    SETTINGS["local_averaging"], schedule=Schedule.SAMPLED, clients_per_round=3
)
SETTINGS["bcm, same"] = dataclasses.replace(SETTINGS["bcm"], committee=Committee.SAME)
HYBRID = Settings(
    privatise=Privatise.HYBRID,
    rounds=3,
    damping=0.5,
    steps=6,
    step_size=0.02,
    sample_rate=0.5,
    clip_norm=2.0,
    x_bound=1.7,
    y_bound=1.0,
)
SETTINGS["hybrid"] = HYBRID
SETTINGS["hybrid, full"] = dataclasses.replace(HYBRID, posterior=PosteriorKind.FULL)
QUANTILE = {"rounds": 3, "damping": 0.5, "steps": 8, "step_size": 0.1, "clip_quantile": 0.5, "first_share": 0.5}
SETTINGS |= {
    "quantile, virtual_clients": Settings(
        privatise=Privatise.VIRTUAL_CLIENTS, clip_norm=(0.3, 0.1), shards=4, **QUANTILE
    ),
    "quantile, local_averaging": Settings(
        privatise=Privatise.LOCAL_AVERAGING, clip_norm=(1.0, 0.3), shards=4, **QUANTILE
    ),
    "quantile, parameter_perturbation": Settings(
        privatise=Privatise.PARAMETER_PERTURBATION, clip_norm=(2.0, 1.0), **QUANTILE
    ),
    "quantile, network": Settings(privatise=Privatise.LOCAL_AVERAGING, clip_norm=(2.0, 0.5), shards=4, **QUANTILE),
}
LINREG = Settings(
    kind=ProtocolKind.LINREG,
    privatise=Privatise.SUFFICIENT_STATISTICS,
    rounds=2,
    damping=1.0,
    steps=1,
    step_size=0.1,
    posterior=PosteriorKind.FULL,
    first_share=0.3,
    bounds=BOUNDS,
)
SETTINGS |= {
    "linreg": LINREG,
    "linreg, no projection": dataclasses.replace(LINREG, projection=False, rounds=1),
    "linreg, input_perturbation": dataclasses.replace(
        LINREG, privatise=Privatise.INPUT_PERTURBATION, projection=False, rounds=1
    ),
}
CENTRED = Settings(
    kind=ProtocolKind.CENTRED,
    privatise=Privatise.SCORES,
    rounds=3,
    damping=1.0,
    steps=1,
    step_size=0.1,
)
SETTINGS |= {
    "centred": CENTRED,
    "centred, softmax": CENTRED,
    "centred, poisson": CENTRED,
    "centred, negative binomial": CENTRED,
    "centred, linear": CENTRED,
    "centred, sampled": dataclasses.replace(CENTRED, schedule=Schedule.SAMPLED, clients_per_round=3),
}
OTHER_MODELS = {
    "centred, softmax": SoftmaxRegression(num_features=FEATURES, num_classes=3),
    "centred, poisson": PoissonRegression(num_features=FEATURES, max_count=5),
    "centred, negative binomial": NegativeBinomialRegression(num_features=FEATURES, max_count=5, concentration=0.5),
}
EXACT = ("sufficient_statistics", "virtual_clients, exact", "hybrid", "hybrid, full")
NONE, TRUSTED, SHARING, MASKS = AggregationKind


@dataclass(frozen=True)
class Case:
    """A method, how messages are added up, and whom it protects."""

    name: str
    kind: AggregationKind = NONE
    unit: Unit = Unit.ROW

    def __str__(self) -> str:
        return f"{self.name}, {self.kind.value}, {self.unit.value}"

    @property
    def settings(self) -> Settings:
        own = SETTINGS[self.name]
        if self.unit is Unit.PERSON:
            own = dataclasses.replace(own, rows_per_person=ROWS_PER_PERSON)
        if self.unit is Unit.CLIENT and own.clip_quantile is None:
            own = dataclasses.replace(own, rounds=2)
        return dataclasses.replace(own, aggregation=AggregationSection(kind=self.kind))

    @property
    def is_regression(self) -> bool:
        return self.name in EXACT or self.name.startswith("linreg") or self.name == "centred, linear"

    @property
    def model(self) -> AbstractModel:
        if self.name in OTHER_MODELS:
            return OTHER_MODELS[self.name]
        return REGRESSION if self.is_regression else NETWORK if "network" in self.name else MODEL

    @property
    def epsilon(self) -> float:
        """Little noise where a shard's change follows its cavity; a lot of budget where so few shards are counted."""
        return 3000.0 if self.name.startswith("quantile") else 50.0 if self.is_regression else 1.0

    @property
    def num_silos(self) -> int:
        if self.name in ("local_averaging, sampled", "centred, sampled"):
            return 4
        return 3 if self.kind is MASKS else 2

    def check(self, relation: Relation, num_pairs: int) -> int:
        method = whole_run(
            self.model,
            self.settings,
            budget_of(relation, self.unit, self.epsilon),
            self.num_silos,
            real_target=self.is_regression,
        )
        pairs = pairs_of(self.settings, self.unit, relation, num_pairs, real_target=self.is_regression)
        return check_method(method, pairs, unit=self.unit, num_silos=self.num_silos)


NO_SUMS = (
    "dp_optimisation, fixed size",
    "dp_optimisation, sequential",
    "dp_optimisation, asynchronous",
    "hybrid",
    "hybrid, full",
    "linreg, input_perturbation",
)
OF_PERSONS = (
    "dp_optimisation",
    "dp_optimisation, fixed size",
    "dp_optimisation, ordinary clipping, full",
    "bcm",
    "global_vi",
    "parameter_perturbation",
    "local_averaging",
    "virtual_clients",
    "quantile, virtual_clients",
    "quantile, local_averaging",
    "centred",
    "centred, softmax",
    "centred, poisson",
)
OF_SILOS = ("parameter_perturbation", "quantile, parameter_perturbation")
ALL = [
    *(Case(name, kind) for name in SETTINGS for kind in AggregationKind if kind is NONE or name not in NO_SUMS),
    *(
        Case(name, kind, Unit.PERSON)
        for name in OF_PERSONS
        for kind in AggregationKind
        if name not in NO_SUMS or kind is NONE
    ),
    *(Case(name, kind, Unit.CLIENT) for name in OF_SILOS for kind in (TRUSTED, SHARING, MASKS)),
]
# One relation of each method, each aggregation and each unit; all the rest is slow.
QUICK = {
    Case("dp_optimisation"): Relation.SUBSTITUTE,
    Case("dp_optimisation", MASKS): Relation.ADD_REMOVE,
    Case("dp_optimisation, fixed size"): Relation.SUBSTITUTE,
    Case("bcm"): Relation.SUBSTITUTE,
    Case("global_vi"): Relation.SUBSTITUTE,
    Case("global_vi", SHARING): Relation.SUBSTITUTE,
    Case("parameter_perturbation"): Relation.SUBSTITUTE,
    Case("parameter_perturbation", TRUSTED): Relation.SUBSTITUTE,
    Case("local_averaging"): Relation.ADD_REMOVE,
    Case("local_averaging", MASKS): Relation.SUBSTITUTE,
    Case("virtual_clients"): Relation.SUBSTITUTE,
    Case("virtual_clients, parts"): Relation.SUBSTITUTE,
    Case("virtual_clients, exact"): Relation.ADD_REMOVE,
    Case("virtual_clients, exact", SHARING): Relation.SUBSTITUTE,
    Case("virtual_clients, network"): Relation.SUBSTITUTE,
    Case("local_averaging, network", TRUSTED): Relation.SUBSTITUTE,
    Case("sufficient_statistics"): Relation.SUBSTITUTE,
    Case("sufficient_statistics", SHARING): Relation.ADD_REMOVE,
    Case("hybrid"): Relation.SUBSTITUTE,
    Case("quantile, virtual_clients"): Relation.SUBSTITUTE,
    Case("quantile, local_averaging", SHARING): Relation.ADD_REMOVE,
    Case("linreg"): Relation.SUBSTITUTE,
    Case("linreg", SHARING): Relation.SUBSTITUTE,
    Case("linreg, no projection"): Relation.ADD_REMOVE,
    Case("linreg, input_perturbation"): Relation.SUBSTITUTE,
    Case("centred"): Relation.SUBSTITUTE,
    Case("centred", MASKS): Relation.ADD_REMOVE,
    Case("centred, softmax"): Relation.ADD_REMOVE,
    Case("centred", NONE, Unit.PERSON): Relation.SUBSTITUTE,
    Case("dp_optimisation", NONE, Unit.PERSON): Relation.SUBSTITUTE,
    Case("local_averaging", NONE, Unit.PERSON): Relation.SUBSTITUTE,
    Case("virtual_clients", MASKS, Unit.PERSON): Relation.SUBSTITUTE,
    Case("quantile, virtual_clients", NONE, Unit.PERSON): Relation.SUBSTITUTE,
    Case("parameter_perturbation", TRUSTED, Unit.CLIENT): Relation.SUBSTITUTE,
    Case("quantile, parameter_perturbation", MASKS, Unit.CLIENT): Relation.ADD_REMOVE,
}
ONLY_SUBSTITUTE = ("dp_optimisation, fixed size", "linreg, input_perturbation")
# Of a right method, and to find what was planted.
PAIRS, SLOW_PAIRS = 24, 64


def cases() -> list:
    quick = [pytest.param(case, relation, id=f"{case}, {relation.value}") for case, relation in QUICK.items()]
    rest = [
        pytest.param(case, relation, marks=pytest.mark.slow, id=f"{case}, {relation.value}")
        for case in ALL
        for relation in Relation
        if QUICK.get(case) is not relation and not (case.name in ONLY_SUBSTITUTE and relation is Relation.ADD_REMOVE)
    ]
    return quick + rest


@pytest.mark.parametrize(("case", "relation"), cases())
def test_one_changed_unit_moves_each_released_sum_by_no_more_than_is_priced_in_every_round(case, relation):
    assert case.check(relation, PAIRS) == PAIRS


def test_noise_in_a_shards_factor_is_caught(monkeypatch):
    """What the public code does: the released (noisy) change goes into every shard's factor (SPEC 0)."""

    def noisy_reply(self, door, seat, own, down, found):
        state, message = right_reply(self, door, seat, own, down, found)
        released = self.damping * self.ball_at(down).unflatten([message.value], self.solve.local.family.zeros())
        clean = jax.tree.map(lambda new, old: (new - old).sum(axis=0), state.eta_t, own.eta_t)
        return pvi.SiloState(eta_t=state.eta_t + (released - clean)), message

    right_reply = ShardedSilo.reply
    monkeypatch.setattr(ShardedSilo, "reply", noisy_reply)
    with pytest.raises(PrivacyViolation, match="move by at most"):
        Case("virtual_clients, exact").check(Relation.SUBSTITUTE, SLOW_PAIRS)


def test_noise_of_a_total_in_a_shards_factor_is_caught(monkeypatch):
    """The same with the noise of a sum over silos, which a silo may learn from the total."""

    class NoisyParties(gate.ReplayingParties):
        def total(self, visit):
            self.seen = super().total(visit)
            return self.seen

        def settle(self, visit, counted):
            silo, states = self.inner.plan.silos[visit.part], self.inner.states
            before = [states[m].eta_t for m in visit.silos]
            super().settle(visit, counted)
            released = silo.ball.unflatten(silo.query.read(self.seen).blocks, silo.solve.local.family.zeros())
            noise = silo.damping * released
            for m, old in zip(visit.silos, before, strict=True):
                noise = noise - jax.tree.map(lambda leaf: leaf.sum(axis=0), states[m].eta_t - old)
            for m in visit.silos:
                states[m] = pvi.SiloState(eta_t=states[m].eta_t + noise)

    monkeypatch.setattr(gate, "ReplayingParties", NoisyParties)
    with pytest.raises(PrivacyViolation, match="move by at most"):
        Case("virtual_clients, exact", SHARING).check(Relation.SUBSTITUTE, SLOW_PAIRS)


def test_a_state_that_depends_on_an_unreleased_share_is_caught(monkeypatch):
    """Inside a secure sum a silo's own noisy message is nobody's to see; factors made of it would change unseen."""

    def greedy_reply(self, door, seat, own, down, found):
        _, message = right_reply(self, door, seat, own, down, found)
        share = self.query.layouts[seat.index].decode(message.payload)
        moved = self.damping * self.ball_at(down).unflatten(share, self.solve.local.family.zeros())
        return pvi.SiloState(eta_t=own.eta_t + moved), message

    right_reply = ShardedSilo.reply
    monkeypatch.setattr(ShardedSilo, "reply", greedy_reply)
    with pytest.raises(PrivacyViolation):
        Case("virtual_clients, exact", SHARING).check(Relation.SUBSTITUTE, SLOW_PAIRS)


def test_shards_that_share_rows_are_caught(monkeypatch):
    """All shards see all rows: one changed row moves every term."""

    def everything(self, silos, layouts):
        rows = stack([(silo.x, silo.y) for silo in silos], self.max_rows)
        return jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[:, None], self.shards, axis=1), rows)

    monkeypatch.setattr(ShardSlots, "lay_out", everything)
    with pytest.raises(PrivacyViolation, match="move by at most"):
        Case("local_averaging").check(Relation.SUBSTITUTE, SLOW_PAIRS)


# Methods whose silos keep a state, and the kind of silo that keeps it.
KEEPERS = {
    "dp_optimisation": (NONE, pvi.OptimisingSilo),
    "local_averaging": (NONE, AveragingSilo),
    "virtual_clients, exact": (SHARING, ShardedSilo),
}


@pytest.fixture
def second_visit_runs_away(monkeypatch):
    """Whatever was released there."""

    def advance(self, state, visit, d_eta):
        far = jax.tree.map(lambda leaf: np.full_like(leaf, np.inf), d_eta)
        return right_advance(self, state, visit, far if visit.number == 1 else d_eta)

    right_advance = pvi.PVIServer.advance
    monkeypatch.setattr(pvi.PVIServer, "advance", advance)


@pytest.mark.usefixtures("second_visit_runs_away")
@pytest.mark.parametrize("name", KEEPERS)
def test_a_run_passes_whose_second_visit_does_not_count(name):
    assert Case(name, KEEPERS[name][0]).check(Relation.SUBSTITUTE, 4) == 4


def settles_always(monkeypatch, keeper):
    right_settle = LocalParties.settle
    monkeypatch.setattr(LocalParties, "settle", lambda self, visit, counted: right_settle(self, visit, True))


def moves_in_its_reply(monkeypatch, keeper):
    def reply(self, door, seat, own, down, found):
        state, message = right_reply(self, door, seat, own, down, found)
        for leaf, new in zip(jax.tree.leaves(own.eta_t), jax.tree.leaves(state.eta_t), strict=True):
            leaf[...] = new
        return state, message

    right_reply = keeper.reply
    monkeypatch.setattr(keeper, "reply", reply)


@pytest.mark.usefixtures("second_visit_runs_away")
@pytest.mark.parametrize("plant", [settles_always, moves_in_its_reply])
@pytest.mark.parametrize("name", KEEPERS)
def test_a_silo_that_moves_its_state_in_a_visit_that_did_not_count_is_caught(name, plant, monkeypatch):
    kind, keeper = KEEPERS[name]
    plant(monkeypatch, keeper)
    with pytest.raises(PrivacyViolation, match="AssertionError") as caught:
        Case(name, kind).check(Relation.SUBSTITUTE, 1)
    assert "left a trace" in str(caught.value.__cause__)
