"""`silobayes predict DIR --at new.csv`: means or class probabilities of new rows, with intervals."""

import json
from pathlib import Path

import click

from silobayes.cli.running import interval_words
from silobayes.core.errors import InvalidInput

_MAX_LINES = 20


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--at", "table", required=True, type=click.Path(path_type=Path),
    help="The new rows: .csv, .csv.gz, .parquet or .npz with the columns of data.features; a target is not read.",
)  # fmt: skip
@click.option("--level", type=float, default=0.95, show_default=True, help="Probability of the intervals.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a new CSV file instead of printing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def predict(directory: Path, table: Path, level: float, out: Path | None, as_json: bool) -> None:
    """Predict the rows of a table from the finished run in DIR; intervals say how sure the mean is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from silobayes.posteriors import Posterior
    from silobayes.report import predictions
    from silobayes.report.results import result
    from silobayes.report.run_files import read_run

    if out is not None and out.exists():
        raise InvalidInput("--out", "a new file", str(out), "Choose another name, or remove it.")
    run = read_run(directory)
    found = predictions.predict(run, Posterior.load(directory), table, level)
    if out is not None:
        try:
            found.to_csv(out, index=False)
        except OSError as error:
            got = f"{out} ({error.strerror})"
            raise InvalidInput("--out", "a file that can be written", got, "Choose another place.") from None
    privacy = result(run)["privacy"]
    if as_json:
        told = {"is_private": privacy["is_private"], "stamp": privacy["stamp"], "level": level}
        click.echo(json.dumps({**told, "rows": found.to_dict(orient="records")}, allow_nan=False))
        return
    console = Console()
    if not privacy["is_private"]:
        console.print(Text(str(privacy["stamp"]), style="bold red"))
    if out is not None:
        click.echo(f"Wrote {len(found)} rows to {out}.")
        return
    shown = Table(title=f"Predictions, {interval_words(level)} of the mean", title_justify="left")
    for heading in ("row", *found.columns):
        shown.add_column(heading, justify="right")
    for number, row in enumerate(found.head(_MAX_LINES).itertuples(index=False), start=1):
        shown.add_row(str(number), *(Text(value) if isinstance(value, str) else f"{value:.4g}" for value in row))
    console.print(shown)
    if len(found) > _MAX_LINES:
        console.print(f"... and {len(found) - _MAX_LINES} more rows; --out FILE or --json gives all")
