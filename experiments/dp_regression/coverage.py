"""Do the intervals cover? Simulated studies in which the model is right: normal rows, coefficients from the prior."""

from typing import Any

import numpy as np

from experiments import planned
from silobayes.data.silo import Silo
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Relation, Unit
from silobayes.study import Study

SIZES = ((6, 3000), (12, 1500))
CORRELATIONS = (0.0, 0.6)
EPSILONS = (0.3, 1.0, 3.0, 10.0)
# Of a feature, in units of its bound; residual standard deviation; bound of the target.
SPREAD, RESIDUAL, TARGET_BOUND = 0.25, 0.5, 3.0


def simulate(dim: int, num_rows: int, correlation: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features, target, coefficients)."""
    rng = np.random.default_rng([dim, num_rows, seed])
    truth = rng.normal(size=dim)
    mix = np.linalg.cholesky(correlation * np.ones((dim, dim)) + (1 - correlation) * np.eye(dim))
    x = SPREAD * rng.normal(size=(num_rows, dim)) @ mix.T
    return x, x @ truth + RESIDUAL * rng.normal(size=num_rows), truth


def run(num_studies: int, delta: float) -> list[dict[str, Any]]:
    """Coverage of 95 % intervals, projected and not."""
    records = []
    for dim, num_rows in SIZES:
        for correlation in CORRELATIONS:
            studies = [simulate(dim, num_rows, correlation, seed) for seed in range(num_studies)]
            for epsilon in EPSILONS:
                for projection in (False, True):
                    coverage, error = _cell(studies, epsilon, delta, projection)
                    records.append(
                        {
                            "dim": dim,
                            "rows": num_rows,
                            "correlation": correlation,
                            "epsilon": epsilon,
                            "projection": projection,
                            "coverage": coverage,
                            "error": error,
                        }
                    )
    return records


def _cell(studies: list, epsilon: float, delta: float, projection: bool) -> tuple[float, float]:
    dim = studies[0][0].shape[1]
    study = Study.from_dict(
        {
            "study": {"name": "simulated"},
            "data": {
                "target": "y",
                "target_bounds": [-TARGET_BOUND, TARGET_BOUND],
                "bounds": {f"x{number}": [-1.0, 1.0] for number in range(dim)},
                "intercept": False,
                "public": ["rows"],
            },
            "model": {"kind": "linear_regression", "options": {"noise_stddev": RESIDUAL, "prior_stddev": 1.0}},
            "privacy": {"epsilon": epsilon, "delta": delta, "relation": "substitute", "unit": "row"},
            "protocol": {"kind": "linreg", "projection": projection} | ({"first_share": 0.3} if projection else {}),
        }
    )
    budget = Budget(epsilon=epsilon, delta=delta, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    plan = planned.plan_for(study, [len(studies[0][1])])
    covered, errors = [], []
    for seed, (x, y, truth) in enumerate(studies):
        doors = [planned.open_door(budget, seed)]
        posterior, _ = planned.run(study, plan, [Silo(name="all", x=x, y=y)], doors)
        error = np.abs(posterior.mean - truth)
        covered.append(np.mean(error < 1.96 * posterior.stddev))
        errors.append(error.mean())
    return float(f"{np.mean(covered):.3f}"), float(f"{np.mean(errors):.3f}")
