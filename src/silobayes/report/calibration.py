"""What a calibration showed, as files: `calibration.json` and `calibration.png`."""

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from silobayes.report.figures import ALONE, BUDGET, EXACT, PRIVATE
from silobayes.runs.coverage import LEVELS, Calibration, Places

JSON, PNG = "calibration.json", "calibration.png"
# Standard errors; a bar of honest posteriors is outside in one of a hundred.
_BAND = 2.58
_MOST_HISTOGRAMS, _COLUMNS = 12, 4


def write_calibration(calibration: Calibration, directory: Path) -> dict[str, Path]:
    """Write both files; the directory is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    places = {"json": directory / JSON, "png": directory / PNG}
    places["json"].write_text(json.dumps(calibration.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    calibration_figure(calibration).savefig(places["png"], dpi=120, metadata={"Software": None})
    return places


def calibration_figure(calibration: Calibration) -> Figure:
    """Coverage against what is claimed, ranks of all parameters together, and of those that are covered worst."""
    shown = _worst(calibration.places)
    rows = math.ceil(len(shown) / _COLUMNS)
    figure = Figure(figsize=(9.6, 3.6 + 1.5 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, _COLUMNS, height_ratios=[2.4] + [1.0] * rows)
    _coverage(figure.add_subplot(grid[0, : _COLUMNS // 2]), calibration)
    together = figure.add_subplot(grid[0, _COLUMNS // 2 :], title="all parameters", ylabel="truths")
    together.set_xlabel("position of the truth in the posterior")
    ranks = calibration.places.ranks(calibration.num_bins)
    _histogram(together, ranks.sum(axis=0), calibration.places.ranks_error(calibration.num_bins))
    for place, k in enumerate(shown):
        axes = figure.add_subplot(grid[1 + place // _COLUMNS, place % _COLUMNS])
        share = 1 / calibration.num_bins
        _histogram(axes, ranks[k], math.sqrt(calibration.repetitions * share * (1 - share)))
        axes.set_title(calibration.names[k], fontsize="x-small")
        axes.tick_params(labelsize="x-small")
    figure.suptitle(textwrap.fill(calibration.sentence, 110), fontsize="medium")
    return figure


def _coverage(axes: Any, calibration: Calibration) -> None:
    claimed = np.linspace(0.0, 1.0, 101)
    axes.plot([0, 1], [0, 1], color=BUDGET, linewidth=0.8, linestyle="--", label="as claimed")
    for places, color, label in (
        (calibration.exact, EXACT, "not private"),
        (calibration.places, PRIVATE, "private" if calibration.is_private else "this study"),
    ):
        if places is None:
            continue
        axes.plot(claimed, [places.covered(level).mean() for level in claimed], color=color, linewidth=1.4)
        shares = [places.coverage(level) for level in LEVELS]
        axes.errorbar(
            LEVELS, [share.value for share in shares], yerr=[2 * share.error for share in shares], fmt="o", color=color,
            markersize=4, label=label,
        )  # fmt: skip
    axes.set_xlabel("probability of the interval")
    axes.set_ylabel("share of truths in it")
    axes.legend(loc="upper left", fontsize="small", frameon=False)


def _histogram(axes: Any, counts: np.ndarray, error: float) -> None:
    """Bars, the height of flat ones, and the band around it that chance explains."""
    bins, flat = len(counts), counts.mean()
    axes.axhspan(max(flat - _BAND * error, 0.0), flat + _BAND * error, color=ALONE, alpha=0.25, linewidth=0)
    axes.axhline(flat, color=BUDGET, linewidth=0.8, linestyle="--")
    axes.bar((np.arange(bins) + 0.5) / bins, counts, width=0.9 / bins, color=PRIVATE)
    axes.set_xlim(0, 1)


def _worst(places: Places) -> list[int]:
    """The parameters whose 95 % intervals cover worst, in their own order."""
    away = np.abs(places.covered(0.95).mean(axis=0) - 0.95)
    return sorted(np.argsort(-away, kind="stable")[:_MOST_HISTOGRAMS].tolist())
