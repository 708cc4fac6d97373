"""`silobayes plan study.toml`: noise, rounds, expected widths and what leaves a site, before any row is read."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from silobayes.cli.sizes import read_sizes, size_options
from silobayes.core.digits import round_up

if TYPE_CHECKING:
    from silobayes.report.planning import Plan

_MAX_NUMBERS = 4
_MAX_LINES = 20


@click.command()
@click.argument("study", type=click.Path(path_type=Path))
@size_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(study: Path, rows: str | None, persons: str | None, as_json: bool) -> None:
    """Work out STUDY before any row is read; charges nothing."""
    from silobayes.report import planning
    from silobayes.study import Study

    meant = Study.from_toml(study)
    made = planning.plan(meant, *read_sizes(meant, study.parent, rows, persons))
    if as_json:
        click.echo(json.dumps(made.to_json(), allow_nan=False))
    else:
        _print(made)


def _print(made: "Plan") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, answer = Console(), made.to_json()
    table = Table(title="Settings", title_justify="left", show_header=False)
    for key, value in answer["settings"].items():
        parts = {f"{key}.{part}": entry for part, entry in value.items()} if isinstance(value, dict) else {key: value}
        for name, entry in parts.items():
            table.add_row(name, _text(entry))
    table.add_row("messages", str(made.num_messages))
    console.print(table)
    console.print(Text(f"Method: {answer['choice']}"))
    table = Table(title="Silos", title_justify="left")
    unit = "rows" if made.silos[0].persons is None else "rows of persons"
    for heading in ("silo", unit, "releases", "noise std", "clip norm", "epsilon"):
        table.add_column(heading, justify="left" if heading == "silo" else "right")
    for silo, row in list(zip(made.silos, answer["silos"], strict=True))[:_MAX_LINES]:
        events = row["events"]
        table.add_row(
            Text(silo.name),
            str(silo.rows) if silo.persons is None else f"{silo.rows} of {silo.persons}",
            _counts([event.get("count", 1) for event in events]),
            _numbers([event["std"] for event in events if "std" in event]),
            _numbers([event["clip_norm"] for event in events if "clip_norm" in event]),
            "-" if silo.epsilon is None else round_up(silo.epsilon),
        )
    console.print(table)
    if len(made.silos) > _MAX_LINES:
        console.print(f"... and {len(made.silos) - _MAX_LINES} more silos")
    if made.widths is not None:
        table = Table(title="Expected sd of the coefficients, roughly", title_justify="left")
        shares = [width.privacy_share for width in made.widths[:_MAX_LINES]]
        headings = ("coefficient", "private", "not private") + (
            ("variance due to privacy",) if None not in shares else ()
        )
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "coefficient" else "right")
        for width in made.widths[:_MAX_LINES]:
            due = () if width.privacy_share is None else (f"{100 * width.privacy_share:.0f} %",)
            table.add_row(Text(width.name), f"{width.private:.2g}", f"{width.not_private:.2g}", *due)
        console.print(table)
        if len(made.widths) > _MAX_LINES:
            console.print(f"... and {len(made.widths) - _MAX_LINES} more coefficients")
        console.print(
            "For columns that are independent and coefficients near the start: rare outcomes make all of it larger. "
            "`silobayes calibrate` tells more."
        )
    console.print(Text(f"Each site sends {answer['leaves_a_site']}"))
    if getattr(made.settings, "clip_quantile", None) is not None:
        console.print(
            "The first release chooses the clip norms, around those of the settings; the others are clipped to them."
        )
    if answer["num_shares"] is not None:
        console.print(f"The noise std is that of {answer['num_shares']} shares; every silo of a sum adds one.")


def _counts(counts: list[int]) -> str:
    """Of releases of different kinds; of many of one kind each, of all together."""
    return str(sum(counts)) if len(counts) > _MAX_NUMBERS else " + ".join(map(str, counts)) or "exact"


def _numbers(numbers: list[float]) -> str:
    """One for each kind of release; of many, the range."""
    if len(numbers) > _MAX_NUMBERS:
        return f"{min(numbers):.4g} to {max(numbers):.4g}"
    return " + ".join(f"{number:.4g}" for number in numbers) or "-"


def _text(setting: Any) -> str:
    """A number for each silo as the range of them."""
    many = isinstance(setting, tuple) and len(setting) > _MAX_NUMBERS
    return f"{min(setting)} to {max(setting)}" if many else str(setting)
