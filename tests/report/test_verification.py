"""An honest run passes; every kind of dishonest or damaged one does not."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from silobayes.core.errors import InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.relation import Relation, Unit
from silobayes.report import verification
from silobayes.report.run_files import read_run
from silobayes.report.verification import Verification, verify
from tests.report import run_cases


def failed(run_dir: Path) -> list[str]:
    found = verify(read_run(run_dir))
    assert found.passed == (not any(not check.passed for check in found.checks))
    return [check.name for check in found.checks if not check.passed]


def test_an_honest_run_passes(honest_run: Path) -> None:
    found = verify(read_run(honest_run))
    assert found.passed
    price = accounting.price([run_cases.EVENT], relation=Relation.SUBSTITUTE, delta=1e-5)
    for silo in found.prices:
        assert silo.epsilon == price.epsilon
        assert silo.epsilon_lower <= silo.epsilon <= silo.epsilon_rdp  # two methods, and the order they must have


def test_a_claim_below_the_price_of_the_ledger_is_refuted(run_dir: Path) -> None:
    honest = accounting.price([run_cases.EVENT], relation=Relation.SUBSTITUTE, delta=1e-5).epsilon
    run_cases.claim(run_dir, 0.99 * honest)
    assert failed(run_dir) == ["north: claim", "south: claim"]
    run_cases.claim(run_dir, 1.01 * honest)
    assert failed(run_dir) == []


@pytest.mark.parametrize("value", [None, "0.6", True])
def test_a_claim_that_is_no_number_is_refuted(run_dir: Path, value: object) -> None:
    run_cases.claim(run_dir, value)  # type: ignore[arg-type]
    assert {"north: claim", "south: claim", "largest epsilon"} <= set(failed(run_dir))


def test_a_claim_above_the_budget_is_refused(run_dir: Path) -> None:
    run_cases.claim(run_dir, 1.01)
    assert failed(run_dir) == ["north: budget", "south: budget"]


def test_a_price_above_the_budget_is_refused(run_dir: Path) -> None:
    """The ledger's own budget was larger than the study's: its charges were accepted, yet the study promised less."""
    meant = run_cases.study()
    path = run_dir / "ledgers" / "north.ledger"
    for rest in path.parent.glob("north.ledger*"):
        rest.unlink()
    budget = Budget(epsilon=5.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    account = Ledger.create(path, budget).account(meant.hash, epsilon=5.0, delta=1e-5)
    account.charge(dataclasses.replace(run_cases.EVENT, std=4.0))
    assert set(failed(run_dir)) == {"north: claim", "north: budget"}


def test_the_largest_epsilon_covers_every_silo(run_dir: Path) -> None:
    run_cases.edit_certificate(run_dir, epsilon=0.1)
    assert failed(run_dir) == ["largest epsilon"]


def test_a_changed_study_file_is_noticed(run_dir: Path) -> None:
    path = run_dir / "study.json"
    tables = json.loads(path.read_text())
    tables["privacy"]["epsilon"] = 3.0
    run_cases.write_json(path, tables)
    assert "study hash" in failed(run_dir)
    run_cases.write_json(path, {**tables, "privacy": {"mode": "maybe"}})
    assert failed(run_dir) == ["study"]


def test_a_damaged_posterior_or_one_of_another_study_is_noticed(run_dir: Path) -> None:
    run_cases.posterior(study=run_cases.study(mode="none")).save(run_dir)
    assert failed(run_dir) == ["posterior"]
    run_cases.posterior().save(run_dir)
    assert failed(run_dir) == []
    run_cases.flip_bit(run_dir / "posterior.npz", 0.5)
    assert failed(run_dir) == ["posterior"]


@pytest.mark.parametrize(("key", "value"), [("delta", 1e-6), ("relation", "add_remove"), ("unit", "person")])
def test_terms_that_are_not_the_studys_are_noticed(run_dir: Path, key: str, value: object) -> None:
    run_cases.edit_certificate(run_dir, **{key: value})
    assert failed(run_dir) == [key]


@pytest.mark.parametrize(
    ("relation", "unit"),
    [(Relation.ADD_REMOVE, Unit.ROW), (Relation.SUBSTITUTE, Unit.PERSON)],
    ids=["relation", "unit"],
)
def test_a_charge_for_other_neighbours_or_another_unit_is_noticed(
    run_dir: Path, relation: Relation, unit: Unit
) -> None:
    meant = run_cases.study()
    path = run_dir / "ledgers" / "south.ledger"
    for rest in path.parent.glob("south.ledger*"):
        rest.unlink()
    budget = Budget(epsilon=1.0, delta=1e-5, relation=relation, unit=unit)
    Ledger.create(path, budget).account(meant.hash, epsilon=1.0, delta=1e-5).charge(run_cases.EVENT)
    assert failed(run_dir) == ["south: terms"]


def test_two_methods_that_contradict_each_other_are_noticed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upper bound of the one below the lower bound of the other: one of the accountants is wrong."""
    run_cases.claim(run_dir, 0.7)
    for rdp, expected in ((0.55, ["north: second method", "south: second method"]), (0.65, [])):
        monkeypatch.setattr(verification, "_bounds", lambda *_, rdp=rdp: (0.7, 0.6, rdp))
        assert failed(run_dir) == expected


def _remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [_remove, lambda path: run_cases.flip_bit(path, 0.9)], ids=["missing", "bit"])
def test_a_damaged_or_missing_ledger_is_a_failed_check(run_dir: Path, damage: Callable[[Path], None]) -> None:
    damage(run_dir / "ledgers" / "north.ledger")
    assert "north: ledger" in failed(run_dir)


def test_a_ledger_without_charges_of_the_study_is_noticed(run_dir: Path) -> None:
    run_cases.edit_certificate(run_dir, account="another study")
    assert {"north: ledger", "south: ledger"} <= set(failed(run_dir))


@pytest.mark.parametrize("count", [0, 1])
def test_a_silo_that_the_certificate_leaves_out_is_noticed(run_dir: Path, count: int) -> None:
    silos = json.loads((run_dir / "certificate.json").read_text())["silos"]
    run_cases.edit_certificate(run_dir, silos=silos[:count])
    assert "silos" in failed(run_dir)


def test_a_silo_that_released_and_is_not_certified_is_noticed(run_dir: Path) -> None:
    with (run_dir / "trace.jsonl").open("a") as trace:
        trace.write(json.dumps({"step": 4, "visited": ["west"]}) + "\n")
    assert failed(run_dir) == ["silos"]


def test_more_releases_than_were_paid_are_noticed(run_dir: Path) -> None:
    """Three visits of 60 steps fit into the 200 that were paid; a fourth visit of one silo does not."""
    with (run_dir / "trace.jsonl").open("a") as trace:
        trace.write(json.dumps({"step": 4, "visited": ["north"]}) + "\n")
    assert failed(run_dir) == ["north: releases"]


def test_a_run_with_fixed_noise_is_confirmed_as_not_private(run_dir: Path) -> None:
    run_cases.edit_certificate(run_dir, is_private=False, stamp="NOT PRIVATE: the noise comes from a fixed seed")
    found = verify(read_run(run_dir))
    assert found.passed
    assert found.to_json()["is_private"] is False


def test_a_run_without_privacy_must_be_stamped(run_dir: Path) -> None:
    study = run_cases.study(mode="none")
    run_cases.write_json(run_dir / "study.json", study.to_dict())
    run_cases.edit_certificate(run_dir, study_hash=study.hash)
    run_cases.posterior(study=study).save(run_dir)
    assert failed(run_dir) == ["stamp"]
    run_cases.edit_certificate(run_dir, is_private=False)
    assert failed(run_dir) == []


@pytest.mark.parametrize("name", ["study.json", "run.json", "certificate.json", "metrics.json", "trace.jsonl"])
def test_a_file_that_is_not_json_is_named(run_dir: Path, name: str) -> None:
    for text in ("{", "[1]", '{"a": NaN}'):
        (run_dir / name).write_text(text)
        with pytest.raises(InvalidInput, match=name):
            read_run(run_dir)


def test_nothing_checked_is_not_passed() -> None:
    assert not Verification(checks=(), prices=(), says_private=True).passed


def test_the_json_form_has_no_infinity(honest_run: Path) -> None:
    found = verify(read_run(honest_run))
    unbounded = dataclasses.replace(found, prices=(dataclasses.replace(found.prices[0], epsilon_rdp=math.inf),))
    text = json.dumps(unbounded.to_json(), allow_nan=False)
    assert json.loads(text)["silos"][0]["epsilon_rdp"] is None
