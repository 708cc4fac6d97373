"""The main job on simulated data: mortality in ten ICUs of different sizes and case mix, one private posterior.

The run directory is that of any study. What only a simulation can show comes beside it: the posterior without privacy,
and what each ICU would find alone, at the same price and without privacy. Of these, what is without privacy is kept for
the report.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from silobayes.data.silo import Silo
from silobayes.data.simulate import icu_study
from silobayes.engines import exact
from silobayes.engines.fitting import read_inputs
from silobayes.engines.local import Inputs, Progress, run
from silobayes.inference.rows import pad
from silobayes.models.base import AbstractGLM
from silobayes.posteriors import Posterior
from silobayes.report.build import NOT_PRIVATE, write_report
from silobayes.report.run_files import COMPARISONS
from silobayes.runs.metrics import evaluate
from silobayes.study import Study

EPSILON, DELTA = 1.0, 1e-5
ALL = "all ten"


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """What somebody learns from the rows that they have, at the price of the study and without privacy.

    `metrics` are those of held-out patients; log-likelihoods are means over them. `error` is the root mean square of
    the distances of coefficients from the truth.
    """

    rows: int
    private: Posterior
    not_private: Posterior
    metrics: dict[str, dict[str, float]]
    error: dict[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class DemoResult:
    """What the demo shows; `answers` are of all ICUs together (`ALL`) and of each alone."""

    truth: dict[str, float]
    answers: dict[str, Answers]
    report: Path

    @property
    def together(self) -> Answers:
        """Of all ICUs."""
        return self.answers[ALL]

    @property
    def num_true_inside(self) -> int:
        """How many private 95 % intervals hold the coefficient that patients were simulated with."""
        return self._num_inside(np.array([self.truth[name] for name in self.together.private.names]))

    @property
    def num_exact_inside(self) -> int:
        """How many private 95 % intervals hold the mean without privacy."""
        return self._num_inside(self.together.not_private.mean)

    @property
    def width_ratio(self) -> float:
        """Private intervals in units of those without privacy; the median coefficient."""
        return float(np.median(self.together.private.stddev / self.together.not_private.stddev))

    def num_beaten(self, kind: str) -> int:
        """How many ICUs, alone and `private` or `not_private`, predict held-out patients worse than all privately."""
        best = self.together.metrics["private"]["log_likelihood"]
        return sum(best > own.metrics[kind]["log_likelihood"] for name, own in self.answers.items() if name != ALL)

    def _num_inside(self, values: np.ndarray) -> int:
        summary = self.together.private.summary()
        return int(np.sum((summary["lower"].to_numpy() <= values) & (values <= summary["upper"].to_numpy())))


def simulate(
    directory: Path,
    seed: int,
    progress: Callable[[Progress], None],
    say: Callable[[str], None],
) -> DemoResult:
    """Run the study in the new `directory`; `seed` fixes the simulated patients, never the noise."""
    simulated = icu_study(seed)
    study = Study.from_dict(
        {
            "study": {"name": "icu-demo", "seed": seed},
            "data": simulated.data,
            "silos": {},
            "model": {"kind": "logistic_regression"},
            "privacy": {"epsilon": EPSILON, "delta": DELTA, "relation": "substitute", "unit": "row"},
            "aggregation": {"kind": "secret_sharing"},
        }
    )
    inputs = read_inputs(study, simulated.frames, model=None)
    say("Ten ICUs together, private, their sums added up by secret sharing:")
    posterior = run(inputs, directory, progress)
    say("For comparison: all together without privacy, and each ICU alone, at the same epsilon and without privacy.")
    answers = {ALL: _answers(inputs, inputs.silos, posterior, simulated.coefficients)}
    answers[ALL].not_private.save(directory / COMPARISONS / NOT_PRIVATE)
    for silo in inputs.silos:
        answers[silo.name] = own = _answers(inputs, [silo], _alone(inputs, silo), simulated.coefficients)
        own.not_private.save(directory / COMPARISONS / silo.name)
    return DemoResult(truth=simulated.coefficients, answers=answers, report=write_report(directory)["html"])


def _alone(inputs: Inputs, silo: Silo) -> Posterior:
    """What one ICU gets for the same epsilon by itself; a run of its own, of which only the posterior stays."""
    study = Study.from_dict(inputs.study.to_dict() | {"aggregation": {"kind": "none"}})
    with tempfile.TemporaryDirectory() as scratch:
        return run(dataclasses.replace(inputs, study=study, silos=[silo], test=None), Path(scratch) / "run")


def _answers(inputs: Inputs, silos: Sequence[Silo], private: Posterior, truth: dict[str, float]) -> Answers:
    """Beside a private posterior the one without privacy, and how good both are."""
    assert isinstance(inputs.model, AbstractGLM)
    assert inputs.test is not None
    x, y = (np.concatenate([getattr(silo, part) for silo in silos]) for part in "xy")
    # Of one shape for all: compiled once.
    rows = pad(x, y, sum(silo.num_rows for silo in inputs.silos))
    not_private = exact.without_privacy(inputs.model, inputs.names, rows)
    posteriors = {"private": private, "not_private": not_private}
    true = np.array([truth[name] for name in inputs.names])
    return Answers(
        rows=len(y),
        private=private,
        not_private=not_private,
        metrics={kind: evaluate(posterior, inputs.test) for kind, posterior in posteriors.items()},
        error={kind: float(np.sqrt(np.mean((own.mean - true) ** 2))) for kind, own in posteriors.items()},
    )
