"""CPU time of whole studies, after compilation: `python bench/study.py [--figure growth.png]`.

1. A study of the shape of Adult, simulated: 10 silos of 2,442 rows and 109 columns, 20 rounds, DP optimisation at
   (1, 1e-5), everything included (calibration, ledgers, checkpoints, certificate). Target: under 10 CPU-seconds.
2. One round of 200 small silos, all at once (as the engine does it) and one after the other. Target: 5 times faster.
3. Whole studies of 10, 200 and 2,000 silos, by the clock on the wall too; `--against TREE/src` runs them by turns with
   the sources of another commit. Target: CPU within 5 % of the commit before, wall shorter.
4. Growth with rows, silos and features, five rounds each.

Every study runs once to compile; later runs are timed. A measurement, never a test.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from timing import Arm, Seconds, interleaved, pinned
from whole_studies import OtherTree, measure, seconds, simulate, with_keys

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
SILOS = {10: (500, 30, 20), 200: (100, 30, 10), 2000: (40, 10, 4)}  # rows and features of each, and rounds
METHODS = {
    "dp_optimisation": {"privatise": "dp_optimisation", "steps": 20},
    "virtual_clients": {"privatise": "virtual_clients", "steps": 20, "shards": 4},
}
REPEATS = 3
COLORS = {"total": "#0072B2", "linear": "#999999"}


def cpu_seconds(study: Study, silos: list[Silo], repeats: int = 1) -> tuple[float, float]:
    """Of the first run, which compiles, and of the fastest later one."""
    times = [seconds(study, silos).cpu for _ in range(repeats + 1)]
    return times[0], min(times[1:])


def studies(source: Path | None) -> None:
    """Whole studies of ever more silos, here and, if given, with the sources of another commit; by turns."""
    other = None if source is None else OtherTree(source)
    print("\nWhole studies: wall / CPU seconds after compilation, fastest of", REPEATS)
    print(f"{'':<18}{'silos':>7}{'here':>16}" + (f"{source.parent.name:>16}{'ratio':>16}" if source else ""))
    for method, keys in METHODS.items():
        for num_silos, (num_rows, num_features, rounds) in SILOS.items():
            sizes = {"num_silos": num_silos, "num_rows": num_rows, "num_features": num_features}
            here, there = [], []
            for _ in range(REPEATS + 1):
                here.append(measure(sizes, keys | {"rounds": rounds}))
                if other is not None:
                    there.append(other.measure(sizes, keys | {"rounds": rounds}))
            ours = fastest(here[1:])
            line = f"{method:<18}{num_silos:>7,}{f'{ours.wall:.2f}/{ours.cpu:.2f}':>16}"
            if there:
                theirs = fastest(there[1:])
                ratio = f"{ours.wall / theirs.wall:.2f}/{ours.cpu / theirs.cpu:.2f}"
                line += f"{f'{theirs.wall:.2f}/{theirs.cpu:.2f}':>16}{ratio:>16}"
            print(line, flush=True)
    if other is not None:
        other.close()


def fastest(runs: list[Seconds]) -> Seconds:
    """The shortest of each kind of time."""
    return Seconds(wall=min(run.wall for run in runs), cpu=min(run.cpu for run in runs))


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
    parser.add_argument("--against", type=Path, metavar="TREE/src", help="sources of another commit to compare with")
    parser.add_argument("--no-growth", action="store_true", help="without growth: a few minutes")
    parser.add_argument("--only-studies", action="store_true", help="only whole studies of ever more silos")
    arguments = parser.parse_args()
    studies(arguments.against)
    if arguments.only_studies:
        return
    adult()
    many_silos()
    if not arguments.no_growth:
        found = growth()
        if arguments.figure is not None:
            draw(found, arguments.figure)


if __name__ == "__main__":
    pinned(main)
