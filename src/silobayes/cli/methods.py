"""`silobayes methods`: what there is to choose from, what it releases, for which models and units."""

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def methods(as_json: bool) -> None:
    """List the methods that [protocol] may name."""
    from silobayes.plans import METHODS
    from silobayes.runs import claims

    listed = [
        {
            "method": method.name,
            "kind": method.kind,
            "privatise": method.privatise,
            "summary": method.summary,
            "releases": method.releases,
            "models": method.models,
            "units": [unit.value for unit in method.units],
            "intervals": method.intervals.value if method.units else None,
        }
        for method in METHODS.values()
    ]
    if as_json:
        click.echo(json.dumps({"methods": listed}))
        return
    for one in listed:
        units = ", ".join(one["units"]) or "nobody"
        click.echo(f"{one['method']}\n    {one['summary']}")
        click.echo(f"    releases {one['releases']}; for {one['models']}; protects {units}")
        if one["intervals"] is not None:
            click.echo(f"    intervals: {one['intervals']}")
    click.echo(f"\nWhether intervals include the privacy noise: {claims.INTERVALS_PAGE}.")
    click.echo("silobayes init DIR --method NAME writes a study file with just the keys of one of them.")
