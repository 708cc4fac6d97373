"""Run the scan: `python -m experiments.defaults.run [--study NAME] [--method NAME] [--seeds N]`.

Each run is a study, fitted as a user would, with one constant of the rules multiplied by a factor. results.jsonl grows
run by run; what is there already is not run again. Rows are simulated, so noise has a seed: runs of one study differ by
their settings and as little as possible by chance, and can be repeated.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import silobayes
from experiments.defaults import report
from experiments.defaults.scan import FACTORS, METHODS, plan_of, rules_of
from experiments.defaults.studies import STUDIES
from silobayes.engines.fitting import read_inputs
from silobayes.plans.rules import PublicFacts, settings_of
from silobayes.study import Study


def run_one(study_name: str, name: str, constant: str, factor: float, seed: int) -> dict[str, Any]:
    """Held-out log-likelihood, price and CPU seconds of one run."""
    place, method = STUDIES[study_name], METHODS[name]
    frames = place.frames(seed)

    def study(changes: dict[str, Any]) -> Study:
        return place.study(
            seed,
            is_private=method.is_private,
            protocol=method.protocol | changes,
            aggregation=method.aggregation,
        )

    started = time.process_time()
    changes = method.constants[constant](_settings(study({}), frames), factor) if constant else {}
    with tempfile.TemporaryDirectory() as folder:
        silobayes.fit(study(changes), frames, out=Path(folder) / "run", noise_seed=seed)
        metrics = json.loads((Path(folder) / "run" / "metrics.json").read_text())
    return {
        "changes": changes,
        "log_likelihood": round(metrics["metrics"]["log_likelihood"], 5),
        "cpu_s": round(time.process_time() - started, 1),
    }


def _settings(study: Study, frames: dict[str, Any]) -> Any:
    inputs = read_inputs(study, frames, model=None)
    return settings_of(study, PublicFacts.of(inputs.model, [silo.num_rows for silo in inputs.silos]))


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", choices=list(STUDIES), action="append")
    parser.add_argument("--method", choices=list(METHODS), action="append")
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    for seed in range(asked.seeds):
        for study_name in asked.study or list(STUDIES):
            for name, constants in plan_of(study_name).items():
                if name not in (asked.method or METHODS):
                    continue
                _run_if_missing(study_name, name, "", 1.0, seed)
                for constant in constants:
                    for factor in FACTORS:
                        if factor != 1.0:
                            _run_if_missing(study_name, name, constant, factor, seed)
    report.write()


def _run_if_missing(study_name: str, name: str, constant: str, factor: float, seed: int) -> None:
    key = {"rules": rules_of(study_name), "study": study_name, "method": name, "constant": constant, "factor": factor}
    key["seed"] = seed
    if any(record | key == record for record in report.load(report.SCAN)):
        return
    record = key | run_one(study_name, name, constant, factor, seed)
    print(record, file=sys.stderr, flush=True)
    report.append(report.SCAN, record)


if __name__ == "__main__":
    main()
