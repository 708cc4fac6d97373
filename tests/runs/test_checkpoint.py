"""Checkpoints: loaded equal, refused when changed, whole after a crash."""

import os

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.runs import checkpoint
from silobayes.runs.directory import TRACE, RunDirectory

HASH = "a" * 64


class State(eqx.Module):
    step: int
    values: np.ndarray


TEMPLATE = State(step=0, values=np.zeros((2, 3)))


def state_at(step: int) -> State:
    return State(step=step, values=np.full((2, 3), 0.1 * step))


def save(directory, step, study_hash=HASH):
    checkpoint.save(directory, state_at(step), step=step, study_hash=study_hash, trace={"step": step})


def test_what_is_saved_is_loaded_equal(tmp_path):
    assert checkpoint.load(tmp_path, TEMPLATE, study_hash=HASH) is None
    save(tmp_path, 3)
    state, step, trace = checkpoint.load(tmp_path, TEMPLATE, study_hash=HASH)
    assert (state.step, step, trace) == (3, 3, {"step": 3})
    assert np.array_equal(state.values, state_at(3).values)
    assert [path.name for path in tmp_path.glob("*.npz")] == ["checkpoint-3.npz"]


def test_the_files_are_readable_by_their_owner_only(tmp_path):
    save(tmp_path, 1)
    assert {os.stat(path).st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@given(which=st.sampled_from(["checkpoint.json", "checkpoint-2.npz"]), where=st.floats(0, 0.999), bit=st.integers(0, 7))
def test_a_changed_checkpoint_is_refused(tmp_path_factory, which, where, bit):
    """A flipped bit may leave an equal JSON value (the case of an escape, a space); it may never change the state."""
    directory = tmp_path_factory.mktemp("run")
    save(directory, 2)
    path = directory / which
    raw = bytearray(path.read_bytes())
    raw[int(where * len(raw))] ^= 1 << bit
    path.write_bytes(raw)
    try:
        found = checkpoint.load(directory, TEMPLATE, study_hash=HASH)
    except InvalidInput:
        return
    assert which == "checkpoint.json"
    assert found is not None
    assert found[1] == 2
    assert np.array_equal(found[0].values, state_at(2).values)


@pytest.mark.parametrize("which", ["checkpoint.json", "checkpoint-2.npz"])
def test_a_torn_or_missing_file_is_refused(tmp_path, which):
    save(tmp_path, 2)
    path = tmp_path / which
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidInput):
            checkpoint.load(tmp_path, TEMPLATE, study_hash=HASH)
    if which.endswith("npz"):
        path.unlink()
        with pytest.raises(InvalidInput, match="checkpoint"):
            checkpoint.load(tmp_path, TEMPLATE, study_hash=HASH)


def test_a_checkpoint_of_another_study_is_refused(tmp_path):
    save(tmp_path, 2)
    with pytest.raises(InvalidInput, match="study"):
        checkpoint.load(tmp_path, TEMPLATE, study_hash="b" * 64)


def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    save(tmp_path, 2)
    with pytest.raises(InvalidInput, match="another method"):
        checkpoint.load(tmp_path, State(step=0, values=np.zeros((4, 3))), study_hash=HASH)


@pytest.mark.parametrize("crash_at", [1, 2])
def test_a_crash_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch, crash_at):
    save(tmp_path, 1)
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == crash_at:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    state, step, _ = checkpoint.load(tmp_path, TEMPLATE, study_hash=HASH)
    assert step == state.step == 1


def new_run(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {"study": {}}, HASH, {"silos": []})


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
    run.save_step(state_at(1), 1, {})
    old = {path.name: path.read_bytes() for path in run.path.glob("checkpoint*")}
    run.save_step(state_at(2), 2, {})
    for path in run.path.glob("checkpoint*"):
        path.unlink()
    for name, raw in old.items():
        (run.path / name).write_bytes(raw)
    with pytest.raises(InvalidInput, match="after step 2"):
        run.load_step(TEMPLATE)
    for name in old:
        (run.path / name).unlink()
    with pytest.raises(InvalidInput, match="after step 2"):
        run.load_step(TEMPLATE)


@pytest.mark.parametrize("lost", ["the line", "half the line"])
def test_a_crash_between_checkpoint_and_trace_is_healed(tmp_path, lost):
    run = new_run(tmp_path)
    run.save_step(state_at(1), 1, {"value": 1.5})
    run.save_step(state_at(2), 2, {"value": 2.5})
    trace = run.path / TRACE
    whole = trace.read_text()
    cut = whole.index("\n") + 1
    trace.write_text(whole[:cut] if lost == "the line" else whole[: cut + 8])
    state, step = run.load_step(TEMPLATE)
    assert step == state.step == 2
    assert trace.read_text() == whole


def test_a_finished_run_keeps_no_state(tmp_path):
    run = new_run(tmp_path)
    run.save_step(state_at(1), 1, {})
    assert not run.is_finished
    run.finish({}, {"is_private": True})
    assert run.is_finished
    assert not list(run.path.glob("checkpoint*"))


def test_an_unfinished_run_does_not_lose_its_state(tmp_path):
    run = new_run(tmp_path)
    run.save_step(state_at(1), 1, {})
    with pytest.raises(AssertionError):
        run.remove_state()
    assert run.load_step(TEMPLATE)[1] == 1


def test_trees_of_the_engine_are_plain_arrays():
    assert all(isinstance(leaf, (int, np.ndarray)) for leaf in jax.tree.leaves(state_at(1)))
