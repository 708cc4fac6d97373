"""The main job on simulated data: mortality in ten ICUs of different sizes and case mix, one private posterior.

The run directory is that of any study. Two comparisons that only a simulation can show are kept beside it for the
report: the posterior without privacy, and what each ICU would find alone.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from silobayes.data.simulate import icu_study
from silobayes.engines.fitting import read_inputs
from silobayes.engines.local import Inputs, Progress, run
from silobayes.posteriors import Posterior
from silobayes.report.build import NOT_PRIVATE, write_report
from silobayes.report.run_files import COMPARISONS
from silobayes.runs.metrics import evaluate
from silobayes.study import Study

EPSILON, DELTA = 1.0, 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class DemoResult:
    """What the demo shows; log-likelihoods are means over held-out patients."""

    truth: dict[str, float]
    private: Posterior
    not_private: Posterior
    metrics: dict[str, dict[str, float]]
    report: Path


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
            "protocol": {"kind": "pvi"},
        }
    )
    inputs = read_inputs(study, simulated.frames, model=None)
    say("Ten ICUs together, private:")
    private = run(inputs, directory, progress)
    say("For comparison, without privacy: all together, then each ICU alone.")
    open_study = _without_privacy(inputs)
    comparisons = directory / COMPARISONS
    not_private = _compare(open_study, comparisons, NOT_PRIVATE)
    posteriors = {"private": private, "not private": not_private}
    for silo in inputs.silos:
        alone = dataclasses.replace(open_study, silos=[silo])
        posteriors[f"{silo.name} alone"] = _compare(alone, comparisons, silo.name)
    assert inputs.test is not None
    metrics = {name: evaluate(posterior, inputs.test) for name, posterior in posteriors.items()}
    report = write_report(directory)["html"]
    return DemoResult(
        truth=simulated.coefficients, private=private, not_private=not_private, metrics=metrics, report=report
    )


def _without_privacy(inputs: Inputs) -> Inputs:
    tables = inputs.study.to_dict() | {"privacy": {"mode": "none"}}
    return dataclasses.replace(inputs, study=Study.from_dict(tables), test=None)


def _compare(inputs: Inputs, place: Path, label: str) -> Posterior:
    """A run of its own, of which only the posterior stays."""
    with tempfile.TemporaryDirectory() as scratch:
        posterior = run(inputs, Path(scratch) / "run")
    posterior.save(place / label)
    return posterior
