"""What a ledger is on disk: one append-only SQLite table, a hash chain through it, and an anchor file beside it.

`PATH` is the database (WAL, synchronous=FULL, 0600). Each record carries the SHA-256 of all its fields and of the
record before it; record 0 is the budget with a random id. `PATH.head` is the anchor: sequence and hash of the newest
record that was acknowledged. It is needed because SQLite's recovery silently drops every frame of a write-ahead log
behind the first bad checksum: a flipped bit there would give back committed charges without any error. A database
that does not contain its anchor is refused. A database ahead of its anchor is what a crash between the two leaves; it
counts.

Connections live for one operation, so none is carried over a fork, and the last one to close moves the log into the
database. POSIX only: it relies on file modes, atomic rename and the sync of a directory.

Guarantees:
    Append returns only after the record and the anchor are durable.
    A file that is not what was written is refused, never repaired.
    The files are readable by their owner only.
    A half-created ledger is refused by open and by create.
"""

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol

from silobayes.core.errors import DamagedLedger, InvalidInput, SiloBayesError

FORMAT = 1
APPLICATION_ID = 0x53424C47  # "SBLG"
BUSY_TIMEOUT_S = 60.0
NO_HASH = "0" * 64
_COLUMNS = ("sequence", "kind", "study", "body", "relation", "unit", "time", "prev_hash", "hash")

# Compared word for word on every opening: a flipped bit in a trigger would otherwise lift the ban it stands for.
_SCHEMA = {
    "entries": "CREATE TABLE entries (sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, study TEXT NOT NULL, "
    "body TEXT NOT NULL, relation TEXT NOT NULL, unit TEXT NOT NULL, time TEXT NOT NULL, "
    "prev_hash TEXT NOT NULL, hash TEXT NOT NULL)",
    "entries_no_delete": "CREATE TRIGGER entries_no_delete BEFORE DELETE ON entries "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
    "entries_no_update": "CREATE TRIGGER entries_no_update BEFORE UPDATE ON entries "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
}

_UNREACHABLE = tuple(
    f"SQLITE_{name}" for name in ("BUSY", "LOCKED", "FULL", "READONLY", "IOERR", "CANTOPEN", "PERM", "AUTH", "NOMEM")
)
_WHAT_TO_DO = (
    "Release nothing more from this data set and keep the files as they are. Bring back the newest intact copy of the "
    "database and its .head only if you can prove that nothing was charged after it; otherwise treat the whole budget "
    "as spent. Nothing was charged and nothing was repaired."
)


class LedgerUnavailable(SiloBayesError):
    """The ledger could not be reached (locked, full or read-only disk, no rights); nothing may be released."""

    code: ClassVar[str] = "ledger_unavailable"


def damaged(path: Path, reason: str) -> DamagedLedger:
    """The error for a ledger that is not what was written, with what its owner should do."""
    return DamagedLedger(f"ledger {path}: expected the records that were written, found {reason}. {_WHAT_TO_DO}")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a record says; `body` is JSON with sorted keys."""

    kind: str
    study: str
    body: str
    relation: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Record(Draft):
    """A draft with its place in the chain."""

    sequence: int
    time: str
    prev_hash: str
    hash: str


def digest(*, sequence: int, time: str, prev_hash: str, draft: Draft) -> str:
    """SHA-256 over all fields, each prefixed by its length so that no two records encode alike."""
    total = hashlib.sha256()
    for text in (
        f"silobayes-ledger-{FORMAT}",
        str(sequence),
        draft.kind,
        draft.study,
        draft.body,
        draft.relation,
        draft.unit,
        time,
        prev_hash,
    ):
        field = text.encode()
        total.update(len(field).to_bytes(8, "big") + field)
    return total.hexdigest()


def seal(draft: Draft, *, sequence: int, prev_hash: str) -> Record:
    """The record that follows `prev_hash`, stamped with the present UTC time."""
    time = datetime.now(UTC).isoformat(timespec="microseconds")
    return Record(
        kind=draft.kind,
        study=draft.study,
        body=draft.body,
        relation=draft.relation,
        unit=draft.unit,
        sequence=sequence,
        time=time,
        prev_hash=prev_hash,
        hash=digest(sequence=sequence, time=time, prev_hash=prev_hash, draft=draft),
    )


class Cursor(Protocol):
    """The little of a cursor that is used."""

    def fetchall(self) -> list[Any]:
        """All remaining rows."""
        ...


class Connection(Protocol):
    """The little of `sqlite3.Connection` that is used; the tests bring one over a disk that loses bytes."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Cursor:
        """Run one statement in autocommit mode."""
        ...

    def close(self) -> None:
        """Close; the last one out moves the log into the database."""
        ...


def connect(path: Path) -> Connection:
    """Open an existing file; never creates one."""
    return sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


class Files:
    """The file operations around the database, each one step that a crash can fall before or after."""

    def exists(self, path: Path) -> bool:
        """Whether the name is taken, be it by a dangling link."""
        return os.path.lexists(path)

    def read(self, path: Path) -> bytes:
        """The whole content."""
        return path.read_bytes()

    def write(self, path: Path, data: bytes, *, exclusive: bool) -> None:
        """Write and sync a file of mode 0600; its name is durable only after `sync_directory`."""
        flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC)
        descriptor = os.open(path, flags, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; durable only after `sync_directory`."""
        os.rename(source, target)

    def sync_directory(self, path: Path) -> None:
        """Make the names in the folder durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def encode_head(sequence: int, hash_: str) -> bytes:
    """The anchor's bytes: three lines, the last a checksum of the others."""
    text = f"silobayes-ledger-head {FORMAT}\n{sequence} {hash_}\n"
    return f"{text}{hashlib.sha256(text.encode()).hexdigest()}\n".encode()


def decode_head(data: bytes) -> tuple[int, str] | None:
    """Sequence and hash, or None unless the bytes are exactly what `encode_head` writes."""
    with suppress(ValueError):
        _, line, *_ = data.decode().split("\n")
        sequence, hash_ = line.split(" ")
        if encode_head(int(sequence), hash_) == data:
            return int(sequence), hash_
    return None


class LedgerFile:
    """An append-only list of records that survives crashes and refuses damage."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        connect: Callable[[Path], Connection] = connect,
        files: Files | None = None,
    ) -> None:
        # Resolved, so that a link cannot give one database two anchors (SQLite itself resolves links for its log).
        self.path = Path(path).resolve()
        self.head_path = self.path.with_name(self.path.name + ".head")
        self._connect = connect
        self._files = files or Files()
        self._verified: tuple[Record, ...] = ()

    def create(self, draft: Draft) -> None:
        """Write a new ledger whose record 0 is `draft`; refuse if anything of a ledger is already there.

        The database is built under another name, then the anchor is written, then the database gets its name: a
        crash leaves either nothing, or an anchor without database, which both `open` and `create` refuse.
        """
        for suffix in ("", ".head", "-wal", "-shm", "-journal"):
            found = self.path.with_name(self.path.name + suffix)
            if self._files.exists(found):
                raise self._taken(found)
        draft_path = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.new")
        genesis = seal(draft, sequence=0, prev_hash=NO_HASH)
        with self._translated():
            self._files.write(draft_path, b"", exclusive=True)
            self._build(draft_path, genesis)
            try:
                self._files.write(self.head_path, encode_head(0, genesis.hash), exclusive=True)
            except FileExistsError:  # another process creates it at this very moment
                raise self._taken(self.head_path) from None
            self._files.sync_directory(self.path.parent)
            self._files.rename(draft_path, self.path)
            self._files.sync_directory(self.path.parent)

    def open(self) -> tuple[Record, ...]:
        """Verify everything, and carry the anchor over what a crash left behind it; returns all records."""
        self._require_present()
        with self._session() as db:
            with _immediate(db):
                chain, anchored = self._verify(db)
            if anchored < chain[-1].sequence:
                self._settle(db)
            return chain

    def records(self) -> tuple[Record, ...]:
        """All records as they are on disk now, verified."""
        self._require_present()
        with self._session() as db, _immediate(db):
            return self._verify(db)[0]

    def append(self, decide: Callable[[tuple[Record, ...]], Sequence[Draft]]) -> tuple[Record, ...]:
        """Append what `decide` makes of the present records; no other writer comes between reading and writing.

        `decide` raises to refuse, or returns nothing if there is nothing to write; either way nothing happened.
        Several drafts are one transaction: all of them or none.
        """
        self._require_present()
        with self._session() as db:
            with _immediate(db):
                chain, _ = self._verify(db)
                records: list[Record] = []
                for draft in decide(chain):
                    last = (records or chain)[-1]
                    records.append(seal(draft, sequence=last.sequence + 1, prev_hash=last.hash))
                    _insert(db, records[-1])
            if records:
                self._settle(db)
            return tuple(records)

    def _build(self, path: Path, genesis: Record) -> None:
        db = self._connect(path)
        try:
            db.execute("PRAGMA journal_mode=WAL").fetchall()
            _require_durable(db)
            with _immediate(db):
                db.execute(f"PRAGMA application_id={APPLICATION_ID}").fetchall()
                db.execute(f"PRAGMA user_version={FORMAT}").fetchall()
                for statement in _SCHEMA.values():
                    db.execute(statement).fetchall()
                _insert(db, genesis)
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            db.close()

    def _require_present(self) -> None:
        for path in (self.path, self.head_path):
            if not self._files.exists(path):
                raise InvalidInput(
                    "path",
                    "a ledger with its .head beside it (a missing ledger is not an empty one)",
                    f"no {path}",
                    "Check the path. If the data set never had a ledger, create one (`silobayes ledger create`, or "
                    "Ledger.create in Python); if it had, treat its budget as spent until the files are found.",
                )

    def _taken(self, found: Path) -> InvalidInput:
        fix = "Open it instead. Delete it only if you are certain that nothing was ever charged to this data set."
        if found == self.head_path and (head := decode_head(self._files.read(found))):
            fix = "The creation of this ledger was cut short before any charge: delete this file and create again."
            if head[0] > 0:
                fix = f"The ledger itself is missing: {head[0] + 1} records were written. Bring {self.path.name} back."
        return InvalidInput("path", "a place without a ledger", str(found), fix)

    def _verify(self, db: Connection) -> tuple[tuple[Record, ...], int]:
        """All records and the anchored sequence; raises `DamagedLedger` at the first doubt.

        Records that this object has verified before are taken from memory, and only the last of them is compared.
        """
        if db.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
            raise damaged(self.path, "a database that fails SQLite's integrity check")
        marks = [db.execute(f"PRAGMA {name}").fetchall() for name in ("application_id", "user_version")]
        if marks != [[(APPLICATION_ID,)], [(FORMAT,)]]:
            raise damaged(self.path, f"a database that is not a ledger of format {FORMAT}")
        if dict(db.execute("SELECT name, sql FROM sqlite_master").fetchall()) != _SCHEMA:
            raise damaged(self.path, "tables or triggers that were changed")
        known = self._verified
        first = max(len(known) - 1, 0)
        rows = db.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM entries WHERE sequence >= ? ORDER BY sequence", (first,)
        ).fetchall()
        fresh = self._link(rows, sequence=first, prev_hash=known[first - 1].hash if first else NO_HASH)
        if not fresh or (known and fresh[0] != known[-1]):
            raise damaged(self.path, "fewer or other records than were read before (an older copy?)")
        chain = known[:first] + fresh
        head = decode_head(self._files.read(self.head_path))
        if head is None:
            raise damaged(self.path, f"an unreadable anchor {self.head_path.name}")
        sequence, hash_ = head
        if not 0 <= sequence < len(chain) or chain[sequence].hash != hash_:
            raise damaged(
                self.path,
                f"{len(chain)} records without the acknowledged record {sequence} of {self.head_path.name}: "
                "charges were lost or an older copy was put back",
            )
        self._verified = chain
        return chain, sequence

    def _link(self, rows: list[Any], *, sequence: int, prev_hash: str) -> tuple[Record, ...]:
        chain: list[Record] = []
        for row in rows:
            if type(row[0]) is not int or not all(type(value) is str for value in row[1:]):
                raise damaged(self.path, f"record {sequence} with fields of a wrong type")
            record = Record(**dict(zip(_COLUMNS, row, strict=True)))
            expected = digest(sequence=sequence, time=record.time, prev_hash=prev_hash, draft=record)
            if record.sequence != sequence or record.prev_hash != prev_hash or record.hash != expected:
                raise damaged(self.path, f"record {sequence} missing or changed")
            chain.append(record)
            sequence, prev_hash = sequence + 1, expected
        return tuple(chain)

    def _settle(self, db: Connection) -> None:
        """Advance the anchor to the newest record. SQLite's write lock is the lock of the anchor.

        The checkpoint first syncs the log: after a kill its newest frames may be readable and yet not on disk, and
        an anchor must not outlive its record in a power cut.
        """
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        with _immediate(db):
            chain, _ = self._verify(db)
            scratch = self.head_path.with_name(self.head_path.name + ".new")
            self._files.write(scratch, encode_head(chain[-1].sequence, chain[-1].hash), exclusive=False)
            self._files.rename(scratch, self.head_path)
            self._files.sync_directory(self.path.parent)

    @contextmanager
    def _session(self) -> Iterator[Connection]:
        with self._translated():
            db = self._connect(self.path)
            try:
                if db.execute("PRAGMA journal_mode").fetchall() != [("wal",)]:
                    raise damaged(self.path, "a database that has left WAL mode")
                _require_durable(db)
                yield db
            finally:
                db.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of SQLite and of the disk, as ours."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            if name.startswith(_UNREACHABLE):
                raise self._unavailable(f"{error} ({name})") from error
            raise damaged(self.path, f"a database that SQLite cannot read: {error}") from error
        except UnicodeDecodeError as error:  # SQLite's message quotes damaged bytes
            raise damaged(self.path, "a database whose names SQLite cannot read") from error
        except OSError as error:
            raise self._unavailable(str(error)) from error

    def _unavailable(self, reason: str) -> LedgerUnavailable:
        return LedgerUnavailable(
            f"ledger {self.path}: expected to read and write it, got {reason}. Nothing may be released. Free the disk, "
            "the lock or the rights and try again; a charge that was already on disk stays counted."
        )


@contextmanager
def _immediate(db: Connection) -> Iterator[None]:
    """One transaction that holds the write lock from its first read."""
    db.execute("BEGIN IMMEDIATE").fetchall()
    try:
        yield
        db.execute("COMMIT").fetchall()
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK").fetchall()
        raise


def _require_durable(db: Connection) -> None:
    """Every commit is synced, on macOS down to the platter."""
    for pragma in ("synchronous=FULL", "fullfsync=ON", "checkpoint_fullfsync=ON"):
        db.execute(f"PRAGMA {pragma}").fetchall()
    if db.execute("PRAGMA synchronous").fetchall() != [(2,)]:
        raise LedgerUnavailable("ledger: expected synchronous=FULL, SQLite refused it. Use a stock build of SQLite.")


def _insert(db: Connection, record: Record) -> None:
    marks = ", ".join("?" for _ in _COLUMNS)
    values = tuple(getattr(record, name) for name in _COLUMNS)
    db.execute(f"INSERT INTO entries ({', '.join(_COLUMNS)}) VALUES ({marks})", values).fetchall()


def canonical_json(data: dict[str, Any]) -> str:
    """One line with sorted keys; NaN and infinity are refused."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
