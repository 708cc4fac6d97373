"""`silobayes verify DIR`: the price of a run, recomputed from its ledgers alone, by two methods."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from silobayes.core.digits import round_up

if TYPE_CHECKING:
    from silobayes.report.verification import Verification

_MAX_LINES = 20


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(ctx: click.Context, directory: Path, as_json: bool) -> None:
    """Check the certificate of the run in DIR; exit code 1 if a check fails."""
    from silobayes.report.run_files import read_run
    from silobayes.report.verification import verify as check

    found = check(read_run(directory))
    if as_json:
        click.echo(json.dumps(found.to_json(), allow_nan=False))
    else:
        _print(found)
        if not found.passed:
            click.echo("The certificate is NOT confirmed.")
        elif found.says_private:
            click.echo("The certificate is confirmed.")
        else:
            click.echo("The certificate says NOT PRIVATE, and that is so.")
    ctx.exit(0 if found.passed else 1)


def _print(found: "Verification") -> None:
    """Prices of the silos, checks that failed, and how many passed."""
    for price in found.prices[:_MAX_LINES]:
        bounds = [
            f"{round_up(value)} {how}" if math.isfinite(value) else f"no bound {how}"
            for value, how in ((price.epsilon, "by loss distributions"), (price.epsilon_rdp, "by Renyi divergences"))
        ]
        claimed = round_up(price.claimed) if math.isfinite(price.claimed) else "nothing"
        click.echo(f"{price.silo}: claimed epsilon {claimed}; recomputed {', '.join(bounds)}")
    if len(found.prices) > _MAX_LINES:
        click.echo(f"... and {len(found.prices) - _MAX_LINES} more silos")
    for check in found.checks:
        if not check.passed:
            click.echo(f"{click.style('FAILED', fg='red', bold=True)}  {check.name}: {check.detail}")
    passed = sum(check.passed for check in found.checks)
    click.echo(f"{passed} of {len(found.checks)} checks passed.")
