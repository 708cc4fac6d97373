"""Rehearsals: runs on made-up rows, with the plan, prices and noise of a real one."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silobayes
from silobayes.core.errors import BudgetExceeded, InvalidInput
from silobayes.engines import rehearsal as rehearsals
from silobayes.engines.fitting import read_inputs
from silobayes.engines.rehearsal import Rehearsal
from silobayes.privacy.prepaid import Prepaid
from silobayes.studies.models import build_model
from silobayes.studies.sizes import counts_persons
from silobayes.study import Study
from tests.oracle.cases import CASES, NOISE_SEED

BY_NAME = {case.name: case for case in CASES}
QUICK = {"sufficient_statistics, sharing, full"}

TABLES: dict[str, Any] = {
    "study": {"name": "small", "seed": 3},
    "data": {
        "target": "y",
        "target_bounds": [-4, 4],
        "bounds": {"a": [-3, 3], "ward": ["north", "south", "west"]},
        "spread": {"a": 1.0},
        "coding": "one_hot",
        "public": ["rows"],
    },
    "silos": {"count": 3},
    "model": {"kind": "linear_regression", "options": {"noise_stddev": 1.0}},
    "privacy": {"epsilon": 1.0, "delta": 1e-5, "relation": "substitute", "unit": "row"},
    "protocol": {"privatise": "sufficient_statistics"},
}


def study_with(**sections: Any) -> Study:
    return Study.from_dict({**TABLES, **{name: {**TABLES.get(name, {}), **keys} for name, keys in sections.items()}})


def rehearsal_of(study: Study, rows: Iterable[int] = (30, 20, 25), persons: Any = None, **keys: Any) -> Rehearsal:
    return Rehearsal.of(study, build_model(study, len(study.encoding.feature_names)), list(rows), persons, **keys)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BY_NAME]
)
def test_a_rehearsal_is_what_run_gives_on_the_same_rows_and_noise(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    inputs = read_inputs(case.study, case.silos, model=None)
    sizes = [silo.num_rows for silo in inputs.silos]
    persons = [silo.num_persons for silo in inputs.silos] if counts_persons(case.study) else None
    rehearsed = Rehearsal.of(case.study, inputs.model, sizes, persons).run(inputs.silos, str(NOISE_SEED))
    ran = silobayes.fit(case.study, case.silos, out=tmp_path / "run", noise_seed=NOISE_SEED)
    np.testing.assert_array_equal(rehearsed.mean, ran.mean)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(rehearsed.stddev, ran.stddev)  # type: ignore[attr-defined]


def test_a_rehearsal_releases_what_the_plan_pays_for_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = []

    class Watched(Prepaid):
        @classmethod
        def of(cls, account: Any, paid: Any, taken: Any = ()) -> Prepaid:
            accounts.append(Prepaid.of(account, paid, taken))
            return accounts[-1]

    monkeypatch.setattr(rehearsals, "Prepaid", Watched)
    ready = rehearsal_of(study_with())
    silos = ready.make_up(np.zeros(5), np.random.default_rng(0)).silos
    ready.run(silos, "0")
    assert len(accounts) == 3
    assert all(set(account.remaining.values()) == {0} for account in accounts)
    # A plan that makes more visits than it pays for is stopped at the door.
    longer = dataclasses.replace(ready.plan, visits=ready.plan.visits * 2)
    object.__setattr__(longer, "total_events", ready.plan.total_events)
    with pytest.raises(BudgetExceeded):
        dataclasses.replace(ready, plan=longer).run(silos, "0")


def test_the_same_seeds_give_the_same_rehearsal() -> None:
    ready = rehearsal_of(study_with())
    theta = np.array([0.5, 0.1, 0.2, -0.3, 0.0])
    one, same, other = (ready.make_up(theta, np.random.default_rng(seed)).silos for seed in (1, 1, 2))
    for first, second in zip(one, same, strict=True):
        np.testing.assert_array_equal(first.x, second.x)
        np.testing.assert_array_equal(first.y, second.y)
    assert not np.array_equal(one[0].x, other[0].x)
    means = [ready.run(one, seed).mean for seed in ("1", "1", "2")]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(means[0], means[1])
    assert not np.array_equal(means[0], means[2])


def test_made_up_silos_have_their_sizes_and_lie_within_what_is_declared() -> None:
    ready = rehearsal_of(study_with(), rows=(40, 30, 5000))
    made = ready.make_up(np.array([2.0, 0.0, 0.0, 0.0, 1.0]), np.random.default_rng(0))
    assert [silo.num_rows for silo in made.silos] == [40, 30, 5000]
    assert [silo.name for silo in made.silos] == list(study_with().description.silo_names)
    y = made.silos[2].y
    assert y.min() >= -4
    assert y.max() <= 4
    # N(1, 1 + 4) is beyond 4 with probability .090 and below -4 with .013, as far as x is not clipped.
    assert 0.08 < made.clipped < 0.12
    assert not made.dealt_evenly


@pytest.mark.slow
def test_made_up_counts_are_whole_and_within_their_range() -> None:
    counts = study_with(
        data={"target_bounds": [0, 6]},
        model={"kind": "poisson_regression", "options": {}},
        protocol={"privatise": "dp_optimisation"},
    )
    silos = rehearsal_of(counts).make_up(np.array([1.0, 1, 1, 1, 0.0]), np.random.default_rng(0)).silos
    assert set(np.unique(np.concatenate([silo.y for silo in silos]))) <= set(range(7))


def test_features_of_a_model_of_features_are_moved_into_their_ranges() -> None:
    data: dict[str, Any] = {"target": None, "target_bounds": None, "spread": {}}
    data["bounds"] = {"a": [-3, 3], "b": [0, 1]}
    gaussian = study_with(
        data=data,
        model={"kind": "gaussian", "options": {"noise_stddev": 0.5}},
        protocol={"privatise": "dp_optimisation"},
    )
    made = rehearsal_of(gaussian, rows=(4000, 10, 10)).make_up(np.array([1.0, 0.0]), np.random.default_rng(0))
    x = made.silos[0].x
    assert np.abs(x).max() <= 1.0
    assert abs(made.clipped - (0.5 + 0.0455) / 2) < 0.03  # half of a column, 2 x 2.3 % of the other


def test_each_silo_is_its_own_category_where_a_feature_names_silos() -> None:
    study = study_with(data={"features": ["a", "ward"]}, silos={"count": None, "scheme": "column", "column": "ward"})
    made = rehearsal_of(study).make_up(np.zeros(5), np.random.default_rng(0))
    for k, silo in enumerate(made.silos):
        assert (silo.x[:, 1 + k] == 1).all()


def test_labels_are_dealt_as_the_study_says_or_evenly_where_they_cannot() -> None:
    """At theta = 0 two classes are even; at a strong intercept one is hardly there."""
    study = study_with(
        data={"classes": ["no", "yes"], "target_bounds": None},
        silos={"count": 2, "scheme": "label_skew", "rho": 0.9},
        model={"kind": "logistic_regression", "options": {}},
        protocol={"privatise": "dp_optimisation"},
    )
    ready = rehearsal_of(study, rows=(100, 100))
    made = ready.make_up(np.zeros(5), np.random.default_rng(0))
    assert [silo.num_rows for silo in made.silos] == [100, 100]
    assert np.mean(made.silos[0].y == 0) > 0.7
    assert np.mean(made.silos[1].y == 1) > 0.7
    uneven = ready.make_up(np.array([0.0, 0, 0, 0, 5.0]), np.random.default_rng(0))
    assert uneven.dealt_evenly
    assert [silo.num_rows for silo in uneven.silos] == [100, 100]
    with pytest.raises(InvalidInput, match="label_skew deals them"):
        rehearsal_of(study, rows=(150, 50)).make_up(np.zeros(5), np.random.default_rng(0))


def test_persons_have_as_many_rows_as_is_declared() -> None:
    study = study_with(
        data={"unit": "who", "rows_per_person": 4, "public": ["rows", "persons"]},
        privacy={"unit": "person"},
        model={"kind": "linear_regression", "options": {}},
        protocol={"privatise": "dp_optimisation"},
    )
    made = rehearsal_of(study).make_up(np.zeros(6), np.random.default_rng(0))
    assert [silo.num_persons for silo in made.silos] == [8, 5, 7]
    made = rehearsal_of(study, persons=[30, 10, 9]).make_up(np.zeros(6), np.random.default_rng(0))
    assert [silo.num_persons for silo in made.silos] == [30, 10, 9]
    with pytest.raises(InvalidInput, match="persons"):
        rehearsal_of(study, persons=[30, 10, 2])
