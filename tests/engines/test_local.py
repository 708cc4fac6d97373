"""A run as its user sees it: directory, ledgers, certificate; interrupted and resumed."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import silobayes
from silobayes.core.errors import BudgetExceeded, DamagedLedger, InvalidInput
from silobayes.engines import local
from silobayes.engines.fitting import build_model
from silobayes.engines.local import Inputs, _prepare, communications, resume, run
from silobayes.posteriors import Posterior
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.relation import Relation, Unit
from silobayes.report.run_files import read_run
from silobayes.report.verification import verify
from silobayes.runs import checkpoint, claims, directory
from silobayes.runs.directory import RunDirectory, private_place
from silobayes.study import Study
from tests.engines.cases import MODEL, NAMES, make_silo, make_silos, make_study

PROTOCOLS = {
    "none": {"mode": "none", "rounds": 4, "steps": 20},
    "dp_optimisation": {"privatise": "dp_optimisation", "rounds": 4, "steps": 10, "sample_rate": 0.3},
    "virtual_clients": {"privatise": "virtual_clients", "rounds": 4, "steps": 10, "shards": 5},
    "asynchronous": {"privatise": "dp_optimisation", "rounds": 2, "steps": 10, "schedule": "asynchronous"},
}
SITE = Budget(epsilon=1.2, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)


def make_inputs(noise_seed=3, silos=None, test=None, **study) -> Inputs:
    silos = make_silos() if silos is None else silos
    return Inputs(study=make_study(**study), model=MODEL, silos=silos, test=test, names=NAMES, noise_seed=noise_seed)


class Stop(Exception):
    pass


def stop_after(step: int | None):
    def progress(now):
        if step is None or now.step == step:
            raise Stop

    return progress


def charges(directory) -> list[int]:
    return [len(Ledger.open(path).entries()) for path in sorted((directory / "ledgers").glob("*.ledger"))]


def same(first: Posterior, second: Posterior) -> bool:
    return np.array_equal(first.eta.linear, second.eta.linear) and np.array_equal(
        first.eta.quadratic, second.eta.quadratic
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "asynchronous" else ()) for name in PROTOCOLS]
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does_and_charges_once(name, tmp_path):
    inputs = make_inputs(**PROTOCOLS[name])
    whole = run(inputs, tmp_path / "whole")
    for step in (1, 3):
        out = tmp_path / f"stopped-{step}"
        with pytest.raises(Stop):
            run(inputs, out, stop_after(step))
        with pytest.raises(Stop):
            resume(inputs, out, stop_after(step + 1))
        assert same(resume(inputs, out), whole)
        assert (out / "trace.jsonl").read_text() == (tmp_path / "whole" / "trace.jsonl").read_text()
        assert charges(out) == ([] if name == "none" else [1, 1, 1])
    assert same(resume(inputs, tmp_path / "whole"), whole)  # a finished run is only read


def test_a_run_that_died_after_its_certificate_loses_its_private_state(tmp_path, monkeypatch):
    inputs, out = make_inputs(**PROTOCOLS["virtual_clients"]), tmp_path / "run"

    def die(directory, private):
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "remove", die)
        with pytest.raises(Stop):
            run(inputs, out)
    places = [*out.glob("checkpoint*"), private_place(out)]
    assert len(places) == 3
    assert list(private_place(out).glob("states*"))
    assert [check.name for check in verify(read_run(out)).checks if not check.passed] == ["private state"]
    resume(inputs, out)
    assert not any(path.exists() for path in places)
    assert verify(read_run(out)).passed


def test_real_noise_differs_between_runs_and_fixed_noise_is_stamped(tmp_path):
    private = [run(make_inputs(noise_seed=None, **PROTOCOLS["virtual_clients"]), tmp_path / name) for name in "ab"]
    assert not same(*private)
    run(make_inputs(**PROTOCOLS["virtual_clients"]), tmp_path / "fixed")
    stamps = {name: json.loads((tmp_path / name / "certificate.json").read_text()) for name in ("a", "fixed")}
    assert stamps["a"]["is_private"] is True
    assert stamps["fixed"]["is_private"] is False
    assert "NOT PRIVATE" in stamps["fixed"]["stamp"]


def test_visits_since_the_last_commit_are_made_again_and_paid_once(tmp_path, monkeypatch):
    """A process that dies between two commits; with fixed noise it must end where an uninterrupted run does."""
    inputs, out, seen = make_inputs(**PROTOCOLS["virtual_clients"]), tmp_path / "run", []
    whole = run(inputs, tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(local._Clock, "__exit__", lambda *_: None)
        for commit_s, step in ((0.0, 1), (np.inf, 3)):
            patched.setattr(local, "_COMMIT_S", commit_s)
            with pytest.raises(Stop):
                (resume if out.exists() else run)(inputs, out, stop_after(step))
            assert len((out / "trace.jsonl").read_text().splitlines()) == 1
    assert same(resume(inputs, out, lambda now: seen.append(now.step)), whole)
    assert seen == [2, 3, 4]
    assert (out / "trace.jsonl").read_text() == (tmp_path / "whole" / "trace.jsonl").read_text()
    assert charges(out) == [1, 1, 1]


def test_a_changed_study_is_refused(tmp_path):
    with pytest.raises(Stop):
        run(make_inputs(**PROTOCOLS["dp_optimisation"]), tmp_path / "run", stop_after(1))
    for change in ({"epsilon": 2.0}, {"rounds": 5}, {"seed": 1}):
        with pytest.raises(InvalidInput, match="study"):
            resume(make_inputs(**{**PROTOCOLS["dp_optimisation"], **change}), tmp_path / "run")
    with pytest.raises(InvalidInput, match="silos"):
        resume(make_inputs(silos=make_silos((80, 100, 121)), **PROTOCOLS["dp_optimisation"]), tmp_path / "run")


def test_a_corrupt_checkpoint_is_refused(tmp_path):
    inputs = make_inputs(**PROTOCOLS["dp_optimisation"])
    with pytest.raises(Stop):
        run(inputs, tmp_path / "run", stop_after(2))
    path = tmp_path / "run" / "checkpoint-2.npz"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(InvalidInput, match="checkpoint"):
        resume(inputs, tmp_path / "run")


@pytest.mark.parametrize("schedule", ["synchronous", "sequential", "asynchronous"])
def test_a_round_visits_every_silo_whatever_the_schedule(schedule):
    """2 rounds of 3 silos; a full Gaussian of 4 parameters has 20 natural parameters."""
    inputs = make_inputs(mode="none", rounds=2, steps=2, schedule=schedule)
    settings, _, plan = _prepare(inputs)
    assert communications(plan, settings.rounds, inputs.study.aggregation) == {
        "rounds": 2,
        "messages": 12,
        "bytes": 12 * 20 * 8,
    }


def test_too_many_steps_are_refused_before_anything_is_built():
    with pytest.raises(InvalidInput, match=r"protocol.rounds: .* rounds x steps"):
        _prepare(make_inputs(mode="none", rounds=10**5, steps=10**5))


def test_the_largest_seed_runs(tmp_path):
    run(make_inputs(seed=2**63 - 1, **{**PROTOCOLS["dp_optimisation"], "rounds": 1}), tmp_path / "run")


def test_the_certificate_says_what_was_paid(tmp_path):
    run(make_inputs(noise_seed=None, **PROTOCOLS["dp_optimisation"]), tmp_path / "run")
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert 0.99 < certificate["epsilon"] <= 1.0
    assert certificate["noise"].startswith("float32")
    assert [silo["name"] for silo in certificate["silos"]] == ["silo-0", "silo-1", "silo-2"]
    for silo in certificate["silos"]:
        ledger = Ledger.open(tmp_path / "run" / silo["ledger"])
        (account,) = ledger.accounts()
        assert account.study == certificate["account"]
        assert account.spent().epsilon == silo["epsilon"]
        (entry,) = ledger.entries()
        assert entry.event.count == 40


def test_a_sites_own_ledger_pays_for_several_runs_until_it_is_exhausted(tmp_path):
    ledger = Ledger.create(tmp_path / "site.ledger", SITE)
    inputs = dataclasses.replace(
        make_inputs(**PROTOCOLS["virtual_clients"]), ledgers={"silo-1": tmp_path / "site.ledger"}
    )
    run(inputs, tmp_path / "first")
    assert len(ledger.entries()) == 1
    with pytest.raises(BudgetExceeded, match="No silo was charged"):
        run(inputs, tmp_path / "second")
    assert len(ledger.entries()) == 1
    assert not (tmp_path / "second").exists()  # nothing that could be resumed


def make_site_inputs(tmp_path, noise_seed=3) -> tuple[Ledger, Inputs]:
    ledger = Ledger.create(tmp_path / "site.ledger", SITE)
    ledgers = {"silo-1": tmp_path / "site.ledger"}
    return ledger, dataclasses.replace(make_inputs(noise_seed, **PROTOCOLS["virtual_clients"]), ledgers=ledgers)


@pytest.mark.parametrize("kind", ["unknown silo", "no file", "no ledger", "one for two"])
def test_a_ledger_that_cannot_be_used_is_refused_before_anything_is_written(kind, tmp_path):
    _, inputs = make_site_inputs(tmp_path)
    (tmp_path / "text").write_text("age\n1\n")
    (tmp_path / "text.head").write_text("age\n1\n")
    ledgers = {
        "unknown silo": {"other": tmp_path / "site.ledger"},
        "no file": {"silo-0": tmp_path / "none.ledger"},
        "no ledger": {"silo-0": tmp_path / "text"},
        "one for two": dict.fromkeys(("silo-0", "silo-1"), tmp_path / "site.ledger"),
    }[kind]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DamagedLedger if kind == "no ledger" else InvalidInput, match="ledger"):
        run(dataclasses.replace(inputs, ledgers=ledgers), tmp_path / "run")
    assert sorted(tmp_path.iterdir()) == before


def test_a_resumed_run_remembers_the_sites_own_ledger(tmp_path, monkeypatch):
    ledger, inputs = make_site_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Stop):
        run(dataclasses.replace(inputs, ledgers={"silo-1": Path("site.ledger")}), tmp_path / "run", stop_after(1))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Ledger.create("other.ledger", SITE)
    with pytest.raises(InvalidInput, match="started with"):
        resume(dataclasses.replace(inputs, ledgers={"silo-1": Path("other.ledger")}), tmp_path / "run")
    with pytest.raises(Stop):  # the same file, by another name
        resume(dataclasses.replace(inputs, ledgers={"silo-1": Path("../site.ledger")}), tmp_path / "run", stop_after(2))
    resume(dataclasses.replace(inputs, ledgers={}), tmp_path / "run")
    assert len(ledger.entries()) == 1
    assert charges(tmp_path / "run") == [1, 1]
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["silos"][1]["ledger"] == "site.ledger"  # the certificate is published: no paths of a machine
    assert verify(read_run(tmp_path / "run")).passed


@pytest.mark.parametrize("name", ["site.ledger", "run/ledgers/silo-0.ledger"])
def test_an_unfinished_run_that_lost_a_ledger_is_refused(name, tmp_path):
    _, inputs = make_site_inputs(tmp_path)
    with pytest.raises(Stop):
        run(inputs, tmp_path / "run", stop_after(1))
    (tmp_path / name).unlink()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="a missing ledger is not an empty one"):
            resume(inputs, tmp_path / "run")
        (tmp_path / f"{name}.head").unlink(missing_ok=True)
    assert not (tmp_path / name).exists()


def test_a_run_that_died_before_it_charged_goes_on_with_the_same_ledgers(tmp_path, monkeypatch):
    ledger, inputs = make_site_inputs(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "begin_to_charge", stop_after(None))
        with pytest.raises(Stop):
            run(inputs, tmp_path / "run")
    assert charges(tmp_path / "run") == [0, 0]
    for path in (tmp_path / "run" / "ledgers").glob("silo-0.ledger*"):
        path.unlink()  # nothing was charged to it
    resume(dataclasses.replace(inputs, ledgers={}), tmp_path / "run")
    assert len(ledger.entries()) == 1
    assert charges(tmp_path / "run") == [1, 1]


TINY = PROTOCOLS["virtual_clients"] | {"rounds": 2}


def gone(*names):
    def lose(out):
        for name in names:
            for path in out.glob(name):
                path.unlink()

    return lose


def uncharged(out, *names):
    facts = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**facts, "charged": False}))
    gone(*names)(out)


LOSSES = {
    "trace and checkpoint": gone("trace.jsonl", "checkpoint*"),
    "checkpoint": gone("checkpoint*"),
    "arrays": gone("checkpoint-*.npz"),
    "trace": gone("trace.jsonl"),
    "the commit point": gone("checkpoint.json"),
    "empty trace, no checkpoint": lambda out: ((out / "trace.jsonl").write_text(""), gone("checkpoint*")(out)),
    "charged is false": lambda out: uncharged(out, "trace.jsonl", "checkpoint*"),
    "charged is false, one ledger left": lambda out: uncharged(
        out, "trace.jsonl", "checkpoint*", "ledgers/silo-0.*", "ledgers/silo-1.*"
    ),
    "charged is false and no ledgers": lambda out: uncharged(out, "ledgers/*"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_that_may_have_been_charged_does_not_start_again(loss, tmp_path):
    """Its noise was paid once: without a charge it would be drawn twice."""
    inputs = make_inputs(**TINY)
    with pytest.raises(Stop):
        run(inputs, tmp_path / "run", stop_after(1))
    LOSSES[loss](tmp_path / "run")
    before = charges(tmp_path / "run")
    seen = []
    for _ in range(2):  # and what a refused attempt leaves behind does not let the next one in
        with pytest.raises(InvalidInput):
            resume(inputs, tmp_path / "run", seen.append)
    assert not seen
    assert charges(tmp_path / "run") == before


@pytest.mark.parametrize(
    "lost", [("certificate.json",), ("certificate.json", "trace.jsonl"), ("c*.json", "trace.jsonl")]
)
def test_a_finished_run_without_its_certificate_is_not_run_again(lost, tmp_path):
    inputs, seen = make_inputs(**TINY), []
    run(inputs, tmp_path / "run")
    gone(*lost)(tmp_path / "run")
    with pytest.raises(InvalidInput):
        resume(inputs, tmp_path / "run", seen.append)
    assert not seen


def test_a_crash_at_any_write_of_a_charged_run_can_be_resumed(tmp_path, monkeypatch):
    """Before and after each file is replaced and each line appended: nothing is lost or paid twice."""
    inputs = make_inputs(**{**TINY, "rounds": 1})
    whole = run(inputs, tmp_path / "whole")
    lines = (tmp_path / "whole" / "trace.jsonl").read_text()
    finished = refused = 0
    for crash_at in range(100):
        out, writes = tmp_path / f"run-{crash_at}", []

        def crashing(act, writes=writes, crash_at=crash_at):
            def write(*arguments):
                writes.append(arguments)
                if len(writes) - 1 == crash_at // 2 and crash_at % 2 == 0:
                    raise Stop
                result = act(*arguments)
                if len(writes) - 1 == crash_at // 2:
                    raise Stop
                return result

            return write

        with monkeypatch.context() as patched:
            patched.setattr("silobayes.runs.files.os.replace", crashing(os.replace))
            patched.setattr(directory, "append_lines", crashing(directory.append_lines))
            try:
                run(inputs, out)
            except Stop:
                pass
            else:
                assert len(writes) < crash_at
                finished += 1
                break
        if not (out / "run.json").exists():  # it had not begun
            refused += 1
            continue
        assert same(resume(inputs, out), whole)
        assert (out / "trace.jsonl").read_text() == lines
        assert charges(out) == [1, 1, 1]
        assert verify(read_run(out)).passed
    assert finished == 1
    assert refused == 3


@pytest.mark.parametrize(("first", "then"), [(3, None), (None, 3)])
def test_a_run_goes_on_with_the_kind_of_noise_that_it_was_started_with(first, then, tmp_path):
    """Otherwise steps with noise of a fixed seed would be certified as private."""
    with pytest.raises(Stop):
        run(make_inputs(first, **TINY), tmp_path / "run", stop_after(1))
    facts = tmp_path / "run" / "run.json"
    told = {"noise": "operating system" if first else "fixed seed"}
    for change in ({}, told, {"noise": None}, {**told, "charged": False}):
        facts.write_text(json.dumps({**json.loads(facts.read_text()), **change}))
        with pytest.raises(InvalidInput, match="noise_seed"):
            resume(make_inputs(then, **TINY), tmp_path / "run")
    assert charges(tmp_path / "run") == [1, 1, 1]


def test_the_account_of_a_run_with_fixed_noise_says_so():
    study = make_study(**TINY)
    names = {
        claims.account_name(study.study.name, hash, run_id, is_private=is_private)
        for hash in (study.hash, "0" * 64)
        for run_id in ("ab", "cd")
        for is_private in (True, False)
    }
    assert len(names) == 8
    assert sum("NOT PRIVATE" in name for name in names) == 4
    assert len(claims.account_name("x" * 500, study.hash, "0" * 16, is_private=False)) <= 200


def test_a_place_that_cannot_be_written_is_refused_and_nothing_is_charged(tmp_path):
    ledger, inputs = make_site_inputs(tmp_path)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "run", Path("/proc/x/y")):
        with pytest.raises(InvalidInput, match="out"):
            run(inputs, out)
    assert not ledger.entries()


def test_a_ledger_for_other_neighbours_is_refused(tmp_path):
    Ledger.create(tmp_path / "site.ledger", dataclasses.replace(SITE, relation=Relation.ADD_REMOVE))
    inputs = dataclasses.replace(
        make_inputs(**PROTOCOLS["virtual_clients"]), ledgers={"silo-0": tmp_path / "site.ledger"}
    )
    with pytest.raises(InvalidInput, match="relation"):
        run(inputs, tmp_path / "run")


def test_whole_persons_are_protected_by_perturbing_methods(tmp_path):
    silos = [dataclasses.replace(silo, persons=np.arange(silo.num_rows) // 3) for silo in make_silos()]
    study = {"unit": "person", **PROTOCOLS["virtual_clients"]}
    run(make_inputs(silos=silos, **study), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "certificate.json").read_text())["unit"] == "person"


def test_whole_persons_are_protected_by_dp_optimisation(tmp_path):
    silos = [dataclasses.replace(silo, persons=np.arange(silo.num_rows) // 3) for silo in make_silos()]
    study = make_study(unit="person", rows_per_person=3, **PROTOCOLS["dp_optimisation"])
    silobayes.fit(study, silos, out=tmp_path / "run", noise_seed=3)
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert (certificate["unit"], certificate["method"]) == ("person", "dp_optimisation")
    assert certificate["epsilon"] <= 1.0


def test_how_many_rows_persons_have_is_told_only_if_it_is_declared(tmp_path):
    """Whoever knows the rows of all others would read the last person's from the number of all rows."""
    person_of_row = np.minimum(np.arange(80), 39)  # one person has 41 rows
    silos = [dataclasses.replace(make_silo("a", 80, 0), persons=person_of_row), make_silo("b", 40, 1)]
    silos[1] = dataclasses.replace(silos[1], persons=np.arange(40))
    fewer = [silos[0].take("a", np.arange(60)), silos[1]]
    made, tables = {}, make_study(unit="person", rows_per_person=50, privatise="local_averaging", rounds=2).to_dict()
    for public in (["persons"], ["persons", "rows"]):
        tables["data"]["public"] = public
        for name, own in (("all", silos), ("fewer", fewer)):
            out = tmp_path / f"{name}-{len(public)}"
            with pytest.raises(Stop):
                run(dataclasses.replace(make_inputs(silos=own), study=Study.from_dict(tables)), out, stop_after(1))
            facts = json.loads((out / "run.json").read_text())
            made[name, len(public)] = {key: facts[key] for key in ("silos", "settings", "releases")}
    assert made["all", 1] == made["fewer", 1]
    assert made["all", 1]["silos"] == [{"name": "a", "persons": 40}, {"name": "b", "persons": 40}]
    assert made["all", 2]["silos"] == [{"name": "a", "rows": 80}, {"name": "b", "rows": 40}]
    assert made["fewer", 2]["silos"] == [{"name": "a", "rows": 60}, {"name": "b", "rows": 40}]


def test_rows_of_a_person_beyond_the_bound_are_refused_or_left_out_before_anything_is_spent(tmp_path):
    silos = [dataclasses.replace(silo, persons=np.arange(silo.num_rows) // 3) for silo in make_silos()]
    keys = {"unit": "person", "rows_per_person": 2, **PROTOCOLS["dp_optimisation"]}
    with pytest.raises(InvalidInput, match="at most 2 rows of each person of silo-0"):
        silobayes.fit(make_study(**keys), silos, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    cut = silobayes.fit(make_study(outside="clip", **keys), silos, out=tmp_path / "run", noise_seed=3)
    firsts = [silo.take(silo.name, np.arange(silo.num_rows)[np.arange(silo.num_rows) % 3 < 2]) for silo in silos]
    assert same(cut, silobayes.fit(make_study(outside="clip", **keys), firsts, out=tmp_path / "same", noise_seed=3))


def test_progress_tells_what_each_silo_has_spent(tmp_path):
    seen = []
    run(make_inputs(**PROTOCOLS["dp_optimisation"]), tmp_path / "run", seen.append)
    assert [now.step for now in seen] == [1, 2, 3, 4]
    assert set(seen[0].epsilons) == {"silo-0", "silo-1", "silo-2"}
    for name, epsilon in seen[-1].epsilons.items():
        assert epsilon + seen[-1].epsilons_left[name] == pytest.approx(1.0)


def test_fit_runs_a_study_and_reads_a_finished_one(tmp_path):
    study, silos = make_study(**PROTOCOLS["none"]), make_silos()
    first = silobayes.fit(study, silos, out=tmp_path / "run")
    assert first.names == NAMES
    assert same(silobayes.fit(study, silos, out=tmp_path / "run"), first)
    assert first.summary().loc["x0", "mean"] > 0.5
    with pytest.raises(InvalidInput, match="features"):
        silobayes.fit(study, [make_silo("a", 30, 0).take("b", np.arange(5)), _narrow()], out=tmp_path / "other")


def _narrow():
    silo = make_silo("narrow", 10, 0)
    return dataclasses.replace(silo, x=silo.x[:, :2])


def test_metrics_are_those_of_the_test_rows(tmp_path):
    test = make_silo("test", 400, seed=77)
    posterior = run(make_inputs(test=test, **PROTOCOLS["none"]), tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())["metrics"]
    assert metrics["accuracy"] == pytest.approx(np.mean(posterior.predict(test.x) == test.y))
    assert 0.7 < metrics["auc"] < 1.0
    assert metrics["log_likelihood"] == pytest.approx(float(posterior.log_likelihood(test.x, test.y).mean()))


def test_auc_counts_ordered_pairs():
    from silobayes.runs.metrics import area_under_curve

    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, size=80) / 6, rng.integers(2, size=80)
    pairs = [np.sign(a - b) / 2 + 0.5 for a in scores[labels == 1] for b in scores[labels == 0]]
    assert area_under_curve(scores, labels) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize(
    ("kind", "options", "data", "expected"),
    [
        ("logistic_regression", {}, {"classes": [0, 1]}, "LogisticRegression"),
        ("softmax_regression", {}, {"classes": [0, 1, 2]}, "SoftmaxRegression"),
        ("mlp", {"hidden": [5]}, {"classes": [0, 1]}, "BinaryMLP"),
        ("mlp", {"hidden": [5]}, {"classes": [0, 1, 2]}, "ClassesMLP"),
        ("mlp", {"hidden": [5], "noise_stddev": 1.0}, {"target_bounds": [0, 1]}, "RealMLP"),
        ("linear_regression", {"noise_stddev": 1.0}, {"target_bounds": [0, 1]}, "LinearRegression"),
        ("linear_regression", {}, {"target_bounds": [0, 1]}, "LinearRegressionUnknownNoise"),
        ("poisson_regression", {}, {"target_bounds": [0, 9]}, "PoissonRegression"),
    ],
)
def test_the_study_decides_which_model_is_built(kind, options, data, expected):
    study = Study.from_dict(
        {
            "study": {"name": "s"},
            "data": {"target": "y", "bounds": {"a": [0, 1]}, **data},
            "model": {"kind": kind, "options": options},
            "privacy": {"mode": "none"},
        }
    )
    assert type(build_model(study, 2)).__name__ == expected


@pytest.mark.parametrize(
    "silos",
    [
        [pd.DataFrame({"x0": [8675309.0]})] * 2,
        pd.DataFrame({"x0": [8675309.0]}),
        {"a": np.full((2, 3), 8675309.0)},
        np.full((2, 3), 8675309.0),
    ],
    ids=["list of tables", "table", "dict of arrays", "array"],
)
def test_silos_of_another_kind_are_refused_and_not_quoted(silos, tmp_path):
    with pytest.raises(InvalidInput, match="silo name -> pandas") as refused:
        silobayes.fit(make_study(mode="none"), silos, out=tmp_path / "run")
    assert "8675309" not in str(refused.value)
    assert not (tmp_path / "run").exists()
