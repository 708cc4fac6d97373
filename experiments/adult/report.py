"""Tables and figure of the experiment, from results.jsonl alone: `python -m experiments.adult.report`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.adult.methods import METHODS, SCENARIOS, tuned
from experiments.tables import filled, markdown

HERE = Path(__file__).parent
Record = dict[str, Any]

# 000, read off its figures (+-.0004, +-.001), mean of 5 seeds; its epsilons are nominal (priced as Poisson batches,
# run as shuffled ones). One entry per split of the scenario.
PAPER = {
    "10 silos": {
        "DP optimisation": (".839 / -.348", ".8405 / -.342", ".840 / -.345"),
        "local averaging": (".836 / -.356", ".836 / -.378", ".816 / -.384"),
        "local averaging, secure sum": (".842 / -.338", ".842 / -.367", ".834 / -.370"),
        "virtual clients": (".840 / -.353", ".837 / -.352", ".838 / -.349"),
        "virtual clients, secure sum": (".847 / -.343", ".843 / -.338", ".843 / -.337"),
        "BCM same": (".831 / -.439", ".841 / -.4545", ".832 / -.467"),
        "BCM split": (".834 / -.371", ".8225 / -.402", ".836 / -.369"),
        "global VI, secure sum": (".849 / -.328", ".849 / -.328", ".849 / -.328"),
        "not private": (".852 / -.325", "", ""),
    },
    "200 silos": {
        "DP optimisation": (".8125 / -.410", "", ""),
        "local averaging, secure sum": (".831 / -.363", "", ""),
        "virtual clients, secure sum": (".844 / -.340", "", ""),
        "BCM same": (".777 / -.484", "", ""),
        "BCM split": (".7685 / -.484", "", ""),
        "global VI, secure sum": (".8486 / -.328", "", ""),
    },
    "BNN": {
        "DP optimisation": (".850 / -.323",),
        "local averaging": (".831 / -.362",),
        "virtual clients": (".837 / -.350",),
        "BCM same": (".788 / -.418",),
        "BCM split": (".829 / -.364",),
        "global VI, secure sum": (".856 / -.311",),
    },
}


def load(folder: Path) -> list[Record]:
    """All runs so far."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(folder: Path, record: Record) -> None:
    """One more run."""
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def write(records: Sequence[Record], folder: Path) -> None:
    """README.md with its tables filled in."""
    readme = folder / "README.md"
    readme.write_text(filled(readme.read_text(), tables(records)))


def tables(records: Sequence[Record]) -> dict[str, str]:
    """Name -> Markdown."""
    texts = {}
    for scenario, place in SCENARIOS.items():
        for number, split in enumerate(place.splits):
            chosen = [record for record in records if record["scenario"] == scenario and record["split"] == split]
            lines = [_line(chosen, scenario, name, number) for name in METHODS]
            shown = [line for line in lines if line[1] != "-"]
            heading = ["method", "defaults", "tuned", "paper (nominal eps)", "rounds", "CPU-s"]
            texts[f"{scenario}, {split}"] = markdown(heading, shown) if shown else "Not run yet."
    texts["tuned"] = markdown(
        ["scenario", "method", "settings"],
        [[scenario, name, f"`{json.dumps(one)}`"] for scenario, best in tuned().items() for name, one in best.items()],
    )
    return texts


def _line(records: Sequence[Record], scenario: str, name: str, number: int) -> list[str]:
    own = [record for record in records if record["method"] == name]
    paper = PAPER[scenario].get(name, ("",) * 3)[number]
    cells = [_cell([record for record in own if record["settings"] == kind]) for kind in ("default", "tuned")]
    if tuned().get(scenario, {}).get(name) == {}:
        cells[1] = "the defaults"
    best = [record for record in own if record["settings"] == "tuned"] or own
    rounds = "/".join(
        str(value) for value in sorted({record["communications"] for record in best if "accuracy" in record})
    )
    cpu = [record["cpu_s"] for record in best if "accuracy" in record]
    return [name, *cells, paper, rounds, f"{np.mean(cpu):.0f}" if cpu else ""]


def _cell(records: Sequence[Record]) -> str:
    """Mean accuracy and log-likelihood, with their standard deviations over seeds in the last digits."""
    values = np.array([(record["accuracy"], record["log_likelihood"]) for record in records if "accuracy" in record])
    if len(values) == 0:
        return "refused" if records else "-"
    (accuracy, likelihood), spread = values.mean(axis=0), values.std(axis=0)
    text = f"{accuracy:.4f} / {likelihood:.4f} (sd {spread[0]:.4f} / {spread[1]:.4f}, {len(values)} seeds)"
    return text.replace("0.", ".")


if __name__ == "__main__":
    write(load(HERE), HERE)
