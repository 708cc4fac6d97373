"""Tables and figures of the case study, from results.json alone: `python -m experiments.case_study_001.report`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tables import filled, markdown

HERE = Path(__file__).parent
NAMES = {
    "thesis": "analytic, thesis",
    "believed": "analytic, believed",
    "noise-aware": "analytic, noise-aware",
    "gradient": "gradient",
    "hybrid": "hybrid",
    "client": "client level",
    "client, 10 rounds": "client level, 10 rounds",
}


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Figures, and README.md with its tables filled in."""
    draw(results, folder)
    readme = folder / "README.md"
    readme.write_text(filled(readme.read_text(), tables(results)))


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Name -> Markdown."""
    sizes = [int(rows) for rows in results["prior"]]
    texts = {"run": _run(results), "bias": _bias(results)}
    for rows in sizes:
        texts[f"clip_norm-{rows}"] = _clip_norms(results, rows)
        texts[f"epsilon-{rows}"] = _epsilons(results, rows)
        texts[f"detail-{rows}"] = _detail(results, rows)
    return texts


def _records(results: Mapping[str, Any], sweep: str, rows: int, method: str) -> list[Mapping[str, Any]]:
    return [
        one for one in results["records"] if one["sweep"] == sweep and one["rows"] == rows and one["method"] == method
    ]


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _middle(values: list[float]) -> str:
    return _number(float(np.median(values)))


def _spread(values: list[float]) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{_number(middle)} ({_number(low)}, {_number(high)})"


def _clip_norms(results: Mapping[str, Any], rows: int) -> str:
    lines = []
    for method, name in NAMES.items():
        found = _records(results, "clip_norm", rows, method)
        lines.append([name, *(f"{one['clip_norm']:g}: {_spread(one['kl'])}" for one in found)])
    return markdown(["method", *[f"clip norm {k}" for k in range(1, 6)]], lines)


def _epsilons(results: Mapping[str, Any], rows: int) -> str:
    epsilons = sorted({one["epsilon"] for one in results["records"] if one["sweep"] == "epsilon"})
    lines = []
    for method, name in NAMES.items():
        found = _records(results, "epsilon", rows, method)
        lines.append([name, f"{found[0]['clip_norm']:g}", *(_middle(one["kl"]) for one in found)])
    return markdown(["method", "clip norm", *[f"epsilon {epsilon:g}" for epsilon in epsilons]], lines)


def _detail(results: Mapping[str, Any], rows: int) -> str:
    lines = []
    for method, name in NAMES.items():
        found = _records(results, "epsilon", rows, method)
        (one,) = [one for one in found if one["epsilon"] == 10.0]
        inside = np.mean(np.array([other["error"] for other in found]) < 1.96)
        cells = [_spread(one["kl"]), _spread(one["kl_reverse"]), _middle(one["width"]), _middle(one["error"])]
        lines.append([name, *cells, f"{inside:.2f}"])
    heading = ["method", "KL(q, true)", "KL(true, q)", "sd of q / true sd", "error / sd of q", "95 % intervals cover"]
    return markdown(heading, lines)


def _bias(results: Mapping[str, Any]) -> str:
    lines = [
        [f"{one['clip_norm']:g}"]
        + [_number(one[key]) for key in ("sum", "noise_stddev", "expected", "drawn")]
        + [f"{one['expected'] / one['sum']:.2f}"]
        for one in results["bias"]
    ]
    heading = ["clip norm", "sum of x²", "noise std", "mean of max(0, noisy)", "of 100,000 draws", "factor"]
    return markdown(heading, lines)


def _run(results: Mapping[str, Any]) -> str:
    settings = results["settings"]
    lines = [
        [NAMES[method], *(f"{one.get(key, '-')}" for key in ("rounds", "steps", "damping", "step_size"))]
        for method, one in settings.items()
    ]
    table = markdown(["method", "rounds", "steps", "damping", "step size"], lines)
    prior = ", ".join(f"{_number(value)} ({rows} rows a silo)" for rows, value in results["prior"].items())
    return (
        f"{results['seeds']} repetitions a setting, {results['cpu_s']} CPU-seconds in all. Median divergence of the "
        f"prior, which learns nothing: {prior}.\n\n{table}"
    )


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Divergence against clip norm and against epsilon."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    sizes = [int(rows) for rows in results["prior"]]
    for sweep, label in (("clip_norm", "clip norm (each method's own, see README)"), ("epsilon", "epsilon")):
        figure, axes = plt.subplots(1, len(sizes), figsize=(5.5 * len(sizes), 4), squeeze=False, sharey=True)
        for axis, rows in zip(axes[0], sizes, strict=True):
            for number, (method, name) in enumerate(NAMES.items()):
                found = _records(results, sweep, rows, method)
                low, middle, high = np.percentile([one["kl"] for one in found], [25, 50, 75], axis=1)
                at = [one[sweep] for one in found]
                axis.plot(at, middle, marker="o", ms=3, color=f"C{number}", label=name)
                axis.fill_between(at, low, high, color=f"C{number}", alpha=0.12, lw=0)
            axis.axhline(results["prior"][str(rows)], color="grey", ls=":", label="prior")
            axis.set(xscale="log", yscale="log", xlabel=label, title=f"20 silos of {rows} rows")
        axes[0, 0].set_ylabel("KL(q || true posterior): median, quartiles")
        axes[0, -1].legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(folder / f"{sweep}.png", dpi=90)
        plt.close(figure)


if __name__ == "__main__":
    write(json.loads((HERE / "results.json").read_text()), HERE)
