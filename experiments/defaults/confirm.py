"""Confirmation: `python -m experiments.defaults.confirm` runs all methods with default settings on two real tables.

Bounds, typical values and spreads are what somebody who knows hospitals would declare, not computed from rows, and the
rules were fixed before the first runs; README.md says what changed because of them. *Heart* is the UCI heart disease
table, four hospitals as they are. *Diabetes* is the table of 130 US hospitals, first stays only, so that a row is a
patient; who paid for the stay is the silo (payers of at least 500 patients), and the question is whether the patient
came back.
Noise is drawn afresh.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import silobayes
from experiments.adult.methods import METHODS
from experiments.data import path_of, table
from experiments.defaults import report
from silobayes.study import Study, encode_silos

HEART_FILE = "heart_disease/heart_disease_4sites.csv.gz"
DIABETES_FILE = "diabetes130/diabetic_data.csv.gz"
BUDGET = {"epsilon": 1.0, "delta": 1e-5, "relation": "substitute", "unit": "row"}
NO_FEATURES = "no features"
SEEDS = 3
_FEWEST_PATIENTS = 500

# Column -> (low, high), typical value, spread.
_HEART_NUMBERS = {
    "age": (20, 90, 55, 10),
    "trestbps": (80, 200, 130, 20),
    "thalach": (60, 220, 140, 25),
    "oldpeak": (-3, 7, 1, 1),
}
_HEART_CATEGORIES = {"sex": [0, 1], "cp": [1, 2, 3, 4], "restecg": [0, 1, 2], "exang": [0, 1]}
_DIABETES_NUMBERS = {
    "time_in_hospital": (1, 14, 4, 3),
    "num_lab_procedures": (0, 120, 40, 20),
    "num_procedures": (0, 6, 1, 2),
    "num_medications": (1, 80, 15, 8),
    "number_outpatient": (0, 20, 0, 1),
    "number_emergency": (0, 20, 0, 1),
    "number_inpatient": (0, 20, 0, 1),
    "number_diagnoses": (1, 16, 7, 2),
}
_DIABETES_CATEGORIES = {
    "gender": ["Female", "Male", "Unknown/Invalid"],
    "age": [f"[{low}-{low + 10})" for low in range(0, 100, 10)],
    "race": ["AfricanAmerican", "Asian", "Caucasian", "Hispanic", "Other", "?"],
    "A1Cresult": ["None", "Norm", ">7", ">8"],
    "insulin": ["No", "Steady", "Up", "Down"],
    "change": ["No", "Ch"],
    "diabetesMed": ["No", "Yes"],
}


def _description(numbers: dict[str, tuple], categories: dict[str, list], target: str, classes: list) -> dict[str, Any]:
    return {
        "target": target,
        "classes": classes,
        "bounds": {name: list(facts[:2]) for name, facts in numbers.items()} | categories,
        "typical": {name: facts[2] for name, facts in numbers.items()},
        "spread": {name: facts[3] for name, facts in numbers.items()},
        "coding": "one_hot",
        "public": ["rows", "test"],
        "outside": "clip",
        "test": 0.3,
    }


@cache
def heart() -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Rows with all of eight columns; the rest are missing in whole hospitals."""
    data = _description(_HEART_NUMBERS, _HEART_CATEGORIES, "target", [0, 1])
    rows = table(HEART_FILE)
    rows = rows[["site", *data["bounds"], "target"]].dropna()
    return {str(site): own.drop(columns="site") for site, own in rows.groupby("site")}, data


@cache
def diabetes() -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """One row per patient."""
    data = _description(_DIABETES_NUMBERS, _DIABETES_CATEGORIES, "readmitted", ["no", "yes"])
    # "None" is a category here, not a hole.
    rows = pd.read_csv(path_of(DIABETES_FILE), keep_default_na=False, low_memory=False)
    rows = rows.sort_values("encounter_id").drop_duplicates("patient_nbr")
    rows["readmitted"] = np.where(rows["readmitted"] == "NO", "no", "yes")
    rows = rows[rows["payer_code"] != "?"][["payer_code", *data["bounds"], "readmitted"]]
    silos = {str(payer): own.drop(columns="payer_code") for payer, own in rows.groupby("payer_code")}
    return {payer: own for payer, own in silos.items() if len(own) >= _FEWEST_PATIENTS}, data


@dataclass(frozen=True, kw_only=True)
class Real:
    """A table: (silo -> rows, the section [data])."""

    make: Callable[[], tuple[dict[str, pd.DataFrame], dict[str, Any]]]
    file: str


TABLES = {"heart": Real(make=heart, file=HEART_FILE), "diabetes": Real(make=diabetes, file=DIABETES_FILE)}


def study(table_name: str, name: str, seed: int) -> Study:
    """One run, all settings by default."""
    method = METHODS[name]
    return Study.from_dict(
        {
            "study": {"name": table_name, "seed": seed},
            "data": TABLES[table_name].make()[1],
            "model": {"kind": "logistic_regression"},
            "privacy": BUDGET if method.is_private else {"mode": "none"},
            "protocol": method.protocol,
            "aggregation": method.aggregation,
        }
    )


def run_one(table_name: str, name: str, seed: int) -> dict[str, Any]:
    """Metrics, price and CPU seconds of one run."""
    frames, _ = TABLES[table_name].make()
    if name == NO_FEATURES:
        return _without_features(study(table_name, "not private", seed), frames)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        silobayes.fit(study(table_name, name, seed), frames, out=Path(folder) / "run")
        metrics = json.loads((Path(folder) / "run" / "metrics.json").read_text())["metrics"]
        certificate = json.loads((Path(folder) / "run" / "certificate.json").read_text())
    scores = {key: round(metrics[key], 5) for key in ("accuracy", "log_likelihood", "auc")}
    return scores | {"epsilon": certificate.get("epsilon"), "cpu_s": round(time.process_time() - started, 1)}


def _without_features(plan: Study, frames: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Everybody gets the share of the training rows, without privacy."""
    silos, test, _ = encode_silos(plan, frames)
    assert test is not None
    share = float(np.concatenate([silo.y for silo in silos]).mean())
    likelihood = float(np.mean(np.where(test.y == 1, np.log(share), np.log1p(-share))))
    accuracy = float(np.mean(test.y == (share > 0.5)))
    return {"accuracy": round(accuracy, 5), "log_likelihood": round(likelihood, 5), "auc": 0.5, "epsilon": None}


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=list(TABLES), action="append")
    asked = parser.parse_args()
    for table_name in asked.table or list(TABLES):
        for seed in range(SEEDS):
            for name in [*METHODS, NO_FEATURES]:
                key = {"table": table_name, "method": name, "seed": seed}
                if any(record | key == record for record in report.load(report.CONFIRMATION)):
                    continue
                record = key | run_one(table_name, name, seed)
                print(record, file=sys.stderr, flush=True)
                report.append(report.CONFIRMATION, record)
    report.write()


if __name__ == "__main__":
    main()
