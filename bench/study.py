"""CPU time of whole studies, after compilation: `python bench/study.py [--figure growth.png]`.

1. A study of the shape of Adult, simulated: 10 silos of 2,442 rows and 109 columns, 20 rounds, DP optimisation at
   (1, 1e-5), everything included (calibration, ledgers, checkpoints, certificate). Target: under 10 CPU-seconds.
2. One round of 200 small silos, all at once (as the engine does it) and one after the other. Target: 5 times faster.
3. Growth with rows, silos and features, five rounds each.

Every study runs twice in this process, the second run is timed. A measurement, never a test.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from timing import Arm, interleaved, pinned

import silobayes
from silobayes.data.silo import Silo
from silobayes.engines.parties import LocalParties
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.plans import plan_of
from silobayes.plans.situation import Situation, Sizes
from silobayes.privacy.door import Door
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.schedule import Visit
from silobayes.study import Study
from silobayes.testing import FreeAccount

ADULT = {"num_silos": 10, "num_rows": 2442, "num_features": 109}
GROWTH = {
    "num_rows": (500, 1000, 2442, 5000, 10_000, 20_000),
    "num_silos": (1, 3, 10, 30, 100, 300),
    "num_features": (10, 30, 109, 300, 1000),
}
COLORS = {"total": "#0072B2", "linear": "#999999"}


def simulate(num_silos: int, num_rows: int, num_features: int) -> tuple[Study, list[Silo]]:
    """An encoded table: a constant, otherwise zeros and a few ones per row."""
    rng = np.random.default_rng(0)
    names = [f"x{number}" for number in range(num_features - 1)]
    x = (rng.random((num_silos, num_rows, num_features)) < min(0.5, 12 / num_features)).astype(np.float32)
    x[..., 0] = 1.0
    y = rng.random(x.shape[:2]) < 1 / (1 + np.exp(-x @ rng.normal(scale=0.5, size=num_features)))
    study = Study.from_dict(
        {
            "study": {"name": "bench", "seed": 0},
            "data": {
                "target": "y",
                "classes": ["no", "yes"],
                "bounds": {name: [0, 1] for name in names},
                "public": ["rows"],
            },
            "silos": {},
            "model": {"kind": "logistic_regression"},
            "privacy": {"epsilon": 1.0, "delta": 1e-5, "relation": "substitute", "unit": "row"},
            "protocol": {"kind": "pvi", "privatise": "dp_optimisation"},
        }
    )
    return study, [Silo(name=f"silo{m}", x=x[m], y=y[m].astype(np.int32)) for m in range(num_silos)]


def with_keys(study: Study, **keys: float) -> Study:
    tables = study.to_dict()
    return Study.from_dict(tables | {"protocol": tables["protocol"] | keys})


def cpu_seconds(study: Study, silos: list[Silo], repeats: int = 1) -> tuple[float, float]:
    """Of the first run, which compiles, and of the fastest later one."""
    times = []
    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory() as scratch:
            start = time.process_time()
            silobayes.fit(study, silos, out=Path(scratch) / "run")
            times.append(time.process_time() - start)
    return times[0], min(times[1:])


def adult() -> None:
    study, silos = simulate(**ADULT)
    first, later = cpu_seconds(with_keys(study, rounds=20), silos, repeats=3)
    print("Study of Adult's shape: 10 silos x 2,442 rows x 109 columns, 20 rounds, DP optimisation")
    print(f"  CPU seconds with compilation {first:.1f}, after it {later:.2f} (target < 10)")


def many_silos(num_silos: int = 200, num_rows: int = 122, num_features: int = 109) -> None:
    study, silos = simulate(num_silos, num_rows, num_features)
    loop = {"rounds": 1, "steps": 40, "step_size": 0.05, "sample_rate": 0.3, "clip_norm": 1.0}
    study = with_keys(study, **loop)
    names = tuple(f"x{number}" for number in range(num_features))
    sizes = (Sizes(rows=num_rows, num_features=num_features),) * num_silos
    plan = plan_of(Situation.of(study, LogisticRegression(num_features=num_features), names, sizes))
    door = Door.open(FreeAccount(Relation.SUBSTITUTE, Unit.ROW))
    parties = LocalParties(plan, silos, lambda silo, visit: door, study.aggregation)
    down = plan.server.down(plan.server.init(), plan.visits[0])

    def visit(*asked: int) -> Callable[[], object]:
        return lambda: parties.ask(Visit(silos=asked), down)

    one_by_one = [visit(m) for m in range(num_silos)]
    arms = [
        Arm(name="all at once", num_steps=num_silos, run=visit(*range(num_silos))),
        Arm(name="one by one", num_steps=num_silos, run=lambda: [run() for run in one_by_one]),
    ]
    times = interleaved(arms, repeats=5)
    ratio = times["one by one"].cpu / times["all at once"].cpu
    print(f"\nOne round of {num_silos} silos of {num_rows} rows; us per silo, best wall / median CPU")
    print("".join(f"  {name} {spent}" for name, spent in times.items()), f" ratio {ratio:.1f}x (target >= 5x)")


def growth() -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    print("\nCPU seconds of five rounds, everything else as in the study above")
    for key, values in GROWTH.items():
        found[key] = {}
        for value in values:
            study, silos = simulate(**(ADULT | {key: value}))
            found[key][value] = cpu_seconds(with_keys(study, rounds=5), silos)[1]
        print(f"{key:<13}" + "".join(f"{value:>10,}" for value in values))
        print(f"{'':<13}" + "".join(f"{spent:>10.2f}" for spent in found[key].values()))
    return found


def draw(found: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    everything = [seconds for times in found.values() for seconds in times.values()]
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, (key, times) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        sizes, seconds = list(times), list(times.values())
        axes.loglog(sizes, seconds, "o-", color=COLORS["total"], label="measured")
        axes.loglog(
            sizes, [seconds[-1] * size / sizes[-1] for size in sizes], ":", color=COLORS["linear"], label="linear"
        )
        axes.set_xlabel(key.removeprefix("num_") + (" per silo" if key == "num_rows" else ""))
        axes.set_ylim(min(everything) / 2, max(everything) * 2)
    figure.axes[0].set_ylabel("CPU seconds, five rounds")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where to draw the growth curves")
    parser.add_argument("--no-growth", action="store_true", help="only the study and the silos: half a minute")
    arguments = parser.parse_args()
    adult()
    many_silos()
    if not arguments.no_growth:
        found = growth()
        if arguments.figure is not None:
            draw(found, arguments.figure)


if __name__ == "__main__":
    pinned(main)
