"""kill -9 at any moment of a run with real noise: it ends, pays once, shows nothing twice and leaks nothing."""

import io
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.engines import local
from silobayes.engines.local import resume, run
from silobayes.privacy.ledger import Ledger
from silobayes.runs.directory import private_place
from tests.engines.test_local import PROTOCOLS, Stop, make_inputs, same, stop_after
from tests.runs.killed import CANARY, NUM_VISITS

HERE = Path(__file__).parents[2]
KILLS_PER_RUN = 4
NUM_DRAWS = 3 * NUM_VISITS  # of three silos


class KilledRun:
    """One run, in process after process."""

    def __init__(self, out: Path, name: str) -> None:
        self.out, self.name = out, name
        self.draws = out.with_name(out.name + ".draws")
        self.trace, self.ledgers = b"", {}

    def start(self, keeps_compiled: bool) -> subprocess.Popen:
        """A process that is about to begin; who may be killed writes no compiled code, which would be torn."""
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(self.out.parent / "compiled")}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0" if keeps_compiled else "1e9"}
        command = [sys.executable, "-m", "tests.runs.killed", str(self.out), self.name]
        process = subprocess.Popen(command, env=environment, cwd=HERE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def finish(self) -> float:
        """Let it end, and look; the seconds that it took."""
        seen = self._drawn()
        process = self.start(keeps_compiled=True)
        began = time.monotonic()
        assert process.wait(300) == 0
        took = time.monotonic() - began
        self.look(seen)
        assert len(self.trace.splitlines()) == NUM_VISITS
        assert (self.out / "certificate.json").exists()
        assert not private_place(self.out).exists()
        assert not list(self.out.glob("checkpoint*"))
        return took

    def kill_after(self, is_time) -> bool:
        """Kill it when `is_time(seconds)`, and look; False if it ended before."""
        seen = self._drawn()
        process = self.start(keeps_compiled=False)
        began = time.monotonic()
        while process.poll() is None and not is_time(time.monotonic() - began):
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        code = process.wait()
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            self.look(seen)
            return False
        if not (self.out / "run.json").exists():  # it died before there was a run: nothing was charged, nothing drawn
            assert not list(self.out.rglob("*.ledger"))
            shutil.rmtree(self.out, ignore_errors=True)
            shutil.rmtree(private_place(self.out), ignore_errors=True)
            return True
        self.look(seen)
        self.look_for_canaries()
        return True

    def look(self, seen: int) -> None:
        """At what the last process left: `seen` draws were made before it."""
        before = self.trace
        path = self.out / "trace.jsonl"
        self.trace = path.read_bytes() if path.exists() else b""
        assert self.trace.startswith(before), "what was shown has changed"
        shown = before[: before.rfind(b"\n") + 1].count(b"\n")
        drawn = [int(visit) for visit in self._lines()[seen:]]
        assert all(visit >= shown for visit in drawn), "what was shown was drawn again"
        # Twice in one process neither, and no visit is left out.
        assert sorted(set(drawn)) == list(range(min(drawn, default=0), max(drawn, default=-1) + 1))
        assert all(drawn.count(visit) <= 3 for visit in set(drawn))
        ledgers = self._entries()
        for silo, entries in self.ledgers.items():
            if entries:
                assert ledgers[silo] == entries, "a crash has changed what is charged"
        self.ledgers = ledgers
        accounts = {account for entries in ledgers.values() for account, _ in entries}
        assert len(accounts) <= 1
        if self.trace:
            assert [len(entries) for entries in ledgers.values()] == [1, 1, 1]

    def look_for_canaries(self) -> None:
        """What silos keep for themselves is in their folder and nowhere else."""
        files = [path.read_bytes() for path in self.out.rglob("*") if path.is_file()]
        files += [path.name.encode() for path in self.out.rglob("*")]
        assert not any(mark in content for content in files for mark in marks_of(CANARY))
        stored = [path.read_bytes() for path in private_place(self.out).glob("states-*.npz")]
        if (self.out / "checkpoint.json").exists():
            assert any(np.float64(CANARY).tobytes() in content for content in stored)
        if self.name != "virtual_clients":
            return  # there a silo's factor follows from what it released
        for content in stored:
            with np.load(io.BytesIO(content)) as states:
                numbers = {float(x) for name in states.files if name.startswith("leaves") for x in states[name].flat}
            for number in numbers - {0.0}:
                assert not any(mark in content for content in files for mark in marks_of(number))

    def _lines(self) -> list[str]:
        return self.draws.read_text().splitlines() if self.draws.exists() else []

    def drawn(self, count: int) -> Callable[[float], bool]:
        """Whether so many draws were made from now on, whatever the clock says."""
        last = self._drawn() + count
        return lambda _: self._drawn() >= last

    def _drawn(self) -> int:
        return len(self._lines())

    def _entries(self) -> dict[str, list]:
        """What is charged, read from a copy: opening a ledger tidies up after a crash, and that is the run's to do."""
        copy = self.out.with_name(self.out.name + ".copy")
        shutil.rmtree(copy, ignore_errors=True)
        if not (self.out / "ledgers").exists():
            return {}
        shutil.copytree(self.out / "ledgers", copy)
        found = {}
        for path in sorted(copy.glob("*.ledger")):
            with suppress(Exception):  # half created: it is not there yet
                found[path.name] = [(entry.study, entry.event) for entry in Ledger.open(path).entries()]
        return found


def passed(moment: float) -> Callable[[float], bool]:
    """Whether so many seconds have passed."""
    return lambda seconds: seconds >= moment


def marks_of(number: float) -> list[bytes]:
    """A number as bytes, as text."""
    return [np.float64(number).tobytes(), repr(number).encode()[:14]]


@pytest.mark.parametrize("name", ["virtual_clients"])
def test_a_killed_run_goes_on_and_shows_nothing_twice(name, tmp_path):
    """Killed once, between the first commit of a visit and the last."""
    killed = KilledRun(tmp_path / "run", name)
    trace = killed.out / "trace.jsonl"
    assert killed.kill_after(lambda seconds: trace.exists() and trace.stat().st_size > 0)
    assert 0 < len(killed.trace.splitlines()) < NUM_VISITS
    assert list(killed.ledgers.values())
    killed.finish()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["virtual_clients", "dp_optimisation"])
def test_runs_killed_at_20_random_moments_go_on_and_end(name, tmp_path):
    """A run is killed a few times, then it may end.

    Moments are uniform over the time that a run takes or, by turns, over the first half of its draws: where the machine
    is busy, few of the others fall on visits.
    """
    rng = random.Random(13)
    longest = KilledRun(tmp_path / "whole", name).finish()
    longest = min(longest, KilledRun(tmp_path / "again", name).finish())  # compiled by the first
    kills = between = 0
    while kills < 20:
        killed = KilledRun(tmp_path / f"run-{kills}", name)
        for turn in range(KILLS_PER_RUN):
            moment, draws = rng.random() * longest, rng.randrange(1, NUM_DRAWS // 2)
            if not killed.kill_after(killed.drawn(draws) if turn % 2 else passed(moment)):
                break
            kills += 1
            between += 0 < len(killed.trace.splitlines()) < NUM_VISITS
        killed.finish()
    assert between >= 5, "few kills fell on visits: the test tests little"


def test_a_run_that_lost_its_silos_states_is_refused(tmp_path):
    inputs, out = make_inputs(**PROTOCOLS["virtual_clients"]), tmp_path / "run"
    with pytest.raises(Stop):
        run(inputs, out, stop_after(1))
    shutil.rmtree(private_place(out))
    seen = []
    with pytest.raises(InvalidInput, match=r"run\.silos") as refused:
        resume(inputs, out, seen.append)
    assert "start a new run" in str(refused.value)
    assert not seen


def test_states_left_over_by_a_run_that_was_deleted_are_named(tmp_path):
    inputs, out = make_inputs(**PROTOCOLS["virtual_clients"]), tmp_path / "run"
    with pytest.raises(Stop):
        run(inputs, out, stop_after(1))
    shutil.rmtree(out)
    with pytest.raises(InvalidInput) as refused:
        run(inputs, out)
    assert str(private_place(out)) in str(refused.value)
    assert "Remove" in str(refused.value)
    assert not out.exists()
    shutil.rmtree(private_place(out))
    run(inputs, out)


def test_an_interrupted_run_keeps_all_visits_it_has_made(tmp_path):
    """Ctrl-C, wherever it comes: visits are committed by a clock, and now."""
    inputs, out = make_inputs(**PROTOCOLS["virtual_clients"]), tmp_path / "run"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what they put aside ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(inputs, out, lambda now: signal.raise_signal(signal.SIGINT) if now.step == 3 else None)
    finally:
        signal.signal(signal.SIGINT, before)
    trace = (out / "trace.jsonl").read_bytes()
    assert len(trace.splitlines()) == 3
    seen = []
    resume(inputs, out, lambda now: seen.append(now.step))
    assert seen == [4]
    assert (out / "trace.jsonl").read_bytes().startswith(trace)


def test_an_interrupt_at_any_line_of_the_clock_can_be_resumed(tmp_path, monkeypatch):
    """State and step are committed together: one ahead of the other would make a visit twice and pay it once."""
    inputs = make_inputs(mode="none", rounds=3, steps=2)
    whole = run(inputs, tmp_path / "whole")
    clock = {local._Clock.tick.__code__, local._Clock.commit.__code__}
    monkeypatch.setattr(local, "_COMMIT_S", 1e9)
    for stop_at in range(100):
        out, lines = tmp_path / f"run-{stop_at}", itertools.count()

        def interrupting(frame, event, argument, lines=lines, stop_at=stop_at):
            if frame.f_code not in clock:
                return None
            if event == "line" and next(lines) == stop_at:
                raise KeyboardInterrupt
            return interrupting

        before = sys.gettrace()
        sys.settrace(interrupting)
        try:
            run(inputs, out)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert same(resume(inputs, out), whole)
        assert (out / "trace.jsonl").read_bytes() == (tmp_path / "whole" / "trace.jsonl").read_bytes()
    assert 10 < stop_at < 99
