"""What a report may read: the files of a run directory, checked on the way in. No live object, no row."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silobayes.core.errors import InvalidInput
from silobayes.privacy.ledger_file import canonical_json
from silobayes.runs.directory import CERTIFICATE, METRICS, RUN, STUDY, TRACE

COMPARISONS = "comparisons"
"""Further posteriors of a run, one saved in each sub-directory; only simulations have them."""
_FIX = "Pass the directory of a finished `silobayes run`; `silobayes resume DIR` finishes one."


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The JSON files of a finished run. `study_hash` is that of study.json as it stands there."""

    directory: Path
    study: Mapping[str, Any]
    study_hash: str
    facts: Mapping[str, Any]
    certificate: Mapping[str, Any]
    metrics: Mapping[str, Any]
    trace: tuple[Mapping[str, Any], ...]


def read_run(directory: Path) -> RunFiles:
    """All files of the run in `directory`; an unreadable one raises `InvalidInput` naming it."""
    trace_path, study = directory / TRACE, read_object(directory / STUDY)
    lines = _text(trace_path).splitlines() if trace_path.exists() else []
    return RunFiles(
        directory=directory,
        study=_as_it_was_meant(study),
        study_hash=hashlib.sha256(canonical_json(study).encode()).hexdigest(),
        facts=read_object(directory / RUN),
        certificate=read_object(directory / CERTIFICATE),
        metrics=read_object(directory / METRICS),
        trace=tuple(_parse(line, trace_path) for line in lines if line.strip()),
    )


def _as_it_was_meant(study: dict[str, Any]) -> dict[str, Any]:
    """Studies of earlier versions do not say how categories become features: each had one."""
    data = study.get("data")
    if not isinstance(data, Mapping) or "coding" in data:
        return study
    return {**study, "data": {**data, "coding": "one_hot"}}


def read_object(path: Path) -> dict[str, Any]:
    """One JSON object from a file."""
    return _parse(_text(path), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise InvalidInput(path.name, "a readable file of the run", str(path), _FIX) from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    def no_constant(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(path.name, "valid JSON", f"{path} ({error})", _FIX) from None
    if not isinstance(value, dict):
        raise InvalidInput(path.name, "a JSON object", str(path), _FIX)
    return value
