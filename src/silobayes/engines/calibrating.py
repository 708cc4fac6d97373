"""`silobayes.calibrate`: what a study would say of truths that are known, before anybody's budget is spent.

Again and again a truth is drawn from the prior (or is a given point), silos are made up, the private study runs on them
(`rehearsal`), and where its posterior puts the truth is kept. Repetitions are independent and each has seeds of its
own, so that processes may share them and the result depends neither on how many there are nor on who is first.
"""

import dataclasses
import json
import os
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from silobayes.core.errors import InvalidInput, SiloBayesError, require_count, require_number
from silobayes.engines import workers as own_process
from silobayes.engines.fitting import Place
from silobayes.engines.rehearsal import Rehearsal
from silobayes.families import MeanFieldGaussian
from silobayes.models.base import AbstractGaussianPriorModel, AbstractGLM, AbstractModel
from silobayes.models.mlp import AbstractMLP
from silobayes.posteriors import DESCRIPTION, Posterior
from silobayes.runs.coverage import Calibration, Places
from silobayes.studies.models import build_model
from silobayes.studies.sizes import counted_rows, silo_rows
from silobayes.study import ModelKind, Study

FEWEST_REPETITIONS = 20
# A process of its own takes seconds to start and to compile; it should have something to do then.
_FEWEST_OF_A_WORKER = 10
# Beyond it the posterior without privacy is no longer cheap.
_LARGEST_EXACT = 300


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every repetition needs; its values can be read by a process that has neither NumPy nor JAX yet.

    Attributes:
        study: The canonical form.
        model: None for the study's own.
        point: The truth, where it is not drawn from the prior.
    """

    study: dict[str, Any]
    model: AbstractModel | None
    rows: tuple[int, ...]
    persons: tuple[int, ...] | None
    correlation: float
    point: tuple[float, ...] | None
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Outcome:
    """One repetition; `failure` says why there is no posterior."""

    number: int
    truth: np.ndarray
    places: tuple[np.ndarray, ...] | None = None
    exact: tuple[np.ndarray, ...] | None = None
    is_mean_field: bool = False
    warned: bool = False
    clipped: float = 0.0
    dealt_evenly: bool = False
    failure: str | None = None


class _Repeater:
    """Makes repetitions of a task; what is compiled for the first one serves all others."""

    def __init__(self, task: Task, study: Study) -> None:
        self.task = task
        model = task.model or build_model(study, len(study.encoding.feature_names))
        self.rehearsal = Rehearsal.of(study, model, task.rows, task.persons, task.correlation)
        self.has_exact = isinstance(model, AbstractGLM) and model.dim <= _LARGEST_EXACT

    def __call__(self, number: int) -> _Outcome:
        """One repetition. What ends a run on purpose ends the repetition; anything else is a defect and is raised."""
        task, rehearsal = self.task, self.rehearsal
        rng = np.random.default_rng(np.random.SeedSequence(task.seed, spawn_key=(number,)))
        key = jax.random.key(int(rng.integers(2**31)))
        drawn = _draw_prior(rehearsal.model, key) if task.point is None else task.point
        truth = np.asarray(drawn, float)
        made = rehearsal.make_up(truth, rng)
        common: dict[str, Any] = {"number": number, "truth": truth}
        common |= {"clipped": made.clipped, "dealt_evenly": made.dealt_evenly}
        try:
            posterior = rehearsal.run(made.silos, f"{task.seed}/{number}")
        except SiloBayesError as error:
            return _Outcome(**common, failure=" ".join(str(error).split()))
        if not isinstance(posterior, Posterior):
            fix = "Its intervals are not of the model's parameters; look at its summaries on made-up rows."
            raise InvalidInput("protocol.kind", "a Gaussian posterior to calibrate", type(posterior).__name__, fix)
        exact = rehearsal.without_privacy(made.silos) if self.has_exact else None
        return _Outcome(
            **common,
            places=_places(posterior, truth),
            exact=None if exact is None else _places(exact, truth),
            is_mean_field=isinstance(posterior.family, MeanFieldGaussian) and posterior.covariance is None,
            warned=bool(posterior.warnings),
        )


def calibrate(
    study: Study | Place,
    *,
    rows: int | Sequence[int] | None = None,
    persons: int | Sequence[int] | None = None,
    repetitions: int = 200,
    at: Mapping[str, float] | Place | None = None,
    correlation: float = 0.0,
    seed: int = 0,
    workers: int | None = None,
    model: AbstractModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """How often the intervals of a study would hold the truth, and how wide they would be. Nothing is charged.

    No row is read: silos are made up from what the study declares. Tables that it names are counted, unless `rows` are
    given. Ctrl-C ends it with the repetitions made so far.

    Args:
        study: A `Study` or the path of a study file.
        rows: Training rows of all silos together, or of each; by default as many as the study's tables have.
        persons: The same of persons, where their number decides something; by default as few as there can be.
        repetitions: How many studies; at least 20.
        at: The truth: parameter -> value (those left out are 0), a TOML or JSON file of that, or a run directory, of
            which the posterior mean is taken. By default each repetition draws its own truth from the prior.
        correlation: Of every two numeric columns, in [0, 1).
        seed: Of all that is random here.
        workers: How many processes; by default one for each processor, and none besides this one for few repetitions.
            A script that starts several must do so under `if __name__ == "__main__":`.
        model: Instead of the one that the study describes (a NumPyro model, say).
        progress: Called with how many repetitions are done, and how many there are.
    """
    folder = Path() if isinstance(study, Study) else Path(study).parent
    study = study if isinstance(study, Study) else Study.from_toml(Path(study))
    fix = "Frequencies of fewer say nothing."
    require_count("repetitions", repetitions, at_least=FEWEST_REPETITIONS, fix=fix)
    require_count("seed", seed, at_least=0, fix="Pass a whole number.")
    if workers is not None:
        require_count("workers", workers, at_least=1, fix="Pass the number of processes.")
    if study.model.kind is ModelKind.NUMPYRO and model is None:
        fix = "Pass silobayes.calibrate(..., model=from_numpyro(...)) in Python."
        raise InvalidInput("model.kind", "a model of the catalogue", study.model.kind.value, fix)
    task = Task(
        study=study.to_dict(),
        model=model,
        rows=tuple(counted_rows(study, folder) if rows is None else _of_each(study, rows)),
        persons=None if persons is None else tuple(_of_each(study, persons)),
        correlation=correlation,
        point=None,
        seed=seed,
    )
    here = _Repeater(task, study)
    names = here.rehearsal.names
    if at is not None:
        point = read_point(at, names)
        here.task = task = dataclasses.replace(task, point=tuple(point.get(name, 0.0) for name in names))
    if workers is None:
        workers = max(1, min(os.cpu_count() or 1, repetitions // _FEWEST_OF_A_WORKER))
    outcomes: list[_Outcome] = []
    made = _in_processes(task, repetitions, workers) if workers > 1 else (here(k) for k in range(repetitions))
    try:
        with closing(made):
            for outcome in made:
                outcomes.append(outcome)
                if progress is not None:
                    progress(len(outcomes), repetitions)
    except KeyboardInterrupt:
        if not any(outcome.places for outcome in outcomes):
            raise
    return _calibration(study, here, sorted(outcomes, key=lambda own: own.number), repetitions, at)


def read_point(at: Mapping[str, float] | Place, names: Sequence[str]) -> dict[str, float]:
    """Parameter -> value, from a file, a run or as given; names that the study does not have are refused."""
    point = dict(at) if isinstance(at, Mapping) else _read_values(Path(at))
    for name, value in point.items():
        if name not in names:
            known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise InvalidInput("at", f"parameters of the study: {known}", name, "Correct the name.")
        fix = "Pass a number for each parameter, in units of the encoded features."
        point[name] = require_number(f"at.{name}", value, above=-np.inf, fix=fix)
    return point


def _read_values(place: Path) -> dict[str, Any]:
    if (place / DESCRIPTION).exists() or place.name == DESCRIPTION:
        posterior = Posterior.load(place.parent if place.name == DESCRIPTION else place)
        return dict(zip(posterior.names, posterior.mean.tolist(), strict=True))
    fix = "Pass a run directory, or a TOML or JSON file of parameter = value."
    try:
        text = place.read_text(encoding="utf-8")
        values = json.loads(text) if place.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput("at", "a file of parameter = value", f"{place} ({error})", fix) from None
    if not isinstance(values, dict):
        raise InvalidInput("at", "a table of parameter = value", type(values).__name__, fix)
    return values


def prepare(**task: Any) -> None:
    """In a process of its own (`workers.start`): what all its repetitions share."""
    global _repeater
    _repeater = _Repeater(Task(**task), Study.from_dict(task["study"]))


_repeater: _Repeater | None = None


def _repeat(number: int) -> _Outcome:
    assert _repeater is not None, "prepared when the process was started"
    return _repeater(number)


def _in_processes(task: Task, repetitions: int, workers: int) -> Generator[_Outcome]:
    """Outcomes as they come. At most one repetition waits in each process, so that Ctrl-C is soon over."""
    try:
        ForkingPickler.dumps(task.model)  # as it would go to a process of our own; nothing is read back here
    except Exception as error:
        fix = "Define the model's function at the top of a module, or pass workers=1."
        raise InvalidInput("workers", "1 with a model that cannot go to another process", str(error), fix) from None
    waiting = iter(range(repetitions))
    running: set[Future[_Outcome]] = set()
    processes = ProcessPoolExecutor(workers, get_context("spawn"), own_process.start, (vars(task),))
    try:
        for number in waiting:
            running.add(processes.submit(_repeat, number))
            if len(running) >= workers:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool:
        fix = 'Call calibrate under `if __name__ == "__main__":`, or pass workers=1; or there was too little memory.'
        raise SiloBayesError(f"A process ended before its repetition did. {fix}") from None
    finally:
        processes.shutdown(cancel_futures=True)


def _places(posterior: Posterior, truth: np.ndarray) -> tuple[np.ndarray, ...]:
    return posterior.share_below(truth), posterior.stddev, posterior.mean - truth


def _of_each(study: Study, numbers: int | Sequence[int]) -> list[int]:
    return silo_rows(study, numbers) if isinstance(numbers, int) else list(numbers)


def _calibration(
    study: Study, here: _Repeater, outcomes: Sequence[_Outcome], asked: int, at: Mapping[str, float] | Place | None
) -> Calibration:
    failures = tuple(own.failure for own in outcomes if own.failure is not None)
    good = [own for own in outcomes if own.places is not None]
    if not good:
        raise SiloBayesError(f"No repetition ended with a posterior. The first said: {failures[0]}")
    rehearsal, model, task = here.rehearsal, here.rehearsal.model, here.task
    notes = []
    if isinstance(model, AbstractMLP):
        notes.append(
            "Units of a network can be swapped without changing what it says, so that its weights have no truth of "
            "their own: their coverage says little, and repetitions are slow."
        )
    prior = model.prior_stddev if isinstance(model, AbstractGaussianPriorModel) else None
    return Calibration(
        study=study.study.name,
        study_hash=study.hash,
        method=study.method.name,
        is_private=study.budget is not None,
        intervals=study.method.intervals,
        is_mean_field=any(own.is_mean_field for own in good),
        names=rehearsal.names,
        places=_stacked([own.places for own in good]),
        exact=_stacked([own.exact for own in good]) if here.has_exact else None,
        prior_stddev=prior,
        truths=np.stack([own.truth for own in good]),
        asked=asked,
        failures=failures,
        warned=float(np.mean([own.warned for own in good])),
        clipped=float(np.mean([own.clipped for own in outcomes])),
        dealt_evenly=sum(own.dealt_evenly for own in outcomes),
        facts={
            "rows": list(task.rows),
            "persons": None if rehearsal.persons is None else list(rehearsal.persons),
            "correlation": task.correlation,
            "seed": task.seed,
            "at": None if task.point is None else dict(zip(rehearsal.names, task.point, strict=True)),
        },
        notes=tuple(notes),
    )


def _stacked(places: Sequence[tuple[np.ndarray, ...] | None]) -> Places:
    positions, stddevs, errors = (
        np.stack(parts) for parts in zip(*[own for own in places if own is not None], strict=True)
    )
    return Places(positions=positions, stddevs=stddevs, errors=errors)


@eqx.filter_jit
def _draw_prior(model: AbstractModel, key: Any) -> Any:
    return model.draw_prior(key)
