"""`silobayes ledger create | show PATH`: what a data holder allows, and what has been spent of it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import click

from silobayes.core.digits import round_down, round_up
from silobayes.privacy.events import canonical, to_json
from silobayes.privacy.ledger import Budget, Entry, Ledger, Spent
from silobayes.privacy.relation import Relation, Unit


@click.group()
def ledger() -> None:
    """Create the privacy ledger of a data set, or look into it."""


@ledger.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--epsilon", type=float, required=True, help="What all studies together may spend.")
@click.option("--delta", type=float, required=True, help="Well below one over the number of rows.")
@click.option("--relation", type=click.Choice([r.value for r in Relation]), required=True, help="Who are neighbours.")
@click.option("--unit", type=click.Choice([u.value for u in Unit]), required=True, help="Whom the budget protects.")
def create(path: Path, epsilon: float, delta: float, relation: str, unit: str) -> None:
    """Write a new ledger at PATH, once for a data set; `silobayes run --ledger SILO=PATH` charges it."""
    Ledger.create(path, Budget(epsilon=epsilon, delta=delta, relation=Relation(relation), unit=Unit(unit)))
    click.echo(f"Wrote {path} and {path}.head. Keep both; a data set has one ledger.")


@ledger.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def show(path: Path, as_json: bool) -> None:
    """Verify the ledger at PATH and show its budget, studies and charges."""
    opened = Ledger.open(path)
    entries = opened.entries()
    site = opened.spent()
    studies = [(account.study, account.cap, account.spent()) for account in opened.accounts()]
    if as_json:
        click.echo(json.dumps(_as_json(path, opened.budget, site, studies, entries), allow_nan=False))
    else:
        _print(path, opened.budget, site, studies, entries)


def _as_json(
    path: Path, budget: Budget, site: Spent, studies: list[tuple[str, Budget, Spent]], entries: tuple[Entry, ...]
) -> dict[str, Any]:
    return {
        "path": str(path),
        "budget": dataclasses.asdict(budget),
        "spent": _spent_json(site),
        "studies": [
            {"study": study, "epsilon": cap.epsilon, "delta": cap.delta, "spent": _spent_json(spent)}
            for study, cap, spent in studies
        ],
        "entries": [
            {
                "sequence": entry.sequence,
                "study": entry.study,
                "time": entry.time,
                "event": to_json(entry.event),
                "relation": entry.relation.value,
                "unit": entry.unit.value,
                "hash": entry.hash,
            }
            for entry in entries
        ],
    }


def _spent_json(spent: Spent) -> dict[str, Any]:
    """JSON has no infinity: an epsilon that no accountant can bound is null."""
    return {key: value if math.isfinite(value) else None for key, value in dataclasses.asdict(spent).items()}


def _print(
    path: Path, budget: Budget, site: Spent, studies: list[tuple[str, Budget, Spent]], entries: tuple[Entry, ...]
) -> None:
    from rich.console import Console  # late, because `silobayes --help` need not pay for it
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(f"Ledger {path}: intact. {budget.relation.value}, per {budget.unit.value}."))
    table = Table(title="Budgets")
    table.add_column("study", overflow="fold")
    for heading in ("epsilon", "spent", "left", "delta", "charges"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, cap, spent in [*studies, ("all studies", budget, site)]:
        table.add_row(
            Text(name, style="bold" if cap is budget else ""),
            f"{cap.epsilon:.6g}",
            round_up(spent.epsilon),
            round_down(spent.epsilon_left),
            f"{cap.delta:.3g}",
            str(spent.charges),
        )
    console.print(table)
    table = Table(title="Charges")
    for heading in ("#", "time (UTC)", "study", "event"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "#" else "left")
    for entry in entries:
        table.add_row(str(entry.sequence), entry.time[:19], Text(entry.study), Text(canonical(entry.event)))
    console.print(table)
