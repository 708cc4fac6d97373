"""`silobayes explain study.toml`: plain words for a data-protection officer."""

import dataclasses
import json
from pathlib import Path

import click


@click.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain(study: Path, as_json: bool) -> None:
    """What STUDY promises, what leaves a site, and what is not protected. Reads no rows."""
    from silobayes.report.explain import explain as sections_of
    from silobayes.study import Study

    meant = Study.from_toml(study)
    sections = sections_of(meant)
    if as_json:
        answer = {
            "study": meant.study.name,
            "study_hash": meant.hash,
            "sections": [dataclasses.asdict(section) for section in sections],
        }
        click.echo(json.dumps(answer))
        return
    for section in sections:
        click.echo(f"\n{section.heading}\n{'-' * len(section.heading)}")
        for paragraph in section.paragraphs:
            click.echo(click.wrap_text(paragraph, width=100))
            click.echo()
