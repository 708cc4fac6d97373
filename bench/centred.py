"""CPU time of centred regressions, everything included, after compilation: `python bench/centred.py`.

Targets: 20,000 rows of 20 features under 2 CPU-seconds, of 109 under 5; then growth with features, rows and silos.
"""

from timing import pinned
from whole_studies import measure

BASE = {"num_silos": 1, "num_rows": 20_000, "num_features": 20}
GROWTH = {
    "num_features": (5, 10, 20, 50, 109, 200),
    "num_rows": (1000, 5000, 20_000, 50_000),
    "num_silos": (1, 3, 10, 30),
}
KEYS = {"kind": "centred", "privatise": "scores"}
REPEATS = 2


def cpu_seconds(sizes: dict[str, int]) -> float:
    """Of the fastest of a few runs after the first."""
    return min([measure(sizes, KEYS).cpu for _ in range(REPEATS + 1)][1:])


def main() -> None:
    for features, target in ((20, 2.0), (109, 5.0)):
        spent = cpu_seconds(BASE | {"num_features": features})
        print(f"20,000 rows, {features} features: {spent:.2f} CPU-s (target {target:g})", flush=True)
    for key, values in GROWTH.items():
        print(f"\n{key:<13}" + "".join(f"{value:>10,}" for value in values))
        print(f"{'CPU-s':<13}" + "".join(f"{cpu_seconds(BASE | {key: value}):>10.2f}" for value in values), flush=True)


if __name__ == "__main__":
    pinned(main)
