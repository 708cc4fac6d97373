"""Draws per second of every sampler on one core, and the ratio to NumPy's float normal in the same process.

Run as `OMP_NUM_THREADS=1 python bench/samplers.py`. A measurement, not a test.
"""

import time
from collections.abc import Callable

import numpy as np

from silobayes.privacy.batches import poisson_batches, subsets_without_replacement
from silobayes.privacy.discrete import discrete_gaussian, randomised_response, rounded_laplace
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.skellam import skellam

COUNT = 1_000_000
REPEATS = 5


def rate_of(work: Callable[[], object], count: int) -> float:
    """Draws per second of the fastest of a few runs, after one to warm up."""
    work()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return count / best


def samplers() -> list[tuple[str, Callable[[], object], int]]:
    entropy = Entropy.from_os()
    answers = np.arange(COUNT) % 5
    rows: list[tuple[str, Callable[[], object], int]] = [
        ("uint64", lambda: entropy.uint64(COUNT), COUNT),
        ("uniform_below(1000)", lambda: entropy.uniform_below(1000, COUNT), COUNT),
        ("normal_float32", lambda: entropy.normal_float32(COUNT), COUNT),
    ]
    for stddev in (0.1, 1.0, 10.0, 1e4, 2.0**30, 2.0**40, 2.0**50):
        rows.append((f"discrete_gaussian({stddev:g})", lambda s=stddev: discrete_gaussian(entropy, s, COUNT), COUNT))
    rows.append(("discrete_gaussian(100), 10 at a time", lambda: discrete_gaussian(entropy, 100.0, 10), 10))
    for scale in (1.0, 1e4, 2.0**40):
        rows.append((f"rounded_laplace({scale:g})", lambda s=scale: rounded_laplace(entropy, s, COUNT), COUNT))
    for variance in (0.01, 1.0, 1e4, 2.0**20, 2.0**40, 2.0**60):
        rows.append((f"skellam({variance:g})", lambda v=variance: skellam(entropy, v, COUNT), COUNT))
    return [
        *rows,
        ("randomised_response(5, 0.3)", lambda: randomised_response(entropy, answers, 5, 0.3), COUNT),
        ("poisson_batches(1e5, 0.01, 1000)", lambda: poisson_batches(entropy, 100_000, 0.01, 1000), COUNT),
        ("subsets(1e5, 1000, 1000)", lambda: subsets_without_replacement(entropy, 100_000, 1000, 1000), COUNT),
    ]


def main() -> None:
    generator = np.random.default_rng()
    normal64 = rate_of(lambda: generator.standard_normal(COUNT), COUNT)
    normal32 = rate_of(lambda: generator.standard_normal(COUNT, dtype=np.float32), COUNT)
    print(f"{'sampler':40s} {'M draws/s':>10s} {'of NumPy float64':>17s} {'of NumPy float32':>17s}")
    print(f"{'NumPy standard_normal float64':40s} {normal64 / 1e6:10.2f} {1:17.2f} {normal64 / normal32:17.2f}")
    for name, work, count in samplers():
        rate = rate_of(work, count)
        print(f"{name:40s} {rate / 1e6:10.2f} {rate / normal64:17.2f} {rate / normal32:17.2f}")


if __name__ == "__main__":
    main()
