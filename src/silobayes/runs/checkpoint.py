"""A run's state on disk: arrays in one file, and a JSON file that names them and is the commit point.

A checkpoint may hold private state (factors of virtual clients), so it is readable by its owner only, never leaves the
machine and is removed when the run ends.

Guarantees:
    What is saved is loaded equal.
    A changed or torn checkpoint is refused.
    A checkpoint of another study is refused.
    A crash while saving leaves the checkpoint before.
"""

import hashlib
import io
import json
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.privacy.ledger_file import canonical_json
from silobayes.runs.files import read_json, write_bytes, write_json

State = TypeVar("State")
NAME = "checkpoint.json"
_FORMAT = 1
_FIX = (
    "The run cannot go on from it; what was charged stays charged. Keep the ledgers and start a new run if their "
    "budgets allow it."
)


def save(directory: Path, state: Any, *, step: int, study_hash: str, trace: dict[str, Any]) -> None:
    """Write the state after `step` steps; `trace` is the line that this step adds to the trace."""
    buffer = io.BytesIO()
    leaves = jax.tree.leaves(state)
    np.savez(buffer, **{f"leaf{k}": np.asarray(leaf) for k, leaf in enumerate(leaves)})  # type: ignore[arg-type]
    arrays = f"checkpoint-{step}.npz"
    body = {
        "format": _FORMAT,
        "step": step,
        "study_hash": study_hash,
        "arrays": arrays,
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "trace": trace,
    }
    write_bytes(directory / arrays, buffer.getvalue())
    write_json(directory / NAME, {"body": body, "sha256": _digest(body)})
    for old in directory.glob("checkpoint-*.npz"):
        if old.name != arrays:
            old.unlink()


def load(directory: Path, template: State, *, study_hash: str) -> tuple[State, int, dict[str, Any]] | None:
    """(state, step, its trace line), or None if no step was finished; `template` says which arrays to expect."""
    path = directory / NAME
    if not path.exists():
        return None
    content = read_json(path, _FIX)
    body = content.get("body")
    if not isinstance(body, dict) or content.get("sha256") != _digest(body) or body.get("format") != _FORMAT:
        raise _refuse(path, "other text than was written")
    if body["study_hash"] != study_hash:
        fix = "Resume with the study that the run was started with, or start a new run."
        raise InvalidInput("study", "the study of the checkpoint", "another one", fix)
    try:
        raw = (directory / body["arrays"]).read_bytes()
    except OSError:
        raise _refuse(path, "no arrays") from None
    if hashlib.sha256(raw).hexdigest() != body["sha256"]:
        raise _refuse(path, "other arrays than were written")
    expected, structure = jax.tree.flatten(template)
    with np.load(io.BytesIO(raw), allow_pickle=False) as stored:
        found = [stored[f"leaf{k}"] for k in range(len(stored.files))]
    shapes = [np.shape(leaf) for leaf in expected]
    if [leaf.shape for leaf in found] != shapes:
        raise _refuse(path, "arrays of another method")
    leaves = [int(new) if isinstance(old, int) else new for old, new in zip(expected, found, strict=True)]
    return jax.tree.unflatten(structure, leaves), body["step"], body["trace"]


def files(directory: Path) -> list[Path]:
    """What is there of the state of a run."""
    return sorted(directory.glob("checkpoint*"))


def remove(directory: Path) -> None:
    """Delete the private state of a finished run."""
    for old in files(directory):
        old.unlink(missing_ok=True)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(json.loads(json.dumps(body))).encode()).hexdigest()


def _refuse(path: Path, found: str) -> InvalidInput:
    return InvalidInput("checkpoint", f"what was written to {path}", found, _FIX)
