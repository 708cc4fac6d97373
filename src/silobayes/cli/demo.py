"""`silobayes demo`: the main job on simulated ICUs, offline."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from silobayes.core.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from silobayes.demo import DemoResult


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

    from silobayes.cli.running import progress_bar
    from silobayes.demo import simulate

    out = _free_place() if out is None else out
    if out.exists():
        raise InvalidInput("--out", "a directory that does not exist yet", str(out), "Name a new one, or remove it.")
    console = Console(stderr=as_json)
    with progress_bar(Console(stderr=True)) as show:
        result = simulate(out, seed, show, console.print)
    if as_json:
        click.echo(json.dumps(_as_json(result), allow_nan=False))
        return
    _print_coefficients(console, result)
    _print_answers(console, result)
    for line in _in_words(result):
        console.print(line, highlight=False)
    console.print(f"Report: {result.report}\nCheck its price from the ledgers alone: silobayes verify {out}")


def _as_json(result: "DemoResult") -> dict[str, Any]:
    privacy, together = result.together.private.provenance, result.together
    metrics = {kind.replace("_", " "): own for kind, own in together.metrics.items()}
    for name, answers in result.answers.items():
        if answers is not together:
            metrics[f"{name} alone"] = answers.metrics["not_private"]
            metrics[f"{name} alone, private"] = answers.metrics["private"]
    return {
        "metrics": metrics,
        "privacy": {key: privacy[key] for key in ("epsilon", "delta", "relation", "unit", "silos")},
        "report": str(result.report),
        "coefficients": len(result.truth),
        "intervals_with_truth": result.num_true_inside,
        "intervals_with_not_private_mean": result.num_exact_inside,
        "width_ratio": result.width_ratio,
        "icus_beaten": {kind: result.num_beaten(kind) for kind in ("private", "not_private")},
    }


def _print_coefficients(console: "Console", result: "DemoResult") -> None:
    from rich.table import Table

    table = Table(title="Coefficients (mean ± sd)", title_justify="left")
    for heading in ("coefficient", "truth", "private", "not private"):
        table.add_column(heading, justify="left" if heading == "coefficient" else "right")
    private, exact = result.together.private.summary(), result.together.not_private.summary()
    for name, row in private.to_dict(orient="index").items():
        truth, other = result.truth[str(name)], exact.loc[name]
        missed = " " if row["lower"] <= truth <= row["upper"] else "*"
        cells = f"{row['mean']:.2f} ± {row['sd']:.2f}{missed}", f"{other['mean']:.2f} ± {other['sd']:.2f}"
        table.add_row(str(name), f"{truth:.2f}", *cells)
    console.print(table)
    if result.num_true_inside < len(private):
        console.print("* its 95 % interval misses the truth", highlight=False)


def _print_answers(console: "Console", result: "DemoResult") -> None:
    from rich.table import Table

    title = "Held-out log-likelihood, and error of the coefficients"
    table = Table(title=title, title_justify="left")
    headings = ("patients of", "number", "private", "error", "not private", "error")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    for name, own in result.answers.items():
        cells = (
            cell
            for kind in ("private", "not_private")
            for cell in (f"{own.metrics[kind]['log_likelihood']:.4f}", f"{own.error[kind]:.2f}")
        )
        table.add_row(name if own is result.together else f"{name} alone", str(own.rows), *cells)
    console.print(table)


def _in_words(result: "DemoResult") -> Iterator[str]:
    total, alone = len(result.truth), len(result.answers) - 1
    yield (
        f"Of {total} private 95 % intervals, {result.num_true_inside} contain the true coefficient and "
        f"{result.num_exact_inside} the mean without privacy; as they include the privacy noise, about "
        f"{round(0.95 * total)} should contain the truth."
    )
    yield (
        "With privacy, all ICUs together predict held-out patients better than "
        f"{result.num_beaten('private')} of {alone} ICUs alone at the same epsilon, and than "
        f"{result.num_beaten('not_private')} of {alone} alone without privacy."
    )
    yield f"What privacy cost: intervals {result.width_ratio:.1f} times as wide as without it (the median coefficient)."
    for warning in result.together.private.warnings:
        yield f"Warning: {warning}"


def _free_place() -> Path:
    """The demo can be run again and again: an earlier run, with its ledgers, is never touched."""
    names = itertools.chain(["silobayes-demo"], (f"silobayes-demo-{number}" for number in itertools.count(2)))
    return next(place for place in map(Path, names) if not place.exists())
