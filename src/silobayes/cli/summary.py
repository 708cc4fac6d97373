"""`silobayes summary DIR`: the coefficients of a run, per unit of their columns and as odds or rate ratios."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from silobayes.cli.running import interval_words, intervals_line, print_posterior

if TYPE_CHECKING:
    from rich.console import Console

    from silobayes.posteriors import Posterior


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--level", type=float, default=0.95, show_default=True, help="Probability of the intervals.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def summary(directory: Path, level: float, as_json: bool) -> None:
    """Coefficients of the finished run in DIR: per encoded unit, per unit of the column, as ratios."""
    from rich.console import Console
    from rich.text import Text

    from silobayes.posteriors import Posterior
    from silobayes.report.reading import reading
    from silobayes.report.results import result
    from silobayes.report.run_files import read_run

    ended, posterior = result(read_run(directory)), Posterior.load(directory)
    read = reading(posterior, level)
    if as_json:
        privacy = ended["privacy"]
        told = {"is_private": privacy["is_private"], "stamp": privacy["stamp"], "intervals": ended["intervals"]}
        click.echo(json.dumps({**told, **read}, allow_nan=False))
        return
    console = Console()
    if not ended["privacy"]["is_private"]:
        console.print(Text(str(ended["privacy"]["stamp"]), style="bold red"))
    print_posterior(console, posterior, level, len(posterior.names))
    if posterior.units is not None:
        _print_units(console, posterior, level)
    if ended["privacy"]["is_private"]:
        console.print(intervals_line(ended), highlight=False)
    for warning in posterior.warnings:
        console.print(Text(f"Warning: {warning}", style="yellow"))


def _print_units(console: "Console", posterior: "Posterior", level: float) -> None:
    """Ratios where the model has them, otherwise coefficients, per unit of the column and per encoded unit."""
    from rich.table import Table
    from rich.text import Text

    words, per_unit = interval_words(level), posterior.per_unit(level)
    title = "Coefficients" if posterior.ratio is None else f"{posterior.ratio.capitalize()}s"
    table = Table(title=f"{title} per unit of the column, and per encoded unit", title_justify="left")
    for heading in ("coefficient", "per unit", words, "encoded unit", "per encoded unit", words):
        table.add_column(heading, justify="left" if heading == "coefficient" else "right")
    if posterior.ratio is None:
        own = per_unit.rename(columns={"mean": "value"})
        encoded = posterior.summary(level).rename(columns={"mean": "value"})
    else:
        own = posterior.ratios(level).rename(columns={"ratio": "value"})
        columns = {"encoded_ratio": "value", "encoded_lower": "lower", "encoded_upper": "upper"}
        encoded = own.drop(columns=["value", "lower", "upper"]).rename(columns=columns)
    for name in own.index:
        row, step = own.loc[name], encoded.loc[name]
        table.add_row(
            Text(str(name)),
            f"{row['value']:.5g}",
            f"{row['lower']:.5g} to {row['upper']:.5g}",
            f"{1 / per_unit.loc[name, 'unit']:.5g}",
            f"{step['value']:.5g}",
            f"{step['lower']:.5g} to {step['upper']:.5g}",
        )
    console.print(table)
