"""Tables and figure of the experiment, from results.json alone: `python -m experiments.dp_regression.report`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tables import filled, markdown

HERE = Path(__file__).parent
# Variant -> colour and line; the projected one of a pair is solid.
STYLES = {
    "trusted aggregator": ("#0072b2", "--"),
    "trusted aggregator, projected": ("#0072b2", "-"),
    "distributed": ("#d55e00", "--"),
    "distributed, projected": ("#d55e00", "-"),
    "per-silo noise": ("#009e73", "--"),
    "per-silo noise, projected": ("#009e73", "-"),
    "input perturbation": ("#999999", ":"),
}


def write(results: Mapping[str, Any], folder: Path) -> None:
    """The figure, and README.md with its tables filled in."""
    draw(results, folder / "errors.png")
    readme = folder / "README.md"
    readme.write_text(filled(readme.read_text(), tables(results)))


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Name -> Markdown."""
    texts = {name.replace(" ", "-"): _errors(results, name) for name in results["rows"]}
    return texts | {
        "comparisons": _comparisons(results),
        "coverage": _coverage(results),
        "coverage-range": _coverage_range(results),
        "run": _run(results),
    }


def errors_of(results: Mapping[str, Any], data: str, variant: str, epsilon: float | None = None) -> np.ndarray:
    """The errors of one cell, split by split."""
    (record,) = (
        one
        for one in results["records"]
        if one["data"] == data and one["variant"] == variant and one["epsilon"] == epsilon
    )
    return np.array(record["errors"])


def epsilons_of(results: Mapping[str, Any]) -> list[float]:
    """The budgets, in order."""
    return sorted({one["epsilon"] for one in results["records"] if one["epsilon"] is not None})


def difference(results: Mapping[str, Any], data: str, epsilon: float, first: str, second: str) -> tuple[float, float]:
    """(mean, standard error) of the differences of two variants on the same splits."""
    values = errors_of(results, data, first, epsilon) - errors_of(results, data, second, epsilon)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _run(results: Mapping[str, Any]) -> str:
    rows = ", ".join(f"{name} {count}" for name, count in results["rows"].items())
    return (
        f"{results['splits']} splits, delta {results['delta']:g}, rows: {rows}. It took {results['cpu_s']} CPU seconds."
    )


def _errors(results: Mapping[str, Any], data: str) -> str:
    epsilons = epsilons_of(results)
    lines = [["variant", *(f"{epsilon:.3g}" for epsilon in epsilons)]]
    for variant in STYLES:
        cells = [errors_of(results, data, variant, epsilon) for epsilon in epsilons]
        lines.append([variant, *(_median(cell) for cell in cells)])
    for variant in ("non-private", "no features"):
        lines.append([variant, _median(errors_of(results, data, variant)), *[""] * (len(epsilons) - 1)])
    return markdown(lines[0], lines[1:])


def _comparisons(results: Mapping[str, Any]) -> str:
    epsilons = epsilons_of(results)
    pairs = {
        "distributed - trusted, projected": ("distributed, projected", "trusted aggregator, projected"),
        "distributed - trusted": ("distributed", "trusted aggregator"),
        "projected - not, distributed": ("distributed, projected", "distributed"),
    }
    lines = [["", *(f"{epsilon:.3g}" for epsilon in epsilons)]]
    for data in results["rows"]:
        for name, pair in pairs.items():
            found = [difference(results, data, epsilon, *pair) for epsilon in epsilons]
            lines.append([f"{data}: {name}", *(f"{mean:+.3f} ± {2 * error:.3f}" for mean, error in found)])
    return markdown(lines[0], lines[1:])


def _coverage(results: Mapping[str, Any]) -> str:
    epsilons = sorted({one["epsilon"] for one in results["coverage"]})
    found: dict[str, dict[float, str]] = {}
    for one in results["coverage"]:
        projected = "projected" if one["projection"] else "not projected"
        name = f"{one['dim']} features, {one['rows']} rows, correlation {one['correlation']:g}, {projected}"
        found.setdefault(name, {})[one["epsilon"]] = f"{one['coverage']:.3f} ({one['error']:.3f})"
    lines = [[name, *(cells[epsilon] for epsilon in epsilons)] for name, cells in found.items()]
    return markdown(["", *(f"{epsilon:.3g}" for epsilon in epsilons)], lines)


def _coverage_range(results: Mapping[str, Any]) -> str:
    ranges = []
    for projection in (True, False):
        values = [one["coverage"] for one in results["coverage"] if one["projection"] is projection]
        ranges.append(f"{min(values):.2f} to {max(values):.2f} {'projected' if projection else 'not projected'}")
    return f"{results['studies']} simulated studies a cell; coverage is {', '.join(ranges)}."


def _median(errors: np.ndarray) -> str:
    low, middle, high = np.percentile(errors, [25, 50, 75])
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Median and quartiles of the errors against epsilon, one panel per table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    epsilons = epsilons_of(results)
    figure, axes = plt.subplots(1, len(results["rows"]), figsize=(11, 3.6), squeeze=False)
    for panel, data in zip(axes[0], results["rows"], strict=True):
        for shift, (variant, (colour, line)) in enumerate(STYLES.items()):
            cells = [np.percentile(errors_of(results, data, variant, e), [25, 50, 75]) for e in epsilons]
            low, middle, high = np.array(cells).T
            places = np.array(epsilons) * 1.02 ** (shift - 3)
            bars = [middle - low, high - middle]
            panel.errorbar(places, middle, yerr=bars, color=colour, linestyle=line, label=variant, lw=1.3, capsize=2)
        best = float(np.median(errors_of(results, data, "non-private")))
        none = float(np.median(errors_of(results, data, "no features")))
        panel.axhline(best, color="black", lw=1, label="non-private")
        panel.axhline(none, color="black", lw=0.6, linestyle=":", label="no features")
        panel.set(xscale="log", title=data, xlabel="epsilon", ylim=(0.97 * best, best + 2.0 * (none - best)))
    axes[0][0].set_ylabel("mean absolute error")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    write(json.loads((HERE / "results.json").read_text()), HERE)
