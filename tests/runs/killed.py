"""A run that may be killed at any moment: `python -m tests.runs.killed OUT NAME` starts or resumes it.

Real entropy. Silos' states hold a canary, and `<OUT>.draws` gets a line for every door that is opened: which visit
draws. A visit pauses, so that kills fall on all of them; commits are close, so that they fall on these too.
"""

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from silobayes.engines import local
from silobayes.engines.doors import Doors
from silobayes.protocols import perturbed, pvi
from tests.engines.test_local import make_inputs

CANARY = 8675309.0625
STUDIES = {
    "virtual_clients": {
        "privatise": "virtual_clients",
        "rounds": 60,
        "steps": 5,
        "shards": 5,
        "aggregation": {"kind": "pairwise_masks"},
    },
    "dp_optimisation": {"privatise": "dp_optimisation", "rounds": 60, "steps": 5, "sample_rate": 0.3},
}
NUM_VISITS = 60
_PAUSE_S, _COMMIT_S = 0.02, 0.05


class MarkedState(NamedTuple):
    """A silo's state with a canary."""

    eta_t: Any
    canary: np.ndarray


def _mark(role: type) -> None:
    init, reply = role.init, role.reply

    def marked(state: pvi.SiloState) -> MarkedState:
        return MarkedState(eta_t=state.eta_t, canary=np.array([CANARY]))

    def marked_reply(*arguments):
        state, message = reply(*arguments)
        return marked(state), message

    role.init = lambda *arguments: marked(init(*arguments))
    role.reply = marked_reply


def main(out: Path, name: str) -> None:
    for role in (perturbed.ShardedSilo, pvi.OptimisingSilo):
        _mark(role)
    open_door = Doors.at
    draws = out.with_name(out.name + ".draws").open("a")

    def logged(doors: Doors, silo: int, visit: int):
        print(visit, file=draws, flush=True)
        return open_door(doors, silo, visit)

    Doors.at = logged
    local._COMMIT_S = _COMMIT_S
    inputs = make_inputs(noise_seed=None, **STUDIES[name])
    print("ready", flush=True)
    start = local.resume if (out / "run.json").exists() else local.run
    start(inputs, out, lambda now: time.sleep(_PAUSE_S))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
