"""Run the experiment: `python -m experiments.dp_regression.run [--quick] [--seeds N]` writes results.json.

Studies are planned and run as `silobayes.fit` does it, without run directories (`experiments.planned`).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments import planned
from experiments.dp_regression import coverage, report
from experiments.dp_regression.studies import DATA_SETS, DELTA, NON_PRIVATE, VARIANTS, DataSet, Variant, split, study_of
from silobayes.data.silo import Silo
from silobayes.privacy.accounting import price
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Relation, Unit

HERE = Path(__file__).parent
# The grid, delta and 25 repetitions of the paper's code.
EPSILONS = tuple(float(10**power) for power in (0, 0.25, 0.5, 0.75, 1, 1.5))
NUM_SPLITS = 25
NUM_STUDIES = 60


def main() -> None:
    """Write results.json, the figure and the tables of README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="red wine, two splits, two budgets; nothing is written")
    parser.add_argument("--seeds", type=int, default=NUM_SPLITS)
    options = parser.parse_args()
    if options.quick:
        print(json.dumps(run(DATA_SETS[1:2], EPSILONS[2:5:2], 2), indent=1))
        return
    started = time.process_time()
    results = run(DATA_SETS, EPSILONS, options.seeds)
    results |= {"studies": NUM_STUDIES, "coverage": coverage.run(NUM_STUDIES, DELTA)}
    results["cpu_s"] = round(time.process_time() - started)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    report.write(results, HERE)


def run(data_sets: tuple[DataSet, ...], epsilons: tuple[float, ...], num_splits: int) -> dict[str, Any]:
    """The mean absolute errors on test rows, in units of the target, of every variant, budget and split."""
    records = []
    for data in data_sets:
        frame = data.load()
        for variant in (NON_PRIVATE, *VARIANTS):
            for epsilon in epsilons if variant.is_private else epsilons[:1]:
                errors, spent = fit_all(data, frame, variant, epsilon, num_splits)
                records.append(
                    {
                        "data": data.name,
                        "variant": variant.name,
                        "epsilon": float(f"{epsilon:.4g}") if variant.is_private else None,
                        "spent": spent,
                        "errors": [float(f"{error:.5g}") for error in errors],
                    }
                )
        constant = [float(np.mean(np.abs(frame[data.target].iloc[split(len(frame), s)[1]]))) for s in range(num_splits)]
        records.append(
            {
                "data": data.name,
                "variant": "no features",
                "epsilon": None,
                "spent": None,
                "errors": [float(f"{data.unit * error:.5g}") for error in constant],
            }
        )
    sizes = {data.name: len(data.load()) for data in data_sets}
    return {"delta": DELTA, "splits": num_splits, "rows": sizes, "records": records}


def fit_all(
    data: DataSet, frame: pd.DataFrame, variant: Variant, epsilon: float, num_splits: int
) -> tuple[list[float], float | None]:
    """The errors of all splits, and what one run costs."""
    study = study_of(data, variant, epsilon)
    x, y, _ = study.encoding.encode(frame, data.name)
    budget, spent, errors = None, None, []
    if variant.is_private:
        budget = Budget(epsilon=epsilon, delta=DELTA, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    # Splits have equal sizes, hence equal plans.
    rows = [len(part) for part in np.array_split(split(len(y), 0)[0], variant.num_silos)]
    plan = planned.plan_for(study, rows)
    if budget is not None:
        spent = max(price(e, relation=budget.relation, delta=DELTA).epsilon for e in plan.total_events)
        assert spent <= epsilon, "a plan keeps its budget"
    for seed in range(num_splits):
        train, test = split(len(y), seed)
        parts = np.array_split(train, variant.num_silos)
        silos = [Silo(name=str(m), x=x[part], y=y[part]) for m, part in enumerate(parts)]
        doors = [] if budget is None else [planned.open_door(budget, 1000 * seed + m) for m in range(len(silos))]
        posterior, _ = planned.run(study, plan, silos, doors)
        errors.append(data.unit * float(np.mean(np.abs(y[test] - x[test] @ posterior.mean))))
    return errors, spent


if __name__ == "__main__":
    main()
