"""Simulated silos: different sizes, different case mix, one truth."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd


@dataclass(frozen=True, kw_only=True, eq=False)
class IcuStudy:
    """Simulated intensive care units.

    Attributes:
        frames: ICU -> table of its patients.
        data: The section [data] that describes them: target, features, bounds, classes and what is public.
        coefficients: Feature name (as the encoding names it) -> coefficient of the log odds of death.
    """

    frames: dict[str, pd.DataFrame] = field(repr=False)
    data: dict[str, Any]
    coefficients: dict[str, float]


# Column -> (low, high), typical value and spread of a patient of average severity, shift per unit of severity, and
# decimals as a chart has them. Ranges are those of plausible readings, not of these patients.
_VITALS = {
    "age": (18, 100, 63.0, 15.0, 2.0, 0),
    "heart_rate": (30, 170, 88.0, 16.0, 7.0, 0),
    "mean_arterial_pressure": (30, 130, 80.0, 12.0, -6.0, 0),
    "respiratory_rate": (5, 45, 19.0, 5.0, 2.5, 0),
    "temperature": (33, 41, 37.0, 0.8, 0.1, 1),
    "oxygen_saturation": (80, 100, 96.0, 2.5, -1.0, 0),
    "glasgow_coma_scale": (3, 15, 13.0, 2.5, -1.5, 0),
    "lactate": (0, 8, 2.0, 1.0, 0.9, 1),
    "creatinine": (0, 5, 1.2, 0.7, 0.4, 2),
    "bilirubin": (0, 6, 1.0, 0.9, 0.4, 1),
    "platelets": (0, 600, 220.0, 90.0, -20.0, 0),
    "white_cells": (0, 30, 11.0, 4.5, 1.2, 1),
    "sodium": (120, 160, 139.0, 4.5, 0.0, 0),
    "urine_output": (0, 5000, 1800.0, 800.0, -250.0, 0),
}
_ADMISSIONS = ("medical", "elective_surgery", "emergency_surgery", "trauma")
_MORTALITY = {
    "age": 2.0,
    "heart_rate": 1.0,
    "mean_arterial_pressure": -1.5,
    "respiratory_rate": 1.0,
    "temperature": -0.5,
    "oxygen_saturation": -1.0,
    "glasgow_coma_scale": -1.5,
    "lactate": 2.5,
    "creatinine": 1.0,
    "bilirubin": 1.0,
    "platelets": -0.5,
    "white_cells": 0.5,
    "sodium": 0.0,
    "urine_output": -1.0,
    "admission=elective_surgery": -1.2,
    "admission=emergency_surgery": -0.2,
    "admission=trauma": -0.4,
    "intercept": -2.0,
}


def icu_study(seed: int) -> IcuStudy:
    """Ten ICUs of 500 to 4000 patients, 20,000 together, that differ in severity and in whom they admit.

    Deaths follow one logistic regression on the publicly encoded features.
    """
    rng = np.random.default_rng(seed)
    sizes = np.array([500, 700, 900, 1200, 1500, 1900, 2400, 3000, 3900, 4000])
    frames = {}
    for number, size in enumerate(rng.permutation(sizes)):
        severity = rng.normal(rng.uniform(-0.9, 0.9), 1.0, size)
        log_odds = np.full(size, _MORTALITY["intercept"])
        columns: dict[str, np.ndarray] = {}
        for name, (low, high, typical, spread, shift, decimals) in _VITALS.items():
            reading = np.clip(rng.normal(typical + shift * severity, spread), low, high).round(decimals)
            columns[name] = reading
            log_odds += _MORTALITY[name] * (reading - typical) / max(high - typical, typical - low)
        admission = rng.choice(len(_ADMISSIONS), size, p=rng.dirichlet([4.0, 3.0, 2.0, 1.0]))
        columns["admission"] = np.array(_ADMISSIONS)[admission]
        log_odds += np.array([_MORTALITY.get(f"admission={name}", 0.0) for name in _ADMISSIONS])[admission]
        died = rng.random(size) < 1.0 / (1.0 + np.exp(-log_odds))
        columns["died"] = np.where(died, "yes", "no")
        frames[f"icu-{number:02d}"] = pd.DataFrame(columns)
    return IcuStudy(
        frames=frames,
        data={
            "target": "died",
            "classes": ["no", "yes"],
            "features": [*_VITALS, "admission"],
            "bounds": {
                **{name: [float(low), float(high)] for name, (low, high, *_) in _VITALS.items()},
                "admission": list(_ADMISSIONS),
            },
            "typical": {name: float(typical) for name, (_, _, typical, *_) in _VITALS.items()},
            "public": ["rows", "test"],
            "test": 0.2,
        },
        coefficients=dict(_MORTALITY),
    )
