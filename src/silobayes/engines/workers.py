"""What a process of its own does before it imports NumPy or JAX; nothing here imports them.

Many processes with many threads each would wait for each other, and Ctrl-C is for the process that started them.
"""

import os
import signal
from importlib import import_module
from typing import Any

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


def start(task: dict[str, Any]) -> None:
    """One thread, no interrupts, then `calibrating.prepare`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), _ONE_THREAD["XLA_FLAGS"])))
    os.environ.update({**_ONE_THREAD, "XLA_FLAGS": flags})
    import_module("silobayes.engines.calibrating").prepare(**task)
