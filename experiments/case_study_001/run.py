"""Run the case study: `python -m experiments.case_study_001.run [--quick] [--seeds N]` writes results.json.

First the clip norm of each method is varied at epsilon 10; then epsilon is, on other repetitions, at the clip norm with
the least median divergence in the first sweep.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.case_study_001 import report, simulate
from experiments.case_study_001.simulate import Setting

HERE = Path(__file__).parent
SIZES = (10, 500)
EPSILON = 10.0
EPSILONS = (1.0, 3.0, 10.0, 30.0, 100.0, 500.0)
CLIP_NORMS = {
    "thesis": (0.25, 1.0, 2.0, 4.0, 16.0),
    "noise-aware": (1.0, 2.0, 4.0, 8.0, 16.0),
    "gradient": (0.5, 1.0, 2.0, 4.0, 8.0),
    "hybrid": (0.5, 1.0, 2.0, 4.0, 8.0),
    "client": (1.0, 4.0, 16.0, 64.0, 256.0),
    "client, 10 rounds": (1.0, 4.0, 16.0, 64.0, 256.0),
}
# Natural parameters grow with the rows.
CLIENT_UNITS = {10: 1.0, 500: 16.0}


def main() -> None:
    """Write results.json, the figures and the tables of README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions and settings, nothing is written")
    parser.add_argument("--seeds", type=int, default=12)
    options = parser.parse_args()
    results = run(quick=options.quick, num_seeds=options.seeds)
    if options.quick:
        print(json.dumps(results, indent=1))
        return
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    report.write(results, HERE)


def run(*, quick: bool = False, num_seeds: int = 12) -> dict[str, Any]:
    """All sweeps."""
    started = time.process_time()
    seeds = 2 if quick else num_seeds
    sizes = SIZES[:1] if quick else SIZES
    epsilons = EPSILONS[2:3] if quick else EPSILONS
    records: list[dict[str, Any]] = []
    for rows in sizes:
        for method, norms in CLIP_NORMS.items():
            unit = CLIENT_UNITS[rows] if method.startswith("client") else 1.0
            swept = []
            for norm in norms[2:3] if quick else norms:
                setting = Setting(method=method, rows=rows, clip_norm=unit * norm, epsilon=EPSILON)
                swept += repeat(setting, range(seeds), "clip_norm")
            records += swept
            best = min((one for one in swept if one["method"] == method), key=lambda one: np.median(one["kl"]))
            for epsilon in epsilons:
                setting = Setting(method=method, rows=rows, clip_norm=best["clip_norm"], epsilon=epsilon)
                records += repeat(setting, range(100, 100 + seeds), "epsilon")
    return {
        "seeds": seeds,
        "prior": {str(rows): _prior(rows, range(100, 100 + seeds)) for rows in sizes},
        "records": records,
        "bias": bias(),
        "settings": {
            "gradient": simulate.GRADIENT,
            "hybrid": simulate.HYBRID,
            "client": simulate.CLIENT,
            "client, 10 rounds": simulate.CLIENT_ROUNDS,
        },
        "cpu_s": round(time.process_time() - started),
    }


def repeat(setting: Setting, seeds: range, sweep: str) -> list[dict[str, Any]]:
    """A setting on several repetitions; one record per posterior that it gives."""
    found: dict[str, dict[str, list[float]]] = {}
    epsilon = 0.0
    for seed in seeds:
        silos, theta = simulate.make_silos(setting.rows, seed)
        doors = simulate.open_doors(setting.budget, seed)
        true = simulate.exact(silos)
        for name, q in simulate.fit(setting, silos, doors).items():
            record = found.setdefault(name, {"kl": [], "kl_reverse": [], "width": [], "error": []})
            record["kl"].append(_digits(q.kl(true)))
            record["kl_reverse"].append(_digits(true.kl(q)))
            record["width"].append(_digits(q.stddev / true.stddev))
            record["error"].append(_digits(abs(q.mean - theta) / q.stddev))
        if not epsilon:
            epsilon = simulate.spent(doors, setting.budget)
            assert epsilon <= setting.epsilon, "the charges of a run keep its budget"
    common = {"sweep": sweep, "rows": setting.rows, "clip_norm": setting.clip_norm, "epsilon": setting.epsilon}
    return [{"method": name, **common, "spent": _digits(epsilon), **values} for name, values in found.items()]


def bias() -> list[dict[str, float]]:
    """Of 001 eq. 4.20: what keeping the noisy precision >= 0 adds to it, in closed form and in draws.

    With S the clipped sum of x^2 and s the noise, `E[max(0, S + N(0, s^2))] = S Phi(S/s) + s phi(S/s)`.
    """
    x = np.linspace(-1.0, 1.0, SIZES[0])
    rng = np.random.default_rng(0)
    table = []
    for clip_norm in CLIP_NORMS["thesis"]:
        stddev = simulate.thesis_noise(clip_norm, EPSILON) * clip_norm
        # At theta = 0 without noise in y, (x^2, x y) has norm x^2.
        total = float(np.minimum(x**2, clip_norm).sum())
        expected = total * stats.norm.cdf(total / stddev) + stddev * stats.norm.pdf(total / stddev)
        drawn = np.maximum(0.0, total + stddev * rng.normal(size=100_000)).mean()
        table.append(
            {
                "clip_norm": clip_norm,
                "noise_stddev": _digits(stddev),
                "sum": _digits(total),
                "expected": _digits(float(expected)),
                "drawn": _digits(float(drawn)),
            }
        )
    return table


def _prior(rows: int, seeds: range) -> float:
    """Median divergence of the prior: what doing nothing gives."""
    exact = [simulate.exact(simulate.make_silos(rows, seed)[0]) for seed in seeds]
    return _digits(float(np.median([simulate.PRIOR.kl(one) for one in exact])))


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


if __name__ == "__main__":
    main()
