"""`silobayes run study.toml`: one posterior from the silos of a study, on this machine."""

import dataclasses
from pathlib import Path

import click

from silobayes.cli.running import execute, json_option, read_inputs


@click.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--seed", type=int, help="Instead of the study's seed: splits and model randomness, never the noise.")
@click.option("--out", type=click.Path(path_type=Path), help="The run directory; by default beside the study file.")
@click.option(
    "--engine", type=click.Choice(["local"]), default="local", show_default=True,
    help="Where the silos run: all of them in this process.",
)  # fmt: skip
@click.option(
    "--ledger", "ledgers", multiple=True, metavar="SILO=PATH",
    help="A silo's own ledger, whose budget spans studies; by default each silo gets a new one in the run directory.",
)  # fmt: skip
@json_option
def run(study: Path, seed: int | None, out: Path | None, engine: str, ledgers: tuple[str, ...], as_json: bool) -> None:
    """Run STUDY: progress, then the posterior, its metrics and its price. Ctrl-C is safe: `silobayes resume`."""
    from silobayes.engines import local
    from silobayes.study import Study

    meant = Study.from_toml(study)
    if seed is not None:
        meant = dataclasses.replace(meant, study=dataclasses.replace(meant.study, seed=seed))
    directory = study.parent / f"{study.stem}-run" if out is None else out
    execute(local.run, read_inputs(meant, study.parent, ledgers), directory, study.parent, as_json)
