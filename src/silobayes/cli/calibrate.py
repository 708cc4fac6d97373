"""`silobayes calibrate study.toml`: what a study would say of known truths, before anybody's budget is spent."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from silobayes.cli.sizes import read_sizes, size_options

if TYPE_CHECKING:
    from silobayes.runs.coverage import Calibration

_MAX_LINES = 20
_INTERRUPTED = 130


@click.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--repetitions", type=int, default=200, show_default=True, help="How many studies; at least 20.")
@click.option(
    "--at", type=click.Path(path_type=Path), metavar="FILE",
    help="The truth: a TOML or JSON file of parameter = value (others are 0), or a run directory, whose posterior mean "
    "it is. By default each repetition draws its own from the prior.",
)  # fmt: skip
@size_options
@click.option(
    "--correlation", type=float, default=0.0, show_default=True, help="Of every two numeric columns, in [0, 1)."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of all that is random here.")
@click.option("--workers", type=int, help="Processes; by default one for each processor.")
@click.option("--out", type=click.Path(path_type=Path), help="Write calibration.json and calibration.png there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def calibrate(
    study: Path,
    repetitions: int,
    at: Path | None,
    rows: str | None,
    persons: str | None,
    correlation: float,
    seed: int,
    workers: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run STUDY many times on made-up rows: do its intervals hold the truth, and how wide are they?

    Reads no row and charges nothing. Ctrl-C ends it with the repetitions made so far.
    """
    from rich.console import Console
    from rich.progress import Progress as Bar

    from silobayes.engines.calibrating import calibrate as repeat
    from silobayes.report.calibration import write_calibration
    from silobayes.study import Study

    meant = Study.from_toml(study)
    numbers, people = read_sizes(meant, study.parent, rows, persons)
    try:
        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("repetitions", total=None)
            found = repeat(
                meant,
                rows=numbers,
                persons=people,
                repetitions=repetitions,
                at=at,
                correlation=correlation,
                seed=seed,
                workers=workers,
                progress=lambda done, total: bar.update(task, total=total, completed=done),
            )
    except KeyboardInterrupt:
        click.echo("Stopped before the first repetition was done; nothing was charged.", err=True)
        sys.exit(_INTERRUPTED)
    written = {} if out is None else write_calibration(found, out)
    if as_json:
        click.echo(json.dumps(found.to_json(), allow_nan=False))
    else:
        _print(Console(), found)
        for path in written.values():
            click.echo(f"Wrote {path}")


def _print(console: "object", found: "Calibration") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)
    answer = found.to_json()
    title = f"{answer['repetitions']} repetitions of {found.method} on made-up rows"
    table = Table(title=title, title_justify="left")
    headings = ["parameter", "50 %", "80 %", "95 %", "sd"]
    if found.exact is not None:
        headings += ["not private: 95 %", "width ratio"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    for entry in answer["parameters"][:_MAX_LINES]:
        cells = [_percent(entry["coverage"][level]) for level in ("0.5", "0.8", "0.95")]
        cells.append(f"{entry['sd']:.3g}")
        if found.exact is not None:
            cells += [_percent(entry["without_privacy"]["0.95"]), f"{entry['width_ratio']:.2f}"]
        table.add_row(Text(entry["name"]), *cells)
    every = [*(_percent(answer["coverage"][level]) for level in ("0.5", "0.8", "0.95")), ""]
    if found.exact is not None:
        every += [_percent(answer["without_privacy"]["coverage"]["0.95"]), f"{answer['width_ratio']:.2f}"]
    table.add_section()
    table.add_row("all", *every)
    console.print(table)
    if len(found.names) > _MAX_LINES:
        console.print(f"... and {len(found.names) - _MAX_LINES} more parameters")
    console.print(Text(found.sentence))
    for remark in found.remarks:
        console.print(Text(remark))
    console.print("Nobody's rows were read and nothing was charged.")


def _percent(share: dict[str, float]) -> str:
    return f"{100 * share['value']:.1f}"
