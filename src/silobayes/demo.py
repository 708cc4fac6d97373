"""The main job on simulated data: one posterior from ten silos, with a price that can be checked.

Each silo opens its own ledger, releases the sufficient statistics of a linear regression once through its door, and
the posterior is computed from the sums of the releases alone. The non-private posterior of the pooled rows and the
posterior that ignores the noise are there for comparison; only a simulation can show them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from silobayes.data.simulate import RegressionStudy, regression_study
from silobayes.inference.noisy_statistics import (
    GaussianPosterior,
    exact_posterior,
    noise_aware_posterior,
    noise_multiplier_for,
    pool,
    release_statistics,
)
from silobayes.privacy.door import Door
from silobayes.privacy.ledger import Budget, Ledger, Spent
from silobayes.privacy.relation import Relation, Unit

EPSILON, DELTA, RELATION, UNIT = 1.0, 1e-5, Relation.SUBSTITUTE, Unit.ROW
_PRIOR_PRECISION = 1.0


@dataclass(frozen=True, kw_only=True)
class SiloDone:
    """Progress: one silo has released."""

    number: int
    rows: int
    spent: Spent


@dataclass(frozen=True, kw_only=True, eq=False)
class DemoResult:
    """Everything the demo shows."""

    study: RegressionStudy
    private: GaussianPosterior
    naive: GaussianPosterior
    not_private: GaussianPosterior
    spent: tuple[Spent, ...]

    def to_json(self) -> dict[str, Any]:
        """One object for `--json`."""
        return {
            "coefficients": {
                name: {
                    "truth": float(self.study.coefficients[k]),
                    "mean": float(self.private.mean[k]),
                    "sd": float(self.private.stddev[k]),
                    "privacy_share": float(self.private.privacy_share[k]),
                    "naive_mean": float(self.naive.mean[k]),
                    "naive_sd": float(self.naive.stddev[k]),
                    "not_private_mean": float(self.not_private.mean[k]),
                    "not_private_sd": float(self.not_private.stddev[k]),
                }
                for k, name in enumerate(self.study.names)
            },
            "privacy": {
                "epsilon": max(spent.epsilon for spent in self.spent),
                "delta": DELTA,
                "relation": RELATION.value,
                "unit": UNIT.value,
                "per_silo": [spent.epsilon for spent in self.spent],
            },
        }


def run(directory: Path, seed: int, progress: Callable[[SiloDone], None]) -> DemoResult:
    """Run the study, keeping each silo's ledger in `directory`; `seed` fixes the simulated rows, never the noise."""
    study = regression_study(seed)
    noise_multiplier = noise_multiplier_for(
        len(study.names), y_bound=study.y_bound, relation=RELATION, epsilon=EPSILON, delta=DELTA
    )
    releases, spent = [], []
    for number, silo in enumerate(study.silos):
        budget = Budget(epsilon=EPSILON, delta=DELTA, relation=RELATION, unit=UNIT)
        ledger = Ledger.create(directory / f"silo-{number:02d}.ledger", budget)
        account = ledger.account("demo", epsilon=EPSILON, delta=DELTA)
        door = Door.open(account)
        releases.append(
            release_statistics(door, silo.x, silo.y, y_bound=study.y_bound, noise_multiplier=noise_multiplier)
        )
        spent.append(account.spent())
        progress(SiloDone(number=number, rows=len(silo.y), spent=spent[-1]))
    gram, cross, gram_std, cross_std = pool(releases)
    known = {"residual_variance": study.residual_variance, "prior_precision": _PRIOR_PRECISION}
    x, y = np.concatenate([silo.x for silo in study.silos]), np.concatenate([silo.y for silo in study.silos])
    return DemoResult(
        study=study,
        private=noise_aware_posterior(gram, cross, gram_std=gram_std, cross_std=cross_std, **known),
        naive=exact_posterior(gram, cross, **known),
        not_private=exact_posterior(x.T @ x, x.T @ y, **known),
        spent=tuple(spent),
    )
