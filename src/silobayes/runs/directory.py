"""The run directory: what a run leaves behind and what it goes on from.

    study.json          the study, in its canonical form
    run.json            run id, names and sizes of the silos, settings, where the ledgers are and whether they may
                        have been charged
    ledgers/            one ledger per silo, unless a site brings its own
    checkpoint*.{json,npz}  the server's state at the last commit, while the run is not finished; of a private run also
                        that before the first visit, from before the first charge
    ../<run>.silos/     the silos' states at the same commit, which may be private; removed when the run is finished
    trace.jsonl         what was released, a line per visit
    posterior.{npz,json}, metrics.json, certificate.json    when the run is finished; the certificate comes last

Guarantees:
    A directory that holds a run is not overwritten.
    Resuming with a changed study is refused.
    Two processes cannot run in one directory.
    A checkpoint older than what was released is refused.
    A run that may have been charged does not start again without its checkpoint and its trace.
    The certificate says what was in the other files of the run.
    Nothing private is in the run directory at any moment.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from silobayes.core.errors import InvalidInput
from silobayes.posteriors import ARRAYS, DESCRIPTION
from silobayes.runs import checkpoint
from silobayes.runs.files import append_lines, read_json, write_bytes, write_json

State = TypeVar("State")
STUDY, RUN, TRACE, METRICS, CERTIFICATE, LEDGERS = (
    "study.json",
    "run.json",
    "trace.jsonl",
    "metrics.json",
    "certificate.json",
    "ledgers",
)
# Not run.json: it says where sites keep their ledgers, and a digest would let a reader test guesses of that.
CERTIFIED = (STUDY, TRACE, ARRAYS, DESCRIPTION, METRICS)
"""The files of a finished run that its certificate names, by their digests."""
_FIX = "Pass the directory that `silobayes run` wrote."


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path, study_hash: str, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.study_hash = study_hash
        self.facts = dict(facts)

    @classmethod
    def create(cls, path: Path, study: Mapping[str, Any], study_hash: str, facts: Mapping[str, Any]) -> "RunDirectory":
        """A new run; refuse a directory that already holds one."""
        path = Path(path)
        cls.require_new(path)
        facts = {**facts, "study_hash": study_hash, "charged": False}
        with _writable(path):
            (path / LEDGERS).mkdir(parents=True, mode=0o700)
            private_place(path).mkdir(mode=0o700)
            write_json(path / STUDY, dict(study))
            write_json(path / RUN, facts)
        return cls(path, study_hash, facts)

    @staticmethod
    def require_new(path: Path) -> None:
        """Refuse a place that already holds something."""
        left = private_place(path)
        with _writable(path):
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
            has_left = left.exists()
        if taken:
            fix = "Choose another directory, or `silobayes resume` that run."
            raise InvalidInput("out", "a new or empty directory", str(path), fix)
        if has_left:
            fix = f"Remove {left}: silos' states of a run that is no longer at {path}. Or choose another directory."
            raise InvalidInput("out", "a directory beside which no silos' states are left over", str(left), fix)

    @classmethod
    def open(cls, path: Path, study_hash: str | None = None) -> "RunDirectory":
        """An existing run; refuse it if it belongs to another study than the one with `study_hash`."""
        path = Path(path)
        facts = read_json(path / RUN, _FIX)
        if study_hash is not None and facts.get("study_hash") != study_hash:
            fix = "Resume with the study that the run was started with, or start a new run."
            raise InvalidInput("study", "the study of the run", "a changed one", fix)
        return cls(path, str(facts.get("study_hash")), facts)

    @property
    def ledgers(self) -> dict[str, Path]:
        """Silo name -> its ledger, as the run was started; those of sites are absolute paths."""
        places = self.facts.get("ledgers")
        if not isinstance(places, dict):
            raise InvalidInput(RUN, "where the ledgers of the run are", "nothing", "Start a new run.")
        return {name: self.path / place for name, place in places.items()}

    @property
    def private(self) -> Path:
        """Where silos' states are: beside the run directory, which may be shown to anybody."""
        return private_place(self.path)

    @property
    def has_charged(self) -> bool:
        """Whether a ledger may have been charged: from then on a missing one is not an empty one."""
        return self.facts.get("charged") is not False

    def keep_start(self, server: Any, silos: Any) -> None:
        """Keep the states before the first visit and an empty trace, before the first charge.

        From then on a missing file never means that nothing was released.
        """
        if not self.has_charged:
            checkpoint.save(self.path, self.private, server, silos, step=0, study_hash=self.study_hash, lines=[])
            write_bytes(self.path / TRACE, b"")

    def begin_to_charge(self) -> None:
        """Remember, before the first charge, that every ledger exists and may hold charges."""
        if not self.has_charged:
            self.facts["charged"] = True
            write_json(self.path / RUN, self.facts)

    @property
    def is_finished(self) -> bool:
        """The certificate is written last."""
        return (self.path / CERTIFICATE).exists()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out: two of them would draw twice what was paid once."""
        handle = os.open(self.path / "run.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InvalidInput("out", "a run that nobody is running", str(self.path), "Wait for it.") from None
            yield
        finally:
            os.close(handle)

    def study(self) -> dict[str, Any]:
        """The study that the run was started with."""
        return read_json(self.path / STUDY, _FIX)

    def commit(self, server: Any, silos: Any, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Checkpoint, then the lines of the trace since the last commit: only now these visits count as released."""
        texts = [json.dumps(line, allow_nan=False) for line in lines]
        common: dict[str, Any] = {"step": step, "study_hash": self.study_hash}
        checkpoint.save(self.path, self.private, server, silos, **common, lines=texts)
        append_lines(self.path / TRACE, texts)

    def load(self, server: State, silos: Any) -> tuple[State, Any, int]:
        """The states to go on from and the visits that were made: those given if nothing was committed."""
        found = checkpoint.load(self.path, self.private, (server, silos), study_hash=self.study_hash)
        if self.has_charged:
            for name, is_there in ((checkpoint.NAME, found is not None), (TRACE, (self.path / TRACE).exists())):
                if not is_there:
                    fix = "Noise may have been drawn from what was charged: bring the file back, or start a new run."
                    raise InvalidInput(name, "a file of this run, which was charged", "nothing", fix)
        lines = self._trace_lines()
        step = 0
        if found is not None:
            (server, silos), step, last = found
            missing = step - len(lines)
            if 0 < missing <= len(last):  # the process died between the two writes
                append_lines(self.path / TRACE, last[-missing:])
                lines += last[-missing:]
        if len(lines) != step:
            fix = "Noise for released steps must not be drawn again; bring back the newest checkpoint."
            raise InvalidInput("checkpoint", f"the state after step {len(lines)}", f"that after {step}", fix)
        return server, silos, step

    def _trace_lines(self) -> list[str]:
        path = self.path / TRACE
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a torn last line was never acknowledged; its checkpoint brings it back
            write_bytes(path, whole.encode())
        return whole.splitlines()

    def finish(self, metrics: Mapping[str, Any], certificate: Mapping[str, Any]) -> None:
        """Write the last files and remove the private state; the posterior is there already."""
        write_json(self.path / METRICS, dict(metrics))
        write_json(self.path / CERTIFICATE, {**certificate, "files": digests(self.path)})
        self.remove_state()

    def remove_state(self) -> None:
        """Remove the private state of a finished run; a process may have died before it could."""
        assert self.is_finished, "an unfinished run needs its state"
        checkpoint.remove(self.path, self.private)


def private_place(path: Path) -> Path:
    """The folder of the silos' states of the run in `path`."""
    path = Path(os.path.abspath(path))
    return path.with_name(f"{path.name}.silos")


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of what is there of the files that a certificate names."""
    there = [path / name for name in CERTIFIED if (path / name).is_file()]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in there}


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "Choose a place with room, where you may write. Nothing was charged."
        raise InvalidInput("out", "a directory that can be written", f"{path} ({error.strerror})", fix) from None
