"""What the benchmarks share: one thread for everybody, and variants that take turns in one process."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# BLAS and torch spin when they have more threads than work; XLA sizes its pool by the last one.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PJRT_NPROC": "1"}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant: `run()` does `num_steps` steps."""

    name: str
    num_steps: int
    run: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one run."""

    wall: float
    cpu: float


@dataclass(frozen=True, kw_only=True)
class Time:
    """Microseconds per step: the fastest run by the clock on the wall, the median of CPU time."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.0f}/{self.cpu:.0f}"


def pinned(main: Callable[[], None]) -> None:
    """`main()` with one thread in every library: restarts the process if it was not started so."""
    if any(os.environ.get(name) != value for name, value in _ONE_THREAD.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_ONE_THREAD})
    main()


def interleaved(arms: list[Arm], repeats: int) -> dict[str, Time]:
    """Every arm in turn, `repeats` times after one to warm up: a busy machine hits all of them alike."""
    spent: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
    for _ in range(repeats + 1):
        for arm in arms:
            wall, cpu = time.perf_counter(), time.process_time()
            arm.run()
            once = (time.perf_counter() - wall, time.process_time() - cpu)
            spent[arm.name].append((once[0] / arm.num_steps * 1e6, once[1] / arm.num_steps * 1e6))
    warm = {name: np.array(runs[1:]) for name, runs in spent.items()}
    return {name: Time(wall=float(runs[:, 0].min()), cpu=float(np.median(runs[:, 1]))) for name, runs in warm.items()}
