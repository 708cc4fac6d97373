"""`silobayes demo`: the main job on simulated ICUs, offline."""

import itertools
import json
from pathlib import Path

import click

from silobayes.core.errors import InvalidInput


@click.command()
@click.option("--seed", default=0, show_default=True, help="Seed of the simulated patients (never of the noise).")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A new directory for the run (ledgers, posterior, certificate, report); by default silobayes-demo here, "
    "or the next free silobayes-demo-N.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def demo(seed: int, out: Path | None, as_json: bool) -> None:
    """Mortality in ten simulated ICUs: one private posterior, its price, and a report to look at."""
    from rich.console import Console
    from rich.table import Table

    from silobayes.cli.running import NOISE_NOTE, progress_bar
    from silobayes.demo import simulate

    out = _free_place() if out is None else out
    if out.exists():
        raise InvalidInput("--out", "a directory that does not exist yet", str(out), "Name a new one, or remove it.")
    console = Console(stderr=as_json)
    with progress_bar(Console(stderr=True)) as show:
        result = simulate(out, seed, show, console.print)
    privacy = result.private.provenance
    if as_json:
        answer = {
            "metrics": result.metrics,
            "privacy": {key: privacy[key] for key in ("epsilon", "delta", "relation", "unit", "silos")},
            "report": str(result.report),
        }
        click.echo(json.dumps(answer, allow_nan=False))
        return
    table = Table(title="Coefficients (mean ± sd)", title_justify="left")
    for heading in ("coefficient", "truth", "private", "not private"):
        table.add_column(heading, justify="left" if heading == "coefficient" else "right")
    private, exact = result.private.summary(), result.not_private.summary()
    for name in private.index:
        cells = (f"{summary.loc[name, 'mean']:.2f} ± {summary.loc[name, 'sd']:.2f}" for summary in (private, exact))
        table.add_row(str(name), f"{result.truth[str(name)]:.2f}", *cells)
    console.print(table)
    table = Table(title="Held-out patients", title_justify="left")
    for heading in ("posterior", "log-likelihood", "accuracy", "AUC"):
        table.add_column(heading, justify="left" if heading == "posterior" else "right")
    for name, metrics in result.metrics.items():
        table.add_row(name, *(f"{metrics[key]:.3f}" for key in ("log_likelihood", "accuracy", "auc")))
    console.print(table)
    console.print(NOISE_NOTE, highlight=False)
    console.print(f"Report: {result.report}\nCheck its price from the ledgers alone: silobayes verify {out}")


def _free_place() -> Path:
    """The demo can be run again and again: an earlier run, with its ledgers, is never touched."""
    names = itertools.chain(["silobayes-demo"], (f"silobayes-demo-{number}" for number in itertools.count(2)))
    return next(place for place in map(Path, names) if not place.exists())
