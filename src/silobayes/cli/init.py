"""`silobayes init DIR`: a commented study file to start from."""

import json
from pathlib import Path

import click

from silobayes.core.errors import InvalidInput


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--method", help="Write just the keys of this method; `silobayes methods` lists them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def init(directory: Path, method: str | None, as_json: bool) -> None:
    """Write a commented study.toml into DIR; a file that is already there is never touched."""
    from silobayes.plans import METHODS
    from silobayes.studies.template import by_name, template

    text = _default() if method is None else template(by_name(method, METHODS), is_default=False)
    path = directory / "study.toml"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        taken = path if path.exists() else directory
        raise InvalidInput("DIR", "a place for a new study.toml", str(taken), "Choose another directory.") from None
    except OSError as error:
        fix = "Choose another directory."
        raise InvalidInput("DIR", "a directory that can be written", f"{directory} ({error.strerror})", fix) from None
    if as_json:
        click.echo(json.dumps({"study": str(path)}))
    else:
        click.echo(f"Wrote {path}. Edit it, then: silobayes plan {path}")


def _default() -> str:
    """With the keys of the method that its study gets."""
    from silobayes.plans import METHODS
    from silobayes.studies.template import template
    from silobayes.study import Study

    method = next(method for method in METHODS.values() if method.units)
    return template(Study.from_toml(template(method, is_default=True)).method, is_default=True)
