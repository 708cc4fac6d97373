"""`silobayes report DIR`: one self-contained HTML file and one JSON file."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(directory: Path, as_json: bool) -> None:
    """Write report.html and report.json into the run directory DIR."""
    from silobayes.report.build import write_report

    paths = {key: str(path) for key, path in write_report(directory).items()}
    if as_json:
        click.echo(json.dumps(paths))
    else:
        click.echo(f"Wrote {paths['html']} and {paths['json']}.")
