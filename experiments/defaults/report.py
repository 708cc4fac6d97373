"""Tables of the scan, from results.jsonl alone: `python -m experiments.defaults.report`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Record = dict[str, Any]


def load(folder: Path) -> list[Record]:
    """All runs so far."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(folder: Path, record: Record) -> None:
    """One more run."""
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def write(records: Sequence[Record], folder: Path) -> None:
    pass
