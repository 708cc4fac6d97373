"""Freeze what the cases give: `python -m tests.oracle.freeze [FILE]`.

Never to make a test pass: only where a change of behaviour is wanted and stands in the changelog.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.oracle.cases import CASES, run

FROZEN = Path(__file__).with_name("frozen.json")


def frozen_by(out: Path) -> dict[str, dict]:
    """Run all cases under `out`."""
    results = {}
    for number, case in enumerate(CASES):
        started = time.perf_counter()
        results[case.name] = run(case, out / str(number))
        print(f"{time.perf_counter() - started:6.2f} s  {case.name}", flush=True)
    return results


def main(path: Path) -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        results = frozen_by(Path(out))
    lines = [f"{json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}" for name, one in results.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(results)} cases in {time.perf_counter() - started:.0f} s: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FROZEN)
