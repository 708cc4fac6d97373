"""A run's state on disk: arrays in two files, and a JSON file that names both and is the commit point.

The server's state is public and lies in the run directory. Silos' states may be private (factors of shards), so they
lie in a folder beside it, readable by its owner only, which never leaves the machine and is removed when the run ends.

Guarantees:
    What is saved is loaded equal.
    A changed or torn checkpoint is refused.
    A checkpoint of another study is refused.
    A crash while saving leaves the checkpoint before.
    Nothing private is in the run directory at any moment.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.privacy.ledger_file import canonical_json
from silobayes.runs.files import read_json, write_bytes, write_json

NAME = "checkpoint.json"
_FORMAT = 2
_FIX = (
    "The run cannot go on from it; what was charged stays charged. Keep the ledgers and start a new run if their "
    "budgets allow it."
)


def save(
    directory: Path, private: Path, server: Any, silos: Any, *, step: int, study_hash: str, lines: Sequence[str]
) -> None:
    """Write the states after `step` visits; `lines` are what the visits since the last commit add to the trace."""
    server_arrays, silo_arrays = _arrays(server), _arrays(silos)
    body = {
        "format": _FORMAT,
        "step": step,
        "study_hash": study_hash,
        "arrays": f"checkpoint-{step}.npz",
        "sha256": hashlib.sha256(server_arrays).hexdigest(),
        "silos": f"states-{step}.npz",
        "silos_sha256": hashlib.sha256(silo_arrays).hexdigest(),
        "lines": list(lines),
    }
    write_bytes(directory / body["arrays"], server_arrays)
    write_bytes(private / body["silos"], silo_arrays)
    write_json(directory / NAME, {"body": body, "sha256": _digest(body)})
    for old in (*directory.glob("checkpoint-*.npz"), *private.glob("states-*.npz")):
        if old.name not in (body["arrays"], body["silos"]):
            old.unlink()


def load(
    directory: Path, private: Path, templates: tuple[Any, Any], *, study_hash: str
) -> tuple[tuple[Any, Any], int, list[str]] | None:
    """((server, silos), step, trace lines), or None if nothing was saved; `templates` say which arrays to expect."""
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
    server = _load_arrays(directory / body["arrays"], body["sha256"], templates[0])
    silos = _load_arrays(private / body["silos"], body["silos_sha256"], templates[1])
    return (server, silos), body["step"], body["lines"]


def _arrays(state: Any) -> bytes:
    """Leaves of one kind side by side, with their places: thousands of arrays by themselves take a second to write."""
    buffer = io.BytesIO()
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for place, leaf in enumerate(leaves):
        kinds.setdefault((leaf.dtype.str, leaf.shape), []).append(place)
    arrays = {f"leaves{k}": np.stack([leaves[place] for place in places]) for k, places in enumerate(kinds.values())}
    arrays |= {f"places{k}": np.array(places) for k, places in enumerate(kinds.values())}
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _load_arrays(arrays: Path, digest: str, template: Any) -> Any:
    try:
        raw = arrays.read_bytes()
    except OSError:
        raise _refuse(arrays, "no such file") from None
    if hashlib.sha256(raw).hexdigest() != digest:
        raise _refuse(arrays, "other arrays")
    expected, structure = jax.tree.flatten(template)
    with np.load(io.BytesIO(raw), allow_pickle=False) as stored:
        at: dict[int, np.ndarray] = {}
        for k in range(len(stored.files) // 2):
            at.update(zip(stored[f"places{k}"].tolist(), stored[f"leaves{k}"], strict=True))
        found = [at[place] for place in sorted(at)]
    if [leaf.shape for leaf in found] != [np.shape(leaf) for leaf in expected]:
        raise _refuse(arrays, "arrays of another method")
    leaves = [int(new) if isinstance(old, int) else new for old, new in zip(expected, found, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def files(directory: Path, private: Path) -> list[Path]:
    """What is there of the state of a run."""
    own = [private] if private.exists() else []
    return sorted([*directory.glob("checkpoint*"), *own])


def remove(directory: Path, private: Path) -> None:
    """Delete the state of a finished run; silos' states first."""
    shutil.rmtree(private, ignore_errors=True)
    for old in directory.glob("checkpoint*"):
        old.unlink(missing_ok=True)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(json.loads(json.dumps(body))).encode()).hexdigest()


def _refuse(path: Path, found: str) -> InvalidInput:
    return InvalidInput("checkpoint", f"what was written to {path}", found, _FIX)
