"""Whole runs on neighbouring tables with the same noise: what is not the changed unit's own stays as it is.

The attacker knows the code, the study and all other rows. So whatever a run shows must be the same on both tables, but
for what the noise of the changed silo hides: sides, silos, shards, places, shapes, prices, messages, files and metrics
of the same q. A fixed noise seed makes the rest comparable to the last bit.
"""

import contextlib
import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest

import silobayes
from silobayes.data.silo import Silo
from silobayes.engines import local
from silobayes.engines.parties import LocalParties
from silobayes.privacy.door import Door
from silobayes.privacy.ledger import Ledger
from silobayes.runs.directory import digests
from silobayes.runs.metrics import evaluate
from silobayes.study import Study, load_silos
from tests.data.studies import changed
from tests.engines.harness import Privatise

SILOS, PERSONS, ROWS_PER_PERSON, ROWS = 3, 60, 3, 120
METHODS: dict[str, dict[str, Any]] = {
    "dp_optimisation": {"rounds": 2, "steps": 4, "sample_rate": 0.5},
    "local_averaging": {"rounds": 2, "shards": 4},
    "virtual_clients": {"rounds": 2, "shards": 4},
    "parameter_perturbation": {"rounds": 2},
}
CASES = [(unit, method) for unit in ("row", "person") for method in METHODS]


def study_of(unit: str, method: str, **changes: Any) -> Study:
    public = ["rows", "test"]
    if unit == "person":
        changes |= {"data__unit": "who", "data__rows_per_person": ROWS_PER_PERSON}
        public = ["persons", "test"]
    tables = changed(
        **{"data__test": 0.3, "data__public": public, "silos__count": SILOS, "privacy__unit": unit} | changes
    )
    return Study.from_dict(tables | {"protocol": {"privatise": method, **METHODS[method]}})


def table(unit: str) -> pd.DataFrame:
    """Rows that tell each other apart by age; persons' first rows come first, so that nobody changes places."""
    rng = np.random.default_rng(5)
    ages = 100 * (np.arange(ROWS) + 0.5) / ROWS
    frame = pd.DataFrame({"age": ages, "ward": rng.choice(list("abc"), ROWS), "died": rng.choice(["no", "yes"], ROWS)})
    if unit == "person":
        frame["who"] = [f"p{k}" for k in [*range(PERSONS), *rng.permutation(PERSONS)]]
    return frame


def somebody_else(study: Study, frame: pd.DataFrame, at: int, place: Path) -> pd.DataFrame:
    """The row or person at `at` is another: other values and, of a person, another id and another number of rows."""
    other = frame.copy()
    other.loc[at, ["age", "ward", "died"]] = [99.9, "c", "no" if frame.died[at] == "yes" else "yes"]
    if "who" not in frame:
        return other
    name = renamed(study, frame, at, place).who[at]
    other = other.replace({"who": {frame.who[at]: name}})
    return other.drop(index=other.index[other.who == name][1:])  # one row instead of two


def renamed(study: Study, frame: pd.DataFrame, at: int, place: Path) -> pd.DataFrame:
    """The person at `at` has another id, of the same silo: which silo that is, and who is tested, is public."""
    home = home_of(study, frame, at, place)
    others = (frame.replace({"who": {frame.who[at]: f"candidate-{k}"}}) for k in range(at, 1000))
    return next(other for other in others if home_of(study, other, at, place) == home)


def home_of(study: Study, frame: pd.DataFrame, at: int, place: Path) -> str:
    """Where the row at `at` is dealt to: the name of a silo, or "test"."""
    frame.assign(age=np.where(frame.index == at, 100.0, 0.0)).to_csv(place / "rows.csv", index=False)
    silos, test, _ = load_silos(study, place)
    return next(silo.name for silo in [*silos, test] if silo is not None and silo.x[:, 0].max() > 0.99)


def in_training(study: Study, frame: pd.DataFrame, place: Path) -> list[int]:
    """Some rows that are in a silo; of persons their first ones."""
    return [at for at in range(3, 43, 5) if home_of(study, frame, at, place) != "test"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What one run was given and all that it did and showed."""

    silos: list[Silo]
    test: Silo
    parts: list[np.ndarray]
    shapes: list[Any]
    factors: list[Any]
    releases: list[Any]
    shown: dict[str, Any]
    posterior: Any


def run(study: Study, frame: pd.DataFrame, place: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    frame.to_csv(place / "rows.csv", index=False)
    out = place / f"run-{len(list(place.iterdir()))}"
    kept: dict[str, list[Any]] = {"planned": [], "test": [], "factors": [], "releases": [], "progress": []}

    def spy(owner: Any, name: str, key: str, keep: Any) -> None:
        right = getattr(owner, name)

        def also(*args: Any, **named: Any) -> Any:
            result = right(*args, **named)
            kept[key].append(keep(args, result))
            return result

        patch.setattr(owner, name, also)

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.chdir(place)
        spy(local, "LocalParties", "planned", lambda args, parties: (args[1], parties))
        spy(local, "evaluate", "test", lambda args, _: args[1])
        spy(LocalParties, "_solve", "factors", lambda _, found: found)
        spy(Door, "release", "releases", lambda _, release: release.blocks)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            posterior = silobayes.fit(study, out=out, progress=kept["progress"].append, noise_seed=11)
    ((silos, parties),) = kept["planned"]
    stacks = parties._stacks
    rows = {m: np.asarray(stack.rows.x[at]) for stack in stacks for at, m in enumerate(stack.members.tolist())}
    by_shard = study.protocol.privatise != Privatise.DP_OPTIMISATION
    first = [kept["factors"][0][m] for m in sorted(rows)]
    shown = shown_by(out) | {"progress": kept["progress"], "said": said.getvalue(), "warned": [str(w) for w in warned]}
    return Seen(
        silos=list(silos),
        test=kept["test"][0],
        parts=[part for m in sorted(rows) for part in (rows[m] if by_shard else [rows[m]])],
        shapes=[
            (parties.plan.seats[stack.members[0]].layout.shape, stack.rows.x.shape, stack.members.tolist())
            for stack in stacks
        ],
        factors=[factor for found in first for factor in (shards_of(found) if by_shard else [found])],
        releases=kept["releases"],
        shown=shown,
        posterior=posterior,
    )


def shards_of(found: Any) -> list[Any]:
    """What was found in each shard."""
    leaves, structure = jax.tree.flatten(found)
    return [jax.tree.unflatten(structure, own) for own in zip(*leaves, strict=True)]


def shown_by(out: Path) -> dict[str, Any]:
    """All that is in a run directory, but for the run's random name and the clock."""
    run_id = json.loads((out / "run.json").read_text())["run_id"]
    shown: dict[str, Any] = {"files": sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())}
    for name in shown["files"]:
        path = out / name
        if name.endswith(".ledger"):
            entries = Ledger.open(path).entries()
            shown[name] = (path.stat().st_size, [(one.event, one.study.replace(run_id, "")) for one in entries])
        elif name.endswith((".json", ".jsonl")):
            lines = path.read_text().replace(run_id, "").splitlines() if name.endswith("l") else [path.read_text()]
            content = [json.loads(line.replace(run_id, "")) for line in lines]
            for one in content:
                one.pop("timing", None)
            if name == "certificate.json":
                # Digests tell no more than the files, which are compared by themselves; one of them holds the clock.
                (one,) = content
                assert one["files"] == digests(out)
                one["files"] = sorted(one["files"])
            shown[name] = content
        elif name.endswith(".npz"):
            shown[name] = (path.stat().st_size, {key: np.asarray(value) for key, value in np.load(path).items()})
        else:
            shown[name] = path.stat().st_size
    return shown


def without_numbers(value: Any) -> Any:
    """The same with floats, arrays and their digests reduced to their kind: what is left may not differ."""
    if isinstance(value, dict):
        return {key: "a digest" if key == "sha256" else without_numbers(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_numbers(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype))
    return "a float" if isinstance(value, float) else value


# Released after noise, or computed from what was: these alone may differ between neighbours.
NOISED = ("metrics.json", "posterior.json", "posterior.npz", "trace.jsonl")


def assert_nothing_else_moves(one: Seen, other: Seen) -> str:
    """Whatever is not the changed silo's own is equal; the silo's name."""
    assert [silo.name for silo in one.silos] == [silo.name for silo in other.silos]
    (home,) = [a.name for a, b in zip(one.silos, other.silos, strict=True) if not same_rows(a, b)] or [""]
    assert same_rows(one.test, other.test)
    assert one.shapes == other.shapes
    assert one.shown.keys() == other.shown.keys()
    for name in one.shown:
        if name in NOISED:
            assert without_numbers(one.shown[name]) == without_numbers(other.shown[name]), name
        else:
            np.testing.assert_equal(one.shown[name], other.shown[name], name)
    # No noise is in metrics: for one and the same q they must be one and the same number.
    assert evaluate(one.posterior, one.test) == evaluate(one.posterior, other.test)
    # Every part with the same rows has the same private answer to the first broadcast, to the last bit.
    unmoved = [np.array_equal(a, b) for a, b in zip(one.parts, other.parts, strict=True)]
    assert sum(unmoved) >= len(unmoved) - 2  # a person's old shard and the new one
    for is_same, a, b in zip(unmoved, one.factors, other.factors, strict=True):
        if is_same:
            jax.tree.map(np.testing.assert_array_equal, a, b)
    for at, silo in enumerate(one.silos):
        if silo.name != home and one.releases:
            np.testing.assert_equal(one.releases[at], other.releases[at])
    return home


def same_rows(one: Silo, other: Silo) -> bool:
    return np.array_equal(one.x, other.x) and np.array_equal(one.y, other.y)


@pytest.mark.parametrize(("unit", "method"), CASES)
def test_of_a_changed_unit_nothing_else_moves(unit, method, tmp_path, monkeypatch):
    study, frame = study_of(unit, method), table(unit)
    one = run(study, frame, tmp_path, monkeypatch)
    for at in in_training(study, frame, tmp_path):
        two = run(study, somebody_else(study, frame, at, tmp_path), tmp_path, monkeypatch)
        assert assert_nothing_else_moves(one, two) == home_of(study, frame, at, tmp_path)
        assert not np.array_equal(one.posterior.eta.linear, two.posterior.eta.linear)  # somebody did change


@pytest.mark.parametrize("method", ["dp_optimisation", "parameter_perturbation"])
def test_an_id_alone_changes_no_bit_of_a_run(method, tmp_path, monkeypatch):
    """A person of the same silo with the same rows: metrics and posterior too."""
    study, frame = study_of("person", method), table("person")
    one = run(study, frame, tmp_path, monkeypatch)
    for at in in_training(study, frame, tmp_path)[:3]:
        two = run(study, renamed(study, frame, at, tmp_path), tmp_path, monkeypatch)
        assert assert_nothing_else_moves(one, two) == ""
        for name in NOISED:
            np.testing.assert_equal(one.shown[name], two.shown[name], name)
