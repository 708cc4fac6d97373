"""Tables of the experiment, from its results alone: `python -m experiments.defaults.report`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.adult import methods as real_methods
from experiments.defaults.scan import FACTORS, METHODS, NOT_PRIVATE
from experiments.defaults.studies import NETWORKS, STUDIES
from experiments.tables import filled, markdown

HERE = Path(__file__).parent
SCAN, CONFIRMATION = HERE / "results.jsonl", HERE / "confirmation.jsonl"
Record = dict[str, Any]


def load(path: Path) -> list[Record]:
    """All runs so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, record: Record) -> None:
    """One more run."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def write() -> None:
    """README.md with its tables filled in."""
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text(), tables(load(SCAN), load(CONFIRMATION))))


def tables(scan: Sequence[Record], confirmation: Sequence[Record]) -> dict[str, str]:
    """Name -> Markdown."""
    texts = {}
    for rules in sorted({record["rules"] for record in scan}):
        own = [record for record in scan if record["rules"] == rules]
        for kind, is_network in (("regressions", False), ("networks", True)):
            chosen = [record for record in own if (record["study"] in NETWORKS) == is_network]
            texts[f"{kind}, rules {rules}"] = _scan_table(chosen)
    texts["losses"] = _losses(scan)
    for name in ("heart", "diabetes"):
        texts[name] = _confirmation([record for record in confirmation if record["table"] == name])
    return texts


Scores = dict[tuple[str, str, str, float], float]


def scores_of(records: Sequence[Record]) -> Scores:
    """(study, method, constant, factor) -> held-out log-likelihood, mean over seeds."""
    found: dict[tuple[str, str, str, float], list[float]] = {}
    for record in records:
        key = (record["study"], record["method"], record["constant"], record["factor"])
        found.setdefault(key, []).append(record["log_likelihood"])
    return {key: float(np.mean(values)) for key, values in found.items()}


def differences(scores: Scores, method: str, constant: str, factor: float) -> dict[str, float]:
    """Study -> what is lost against the rule, in thousandths of a nat a row; negative is better than the rule."""
    changed = {key[0]: value for key, value in scores.items() if key[1:] == (method, constant, factor)}
    return {study: 1000 * (scores[study, method, "", 1.0] - value) for study, value in changed.items()}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Over studies; one study has no error."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return float(np.mean(values)), error


def _scan_table(records: Sequence[Record]) -> str:
    scores = scores_of(records)
    lines = []
    for method in METHODS:
        for constant in METHODS[method].constants:
            found = [differences(scores, method, constant, factor) for factor in FACTORS if factor != 1.0]
            if any(found):
                lines.append([method, constant, *map(_difference, found), str(max(map(len, found)))])
    return markdown(["method", "constant", *[f"x {factor:g}" for factor in FACTORS if factor != 1.0], "studies"], lines)


def _difference(found: dict[str, float]) -> str:
    """Bold: better than the rule by more than two standard errors."""
    if not found:
        return "-"
    mean, error = mean_and_error(list(found.values()))
    better = sum(value < 0 for value in found.values())
    text = f"{mean:+.1f} ± {error:.1f} ({better} better)"
    return f"**{text}**" if mean < -2 * error else text


def _losses(scan: Sequence[Record]) -> str:
    """What privacy costs with default settings, by study; the newest rules."""
    newest: dict[tuple[str, str], tuple[int, float]] = {}
    for rules in sorted({record["rules"] for record in scan}):
        own = scores_of([record for record in scan if record["rules"] == rules and record["constant"] == ""])
        newest |= {(study, method): (rules, score) for (study, method, _, _), score in own.items()}
    private = [method for method in METHODS if method != NOT_PRIVATE]
    lines = []
    for study in STUDIES:
        if (study, NOT_PRIVATE) in newest:
            best = newest[study, NOT_PRIVATE][1]
            cells = [newest.get((study, method)) for method in private]
            lines.append([study, f"{best:.3f}", *["-" if c is None else f"{1000 * (best - c[1]):.1f}" for c in cells]])
    return markdown(["rows / silos / epsilon", NOT_PRIVATE, *private], lines)


def _confirmation(records: Sequence[Record]) -> str:
    lines = []
    for method in [*real_methods.METHODS, "no features"]:
        own = [record for record in records if record["method"] == method]
        if own:
            values = np.array([[record[key] for key in ("accuracy", "log_likelihood", "auc")] for record in own])
            cells = [
                f"{mean:.4f} (sd {spread:.4f})" for mean, spread in zip(values.mean(0), values.std(0), strict=True)
            ]
            lines.append([method, *cells, str(len(own))])
    return markdown(["method", "accuracy", "log-likelihood", "AUC", "seeds"], lines) if lines else "Not run yet."


if __name__ == "__main__":
    write()
