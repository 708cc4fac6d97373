"""Checkpoints: loaded equal, refused when changed, whole after a crash."""

import json
import os
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.runs import checkpoint
from silobayes.runs.directory import TRACE, RunDirectory, private_place

HASH = "a" * 64
# Of a silo's private state: its bytes must not be in the run directory.
CANARY = 8675309.0625


class State(eqx.Module):
    step: int
    values: np.ndarray


TEMPLATE = State(step=0, values=np.zeros((2, 3)))
SILOS = [np.zeros(2), np.zeros(3)]
FILES = ("checkpoint.json", "checkpoint-2.npz", "states-2.npz")


def state_at(step: int) -> State:
    return State(step=step, values=np.full((2, 3), 0.1 * step))


def silos_at(step: int) -> list[np.ndarray]:
    return [np.array([CANARY, step]), np.array([CANARY, step, step])]


def save(directory, step, study_hash=HASH):
    private_place(directory).mkdir(exist_ok=True)
    lines = [json.dumps({"step": step})]
    own = private_place(directory)
    checkpoint.save(directory, own, state_at(step), silos_at(step), step=step, study_hash=study_hash, lines=lines)


def load(directory, server=TEMPLATE, silos=SILOS, study_hash=HASH):
    return checkpoint.load(directory, private_place(directory), (server, silos), study_hash=study_hash)


def place_of(directory, name):
    return (private_place(directory) if name.startswith("states") else directory) / name


def are_those_of(states, step: int) -> bool:
    server, silos = states
    same = [np.array_equal(own, expected) for own, expected in zip(silos, silos_at(step), strict=True)]
    return server.step == step and np.array_equal(server.values, state_at(step).values) and all(same)


def test_what_is_saved_is_loaded_equal(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    assert load(directory) is None
    for step in (1, 3):
        save(directory, step)
        states, found, lines = load(directory)
        assert found == step
        assert [json.loads(line) for line in lines] == [{"step": step}]
        assert are_those_of(states, step)
    assert [path.name for path in directory.glob("*.npz")] == ["checkpoint-3.npz"]
    assert [path.name for path in private_place(directory).iterdir()] == ["states-3.npz"]


def test_the_files_are_readable_by_their_owner_only(tmp_path):
    run = new_run(tmp_path)
    save(run.path, 1)
    paths = [path for folder in (run.path, run.private) for path in folder.iterdir() if path.is_file()]
    assert len(paths) == 5
    assert {os.stat(path).st_mode & 0o777 for path in paths} == {0o600}
    assert os.stat(run.private).st_mode & 0o777 == 0o700


@given(which=st.sampled_from(FILES), where=st.floats(0, 0.999), bit=st.integers(0, 7))
def test_a_changed_checkpoint_is_refused(tmp_path_factory, which, where, bit):
    """A flipped bit may leave an equal JSON value (the case of an escape, a space); it may never change the state."""
    directory = tmp_path_factory.mktemp("run")
    save(directory, 2)
    path = place_of(directory, which)
    raw = bytearray(path.read_bytes())
    raw[int(where * len(raw))] ^= 1 << bit
    path.write_bytes(raw)
    try:
        found = load(directory)
    except InvalidInput:
        return
    assert which == "checkpoint.json"
    assert found is not None
    assert found[1] == 2
    assert are_those_of(found[0], 2)


@pytest.mark.parametrize("which", FILES)
def test_a_torn_or_missing_file_is_refused(tmp_path, which):
    directory = tmp_path / "run"
    directory.mkdir()
    save(directory, 2)
    path = place_of(directory, which)
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidInput):
            load(directory)
    if which.endswith("npz"):
        path.unlink()
        with pytest.raises(InvalidInput, match="checkpoint"):
            load(directory)


def test_a_checkpoint_of_another_study_is_refused(tmp_path):
    save(tmp_path, 2)
    with pytest.raises(InvalidInput, match="study"):
        load(tmp_path, study_hash="b" * 64)


@pytest.mark.parametrize(
    "other", [{"server": State(step=0, values=np.zeros((4, 3)))}, {"silos": SILOS[:1]}, {"silos": SILOS[::-1]}]
)
def test_a_checkpoint_of_another_method_is_refused(tmp_path, other):
    save(tmp_path, 2)
    with pytest.raises(InvalidInput, match="another method"):
        load(tmp_path, **other)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_a_crash_while_saving_leaves_the_checkpoint_before_and_nothing_private_in_the_run(
    tmp_path, monkeypatch, crash_at, is_done
):
    """Before and after each file is replaced; what was written is left where it is."""
    directory = tmp_path / "run"
    directory.mkdir()
    save(directory, 1)
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == crash_at and not is_done:
            raise KeyboardInterrupt
        real(source, target)
        if len(calls) == crash_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save(directory, 2)
    states, step, _ = load(directory)
    assert step == (2 if crash_at == 3 and is_done else 1)
    assert are_those_of(states, step)
    canary = np.float64(CANARY).tobytes()
    assert not any(canary in path.read_bytes() for path in directory.rglob("*"))
    assert any(canary in path.read_bytes() for path in private_place(directory).iterdir())  # it would be found


def new_run(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {"study": {}}, HASH, {"silos": []})


def commit(run: RunDirectory, step: int, *lines: dict) -> None:
    run.commit(state_at(step), silos_at(step), step, lines or [{}])


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    new_run(tmp_path)
    with pytest.raises(InvalidInput, match="out"):
        new_run(tmp_path)


def test_two_processes_cannot_run_in_one_directory(tmp_path):
    run = new_run(tmp_path)
    with run.lock(), pytest.raises(InvalidInput, match="nobody"), run.lock():
        pass
    with run.lock():  # free again
        pass


def test_a_checkpoint_older_than_what_was_released_is_refused(tmp_path):
    run = new_run(tmp_path)
    commit(run, 1)
    old = {path: path.read_bytes() for path in _state_of(run)}
    commit(run, 2)
    for path in _state_of(run):
        path.unlink()
    for path, raw in old.items():
        path.write_bytes(raw)
    with pytest.raises(InvalidInput, match="after step 2"):
        run.load(TEMPLATE, SILOS)
    for path in old:
        path.unlink()
    with pytest.raises(InvalidInput, match="after step 2"):
        run.load(TEMPLATE, SILOS)


def _state_of(run: RunDirectory) -> list[Path]:
    return [*run.path.glob("checkpoint*"), *run.private.iterdir()]


@pytest.mark.parametrize("lost", ["the lines", "half of the first", "the last", "half of the last"])
def test_a_crash_between_checkpoint_and_trace_is_healed(tmp_path, lost):
    """A commit of two visits."""
    run = new_run(tmp_path)
    commit(run, 1, {"value": 1.5})
    commit(run, 3, {"value": 2.5}, {"value": 3.5})
    trace = run.path / TRACE
    whole = trace.read_text()
    first, last = (whole.index(f'"value": {value}') for value in (2.5, 3.5))
    kept = {"the lines": first - 1, "half of the first": first + 8, "the last": last - 1, "half of the last": last + 8}
    trace.write_text(whole[: kept[lost]])
    server, silos, step = run.load(TEMPLATE, SILOS)
    assert step == 3
    assert are_those_of((server, silos), 3)
    assert trace.read_text() == whole


def test_a_finished_run_keeps_no_state(tmp_path):
    run = new_run(tmp_path)
    commit(run, 1)
    assert not run.is_finished
    run.finish({}, {"is_private": True})
    assert run.is_finished
    assert not list(run.path.glob("checkpoint*"))
    assert not run.private.exists()


def test_an_unfinished_run_does_not_lose_its_state(tmp_path):
    run = new_run(tmp_path)
    commit(run, 1)
    with pytest.raises(AssertionError):
        run.remove_state()
    assert run.load(TEMPLATE, SILOS)[2] == 1


def test_trees_of_the_engine_are_plain_arrays():
    assert all(isinstance(leaf, (int, np.ndarray)) for leaf in jax.tree.leaves(state_at(1)))
