"""The ledger against power cuts, kills, torn files, flipped bits and other writers: zero under-counts.

Truth is what the caller was told: a charge that returned must be counted ever after, or the ledger must refuse. Run as
a script this file is the nursery of the killed and of the competing writers, so that no thread of the test runner is
forked along.
"""

import copy
import functools
import itertools
import json
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import apsw
import pytest

from silobayes.core.errors import BudgetExceeded, DamagedLedger, InvalidInput
from silobayes.privacy.events import ApproximateDPEvent
from silobayes.privacy.ledger import Account, Budget, Ledger
from silobayes.privacy.ledger_file import LedgerFile, LedgerUnavailable, connect, decode_head
from silobayes.privacy.relation import Relation, Unit
from tests.privacy import disk_model as model

BUDGET = Budget(epsilon=1e9, delta=1e-6, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
REFUSALS = (DamagedLedger, LedgerUnavailable, InvalidInput)


class Additive:
    """Basic composition: cheap, exact for these events, and it counts."""

    def delta_at(self, events, *, relation, epsilon):
        return 0.0 if self.price(events, relation=relation, delta=0.0).epsilon <= epsilon else 1.0

    def price(self, events, *, relation, delta):
        return SimpleNamespace(epsilon=sum(event.epsilon * event.count for event in events))


def charge(epsilon: float) -> ApproximateDPEvent:
    return ApproximateDPEvent(epsilon=epsilon, delta=0.0)


def account(ledger: Ledger) -> Account:
    return ledger.account("study", epsilon=ledger.budget.epsilon, delta=1e-6)


def counted(path: Path) -> set[float]:
    """The charges that a fresh process finds. Each test charge has an epsilon of its own."""
    return {entry.event.epsilon for entry in Ledger.open(path, pricing=Additive()).entries()}


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder without a slow disk under it, because these tests sync tens of thousands of times."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


# Power cuts and kills, on the disk model.


class Machine:
    """A machine with a model disk; remembers what its users were told."""

    def __init__(self) -> None:
        self.vfs = model.ModelVFS(f"model-{next(_NUMBERS)}")
        self.path = model.ROOT / "ledger.db"
        self.created = False
        self.told: set[float] = set()
        self.told_sequence = 0
        self.charges = itertools.count(1)

    @property
    def disk(self):
        return self.vfs.disk

    def storage(self, path) -> LedgerFile:
        return LedgerFile(path, connect=self.vfs.connect, files=self.disk)

    def work(self, charges: int, crash_at: int | None) -> bool:
        """Create or open, then charge; true if the machine stopped meanwhile."""
        self.disk.crash_at = crash_at
        try:
            if not self.created:
                Ledger.create(self.path, BUDGET, pricing=Additive(), storage=self.storage)
                self.created = True
            payer = account(Ledger.open(self.path, pricing=Additive(), storage=self.storage))
            for _ in range(charges):
                epsilon = float(next(self.charges))
                self.told_sequence = payer.charge(charge(epsilon)).sequence
                self.told.add(epsilon)
        except (model.Crashed, apsw.Error):
            assert self.disk.crashed, "an error that is not the crash"
            return True
        return False

    def check(self, folder: Path, fate) -> None:
        """After a power cut the ledger opens, and counts at least what was told; a half-created one is refused."""
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            self.disk.after_power_cut(fate).save(Path(scratch))
            path, head = Path(scratch) / "ledger.db", Path(scratch) / "ledger.db.head"
            assert head.exists() or not path.exists(), "a database without its anchor"
            try:
                anchor = decode_head(head.read_bytes()) if head.exists() else None
                found = counted(path)
            except InvalidInput:
                assert not self.created
                return
            assert anchor is not None
            assert anchor[0] >= self.told_sequence
            assert self.told <= found
            account(Ledger.open(path, pricing=Additive())).charge(charge(0.5))
            assert counted(path) == found | {0.5}


_NUMBERS = itertools.count()


def fates(seed: int) -> list:
    rng = random.Random(seed)
    return [model.nothing, model.everything, model.first_part(rng), model.some(rng), model.some(rng)]


def test_a_power_cut_before_or_after_any_durable_step_loses_no_charge(memory_folder):
    total = Machine()
    assert not total.work(charges=3, crash_at=None)
    assert total.disk.steps > 100
    for step in range(total.disk.steps + 1):
        machine = Machine()
        assert machine.work(charges=3, crash_at=step) == (step < total.disk.steps)
        for fate in fates(step):
            machine.check(memory_folder, fate)


def test_a_power_cut_leaves_all_of_several_charges_or_none(memory_folder):
    events = [charge(1.0), charge(2.0)]
    for step in itertools.count():
        machine = Machine()
        ledger = Ledger.create(machine.path, BUDGET, pricing=Additive(), storage=machine.storage)
        machine.created = True
        machine.disk.crash_at = machine.disk.steps + step
        try:
            ledger.pay("study", events, epsilon=BUDGET.epsilon, delta=1e-6)
            machine.told, machine.told_sequence = {1.0, 2.0}, 3
        except (model.Crashed, apsw.Error):
            assert machine.disk.crashed, "an error that is not the crash"
        for fate in fates(step):
            machine.check(memory_folder, fate)
            with tempfile.TemporaryDirectory(dir=memory_folder) as scratch:
                machine.disk.after_power_cut(fate).save(Path(scratch))
                assert counted(Path(scratch) / "ledger.db") in (set(), {1.0, 2.0})
        if not machine.disk.crashed:
            break
    assert step > 10


def test_the_disk_model_catches_a_ledger_that_does_not_sync(memory_folder, monkeypatch):
    """The test above can fail: without synchronous=FULL told charges are lost."""
    monkeypatch.setattr(
        "silobayes.privacy.ledger_file._require_durable", lambda db: db.execute("PRAGMA synchronous=OFF")
    )
    machine = Machine()
    machine.work(charges=3, crash_at=None)
    with pytest.raises((AssertionError, *REFUSALS)):
        machine.check(memory_folder, model.nothing)


def test_a_power_cut_while_recovering_from_a_kill_loses_no_charge(memory_folder):
    """After a kill the newest records may be readable and yet not safe: the anchor must not outlive them."""
    before = Machine()
    before.work(charges=1, crash_at=None)
    at_rest = before.disk.after_power_cut(model.nothing)
    for kill in itertools.count():
        killed = Machine()
        killed.created, killed.told, killed.told_sequence = True, set(before.told), before.told_sequence
        killed.vfs.disk = copy.deepcopy(at_rest)
        if not killed.work(charges=1, crash_at=kill):
            break
        for cut in itertools.count():
            machine = Machine()
            machine.created, machine.told, machine.told_sequence = True, set(killed.told), killed.told_sequence
            machine.vfs.disk = copy.deepcopy(killed.disk).after_kill()
            if not machine.work(charges=0, crash_at=cut):
                break
            machine.check(memory_folder, model.nothing)
            machine.check(memory_folder, model.first_part(random.Random(cut)))
    assert kill > 10


@pytest.mark.parametrize("runs", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_repeated_kills_and_power_cuts_lose_no_charge(memory_folder, runs):
    """Also a crash while recovering from a crash, and a power cut after a kill, when what is read is not yet safe."""
    for seed in range(runs):
        rng = random.Random(seed)
        machine = Machine()
        machine.work(charges=rng.randint(0, 3), crash_at=None)
        for _ in range(rng.randint(1, 6)):
            stopped = machine.work(charges=rng.randint(0, 3), crash_at=rng.randint(0, 90))
            fate = rng.choice(fates(rng.randrange(1 << 30)))
            killed = not stopped or rng.random() < 0.5
            machine.vfs.disk = machine.disk.after_kill() if killed else machine.disk.after_power_cut(fate)
        machine.check(memory_folder, rng.choice(fates(seed)))


def test_a_half_created_ledger_is_refused_by_open_and_by_create(memory_folder):
    seen = set()
    machine = Machine()
    machine.work(charges=0, crash_at=None)
    for step in range(machine.disk.steps):
        machine = Machine()
        machine.work(charges=0, crash_at=step)
        with tempfile.TemporaryDirectory(dir=memory_folder) as scratch:
            machine.disk.after_power_cut(model.everything).save(Path(scratch))
            path = Path(scratch) / "ledger.db"
            if path.exists():
                continue
            with pytest.raises(InvalidInput, match="a missing ledger is not an empty one"):
                Ledger.open(path)
            if not path.with_name("ledger.db.head").exists():
                seen.add("nothing")
                Ledger.create(path, BUDGET)
                continue
            with pytest.raises(InvalidInput, match=r"delete this file and create again|Delete it only if") as caught:
                Ledger.create(path, BUDGET)
            seen.add("cut short" if "cut short" in str(caught.value) else "torn head")
    assert seen == {"nothing", "cut short", "torn head"}


# Damage: every torn prefix and every flipped bit of every file.


def connect_small(path: Path):
    db = connect(path)
    db.execute("PRAGMA page_size=512").fetchall()
    return db


def specimen(folder: Path, *, in_log: bool) -> tuple[dict[str, bytes], set[float]]:
    """The files of a small ledger, at rest or as a kill leaves them (charges still in the log), and what was told."""
    path = folder / "ledger.db"
    Ledger.create(path, BUDGET, storage=functools.partial(LedgerFile, connect=connect_small))
    payer = account(Ledger.open(path, pricing=Additive()))
    payer.charge(charge(1.0))
    reader = None
    if in_log:  # an open reader keeps checkpoint and last close from emptying the log
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN").fetchall()
        reader.execute("SELECT count(*) FROM entries").fetchall()
    payer.charge(charge(2.0))
    payer.charge(charge(3.0))
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    if reader is not None:
        reader.close()
    return files, {1.0, 2.0, 3.0}


def verdict(folder: Path, files: dict[str, bytes], told: set[float]) -> str:
    """'refused' or 'counted'; fails on an under-count and on any other exception."""
    for file in folder.glob("ledger.db*"):
        file.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    try:
        records = LedgerFile(folder / "ledger.db").open()
    except REFUSALS:
        return "refused"
    assert told <= {json.loads(record.body)["epsilon"] for record in records if record.kind == "charge"}
    return "counted"


STRIDES = [
    pytest.param(False, id="sample"),
    pytest.param(True, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
]
STATES = pytest.mark.parametrize("in_log", [False, True], ids=["at_rest", "in_log"])


@STATES
def test_every_torn_prefix_is_refused_or_counts_everything(memory_folder, in_log):
    (memory_folder / "original").mkdir()
    files, told = specimen(memory_folder / "original", in_log=in_log)
    assert verdict(memory_folder, files, told) == "counted"
    for name, data in files.items():
        step = 97 if name.endswith("-shm") else 1
        verdicts = {verdict(memory_folder, files | {name: data[:size]}, told) for size in range(0, len(data), step)}
        assert verdicts == ({"counted"} if name.endswith("-shm") else {"refused"}), name


@STATES
@pytest.mark.parametrize("exhaustive", STRIDES)
def test_every_flipped_bit_is_refused_or_counts_everything(memory_folder, exhaustive, in_log):
    (memory_folder / "original").mkdir()
    files, told = specimen(memory_folder / "original", in_log=in_log)
    assert set(files) >= {"ledger.db", "ledger.db.head"} | ({"ledger.db-wal", "ledger.db-shm"} if in_log else set())
    for name, data in files.items():
        step = (1 if exhaustive else 17) * (97 if name.endswith("-shm") else 1)
        verdicts = []
        for bit in range(0, 8 * len(data), step):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            verdicts.append(verdict(memory_folder, files | {name: bytes(flipped)}, told))
        if name.endswith(".head"):
            assert set(verdicts) == {"refused"}
        elif not name.endswith("-shm"):  # rebuilt from the log by whoever comes first
            assert "refused" in verdicts


def test_without_its_anchor_a_ledger_would_lose_charges_silently(memory_folder, monkeypatch):
    """Why there is an anchor, and that the flips above can fail: SQLite drops what follows a bad frame."""
    (memory_folder / "original").mkdir()
    files, told = specimen(memory_folder / "original", in_log=True)
    log = files["ledger.db-wal"]
    torn = files | {"ledger.db-wal": log[: len(log) // 2]}
    assert verdict(memory_folder, torn, told) == "refused"
    genesis = _genesis(files)
    monkeypatch.setattr("silobayes.privacy.ledger_file.decode_head", lambda data: (0, genesis))
    with pytest.raises(AssertionError):
        verdict(memory_folder, torn, told)


def _genesis(files: dict[str, bytes]) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        for name, data in files.items():
            Path(scratch, name).write_bytes(data)
        db = sqlite3.connect(Path(scratch) / "ledger.db")
        (hash_,) = db.execute("SELECT hash FROM entries WHERE sequence = 0").fetchone()
        db.close()
        return hash_


def test_an_older_copy_of_the_database_is_refused(memory_folder):
    path = memory_folder / "ledger.db"
    Ledger.create(path, BUDGET)
    payer = account(Ledger.open(path, pricing=Additive()))
    older = path.read_bytes()
    payer.charge(charge(1.0))
    path.write_bytes(older)
    for act in (lambda: Ledger.open(path), lambda: payer.charge(charge(2.0))):
        with pytest.raises(DamagedLedger, match="older copy"):
            act()


# Kills and competing writers, in real processes.


def writer(path: Path, told: int, first: int) -> None:
    """Charge for ever (or until refused); say each charge that returned."""
    payer = account(Ledger.open(path, pricing=Additive()))
    for number in itertools.count(first):
        try:
            payer.charge(charge(float(number)) if first else charge(1.0))
        except BudgetExceeded:
            os._exit(0)
        os.write(told, number.to_bytes(8, "big"))


def fork_writer(path: Path, first: int) -> tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            writer(path, writing, first)
        finally:
            os._exit(1)
    os.close(writing)
    return child, reading


def drain(pipe: int) -> list[int]:
    data = b""
    while chunk := os.read(pipe, 1 << 16):
        data += chunk
    os.close(pipe)
    return [int.from_bytes(data[i : i + 8], "big") for i in range(0, len(data) - 7, 8)]


def nursery_kill(folder: Path, kills: int) -> dict:
    rng = random.Random(7)
    told: set[float] = set()
    missing = unsaid = 0
    path = folder / "0.db"
    for index in range(kills):
        if index % 20 == 0:
            path, told = folder / f"{index}.db", set()
            Ledger.create(path, BUDGET)
        child, pipe = fork_writer(path, first=1000 * (index + 1))
        select.select([pipe], [], [])  # its first charge has returned
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told |= {float(number) for number in drain(pipe)}
        found = counted(path)
        missing += len(told - found)
        unsaid += len(found - told)
        told = found
    return {"kills": kills, "missing": missing, "unsaid": unsaid}


def nursery_compete(folder: Path, writers: int, epsilon: float) -> dict:
    path = folder / "ledger.db"
    ledger = Ledger.create(
        path, Budget(epsilon=epsilon, delta=1e-6, relation=Relation.SUBSTITUTE, unit=Unit.ROW), pricing=Additive()
    )
    account(ledger)
    children = [fork_writer(path, first=0) for _ in range(writers)]
    told = [len(drain(pipe)) for _, pipe in children]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
    return {"told": told, "codes": codes, "entries": len(ledger.entries()), "epsilon": ledger.spent().epsilon}


def nursery(folder: Path, call: str) -> dict:
    command = [sys.executable, "-m", "tests.privacy.test_ledger_crash", str(folder), call]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_200_kills_lose_no_charge(memory_folder):
    result = nursery(memory_folder, "kill")
    assert result["kills"] == 200
    assert result["missing"] == 0
    assert result["unsaid"] > 0, "no kill fell between the commit and the answer: the test tests little"


def test_8_concurrent_writers_never_jointly_exceed_a_budget(memory_folder):
    result = nursery(memory_folder, "compete")
    assert result["codes"] == [0] * 8
    assert sum(result["told"]) == result["entries"] == 100
    assert result["epsilon"] == 100.0
    assert sum(told > 0 for told in result["told"]) >= 2, "they did not compete"


if __name__ == "__main__":
    calls = {
        "kill": lambda folder: nursery_kill(folder, 200),
        "compete": lambda folder: nursery_compete(folder, 8, 100.0),
    }
    print(json.dumps(calls[sys.argv[2]](Path(sys.argv[1]))))
