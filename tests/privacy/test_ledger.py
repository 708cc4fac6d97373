"""What the ledger promises when nothing crashes; `test_ledger_crash.py` has the rest."""

import dataclasses
import functools
import math
import os
import sqlite3
import stat
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from silobayes.core.errors import BudgetExceeded, DamagedLedger, InvalidInput, SiloBayesError
from silobayes.privacy import accounting, events, ledger_file
from silobayes.privacy.events import ApproximateDPEvent, GaussianEvent
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.ledger_file import Files, LedgerFile, LedgerUnavailable, decode_head, encode_head
from silobayes.privacy.relation import Relation, Unit

NUMBERS = {"epsilon": 10.0, "delta": 1e-6}
WORDS = {"relation": Relation.SUBSTITUTE, "unit": Unit.PERSON}


class Additive:
    """Basic composition, which is exact for the events below."""

    def delta_at(self, events, *, relation, epsilon):
        return 0.0 if self.price(events, relation=relation, delta=0.0).epsilon <= epsilon else 1.0

    def price(self, events, *, relation, delta):
        return SimpleNamespace(epsilon=sum(event.epsilon * event.count for event in events))


def pay(epsilon: float, count: int = 1) -> ApproximateDPEvent:
    return ApproximateDPEvent(epsilon=epsilon, delta=0.0, count=count)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger.create(path, Budget(**NUMBERS, **WORDS), pricing=Additive())


# Budgets.


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf, "1", True, None])
@pytest.mark.parametrize("key", ["epsilon", "delta"])
def test_a_bad_number_of_a_budget_is_named(key, value, ledger):
    with pytest.raises(InvalidInput, match=f"{key}: expected a number") as caught:
        Budget(**NUMBERS | {key: value}, **WORDS)
    assert caught.value.key == key
    with pytest.raises(InvalidInput, match=f"{key}: expected a number"):
        ledger.account("a", **NUMBERS | {key: value})
    assert ledger.accounts() == ()


@pytest.mark.parametrize("delta", [1.0, accounting.DELTA_FLOOR / 2])
def test_a_delta_that_cannot_be_certified_is_refused(delta):
    with pytest.raises(InvalidInput, match="delta: expected"):
        Budget(epsilon=1.0, delta=delta, **WORDS)


@pytest.mark.parametrize("key", ["relation", "unit"])
def test_an_unknown_word_of_a_budget_is_named(key):
    with pytest.raises(InvalidInput, match=f"{key}: expected one of"):
        Budget(**NUMBERS, **WORDS | {key: "neighbourly"})
    with pytest.raises(TypeError, match=key):
        Budget(**NUMBERS, **{word: value for word, value in WORDS.items() if word != key})


def test_a_ledger_keeps_its_budget(ledger, path):
    assert Ledger.open(path).budget == ledger.budget == Budget(**NUMBERS, **WORDS)


# Charges.


def test_a_charge_is_recorded_with_relation_and_unit(ledger, path):
    receipt = ledger.account("a", **NUMBERS).charge(pay(2.0))
    (entry,) = Ledger.open(path, pricing=Additive()).entries()
    assert (entry.sequence, entry.hash, entry.event) == (receipt.sequence, receipt.hash, receipt.event)
    assert (entry.study, entry.relation, entry.unit) == ("a", Relation.SUBSTITUTE, Unit.PERSON)
    assert entry.time.endswith("+00:00")


def test_budgets_span_studies(ledger):
    first, second = (ledger.account(name, epsilon=7.0, delta=1e-6) for name in ("a", "b"))
    first.charge(pay(6.0))
    with pytest.raises(BudgetExceeded, match=r"budget of the site.* asked 5, spent 6, left 4, together 11"):
        second.charge(pay(5.0))
    with pytest.raises(BudgetExceeded, match=r"budget of study a.* asked 2, spent 6, left 1, together 8"):
        first.charge(pay(2.0))
    second.charge(pay(4.0))
    assert (first.spent().epsilon, second.spent().epsilon, ledger.spent().epsilon) == (6.0, 4.0, 10.0)
    assert (first.spent().epsilon_left, second.spent().epsilon_left, ledger.spent().epsilon_left) == (1.0, 3.0, 0.0)
    assert [len(some.entries()) for some in (first, second, ledger)] == [1, 1, 2]


def test_a_refused_charge_changes_nothing(ledger, path):
    account = ledger.account("a", **NUMBERS)
    account.charge(pay(10.0))
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    for event, error in ((pay(0.001), BudgetExceeded), ("gaussian", InvalidInput), (None, InvalidInput)):
        with pytest.raises(error):
            account.charge(event)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_several_charges_are_paid_together_or_not_at_all(ledger):
    with pytest.raises(BudgetExceeded, match="together 11"):
        ledger.pay("a", [pay(5.0), pay(6.0)], **NUMBERS)
    assert (ledger.entries(), ledger.accounts()) == ((), ())
    account = ledger.pay("a", [pay(5.0), pay(1.0)], **NUMBERS)
    account.charge(pay(2.0))
    assert [entry.event for entry in account.entries()] == [pay(5.0), pay(1.0), pay(2.0)]
    with pytest.raises(InvalidInput, match="the cap that study a was opened with"):
        ledger.pay("a", [pay(1.0)], **{**NUMBERS, "epsilon": 9.0})
    assert ledger.spent().charges == 3


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0])
def test_a_price_that_is_not_a_number_is_refused(ledger, monkeypatch, price):
    monkeypatch.setattr(Additive, "delta_at", lambda self, events, *, relation, epsilon: price)
    priced = SimpleNamespace(epsilon=price)
    monkeypatch.setattr(Additive, "price", lambda self, events, *, relation, delta: priced)
    with pytest.raises(BudgetExceeded, match="asked inf"):
        ledger.account("a", **NUMBERS).charge(pay(1.0))
    assert ledger.entries() == ()


def test_an_event_that_cannot_be_priced_is_not_charged(ledger, monkeypatch):
    def refuse(self, events, *, relation, epsilon):
        raise InvalidInput("mechanism", "one with a price", "x", "Register one.")

    monkeypatch.setattr(Additive, "delta_at", refuse)
    with pytest.raises(InvalidInput, match="mechanism"):
        ledger.account("a", **NUMBERS).charge(pay(1.0))
    assert ledger.entries() == ()


def test_an_event_that_its_json_does_not_describe_is_refused(ledger):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Hidden(ApproximateDPEvent):  # not registered: would be read back as its parent, without `more`
        more: float

    with pytest.raises(InvalidInput):
        ledger.account("a", **NUMBERS).charge(Hidden(epsilon=0.0, delta=0.0, more=5.0))
    assert ledger.entries() == ()


def test_a_study_s_cap_is_fixed_by_its_first_use(ledger, path):
    ledger.account("a", epsilon=3.0, delta=1e-7)
    again = Ledger.open(path, pricing=Additive())
    assert again.account("a", epsilon=3.0, delta=1e-7).cap.epsilon == 3.0
    for key, value in (("epsilon", 4.0), ("delta", 1e-8)):
        with pytest.raises(InvalidInput, match=f"{key}: .*study a was opened with"):
            again.account("a", **{"epsilon": 3.0, "delta": 1e-7} | {key: value})
    assert [(account.study, account.cap.epsilon) for account in again.accounts()] == [("a", 3.0)]


@pytest.mark.parametrize("key", ["epsilon", "delta"])
def test_a_cap_lies_inside_the_budget(ledger, key):
    with pytest.raises(InvalidInput, match=f"{key}: expected at most the site's"):
        ledger.account("a", **NUMBERS | {key: NUMBERS[key] * 1.001})


@pytest.mark.parametrize("study", ["", " a", "a\n", "\ud800", "x" * 201, None, 3])
def test_a_bad_study_name_is_refused(ledger, study):
    with pytest.raises(InvalidInput, match="study"):
        ledger.account(study, **NUMBERS)


def test_the_accountant_prices_all_charges_together(path):
    """Four Gaussians of mu = 2 / 8 compose to mu = 0.5, far below four times the epsilon of one."""
    ledger = Ledger.create(path, Budget(epsilon=2.0, delta=1e-5, **WORDS))
    account = ledger.account("a", epsilon=2.0, delta=1e-5)
    event = GaussianEvent(clip_norm=1.0, std=8.0)
    for _ in range(4):
        receipt = account.charge(event)
    once = accounting.delta_at(
        [dataclasses.replace(event, count=4)], relation=ledger.budget.relation, epsilon=ledger.budget.epsilon
    )
    assert receipt.study_delta == receipt.site_delta == once <= 1e-5
    assert ledger.spent().epsilon == pytest.approx(_gaussian_epsilon(0.5, 1e-5), rel=1e-9)
    with pytest.raises(BudgetExceeded):
        account.charge(event)
    assert len(ledger.entries()) == 4


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Balle and Wang 2018, Theorem 8, solved independently of the accountant."""
    law = NormalDist()

    def excess(epsilon: float) -> float:
        return law.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * law.cdf(-mu / 2 - epsilon / mu) - delta

    return brentq(excess, 0.0, 50.0, xtol=1e-13)


# Files.


def test_the_files_are_readable_by_their_owner_only(path):
    modes: set[tuple[str, int]] = set()

    class Watching(Files):
        def write(self, path, data, *, exclusive):
            super().write(path, data, exclusive=exclusive)
            look()

    def look() -> None:
        modes.update((file.name, stat.S_IMODE(file.stat().st_mode)) for file in path.parent.iterdir())

    before = os.umask(0)
    try:
        storage = functools.partial(LedgerFile, files=Watching())
        Ledger.create(path, Budget(**NUMBERS, **WORDS), pricing=Additive(), storage=storage).account("a", **NUMBERS)
        look()
    finally:
        os.umask(before)
    assert {"ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.head", "ledger.db.head.new"} <= dict(modes).keys()
    assert {mode for _, mode in modes} == {0o600}


def test_every_session_is_wal_and_fully_synced(path):
    seen = []

    def watched(where):
        db = sqlite3.connect(where, isolation_level=None, factory=Watched)
        db.execute("PRAGMA synchronous=OFF")
        return db

    class Watched(sqlite3.Connection):
        def close(self):
            seen.append([self.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")])
            super().close()

    ledger = Ledger.create(
        path, Budget(**NUMBERS, **WORDS), pricing=Additive(), storage=functools.partial(LedgerFile, connect=watched)
    )
    ledger.account("a", **NUMBERS).charge(pay(1.0))
    assert len(seen) >= 4
    assert all(pair == ["wal", 2] for pair in seen)


def test_append_returns_only_after_record_and_anchor_are_written(ledger, path):
    receipt = ledger.account("a", **NUMBERS).charge(pay(1.0))
    assert decode_head((path.parent / "ledger.db.head").read_bytes()) == (receipt.sequence, receipt.hash)


def test_a_charge_whose_anchor_fails_raises_and_stays_counted(ledger, path, monkeypatch):
    account = ledger.account("a", **NUMBERS)

    def full(self, path, data, *, exclusive):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Files, "write", full)
        with pytest.raises(LedgerUnavailable, match=r"No space left.*Nothing may be released"):
            account.charge(pay(1.0))
    assert Ledger.open(path, pricing=Additive()).spent().epsilon == 1.0
    assert account.charge(pay(2.0)).sequence == 3


def test_a_missing_ledger_is_not_an_empty_one(ledger, path):
    account = ledger.account("a", **NUMBERS)
    for name in ("ledger.db.head", "ledger.db"):
        kept = (path.parent / name).read_bytes()
        (path.parent / name).unlink()
        for act in (lambda: Ledger.open(path), lambda: account.charge(pay(1.0)), ledger.entries):
            with pytest.raises(InvalidInput, match="a missing ledger is not an empty one"):
                act()
        assert not (path.parent / name).exists()
        (path.parent / name).write_bytes(kept)


@pytest.mark.parametrize("name", ["ledger.db", "ledger.db.head", "ledger.db-wal", "ledger.db-journal"])
def test_create_refuses_a_place_with_anything_of_a_ledger(path, name):
    (path.parent / name).write_bytes(b"anything")
    with pytest.raises(InvalidInput, match="path: expected a place without a ledger"):
        Ledger.create(path, Budget(**NUMBERS, **WORDS))
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_create_refuses_an_existing_ledger(ledger, path):
    with pytest.raises(InvalidInput, match="Open it instead"):
        Ledger.create(path, ledger.budget)


def test_a_link_leads_to_the_same_ledger(ledger, path):
    (path.parent / "link.db").symlink_to(path)
    Ledger.open(path.parent / "link.db", pricing=Additive()).account("a", **NUMBERS).charge(pay(1.0))
    assert ledger.spent().epsilon == 1.0
    assert not (path.parent / "link.db.head").exists()


@pytest.mark.parametrize(
    "statement",
    ["UPDATE entries SET study = 'b'", "DELETE FROM entries", "DELETE FROM entries WHERE sequence = 2"],
)
def test_records_can_be_neither_changed_nor_deleted(ledger, path, statement):
    ledger.account("a", **NUMBERS).charge(pay(1.0))
    db = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute(statement)
    db.close()


FORGERIES = {
    "a trigger dropped": "DROP TRIGGER entries_no_delete",
    "a table added": "CREATE TABLE more (x)",
    "last charge deleted": "DELETE FROM entries WHERE sequence = 3",
    "last charge changed": "UPDATE entries SET body = replace(body, '2.0', '1.0') WHERE sequence = 3",
    "middle charge deleted": "DELETE FROM entries WHERE sequence = 2",
    "middle charge changed": "UPDATE entries SET body = replace(body, '2.0', '1.0') WHERE sequence = 2",
    "unit swapped": "UPDATE entries SET unit = 'row' WHERE sequence = 3",
    "budget raised": "UPDATE entries SET body = replace(body, '10.0', '90.0') WHERE sequence = 0",
    "a wrong type": "UPDATE entries SET body = CAST(body AS BLOB) WHERE sequence = 3",
    "another format": "PRAGMA user_version = 2",
    "out of WAL": "PRAGMA journal_mode = DELETE",
}


def forge(path: Path, statement: str) -> None:
    """Run the statement with the triggers out of the way, and put them back."""
    triggers = {name: sql for name, sql in ledger_file._SCHEMA.items() if "TRIGGER" in sql}
    db = sqlite3.connect(path, isolation_level=None)
    if statement.startswith(("UPDATE", "DELETE")):
        for name in triggers:
            db.execute(f"DROP TRIGGER {name}")
    db.execute(statement).fetchall()
    if statement.startswith(("UPDATE", "DELETE")):
        for sql in triggers.values():
            db.execute(sql)
    db.close()


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_file_that_is_not_what_was_written_is_refused(ledger, path, forgery):
    account = ledger.account("a", **NUMBERS)
    account.charge(pay(2.0))
    account.charge(pay(2.0))
    forge(path, FORGERIES[forgery])
    with pytest.raises(DamagedLedger, match="Release nothing more from this data set"):
        Ledger.open(path)
    if not forgery.startswith(("middle", "budget")):  # a running ledger has those in its memory, see below
        with pytest.raises(DamagedLedger):
            account.charge(pay(1.0))


def test_a_running_ledger_counts_what_it_has_seen_even_if_the_disk_forgets(ledger, path):
    account = ledger.account("a", **NUMBERS)
    account.charge(pay(6.0))
    account.charge(pay(1.0))
    forge(path, FORGERIES["middle charge deleted"])
    with pytest.raises(BudgetExceeded, match="spent 7"):
        account.charge(pay(4.0))


def test_a_database_that_fails_sqlite_s_own_check_is_refused(ledger, path):
    """An orphaned page: the records are all there, yet something wrote to this file that is not SQLite."""
    data = bytearray(path.read_bytes())
    pages = int.from_bytes(data[28:32], "big")
    data[28:32] = (pages + 1).to_bytes(4, "big")
    path.write_bytes(data + bytes(len(data) // pages))
    with pytest.raises(DamagedLedger, match="integrity check"):
        Ledger.open(path)


def test_the_anchor_of_another_ledger_is_refused(ledger, path):
    other = Ledger.create(path.parent / "other.db", ledger.budget)
    assert other.budget == ledger.budget
    (path.parent / "ledger.db.head").write_bytes((path.parent / "other.db.head").read_bytes())
    with pytest.raises(DamagedLedger, match="without the acknowledged record 0"):
        Ledger.open(path)


@given(st.integers(0, 2**63), st.text("0123456789abcdef", min_size=64, max_size=64))
def test_an_anchor_reads_back_and_nothing_else_does(sequence, hash_):
    data = encode_head(sequence, hash_)
    assert decode_head(data) == (sequence, hash_)
    for other in (data[:-1], data + b"\n", data.replace(b" 1\n", b" 2\n"), b"\xff", b""):
        assert decode_head(other) is None


def test_a_locked_ledger_is_unavailable(ledger, path, monkeypatch):
    monkeypatch.setattr(ledger_file, "BUSY_TIMEOUT_S", 0.05)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="locked"):
        ledger.account("a", **NUMBERS)
    blocker.close()


def test_an_event_of_a_newer_version_blocks_charges_until_it_can_be_priced(ledger, path, monkeypatch):
    account = ledger.account("a", **NUMBERS)

    @events.event("from_the_future")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Future(ApproximateDPEvent):
        pass

    try:
        account.charge(Future(epsilon=1.0, delta=0.0))
    finally:
        del events._REGISTRY["from_the_future"]
    from silobayes.privacy import ledger as module

    module._read_event.cache_clear()
    with pytest.raises(LedgerUnavailable, match="install the version that wrote it"):
        Ledger.open(path, pricing=Additive()).account("a", **NUMBERS).charge(pay(1.0))


def test_every_error_has_a_code():
    assert issubclass(LedgerUnavailable, SiloBayesError)
    assert LedgerUnavailable.code == "ledger_unavailable"
