"""Choose settings on a fifth of the training rows of seed 0: `python -m experiments.adult.tune`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import silobayes
from experiments.adult.methods import CANDIDATES, METHODS, SCENARIOS, TUNED, Scenario, privacy_of, tuned
from experiments.adult.studies import study
from silobayes.data.silo import Silo, concatenate
from silobayes.runs.metrics import evaluate
from silobayes.study import Study, load_silos


def split_silos(study: Study) -> tuple[list[Silo], Silo]:
    """Four fifths of each silo's training rows, and the rest of all silos together; test rows are not touched."""
    silos, _, _ = load_silos(study, Path())
    rng = np.random.default_rng(0)
    kept, held_out = [], []
    for silo in silos:
        order = rng.permutation(silo.num_rows)
        cut = max(1, silo.num_rows // 5)
        kept.append(silo.take(silo.name, order[cut:]))
        held_out.append(silo.take(silo.name, order[:cut]))
    return kept, concatenate("validation", held_out)


def score(name: str, scenario: Scenario, settings: dict) -> float:
    """Log-likelihood on the rows held out."""
    method = METHODS[name]
    plan = study(
        seed=0,
        num_clients=scenario.num_clients,
        split="balanced",
        privacy=privacy_of(method, scenario),
        protocol=method.protocol | settings,
        aggregation=method.aggregation,
        model=scenario.model,
    )
    kept, held_out = split_silos(plan)
    with tempfile.TemporaryDirectory() as folder:
        posterior = silobayes.fit(plan, kept, out=Path(folder) / "run")
    return float(evaluate(posterior, held_out)["log_likelihood"])


def main() -> None:
    """Tune all methods of a scenario, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=list(SCENARIOS), action="append")
    parser.add_argument("--method", choices=list(METHODS), action="append")
    asked = parser.parse_args()
    for scenario in asked.scenario or list(SCENARIOS):
        for name, others in CANDIDATES[scenario].items():
            if name not in (asked.method or CANDIDATES[scenario]):
                continue
            scores, candidates = [], [{}, *others]
            for settings in candidates:
                scores.append(score(name, SCENARIOS[scenario], settings))
                print(f"{scenario}, {name}: {scores[-1]:.4f} {settings}", file=sys.stderr, flush=True)
            best = tuned()
            best.setdefault(scenario, {})[name] = candidates[int(np.argmax(scores))]
            TUNED.write_text(json.dumps(best, indent=1) + "\n")


if __name__ == "__main__":
    main()
