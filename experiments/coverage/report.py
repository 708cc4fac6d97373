"""The table of README.md, from results.jsonl alone: `python -m experiments.coverage.report`."""

import json
from pathlib import Path
from typing import Any

from experiments.coverage.designs import CELLS, Cell
from experiments.tables import filled, markdown

HERE = Path(__file__).parent
_HEADING = ("study", "50 %", "80 %", "95 %", "+-", "width / not private", "width / bound", "warned")


def results() -> dict[str, dict[str, Any]]:
    """Cell -> what was measured."""
    lines = (json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines())
    return {line["cell"]: line for line in lines}


def tables(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Name -> Markdown, of the cells that were run."""
    lines = [_line(cell, found[name]) for name, cell in CELLS.items() if name in found]
    missing = [_words(cell) for name, cell in CELLS.items() if name not in found]
    return {"coverage": markdown(_HEADING, lines), "missing": "; ".join(missing) or "none"}


def _line(cell: Cell, found: dict[str, Any]) -> list[str]:
    coverage = [f"{level:.3f}" for level in found["coverage"]]
    widths = ["" if found[key] is None else f"{found[key]:.2f}" for key in ("beside_open", "beside_bound")]
    return [_words(cell), *coverage, f"{found['error'][-1]:.3f}", *widths, f"{100 * found['warned']:.0f} %"]


def _words(cell: Cell) -> str:
    model = cell.model.removesuffix("_regression").replace("_", " ")
    words = [f"{model}, {cell.design.replace('_', '-')}, d {cell.features}, {cell.rows} rows, epsilon {cell.epsilon:g}"]
    if cell.silos > 1:
        words.append(f"{cell.silos} silos{' in a sum' if cell.summed else ''}")
    if cell.persons is not None:
        words.append(f"{cell.persons} persons")
    if cell.signal != Cell.signal:
        words.append("strong signal")
    return ", ".join([*words, *(["DP optimisation"] if cell.protocol != "centred" else [])])


def main() -> None:
    """Write it."""
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text(), tables(results())))


if __name__ == "__main__":
    main()
