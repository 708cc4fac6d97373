"""Writing files so that a crash leaves the old one or the new one, never a part."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silobayes.core.errors import InvalidInput


def write_bytes(path: Path, content: bytes) -> None:
    """Whole or not at all, durable on return, readable by the owner only."""
    scratch = path.with_name(path.name + ".new")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(scratch, path)
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`value` as JSON, whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """A JSON object; `InvalidInput` naming the file if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InvalidInput(path.name, "a readable file of the run", str(path), fix) from None
    if not isinstance(value, dict):
        raise InvalidInput(path.name, "a JSON object", str(path), fix)
    return value


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """More lines, durable on return."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        view = memoryview("".join(line + "\n" for line in lines).encode())
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Make a rename in `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
