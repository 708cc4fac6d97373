"""Whole studies on simulated silos, for `study.py`; as a script, a worker that runs them in another source tree.

The worker reads one line of JSON per run, the arguments of `measure`, and answers with its times. It uses nothing but
`silobayes.fit`, studies and silos, so that it runs over any commit that has these.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from timing import Seconds

import silobayes
from silobayes.data.silo import Silo
from silobayes.study import Study


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


def with_keys(study: Study, **keys: Any) -> Study:
    """The study with such keys of its method."""
    tables = study.to_dict()
    return Study.from_dict(tables | {"protocol": tables["protocol"] | keys})


def seconds(study: Study, silos: list[Silo]) -> Seconds:
    """Of one run, everything included: calibration, ledgers, checkpoints, certificate."""
    with tempfile.TemporaryDirectory() as scratch:
        wall, cpu = time.perf_counter(), time.process_time()
        silobayes.fit(study, silos, out=Path(scratch) / "run")
        # Before the directory is removed, which is no part of a run.
        return Seconds(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)


def measure(sizes: Mapping[str, int], keys: Mapping[str, Any]) -> Seconds:
    """One run of a study of such sizes and keys."""
    study, silos = simulate(**sizes)
    return seconds(with_keys(study, **keys), silos)


class OtherTree:
    """A process that runs studies with the sources of another commit."""

    def __init__(self, source: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source)}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, sizes: Mapping[str, int], keys: Mapping[str, Any]) -> Seconds:
        """See the function of this name."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([sizes, keys]) + "\n")
        self._process.stdin.flush()
        return Seconds(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    for line in sys.stdin:
        found = measure(*json.loads(line))
        print(json.dumps({"wall": found.wall, "cpu": found.cpu}), flush=True)


if __name__ == "__main__":
    main()
