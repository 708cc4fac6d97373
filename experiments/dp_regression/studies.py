"""The three tables and the studies on them; every number that a study uses is published elsewhere and public.

As in 004 I: each column is centred and scaled so that its range has length 10, and bounds of [-7.5, 7.5] are assumed,
one and a half times too long. Means and ranges are those that the data sets' authors published (abalone.names; Cortez
et al. 2009, Table 1), not those of the rows at hand. The paper's loaders read infants as females and lost a row of each
wine; here Sex has three categories, and all rows count.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.data import table
from silobayes.study import Study

# 004 I: ranges of length 10, bounds of 7.5 on either side; priors and noise of one in these units.
REACH, HALF = 10.0, 7.5
NUM_SILOS = 10
DELTA = 1e-4


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A table, its target, and (smallest, largest, mean) of each number as published."""

    name: str
    file: str
    target: str
    numbers: dict[str, tuple[float, float, float]]
    categories: dict[str, list[str]]

    @property
    def unit(self) -> float:
        """What one unit of the scaled target is of the target itself."""
        low, high, _ = self.numbers[self.target]
        return (high - low) / REACH

    def load(self) -> pd.DataFrame:
        """All rows; the target is centred and scaled by published numbers."""
        frame = table(self.file)
        frame[self.target] = (frame[self.target] - self.numbers[self.target][2]) / self.unit
        return frame


DATA_SETS = (
    DataSet(
        name="abalone",
        file="abalone/abalone.csv.gz",
        target="Rings",
        numbers={
            "Length": (0.075, 0.815, 0.524),
            "Diameter": (0.055, 0.650, 0.408),
            "Height": (0.000, 1.130, 0.140),
            "WholeWeight": (0.002, 2.826, 0.829),
            "ShuckedWeight": (0.001, 1.488, 0.359),
            "VisceraWeight": (0.001, 0.760, 0.181),
            "ShellWeight": (0.002, 1.005, 0.239),
            "Rings": (1, 29, 9.934),
        },
        categories={"Sex": ["F", "I", "M"]},
    ),
    DataSet(
        name="red wine",
        file="wine_quality/winequality-red.csv.gz",
        target="quality",
        numbers={
            "fixed acidity": (4.6, 15.9, 8.3),
            "volatile acidity": (0.1, 1.6, 0.5),
            "citric acid": (0.0, 1.0, 0.3),
            "residual sugar": (0.9, 15.5, 2.5),
            "chlorides": (0.01, 0.61, 0.08),
            "free sulfur dioxide": (1, 72, 14),
            "total sulfur dioxide": (6, 289, 46),
            "density": (0.990, 1.004, 0.996),
            "pH": (2.7, 4.0, 3.3),
            "sulphates": (0.3, 2.0, 0.7),
            "alcohol": (8.4, 14.9, 10.4),
            "quality": (3, 8, 5.6),
        },
        categories={},
    ),
    DataSet(
        name="white wine",
        file="wine_quality/winequality-white.csv.gz",
        target="quality",
        numbers={
            "fixed acidity": (3.8, 14.2, 6.9),
            "volatile acidity": (0.1, 1.1, 0.3),
            "citric acid": (0.0, 1.7, 0.3),
            "residual sugar": (0.6, 65.8, 6.4),
            "chlorides": (0.01, 0.35, 0.05),
            "free sulfur dioxide": (2, 289, 35),
            "total sulfur dioxide": (9, 440, 138),
            "density": (0.987, 1.039, 0.994),
            "pH": (2.7, 3.8, 3.1),
            "sulphates": (0.2, 1.1, 0.5),
            "alcohol": (8.0, 14.2, 10.4),
            "quality": (3, 9, 5.9),
        },
        categories={},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to fit: how many silos, who adds up, what is noised."""

    name: str
    num_silos: int
    protocol: dict[str, object]
    aggregation: str = "none"

    @property
    def is_private(self) -> bool:
        """Whether it has a budget."""
        return self.name != "non-private"


def _both(name: str, num_silos: int, aggregation: str = "none") -> tuple[Variant, Variant]:
    common = {"num_silos": num_silos, "aggregation": aggregation}
    return (
        Variant(name=name, protocol={"projection": False}, **common),
        Variant(name=f"{name}, projected", protocol={"projection": True}, **common),
    )


NON_PRIVATE = Variant(name="non-private", num_silos=1, protocol={})
VARIANTS = (
    *_both("trusted aggregator", 1),
    *_both("distributed", NUM_SILOS, "secret_sharing"),
    *_both("per-silo noise", NUM_SILOS),
    Variant(name="input perturbation", num_silos=NUM_SILOS, protocol={"privatise": "input_perturbation"}),
)


def study_of(data: DataSet, variant: Variant, epsilon: float) -> Study:
    """The study; `epsilon` is not used by the variant without privacy."""
    bounds: dict[str, list] = {}
    for column, (low, high, mean) in data.numbers.items():
        if column != data.target:
            reach = HALF / REACH * (high - low)
            bounds[column] = [mean - reach, mean + reach]
    privacy = {"epsilon": epsilon, "delta": DELTA, "relation": "substitute", "unit": "row"}
    return Study.from_dict(
        {
            "study": {"name": f"{data.name}, {variant.name}"},
            "data": {
                "target": data.target,
                "target_bounds": [-HALF, HALF],
                "bounds": {**bounds, **data.categories},
                "coding": "one_hot",
                "outside": "clip",
                "intercept": False,
                "public": ["rows"],
            },
            # Coefficients of features in [-1, 1] are HALF times those of features in [-HALF, HALF].
            "model": {"kind": "linear_regression", "options": {"noise_stddev": 1.0, "prior_stddev": HALF}},
            "privacy": privacy if variant.is_private else {"mode": "none"},
            "protocol": {"kind": "linreg", **variant.protocol},
            "aggregation": {"kind": variant.aggregation},
        }
    )


def split(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, test): four fifths and one fifth of the rows at random."""
    order = np.random.default_rng(seed).permutation(num_rows)
    return np.split(order, [4 * num_rows // 5])
