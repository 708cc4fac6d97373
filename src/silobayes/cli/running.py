"""What `run` and `resume` share: read the silos, show progress, end with a table or one JSON object."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from silobayes.core.digits import round_down, round_up
from silobayes.core.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from silobayes.engines.local import Inputs, Progress
    from silobayes.posteriors import Posterior
    from silobayes.study import Study

_MAX_LINES = 20
_INTERRUPTED = 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")


def read_inputs(study: "Study", folder: Path, ledgers: tuple[str, ...]) -> "Inputs":
    """The study's tables under `folder`, encoded and checked; nothing is charged."""
    from silobayes.engines import fitting
    from silobayes.study import load_silos

    silos, test, _ = load_silos(study, folder)
    inputs = fitting.read_inputs(study, silos, model=None, ledgers=_ledgers(ledgers))
    return dataclasses.replace(inputs, test=test)


def execute(
    start: "Callable[[Inputs, Path, Callable[[Progress], None]], Posterior]",
    inputs: "Inputs",
    out: Path,
    folder: Path,
    as_json: bool,
) -> None:
    """Start or go on with the run in `out`, then print how it ended."""
    from rich.console import Console

    from silobayes.runs.directory import RUN

    console = Console(stderr=True)
    try:
        with progress_bar(console) as show:
            posterior = start(inputs, out, show)
    except KeyboardInterrupt:
        started = (out / RUN).exists()
        go_on = f"finished steps are kept. Go on: {_resume_command(out, folder)}" if started else "nothing was charged."
        click.echo(f"Stopped; {go_on}", err=True)
        sys.exit(_INTERRUPTED)
    print_end(posterior, out, as_json)


def print_end(posterior: "Posterior", out: Path, as_json: bool) -> None:
    """How the run in `out` ended."""
    from rich.console import Console

    from silobayes.report.results import result
    from silobayes.report.run_files import read_run

    ended = result(read_run(out))
    if as_json:
        click.echo(json.dumps(ended, allow_nan=False))
    else:
        _print(Console(), ended, posterior, out)


@contextmanager
def progress_bar(console: "Console") -> "Iterator[Callable[[Progress], None]]":
    """A bar of steps; the price of the whole run is paid before the first step, so it is shown once."""
    from rich.progress import Progress as Bar

    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("steps", total=None)
        shown = False

        def show(progress: "Progress") -> None:
            nonlocal shown
            if not shown:
                shown = True
                for line in _prices(progress):
                    console.print(line, highlight=False)
            bar.update(task, total=progress.num_steps, completed=progress.step)

        yield show


def _prices(progress: "Progress") -> list[str]:
    lines = [
        f"{name}: epsilon {round_up(spent)} spent, {round_down(progress.epsilons_left[name])} left"
        for name, spent in progress.epsilons.items()
    ]
    hidden = len(lines) - _MAX_LINES
    return lines if hidden <= 0 else [*lines[:_MAX_LINES], f"... and {hidden} more silos"]


def _print(console: "Console", ended: dict[str, Any], posterior: "Posterior", out: Path) -> None:
    from rich.text import Text

    print_posterior(console, posterior, 0.95, _MAX_LINES)
    for key, value in ended["metrics"].items():
        console.print(f"{key.replace('_', ' ')}: {value:.4f}", highlight=False)
    privacy = ended["privacy"]
    if privacy["is_private"]:
        console.print(
            f"Each silo spent at most epsilon {round_up(privacy['epsilon'])} at delta {privacy['delta']:g} "
            f"(unit: {privacy['unit']}, relation: {privacy['relation']}).",
            highlight=False,
        )
        console.print(intervals_line(ended), highlight=False)
        if skipped := posterior.provenance.get("visits_without_effect"):
            console.print(f"{skipped} visits had no effect: with this much noise q would have run away.", style="red")
    else:
        console.print(Text(str(privacy["stamp"]), style="bold red"))
    for warning in getattr(posterior, "warnings", ()):
        console.print(Text(f"Warning: {warning}", style="yellow"))
    console.print(Text(f"Next: silobayes summary {out}; silobayes report {out}; silobayes verify {out}"))


def print_posterior(console: "Console", posterior: "Posterior", level: float, max_lines: int) -> None:
    """Mean, sd and interval of each parameter, in encoded units."""
    from rich.table import Table
    from rich.text import Text

    summary = posterior.summary(level)
    table = Table(title="Posterior", title_justify="left")
    for heading in ("parameter", "mean", "sd", interval_words(level)):
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    for name, row in summary.head(max_lines).iterrows():
        interval = f"{row['lower']:.3f} to {row['upper']:.3f}"
        table.add_row(Text(str(name)), f"{row['mean']:.3f}", f"{row['sd']:.3f}", interval)
    console.print(table)
    if len(summary) > max_lines:
        console.print(f"... and {len(summary) - max_lines} more parameters")


def intervals_line(ended: Mapping[str, Any]) -> str:
    """What the intervals of a private run include, and where that is explained."""
    from silobayes.runs import claims
    from silobayes.studies.method import Intervals

    return claims.intervals_in_words(Intervals(ended["intervals"]))


def interval_words(level: float) -> str:
    """`95 % interval`."""
    return f"{100 * level:.10g} % interval"


def _resume_command(out: Path, folder: Path) -> str:
    return f"silobayes resume {out}" + ("" if out.parent == folder else f" --data {folder}")


def _ledgers(given: tuple[str, ...]) -> dict[str, Path]:
    pairs = [item.partition("=") for item in given]
    for (name, equals, path), item in zip(pairs, given, strict=True):
        if not (name and equals and path):
            raise InvalidInput("--ledger", "SILO=PATH", item, "Name the silo and the file of its ledger.")
    return {name: Path(path) for name, _, path in pairs}
