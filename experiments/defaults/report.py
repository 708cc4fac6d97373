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
            if chosen:
                texts[f"{kind}, rules {rules}"] = _scan_table(chosen)
    texts["losses"] = _losses(scan)
    for name in ("heart", "diabetes", "heart, first rules", "diabetes, first rules"):
        texts[name] = _confirmation([record for record in confirmation if record["table"] == name])
    return texts


Scores = dict[tuple[str, int, str, str, float], float]


def scores_of(records: Sequence[Record]) -> Scores:
    """(study, seed, method, constant, factor) -> held-out log-likelihood; a seed is a table of its own."""
    keys = ("study", "seed", "method", "constant", "factor")
    return {tuple(record[key] for key in keys): record["log_likelihood"] for record in records}


def differences(scores: Scores, method: str, constant: str, factor: float) -> list[float]:
    """What each table loses against the rule, in thousandths of a nat a row; negative is better than the rule."""
    changed = {key[:2]: value for key, value in scores.items() if key[2:] == (method, constant, factor)}
    return [1000 * (scores[*table, method, "", 1.0] - value) for table, value in changed.items()]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Over tables; one has no error."""
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
    return markdown(["method", "constant", *[f"x {factor:g}" for factor in FACTORS if factor != 1.0], "tables"], lines)


def _difference(found: list[float]) -> str:
    """Bold: better than the rule by more than two standard errors."""
    if not found:
        return "-"
    mean, error = mean_and_error(found)
    better = sum(value < 0 for value in found)
    text = f"{mean:+.1f} ± {error:.1f} ({better} better)"
    return f"**{text}**" if mean < -2 * error else text


def _losses(scan: Sequence[Record]) -> str:
    """What privacy costs with default settings, mean over seeds; studies that were run without privacy too."""
    scores: dict[tuple[str, str], list[float]] = {}
    for record in scan:
        if record["constant"] == "":
            scores.setdefault((record["study"], record["method"]), []).append(record["log_likelihood"])
    private = [method for method in METHODS if method != NOT_PRIVATE]
    lines = []
    for study in STUDIES:
        if (study, NOT_PRIVATE) in scores:
            best = np.mean(scores[study, NOT_PRIVATE])
            cells = [scores.get((study, method)) for method in private]
            lost = ["-" if cell is None else f"{1000 * (best - np.mean(cell)):.1f}" for cell in cells]
            lines.append([study, f"{best:.3f}", *lost])
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
