"""`silobayes resume DIR`: go on with a run after Ctrl-C or a crash; nothing is charged again."""

from pathlib import Path

import click

from silobayes.cli.running import execute, json_option, ledger_option, read_inputs


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--data", type=click.Path(path_type=Path),
    help="The folder of the study file, to which its tables are relative; by default the one that DIR is in.",
)  # fmt: skip
@ledger_option
@json_option
def resume(directory: Path, data: Path | None, ledgers: tuple[str, ...], as_json: bool) -> None:
    """Go on with the run in DIR where it stopped; a finished run is only shown."""
    from silobayes.engines import local
    from silobayes.runs.directory import RunDirectory
    from silobayes.study import Study

    study = Study.from_dict(RunDirectory.open(directory).study())
    folder = directory.parent if data is None else data
    execute(local.resume, read_inputs(study, folder, ledgers), directory, folder, as_json)
