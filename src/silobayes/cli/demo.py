"""`silobayes demo`: the main job on simulated silos, offline."""

import json
import tempfile
from pathlib import Path

import click

from silobayes.core.digits import round_up
from silobayes.core.errors import InvalidInput


@click.command()
@click.option("--seed", default=0, show_default=True, help="Seed of the simulated rows (never of the noise).")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the silos' ledgers in this new directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo(seed: int, out: Path | None, as_json: bool) -> None:
    """One posterior from ten simulated silos by private linear regression, with its price."""
    from rich.console import Console
    from rich.table import Table

    from silobayes.demo import DELTA, EPSILON, RELATION, UNIT, run

    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory() as scratch:
        directory = out or Path(scratch)
        if out is not None and out.exists():
            raise InvalidInput("--out", "a directory that does not exist yet", str(out), "Name a new one.")
        directory.mkdir(parents=True, exist_ok=True)
        result = run(
            directory,
            seed,
            lambda silo: console.print(
                f"silo {silo.number:2d}: {silo.rows:5d} rows, "
                f"epsilon {round_up(silo.spent.epsilon)} of {EPSILON:g} spent"
            ),
        )
    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    table = Table(title="Posterior of the coefficients (mean ± sd)")
    for heading in ("coefficient", "truth", "private", "noise ignored", "not private", "variance due to privacy"):
        table.add_column(heading, justify="left" if heading == "coefficient" else "right")
    for k, name in enumerate(result.study.names):
        table.add_row(
            name,
            f"{result.study.coefficients[k]:.2f}",
            *(
                f"{posterior.mean[k]:.3f} ± {posterior.stddev[k]:.3f}"
                for posterior in (result.private, result.naive, result.not_private)
            ),
            f"{100 * result.private.privacy_share[k]:.0f} %",
        )
    console.print(table)
    console.print(
        f"Each silo spent epsilon {round_up(max(spent.epsilon for spent in result.spent))} of {EPSILON:g} "
        f"at delta {DELTA:g} (unit: {UNIT.value}, relation: {RELATION.value}); "
        "the posterior is computed from the releases alone."
    )
    if out is not None:
        console.print(f"Ledgers: silobayes ledger show {out / 'silo-00.ledger'}")
