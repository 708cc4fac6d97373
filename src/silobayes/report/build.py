"""One self-contained HTML file and one JSON file from a run directory.

Guarantees:
    The report is made of files of the run directory alone.
    The HTML fetches nothing and runs nothing.
    Texts of a study cannot become markup.
    A run that is not private is stamped in the first lines.
    Equal runs give equal bytes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from silobayes.core.digits import epsilon_text
from silobayes.posteriors import DESCRIPTION, Posterior
from silobayes.report import figures
from silobayes.report.explain import explain
from silobayes.report.reading import forest, reading, records, variance_shares
from silobayes.report.run_files import COMPARISONS, RunFiles, read_run
from silobayes.report.verification import Verification, verify
from silobayes.runs import claims
from silobayes.study import Study

HTML, JSON = "report.html", "report.json"
NOT_PRIVATE = "not_private"
"""Directory under `comparisons/` of the posterior without privacy; the others there are silos alone."""
LEVEL = 0.95
"""Of all intervals of a report."""
_MAX_ROWS = 300


def write_report(directory: Path) -> dict[str, Path]:
    """Write `report.html` and `report.json` into the run directory; returns their paths."""
    run = read_run(directory)
    checked = verify(run)
    posterior = Posterior.load(directory)
    comparisons = _comparisons(directory, posterior.names)
    data = as_json(run, posterior, comparisons, checked)
    paths = {"html": directory / HTML, "json": directory / JSON}
    paths["html"].write_text(as_html(run, posterior, comparisons, checked, data), encoding="utf-8")
    paths["json"].write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    return paths


def as_json(
    run: RunFiles, posterior: Posterior, comparisons: Mapping[str, pd.DataFrame], checked: Verification
) -> dict[str, Any]:
    """Everything the report says, for machines."""
    return {
        "study": dict(run.study),
        "is_private": run.certificate.get("is_private") is True,
        "certificate": dict(run.certificate),
        "verification": checked.to_json(),
        "posterior": records(posterior.summary()),
        "reading": reading(posterior, LEVEL),
        "comparisons": {name: records(table) for name, table in comparisons.items()},
        **{key: run.metrics.get(key, {}) for key in ("metrics", "communications", "timing")},
    }


def as_html(
    run: RunFiles,
    posterior: Posterior,
    comparisons: Mapping[str, pd.DataFrame],
    checked: Verification,
    data: Mapping[str, Any],
) -> str:
    """The report for people."""
    study = Study.from_dict(run.study)
    summary, exact = posterior.summary(), comparisons.get(NOT_PRIVATE)
    alone = {name: table for name, table in comparisons.items() if name != NOT_PRIVATE}
    is_private = data["is_private"]
    silos = [silo for silo in run.certificate.get("silos", []) if isinstance(silo, Mapping)]
    label = "private" if is_private else "this run (not private)"
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("silobayes.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["epsilon"] = epsilon_text
    return environment.get_template("report.html.jinja").render(
        study=study,
        is_private=is_private,
        intervals_are=claims.intervals_in_words(study.method.intervals),
        stamp=run.certificate.get("stamp") or "NOT PRIVATE: nothing in this run protects anybody",
        certificate=_flat(run.certificate),
        epsilon=run.certificate.get("epsilon"),
        metrics=_flat(data["metrics"]),
        communications=_flat(data["communications"]),
        timing=_flat(data["timing"]),
        rows=_rows(summary, exact)[:_MAX_ROWS],
        num_parameters=len(summary),
        has_exact=exact is not None,
        num_alone=len(alone),
        sections=explain(study),
        checked=checked,
        intervals=figures.interval_figure(summary, exact, alone, label),
        num_shown=min(len(summary), figures.MAX_PARAMETERS),
        events={str(silo.get("name")): _events_text(silo.get("events")) for silo in silos},
        epsilons=_epsilons(silos, study),
        trace=_trace(run, posterior),
        warnings=posterior.warnings,
        ratio=posterior.ratio,
        **_on_the_readers_scale(posterior),
    )


def _on_the_readers_scale(posterior: Posterior) -> dict[str, Any]:
    """Tables and figures of a regression; each None, or empty, where the posterior does not know enough."""
    per_unit = [] if posterior.units is None else _rows(posterior.per_unit(LEVEL), None)
    if per_unit and posterior.ratio is not None:
        ratios = posterior.ratios(LEVEL).to_dict(orient="index")
        for row in per_unit:
            row["ratio"] = ratios.get(row["name"])
    strongest = figures.strongest(posterior.summary(LEVEL), figures.MAX_PARAMETERS)
    drawn, shares = forest(posterior, LEVEL, strongest), variance_shares(posterior)
    return {
        "per_unit": per_unit[:_MAX_ROWS],
        "forest": None if drawn is None or drawn.empty else figures.forest_figure(drawn, posterior.ratio),
        "has_without": drawn is not None and "lower_without" in drawn,
        "shares": None if shares is None else figures.shares_figure(shares.loc[strongest]),
    }


def _comparisons(directory: Path, names: tuple[str, ...]) -> dict[str, pd.DataFrame]:
    """Summaries of the other posteriors of the run, the one without privacy first."""
    found = sorted(path.parent for path in (directory / COMPARISONS).glob(f"*/{DESCRIPTION}"))
    tables = {path.name: Posterior.load(path).summary() for path in found}
    same = {name: table for name, table in tables.items() if tuple(table.index) == names}
    return dict(sorted(same.items(), key=lambda item: (item[0] != NOT_PRIVATE, item[0])))


def _rows(summary: pd.DataFrame, exact: pd.DataFrame | None) -> list[dict[str, Any]]:
    rows = [{"name": str(name), **values} for name, values in summary.to_dict(orient="index").items()]
    if exact is not None:
        for row in rows:
            row["exact_mean"], row["exact_sd"] = exact.loc[row["name"], "mean"], exact.loc[row["name"], "sd"]
    return rows


def _epsilons(silos: list[Mapping[str, Any]], study: Study) -> str | None:
    if not silos or study.privacy.epsilon is None:
        return None
    given = {str(silo.get("name")): silo.get("epsilon") for silo in silos}
    spent = {name: value for name, value in given.items() if isinstance(value, float)}
    if len(spent) < len(given):
        return None
    return figures.epsilon_figure(list(spent), list(spent.values()), study.privacy.epsilon)


def _events_text(events: object) -> str:
    """What a silo released, in a line; the ledger's own form is in the certificate."""
    return "; ".join(_event_text(event) for event in events) if isinstance(events, Sequence) else ""


def _event_text(event: object) -> str:
    if not isinstance(event, Mapping):
        return ""
    known = {key: event[key] for key in ("count", "clip_norm", "std", "grid") if key in event}
    sampling = event.get("sampling")
    if isinstance(sampling, Mapping):
        known |= {str(sampling.get("scheme")): sampling.get("rate")}
    numbers = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in known.items()
    )
    return f"{event.get('mechanism')}: {numbers}"


def _trace(run: RunFiles, posterior: Posterior) -> str | None:
    """Means of the posterior after each step; a step whose precision is not positive has no mean and is left out."""
    means = []
    for line in run.trace:
        eta = line.get("eta")
        if not isinstance(eta, Mapping):
            continue
        linear, quadratic = np.asarray(eta["linear"], float), np.asarray(eta["quadratic"], float)
        precision = -2.0 * quadratic
        if linear.shape != (len(posterior.names),):
            continue
        if precision.ndim == 1:
            means.append(np.where(precision > 0.0, linear / np.where(precision > 0.0, precision, 1.0), np.nan))
        elif np.all(np.linalg.eigvalsh(precision) > 0.0):
            means.append(np.linalg.solve(precision, linear))
    if len(means) < 2 or not np.isfinite(means[-1]).all():
        return None
    return figures.trace_figure(posterior.names, np.stack(means))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, text) of everything but the list of silos, which has a table of its own."""
    lines: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += _flat(value, f"{prefix}{key}.")
        elif key == "epsilon" and isinstance(value, float):
            lines.append((f"{prefix}{key}", epsilon_text(value)))
        elif isinstance(value, float):
            lines.append((f"{prefix}{key}", f"{value:.6g}"))
        elif not (key == "silos" and isinstance(value, list)):
            lines.append((f"{prefix}{key}", str(value)))
    return lines
