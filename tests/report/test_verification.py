"""An honest run passes; every kind of dishonest or damaged one does not."""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import silobayes
from silobayes.core.errors import InvalidInput
from silobayes.posteriors import Posterior
from silobayes.privacy import accounting
from silobayes.privacy.events import AbstractEvent, DiscreteGaussianEvent, Sampling, Scheme, to_json
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.ledger_file import canonical_json
from silobayes.privacy.relation import Relation, Unit
from silobayes.report import verification
from silobayes.report.predictions import predict
from silobayes.report.run_files import read_run
from silobayes.report.verification import Verification, verify
from silobayes.runs import claims
from silobayes.study import Study
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
    path = run_dir / "ledgers" / "north.ledger"
    for rest in path.parent.glob("north.ledger*"):
        rest.unlink()
    budget = Budget(epsilon=5.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    account = Ledger.create(path, budget).account(run_cases.account_of(), epsilon=5.0, delta=1e-5)
    account.charge(dataclasses.replace(run_cases.EVENT, std=4.0))
    assert set(failed(run_dir)) == {"north: claim", "north: budget", "north: events"}


def test_the_largest_epsilon_covers_every_silo(run_dir: Path) -> None:
    run_cases.edit_certificate(run_dir, epsilon=0.1)
    assert failed(run_dir) == ["largest epsilon"]


def test_a_changed_study_file_is_noticed(run_dir: Path) -> None:
    path = run_dir / "study.json"
    tables = json.loads(path.read_text())
    tables["privacy"]["epsilon"] = 3.0
    run_cases.write_json(path, tables)
    assert {"study hash", "files"} <= set(failed(run_dir))
    run_cases.write_json(path, {**tables, "privacy": {"mode": "maybe"}})
    assert failed(run_dir) == ["study"]


def test_a_damaged_posterior_or_one_of_another_study_is_noticed(run_dir: Path) -> None:
    whole = json.loads((run_dir / "posterior.json").read_text())["provenance"]
    run_cases.posterior(study=run_cases.study(mode="none")).save(run_dir)
    assert failed(run_dir) == ["files", "posterior"]
    run_cases.posterior(provenance=whole).save(run_dir)
    run_cases.seal(run_dir)
    assert failed(run_dir) == []
    run_cases.flip_bit(run_dir / "posterior.npz", 0.5)
    assert failed(run_dir) == ["files", "posterior"]


@pytest.mark.parametrize(("key", "value"), [("delta", 1e-6), ("relation", "add_remove"), ("unit", "person")])
def test_terms_that_are_not_the_studys_are_noticed(run_dir: Path, key: str, value: object) -> None:
    run_cases.edit_certificate(run_dir, **{key: value})
    assert failed(run_dir) == [key]


@pytest.mark.parametrize("value", ["honest", "partly", None, True])
def test_a_word_on_intervals_that_is_not_the_methods_is_noticed(run_dir: Path, value: object) -> None:
    run_cases.edit_certificate(run_dir, intervals=value)
    assert failed(run_dir) == ["intervals"]


def test_a_certificate_from_before_there_was_a_word_on_intervals_is_confirmed(run_dir: Path) -> None:
    path = run_dir / "certificate.json"
    without = {key: value for key, value in json.loads(path.read_text()).items() if key != "intervals"}
    run_cases.write_json(path, without)
    run_cases.seal(run_dir)
    assert failed(run_dir) == []


@pytest.mark.parametrize(
    ("relation", "unit"),
    [(Relation.ADD_REMOVE, Unit.ROW), (Relation.SUBSTITUTE, Unit.PERSON)],
    ids=["relation", "unit"],
)
def test_a_charge_for_other_neighbours_or_another_unit_is_noticed(
    run_dir: Path, relation: Relation, unit: Unit
) -> None:
    path = run_dir / "ledgers" / "south.ledger"
    for rest in path.parent.glob("south.ledger*"):
        rest.unlink()
    budget = Budget(epsilon=1.0, delta=1e-5, relation=relation, unit=unit)
    Ledger.create(path, budget).account(run_cases.account_of(), epsilon=1.0, delta=1e-5).charge(run_cases.EVENT)
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
    run_cases.seal(run_dir)
    assert failed(run_dir) == ["silos"]


def test_more_releases_than_were_paid_are_noticed(run_dir: Path) -> None:
    """Three visits of 60 steps fit into the 200 that were paid; a fourth visit of one silo does not."""
    with (run_dir / "trace.jsonl").open("a") as trace:
        trace.write(json.dumps({"step": 4, "visited": ["north"]}) + "\n")
    run_cases.seal(run_dir)
    assert failed(run_dir) == ["north: releases"]


def test_a_run_with_fixed_noise_is_confirmed_as_not_private(fixed_run: Path) -> None:
    found = verify(read_run(fixed_run))
    assert found.passed
    assert found.to_json()["is_private"] is False


def _without_privacy(run_dir: Path) -> None:
    study = run_cases.study(mode="none")
    run_cases.write_json(run_dir / "study.json", study.to_dict())
    run_cases.change_json(run_dir / "run.json", study_hash=study.hash, noise=None, settings={"privatise": "none"})
    kept = {key: json.loads((run_dir / "certificate.json").read_text())[key] for key in ("study", "versions")}
    not_private = {"study_hash": study.hash, "is_private": False, "mode": "none", "stamp": claims.NO_PRIVACY}
    run_cases.write_json(run_dir / "certificate.json", {**kept, **not_private})
    run_cases.seal(run_dir)


def test_a_run_without_privacy_must_be_stamped_and_promises_nothing(run_dir: Path) -> None:
    _without_privacy(run_dir)
    assert failed(run_dir) == []
    for change in ({"is_private": True}, {"stamp": None}, {"is_private": None}):
        run_cases.edit_certificate(run_dir, **{"is_private": False, "stamp": claims.NO_PRIVACY, **change})
        assert failed(run_dir) == ["stamp"]
    _without_privacy(run_dir)
    run_cases.edit_certificate(run_dir, epsilon=0.1, delta=1e-5)
    assert failed(run_dir) == ["promises"]
    _without_privacy(run_dir)
    run_cases.edit_certificate(run_dir, mode="dp")
    assert failed(run_dir) == ["mode"]


def _silos_with(run_dir: Path, **changes: object) -> None:
    silos = json.loads((run_dir / "certificate.json").read_text())["silos"]
    run_cases.edit_certificate(run_dir, silos=[{**silos[0], **changes}, *silos[1:]])


def _event_with(**changes: object) -> dict[str, object]:
    return {**to_json(run_cases.EVENT), **changes}


def _charge(run_dir: Path, account: str, event: AbstractEvent, silo: str = "north") -> None:
    ledger = Ledger.open(run_dir / "ledgers" / f"{silo}.ledger")
    ledger.account(account, epsilon=1.0, delta=1e-5).charge(event)


def _pay_with(run_dir: Path, *events: AbstractEvent) -> None:
    """Let north's ledger, and what the certificate says of it, be of other events."""
    path = run_dir / "ledgers" / "north.ledger"
    for rest in path.parent.glob("north.ledger*"):
        rest.unlink()
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    Ledger.create(path, budget).pay(run_cases.account_of(), events, epsilon=1.0, delta=1e-5)
    _silos_with(run_dir, events=[to_json(event) for event in events])


def _swap_study(run_dir: Path, **sections: dict) -> None:
    """Another study file, and everything that can be edited agrees."""
    tables = run_cases.study().to_dict()
    swapped = Study.from_dict({name: {**tables[name], **sections.get(name, {})} for name in tables})
    run_cases.write_json(run_dir / "study.json", swapped.to_dict())
    run_cases.edit_facts(run_dir, study_hash=swapped.hash)
    run_cases.edit_certificate(run_dir, study_hash=swapped.hash, study=swapped.study.name)


def _leave_out_south(run_dir: Path) -> None:
    trace = [json.loads(line) for line in (run_dir / "trace.jsonl").read_text().splitlines()]
    lines = [json.dumps({**line, "visited": ["north"]}) + "\n" for line in trace]
    (run_dir / "trace.jsonl").write_text("".join(lines))
    silos = json.loads((run_dir / "certificate.json").read_text())["silos"]
    run_cases.edit_certificate(run_dir, silos=silos[:1])


def _visit_once_more(run_dir: Path, **facts: object) -> None:
    with (run_dir / "trace.jsonl").open("a") as trace:
        trace.write(json.dumps({"step": 4, "visited": ["north", "south"]}) + "\n")
    run_cases.edit_facts(run_dir, **facts)


GRID = DiscreteGaussianEvent(clip_norm=1.0, std=40.0, grid=0.001, dimension=3)
TAMPERINGS: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    # words of the certificate, and all that is in no ledger made to agree
    "noise": (lambda run: run_cases.edit_certificate(run, noise="discrete Gaussian on a grid"), {"noise"}),
    "no noise": (lambda run: run_cases.edit_certificate(run, noise=None), {"noise"}),
    "sampler": (lambda run: run_cases.edit_certificate(run, sampler="without_replacement"), {"sampler"}),
    "no sampler": (lambda run: run_cases.edit_certificate(run, sampler=None), {"sampler"}),
    "method": (lambda run: run_cases.edit_certificate(run, method="sufficient_statistics"), {"method"}),
    "aggregation": (
        lambda run: run_cases.edit_certificate(run, aggregation={"kind": "secret_sharing", "colluding": 0}),
        {"aggregation"},
    ),
    "colluding": (
        lambda run: run_cases.edit_certificate(run, aggregation={"kind": "none", "colluding": 5}),
        {"aggregation"},
    ),
    "false is not zero": (
        lambda run: run_cases.edit_certificate(run, aggregation={"kind": "none", "colluding": False}),
        {"aggregation"},
    ),
    "accountant": (lambda run: run_cases.edit_certificate(run, accountant="exact"), {"accountant"}),
    "mode": (lambda run: run_cases.edit_certificate(run, mode="none"), {"mode"}),
    "study name": (lambda run: run_cases.edit_certificate(run, study="another"), {"study"}),
    "versions": (lambda run: run_cases.edit_certificate(run, versions={"silobayes": "9.9"}), {"versions"}),
    "stamp": (lambda run: run_cases.edit_certificate(run, stamp="PRIVATE"), {"stamp"}),
    "is private": (lambda run: run_cases.edit_certificate(run, is_private=False), {"is private", "stamp"}),
    "is private, another word": (
        lambda run: run_cases.edit_certificate(run, is_private="yes"),
        {"is private", "stamp"},
    ),
    "released": (lambda run: run_cases.edit_certificate(run, released={"clip_norms": [1.0]}), {"released"}),
    "events": (lambda run: _silos_with(run, events=[_event_with(std=80.0)]), {"north: events"}),
    "no events": (lambda run: _silos_with(run, events=[]), {"north: events"}),
    "count of events": (lambda run: _silos_with(run, events=[_event_with(count=20)]), {"north: events"}),
    "ledger's name": (lambda run: _silos_with(run, ledger="ledgers/other.ledger"), {"north: place"}),
    # the run directory
    "one ledger for two": (
        lambda run: run_cases.edit_facts(run, ledgers=dict.fromkeys(("north", "south"), "ledgers/south.ledger")),
        {"ledgers", "north: place", "other silos"},
    ),
    "method in run.json": (lambda run: run_cases.edit_facts(run, settings={"privatise": "hybrid"}), {"run.json"}),
    "study in run.json": (lambda run: run_cases.edit_facts(run, study_hash="0" * 64), {"run.json"}),
    "version in run.json": (lambda run: run_cases.edit_facts(run, version="9.9"), {"versions"}),
    "run id": (
        lambda run: run_cases.edit_facts(run, run_id="f" * 16),
        {"account", "is private"},
    ),
    "noise in run.json": (lambda run: run_cases.edit_facts(run, noise="fixed seed"), {"account"}),
    "no releases in run.json": (
        lambda run: run_cases.edit_facts(run, releases=None),
        {"north: releases", "south: releases"},
    ),
    "text for releases": (
        lambda run: run_cases.edit_facts(run, releases=["0"] * 4),
        {"north: releases", "south: releases"},
    ),
    "more visits, and releases made small": (
        lambda run: _visit_once_more(run, releases=[0, 1, 2, 3, 4]),
        {"north: releases", "south: releases"},
    ),
    "a silo left out everywhere": (_leave_out_south, {"other silos"}),
    "a silo left out of run.json too": (
        lambda run: (
            _leave_out_south(run),
            run_cases.edit_facts(
                run, silos=[{"name": "north", "rows": 500}], ledgers={"north": "ledgers/north.ledger"}
            ),
        ),
        {"other silos"},
    ),
    # files that were edited after the certificate, which names their digests
    "metrics": (lambda run: run_cases.change_json(run / "metrics.json", metrics={"accuracy": 0.99}), {"files"}),
    "trace": (lambda run: (run / "trace.jsonl").write_text((run / "trace.jsonl").read_text() + "\n"), {"files"}),
    "trace gone": (lambda run: (run / "trace.jsonl").unlink(), {"files", "silos"}),
    "no digests": (lambda run: run_cases.change_json(run / "certificate.json", files=None), {"files"}),
    "some digests": (lambda run: run_cases.change_json(run / "certificate.json", files={}), {"files"}),
    "certificate alone": (lambda run: run_cases.change_json(run / "certificate.json", more=1), {"posterior"}),
    # what was charged is not what the study's method draws
    "noise of another method": (
        lambda run: _pay_with(run, dataclasses.replace(GRID, std=600.0, count=200)),
        {"method's noise", "sampler", "noise"},
    ),
    "noise of two kinds": (
        lambda run: _pay_with(run, run_cases.EVENT, GRID),
        {"method's noise", "noise", "north: claim"},
    ),
    "other batches": (
        lambda run: _pay_with(
            run,
            dataclasses.replace(
                run_cases.EVENT, sampling=Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=0.05), std=20.0
            ),
        ),
        {"sampler"},
    ),
    "charged under another name too": (
        lambda run: _charge(run, run_cases.account_of(is_private=False), GRID),
        {"north: account"},
    ),
    # another study file: its hash is in the account's name
    "study swapped": (
        lambda run: _swap_study(run, data={"public": ["rows", "test"]}),
        {"account", "is private"},
    ),
    "name of the study swapped": (
        lambda run: _swap_study(run, study={"name": "harmless"}),
        {"account", "is private"},
    ),
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_what_does_not_follow_from_study_ledgers_and_run_is_noticed(run_dir: Path, tampering: str) -> None:
    tamper, expected = TAMPERINGS[tampering]
    tamper(run_dir)
    found = set(failed(run_dir))
    assert found == expected


PRIVATE: dict[str, object] = {"is_private": True, "stamp": None}


@pytest.mark.parametrize(
    ("certificate", "facts"),
    [
        (PRIVATE, {}),
        (PRIVATE, {"noise": claims.FROM_SYSTEM}),
        ({**PRIVATE, "account": run_cases.account_of()}, {}),
        ({**PRIVATE, "account": run_cases.account_of()}, {"noise": claims.FROM_SYSTEM}),
        ({**PRIVATE, "account": None}, {"noise": claims.FROM_SYSTEM}),
        ({**PRIVATE, "account": claims.earlier_account_name("mortality <b>&", run_cases.RUN_ID)}, {"noise": None}),
    ],
)
@pytest.mark.parametrize("without_noise", [False, True], ids=["", "fact removed"])
def test_a_fixed_seed_run_relabelled_as_private_is_noticed(
    fixed_run: Path, tmp_path: Path, certificate: dict[str, object], facts: dict[str, object], without_noise: bool
) -> None:
    """Whatever its certificate, posterior and run.json say: the account's name is in the ledger's hash chain."""
    run_dir = Path(shutil.copytree(fixed_run, tmp_path / "run"))
    run_cases.edit_facts(run_dir, **facts)
    if without_noise:
        told = json.loads((run_dir / "run.json").read_text())
        run_cases.write_json(run_dir / "run.json", {key: value for key, value in told.items() if key != "noise"})
    run_cases.edit_certificate(run_dir, **certificate)
    found = verify(read_run(run_dir))
    assert not found.passed
    assert found.to_json()["is_private"] is False
    assert {check.name for check in found.checks if not check.passed} & {"is private", "north: ledger"}


def test_a_run_of_an_earlier_version_is_verified_as_far_as_it_says_enough(tmp_path: Path) -> None:
    """It has neither digests nor the source of its noise: all is checked, and that it is private is not confirmed."""
    account = claims.earlier_account_name("mortality <b>&", run_cases.RUN_ID)
    run_dir = run_cases.write_run(tmp_path / "run", comparisons=False, account=account)
    told = json.loads((run_dir / "run.json").read_text())
    run_cases.write_json(run_dir / "run.json", {key: value for key, value in told.items() if key != "noise"})
    run_cases.seal(run_dir)
    certificate = json.loads((run_dir / "certificate.json").read_text())
    del certificate["files"]
    run_cases.write_json(run_dir / "certificate.json", certificate)
    assert failed(run_dir) == ["is private"]
    run_cases.change_json(run_dir / "certificate.json", is_private=False, stamp=claims.FIXED_NOISE)
    provenance = json.loads((run_dir / "certificate.json").read_text())
    run_cases.change_json(run_dir / "posterior.json", provenance=provenance)
    assert failed(run_dir) == []


@pytest.mark.parametrize("content", [{}, {"silos": 3, "ledgers": 4, "settings": 5, "releases": "x", "noise": []}])
def test_a_run_json_that_says_nothing_is_a_failed_check(run_dir: Path, content: dict[str, object]) -> None:
    run_cases.write_json(run_dir / "run.json", content)
    assert {"run.json", "account"} <= set(failed(run_dir))


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


def test_a_run_from_before_references_is_read_as_it_was_meant(tmp_path: Path) -> None:
    """Its study says nothing of coding: each category had a feature, and its hash is that of its file."""
    tables = {
        "study": {"name": "before"},
        "data": {"target": "died", "classes": ["no", "yes"], "bounds": {"ward": ["a", "b"]}, "coding": "one_hot"},
        "model": {"kind": "logistic_regression"},
        "privacy": {"mode": "none"},
        "protocol": {"rounds": 1},
    }
    frame = pd.DataFrame({"ward": list("abab"), "died": ["no", "yes", "yes", "no"]})
    directory = tmp_path / "run"
    silobayes.fit(Study.from_dict(tables), {"one": frame}, out=directory)
    earlier = json.loads((directory / "study.json").read_text())
    del earlier["data"]["coding"]
    run_cases.write_json(directory / "study.json", earlier)
    own_hash = hashlib.sha256(canonical_json(earlier).encode()).hexdigest()
    run_cases.edit_facts(directory, study_hash=own_hash)
    run_cases.edit_certificate(directory, study_hash=own_hash)
    run = read_run(directory)
    assert verify(run).passed
    frame.to_csv(tmp_path / "rows.csv", index=False)
    assert len(predict(run, Posterior.load(directory), tmp_path / "rows.csv", 0.9)) == 4
