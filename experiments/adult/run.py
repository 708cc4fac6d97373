"""Run the experiment: `python -m experiments.adult.run [--scenario NAME] [--settings default|tuned] [--seeds N]`.

Each run is a study, fitted as a user would. results.json grows run by run; what is there already is not run again, so
the experiment can be stopped and gone on with. Noise is drawn afresh: a repetition differs within noise.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import silobayes
from experiments.adult import report
from experiments.adult.methods import METHODS, SCENARIOS, privacy_of, tuned
from experiments.adult.studies import study
from silobayes.core.errors import SiloBayesError

HERE = Path(__file__).parent


def run_one(scenario: str, name: str, split: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Metrics, price and CPU seconds of one run."""
    place, method = SCENARIOS[scenario], METHODS[name]
    plan = study(
        seed=seed,
        num_clients=place.num_clients,
        split=split,
        privacy=privacy_of(method, place),
        protocol=method.protocol | settings,
        aggregation=method.aggregation,
        model=place.model,
    )
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        silobayes.fit(plan, out=Path(folder) / "run")
        metrics = json.loads((Path(folder) / "run" / "metrics.json").read_text())
        certificate = json.loads((Path(folder) / "run" / "certificate.json").read_text())
    return {
        "accuracy": round(metrics["metrics"]["accuracy"], 5),
        "log_likelihood": round(metrics["metrics"]["log_likelihood"], 5),
        "epsilon": certificate.get("epsilon"),
        "communications": metrics["communications"]["rounds"],
        "cpu_s": round(time.process_time() - started, 1),
    }


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=list(SCENARIOS), action="append")
    parser.add_argument("--settings", choices=["default", "tuned"], action="append")
    parser.add_argument("--method", choices=list(METHODS), action="append")
    parser.add_argument("--seeds", type=int)
    asked = parser.parse_args()
    for scenario in asked.scenario or list(SCENARIOS):
        for split in SCENARIOS[scenario].splits:
            for seed in range(asked.seeds or SCENARIOS[scenario].num_seeds):
                for name in asked.method or list(METHODS):
                    for kind in asked.settings or ["default", "tuned"]:
                        _run_if_missing(scenario, name, split, seed, kind)
    report.write(report.load(HERE), HERE)


def _run_if_missing(scenario: str, name: str, split: str, seed: int, kind: str) -> None:
    settings = {} if kind == "default" else tuned().get(scenario, {}).get(name)
    if kind == "tuned" and settings == {}:
        return  # the defaults were best: their runs are the tuned ones too
    key = {"scenario": scenario, "method": name, "split": split, "seed": seed, "settings": kind}
    done = report.load(HERE)
    if settings is None or any(record | key == record for record in done):
        return
    try:
        result = run_one(scenario, name, split, seed, settings)
    except SiloBayesError as error:  # a method may refuse a split: a silo with fewer rows than shards, say
        result = {"refused": str(error)}
    print(key, result, file=sys.stderr, flush=True)
    report.append(HERE, key | result)


if __name__ == "__main__":
    main()
