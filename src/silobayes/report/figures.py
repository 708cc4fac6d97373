"""Figures of a report as SVG in data URIs: one file, nothing to fetch, the same bytes for the same run."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

# Okabe and Ito's colours: told apart by colour-blind readers too.
PRIVATE, EXACT, ALONE, BUDGET = "#0072B2", "#D55E00", "#999999", "#000000"
MAX_PARAMETERS, MAX_LINES, MAX_NAMED_SILOS = 40, 10, 30


def interval_figure(
    private: pd.DataFrame, exact: pd.DataFrame | None, alone: Mapping[str, pd.DataFrame], label: str
) -> str:
    """Intervals of the posterior, of the one without privacy, and of each silo alone, where the run has them."""
    shown = strongest(private, MAX_PARAMETERS)
    rows = np.arange(len(shown))[::-1].astype(float)
    figure = Figure(figsize=(7.2, 1.0 + 0.32 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0.0, color="#cccccc", linewidth=0.8, zorder=0)
    for number, table in enumerate(alone.values()):
        means = table["mean"].reindex(shown)
        axes.plot(
            means, rows - 0.28, "|", color=ALONE, markersize=6, label=None if number else "each silo alone (mean)"
        )
    if exact is not None:
        _bars(axes, exact.loc[shown], rows - 0.12, EXACT, "not private")
    _bars(axes, private.loc[shown], rows + 0.12, PRIVATE, label)
    axes.set_yticks(rows, shown)
    axes.set_ylim(-0.8, len(shown) - 0.2)
    axes.set_xlabel("coefficient, central 95 % interval")
    if exact is not None or alone:
        axes.legend(loc="best", fontsize="small", frameon=False)
    return _uri(figure)


def forest_figure(table: pd.DataFrame, ratio: str | None) -> str:
    """A line for each coefficient: its interval, and within it that without the privacy noise where it is known.

    Ratios stand on a logarithmic axis around 1, coefficients around 0.
    """
    rows = np.arange(len(table))[::-1].astype(float)
    figure = Figure(figsize=(7.2, 1.0 + 0.32 * len(table)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0.0 if ratio is None else 1.0, color="#cccccc", linewidth=0.8, zorder=0)
    is_known = "lower_without" in table
    axes.hlines(
        rows, table["lower"], table["upper"], color=EXACT if is_known else PRIVATE, linewidth=1.4,
        label="95 % interval, with the privacy noise" if is_known else "95 % interval",
    )  # fmt: skip
    if is_known:
        without = (table["lower_without"], table["upper_without"])
        axes.hlines(rows, *without, color=PRIVATE, linewidth=4.5, label="what would be left without it")
    axes.plot(table["value"], rows, "o", color=BUDGET, markersize=4.0)
    if ratio is not None:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(rows, list(table.index))
    axes.set_ylim(-0.8, len(table) - 0.2)
    axes.set_xlabel("coefficient" if ratio is None else f"{ratio} (logarithmic axis)")
    axes.legend(loc="best", fontsize="small", frameon=False)
    return _uri(figure)


def shares_figure(table: pd.DataFrame) -> str:
    """A bar for each parameter, cut into shares of its variance; each kind has a colour and a hatching of its own."""
    rows = np.arange(len(table))[::-1].astype(float)
    figure = Figure(figsize=(7.2, 1.2 + 0.28 * len(table)), layout="constrained")
    axes = figure.add_subplot(xlim=(0.0, 1.0))
    start = np.zeros(len(table))
    for name, color, hatch in zip(table.columns, (EXACT, ALONE, PRIVATE), ("//", "", ".."), strict=False):
        axes.barh(rows, table[name], left=start, color=color, hatch=hatch, edgecolor="white", height=0.7, label=name)
        start = start + table[name].to_numpy()
    axes.set_yticks(rows, list(table.index))
    axes.set_ylim(-0.8, len(table) - 0.2)
    axes.set_xlabel("share of the variance")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize="small", frameon=False)
    return _uri(figure)


def epsilon_figure(names: Sequence[str], spent: Sequence[float], budget: float) -> str:
    """Epsilon spent by each silo against its budget."""
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    axes = figure.add_subplot(ylabel="epsilon spent")
    places = np.arange(len(names))
    axes.bar(places, spent, color=PRIVATE, width=0.7)
    axes.axhline(budget, color=BUDGET, linewidth=1.0, linestyle="--", label="budget")
    if len(names) <= MAX_NAMED_SILOS:
        axes.set_xticks(places, list(names), rotation=45, ha="right")
    else:
        axes.set_xlabel(f"{len(names)} silos")
    axes.set_ylim(0.0, 1.15 * max([budget, *spent]))
    axes.legend(loc="upper right", fontsize="small", frameon=False)
    return _uri(figure)


def trace_figure(names: Sequence[str], means: np.ndarray) -> str:
    """(steps, parameters) means of the released posterior after each step; the largest at the end are drawn."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="posterior mean (released)")
    chosen = np.argsort(-np.abs(means[-1]), kind="stable")[:MAX_LINES]
    for index in chosen:
        axes.plot(np.arange(1, len(means) + 1), means[:, index], linewidth=1.2, label=names[index])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    return _uri(figure)


def strongest(table: pd.DataFrame, count: int) -> list[str]:
    """At most `count` names: those with the largest |mean| / sd, in their own order."""
    if len(table) <= count:
        return list(table.index)
    score = (table["mean"] / table["sd"]).abs().to_numpy()
    kept = set(np.argsort(-score, kind="stable")[:count].tolist())
    return [name for k, name in enumerate(table.index) if k in kept]


def _bars(axes: Any, table: pd.DataFrame, rows: np.ndarray, color: str, label: str) -> None:
    mean, lower, upper = (table[key].to_numpy() for key in ("mean", "lower", "upper"))
    axes.errorbar(
        mean, rows, xerr=np.stack([mean - lower, upper - mean]), fmt="o", color=color, markersize=3.5, linewidth=1.4,
        label=label,
    )  # fmt: skip


def _uri(figure: Figure) -> str:
    out = io.BytesIO()
    # A fixed salt and no date, so that equal runs give equal reports; text as outlines, so that no font is needed.
    with matplotlib.rc_context({"svg.hashsalt": "silobayes", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode("ascii")
