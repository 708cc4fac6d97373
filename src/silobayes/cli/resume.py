"""`silobayes resume DIR`: go on with a run after Ctrl-C or a crash; nothing is charged again."""

from pathlib import Path

import click

from silobayes.cli.running import execute, json_option, print_end, read_inputs
from silobayes.core.errors import InvalidInput


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--data", type=click.Path(path_type=Path),
    help="The folder of the study file, to which its tables are relative; by default the one that DIR is in.",
)  # fmt: skip
@click.option(
    "--ledger", "ledgers", multiple=True, metavar="SILO=PATH",
    help="A silo's own ledger. The run remembers it, so this need not be said; another file is refused.",
)  # fmt: skip
@json_option
def resume(directory: Path, data: Path | None, ledgers: tuple[str, ...], as_json: bool) -> None:
    """Go on with the run in DIR where it stopped; a finished run is only shown."""
    from silobayes.engines import local
    from silobayes.posteriors import Posterior
    from silobayes.runs.directory import RunDirectory
    from silobayes.study import Study

    known = RunDirectory.open(directory)
    if known.is_finished:  # its rows need not be at hand
        print_end(Posterior.load(directory), directory, as_json)
        return
    study = Study.from_dict(known.study())
    if study.data.source is None and study.data.files is None:
        fix = "Go on where the rows are: silobayes.fit(study, silos, out=DIR)."
        raise InvalidInput("silos", "the rows that the run was started with in Python", "none", fix)
    folder = directory.parent if data is None else data
    execute(local.resume, read_inputs(study, folder, ledgers), directory, folder, as_json)
