"""DP optimisation that protects persons: batches of whole persons, each clipped as one."""

import dataclasses

import jax
import numpy as np
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.inference import row_gradients
from silobayes.inference.layouts import person_slots
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Relation, Unit
from silobayes.study import AggregationKind, AggregationSection
from silobayes.testing import FreeAccount, PrivacyViolation
from tests.engines.harness import Run, plan_for
from tests.engines.test_record_replay import SETTINGS, Case

FEATURES, ROWS_PER_PERSON = 3, 4
MODEL = LogisticRegression(num_features=FEATURES)
SUM = AggregationSection(kind=AggregationKind.TRUSTED)
GATE = {name: dataclasses.replace(SETTINGS[name], rows_per_person=ROWS_PER_PERSON) for name in SETTINGS}
GATE["global_vi, summed"] = dataclasses.replace(GATE["global_vi"], aggregation=SUM)


class PlantedCase(Case):
    """A gate for code that is wrong: nothing that was compiled for its model is right, and nobody else compiles it."""

    @property
    def model(self):
        return dataclasses.replace(MODEL, prior_stddev=1.03125)


CASES = [
    PlantedCase("dp_optimisation", unit=Unit.PERSON),
    PlantedCase("global_vi", AggregationKind.TRUSTED, Unit.PERSON),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_clipping_rows_instead_of_persons_is_caught(monkeypatch, case):
    """Each row within the clip norm, each person with as many clip norms as rows."""

    def of_rows(gradients, mask, clip_norm, clipping, rows_per_unit):
        return right(gradients, mask, clip_norm, clipping)

    right = row_gradients.clipped_gradient
    monkeypatch.setattr(row_gradients, "clipped_gradient", of_rows)
    with pytest.raises(PrivacyViolation, match="Clip each unit"):
        case.check(Relation.SUBSTITUTE, 40)


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
    settings = dataclasses.replace(GATE[name], rounds=1 if name == "bcm" else 2, rows_per_person=1)
    answers, events = [], []
    for unit in (Unit.ROW, Unit.PERSON):
        budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=unit)
        own = silos if unit is Unit.PERSON else [dataclasses.replace(silo, persons=None) for silo in silos]
        doors = [Door(FreeAccount(Relation.SUBSTITUTE, unit), FreshDraws(Entropy.not_private(k))) for k in range(2)]
        run = Run(MODEL, own, settings, budget, doors=doors).finish()
        answers.append(run.posterior.eta)
        events.append(run.plan.total_events)
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
        door = Door(FreeAccount(Relation.SUBSTITUTE, Unit.PERSON), FreshDraws(Entropy.not_private(0)))
        answers.append(Run(MODEL, [silo], settings, budget, doors=[door]).step().posterior.eta)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5), *answers)


def test_a_person_has_slots_of_their_own_whoever_else_is_there():
    x = np.arange(6, dtype=np.float32)[:, None]
    silo = Silo(name="a", x=x, y=np.zeros(6, np.int32), persons=np.array([70, 5, 70, 9, 5, 70]))
    (layout,) = person_slots([4], 3)
    assert layout.shape == (4, 3)
    rows = layout.lay_out([silo], [layout])
    assert np.asarray(rows.x)[0, :, 0].tolist() == [0, 2, 5, 1, 4, 0, 3, 0, 0, 0, 0, 0]
    present = np.array([1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0], dtype=bool)
    np.testing.assert_array_equal(rows.present[0], present)


def test_a_person_with_more_rows_than_rows_per_person_is_refused():
    part = {"name": "a", "x": np.zeros((4, 1), np.float32), "y": np.zeros(4, np.int32)}
    few, (four,), (two,) = Silo(**part, persons=np.array([1, 2, 1, 1])), person_slots([4], 2), person_slots([2], 2)
    with pytest.raises(InvalidInput, match="rows_per_person"):
        four.lay_out([few], [four])
    many = Silo(**part, persons=np.array([1, 2, 3, 1]))
    with pytest.raises(InvalidInput, match="max_rows"):
        two.lay_out([many], [two])


def test_missing_keys_are_refused_before_anything_is_planned():
    silo = Silo(name="a", x=np.ones((4, FEATURES)), y=np.arange(4) % 2, persons=np.arange(4))
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.PERSON)
    with pytest.raises(InvalidInput, match=r"data\.rows_per_person"):
        plan_for(MODEL, [silo], SETTINGS["dp_optimisation"], budget)
    with pytest.raises(InvalidInput, match=r"data\.unit"):
        plan_for(MODEL, [dataclasses.replace(silo, persons=None)], GATE["dp_optimisation"], budget)
