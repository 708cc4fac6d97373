"""A disk that loses what was not synced, under SQLite (a VFS) and under the ledger's own file operations.

Every change is one numbered step; `crash_at` stops the machine before that step. What a power cut leaves is decided
afterwards by a `Fate`: of the unsynced changes of each file, and of the unsynced changes of the folder, none, all, or a
random part survives (in sectors of 512 bytes, in any order). A kill instead of a power cut keeps everything, unsynced.

Syncing a file does not sync its name, except for SQLite's own logs, whose first sync also syncs the folder in
SQLite's unix VFS. Locks are left out: one process at a time.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import apsw

from silobayes.privacy.ledger_file import Files

SECTOR = 512
ROOT = Path("/disk")


class Crashed(Exception):
    """The machine has stopped."""


def apply_write(data: bytearray, offset: int, chunk: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(chunk)] = chunk


def truncate(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(max(0, size - len(data))))


Change = tuple[int, bytes] | int  # a write (offset, bytes) or a truncation to a size


@dataclass
class Inode:
    """A file: what a running process reads, what is safe, and the changes between the two."""

    live: bytearray = field(default_factory=bytearray)
    safe: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        _apply(self.live, change)
        self.pending.append(change)

    def sync(self) -> None:
        self.safe = bytearray(self.live)
        self.pending.clear()


def _apply(data: bytearray, change: Change) -> None:
    if isinstance(change, int):
        truncate(data, change)
    else:
        apply_write(data, *change)


NameChange = tuple[str, Inode | None]  # one name points to a file, or to nothing
Fate = Callable[[int], list[bool]]  # which of n unsynced changes survive, in order


def nothing(count: int) -> list[bool]:
    return [False] * count


def everything(count: int) -> list[bool]:
    return [True] * count


def some(rng: random.Random) -> Fate:
    return lambda count: [rng.random() < 0.5 for _ in range(count)]


def first_part(rng: random.Random) -> Fate:
    def fate(count: int) -> list[bool]:
        cut = rng.randint(0, count)
        return [index < cut for index in range(count)]

    return fate


class Disk(Files):
    """The disk; also the ledger's `files`."""

    def __init__(self) -> None:
        self.live: dict[str, Inode] = {}
        self.safe: dict[str, Inode] = {}
        self.pending: list[list[NameChange]] = []
        self.steps = 0
        self.crash_at: int | None = None
        self.crashed = False

    def step(self) -> None:
        if self.crashed or self.steps == self.crash_at:
            self.crashed = True
            raise Crashed(f"stopped before step {self.steps}")
        self.steps += 1

    def rename_in_folder(self, changes: list[NameChange]) -> None:
        """All of `changes` or none (a rename is atomic)."""
        self.pending.append(changes)
        _point(self.live, changes)

    def sync_folder(self) -> None:
        self.safe = dict(self.live)
        self.pending.clear()

    def after_kill(self) -> "Disk":
        """The process is gone, the machine runs on: nothing is lost, nothing more is safe."""
        disk = Disk()
        disk.live, disk.safe, disk.pending = self.live, self.safe, self.pending
        return disk

    def after_power_cut(self, fate: Fate) -> "Disk":
        """Only what was synced, and of the rest what `fate` lets through."""
        disk = Disk()
        names = dict(self.safe)
        for keep, changes in zip(fate(len(self.pending)), self.pending, strict=True):
            if keep:
                _point(names, changes)
        for name, inode in names.items():
            disk.live[name] = disk.safe[name] = _survivor(inode, fate)
        return disk

    def save(self, folder: Path) -> None:
        """Copy the files to a real folder."""
        for name, inode in self.live.items():
            (folder / Path(name).name).write_bytes(bytes(inode.live))

    # The ledger's file operations.

    def exists(self, path: Path) -> bool:
        return str(path) in self.live

    def read(self, path: Path) -> bytes:
        return bytes(self.live[str(path)].live)

    def write(self, path: Path, data: bytes, *, exclusive: bool) -> None:
        assert not (exclusive and self.exists(path))
        self.step()
        inode = self.live.get(str(path)) or Inode()
        if not self.exists(path):
            self.rename_in_folder([(str(path), inode)])
        self.step()
        inode.change(0)
        self.step()
        inode.change((0, data))
        self.step()
        inode.sync()

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        self.rename_in_folder([(str(source), None), (str(target), self.live[str(source)])])

    def sync_directory(self, path: Path) -> None:
        self.step()
        self.sync_folder()


def _point(names: dict[str, Inode], changes: list[NameChange]) -> None:
    for name, inode in changes:
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _survivor(inode: Inode, fate: Fate) -> Inode:
    pieces: list[Change] = []
    for change in inode.pending:
        if isinstance(change, int):
            pieces.append(change)
            continue
        offset, chunk = change
        while chunk:  # split where sectors end: a write may be torn there
            size = SECTOR - offset % SECTOR
            pieces.append((offset, chunk[:size]))
            offset, chunk = offset + len(chunk[:size]), chunk[size:]
    data = bytearray(inode.safe)
    for keep, piece in zip(fate(len(pieces)), pieces, strict=True):
        if keep:
            _apply(data, piece)
    return Inode(live=bytearray(data), safe=bytearray(data))


class ModelFile:
    """One open file of SQLite."""

    def __init__(self, disk: Disk, inode: Inode, *, is_log: bool) -> None:
        self.disk = disk
        self.inode = inode
        self.sync_name = is_log
        self.level = apsw.SQLITE_LOCK_NONE

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        return bytes(self.inode.live[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self.disk.step()
        self.inode.change((offset, bytes(data)))

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self.disk.step()
        self.inode.change(size)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self.disk.step()
        self.inode.sync()
        if self.sync_name:
            self.disk.step()
            self.disk.sync_folder()
            self.sync_name = False

    def xFileSize(self) -> int:  # noqa: N802
        return len(self.inode.live)

    def xLock(self, level: int) -> None:  # noqa: N802
        self.level = level

    def xUnlock(self, level: int) -> None:  # noqa: N802
        self.level = level

    def xCheckReservedLock(self) -> bool:  # noqa: N802
        return self.level >= apsw.SQLITE_LOCK_RESERVED

    def xFileControl(self, op: int, ptr: int) -> bool:  # noqa: N802
        return False

    def xSectorSize(self) -> int:  # noqa: N802
        return 4096

    def xDeviceCharacteristics(self) -> int:  # noqa: N802
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE  # what SQLite's unix VFS says

    def xClose(self) -> None:  # noqa: N802
        pass


class ModelVFS(apsw.VFS):
    """SQLite's view of the disk; `disk` is replaced after a crash."""

    def __init__(self, name: str) -> None:
        self.disk = Disk()
        super().__init__(name, base="")
        self.name = name

    def connect(self, path: Path) -> apsw.Connection:
        """The ledger's `connect`. Exclusive locking, because a VFS in Python has no shared memory for the WAL index."""
        db = apsw.Connection(str(path), vfs=self.name, flags=apsw.SQLITE_OPEN_READWRITE)
        db.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
        return db

    def xFullPathname(self, name: str) -> str:  # noqa: N802
        return name

    def xAccess(self, pathname: str, flags: int) -> bool:  # noqa: N802
        return pathname in self.disk.live

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self.disk.step()
        self.disk.rename_in_folder([(filename, None)])
        if syncdir:
            self.disk.step()
            self.disk.sync_folder()

    def xOpen(self, name, flags):  # noqa: N802
        assert name is not None, "the ledger needs no temporary files"
        path = name if isinstance(name, str) else name.filename()
        is_log = bool(flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL))
        inode = self.disk.live.get(path)
        is_new = inode is None
        if inode is None:
            if not flags[0] & apsw.SQLITE_OPEN_CREATE:
                raise apsw.CantOpenError(path)
            self.disk.step()
            inode = Inode()
            self.disk.rename_in_folder([(path, inode)])
        flags[1] = flags[0]
        return ModelFile(self.disk, inode, is_log=is_log and is_new)
