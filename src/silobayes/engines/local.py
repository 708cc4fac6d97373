"""The local engine: all silos in one process, the reference semantics (DESIGN 5).

Every silo still has its own ledger and its own door; a run lives in a directory (`runs.directory`) and goes on from
there after Ctrl-C or kill -9. A visit: draw from what was paid, solve, reply, merge; commits go by the clock. A visit
that was not committed was never shown to anybody, and its draws died with the process.
"""

import dataclasses
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from silobayes import __version__
from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.engines.doors import Bill, Doors, charged_accounts, check, ledger_places
from silobayes.engines.loop import make_visit
from silobayes.engines.parties import LocalParties
from silobayes.models.base import AbstractModel
from silobayes.plans import plan_of
from silobayes.plans.aggregation import communications
from silobayes.plans.situation import Situation, Sizes
from silobayes.posteriors import Posterior
from silobayes.privacy.events import to_json
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Unit
from silobayes.protocols.roles import Plan
from silobayes.protocols.schedule import Visit, visits_per_silo
from silobayes.runs import claims
from silobayes.runs.directory import LEDGERS, RunDirectory
from silobayes.runs.metrics import evaluate
from silobayes.study import Mode, Study

# Between commits: what a crash may cost.
_COMMIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """After a step: where the run is and what each silo has spent; `epsilons` is empty without privacy."""

    step: int
    num_steps: int
    visited: tuple[str, ...]
    epsilons: Mapping[str, float]
    epsilons_left: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What a run is made of besides its directory.

    Attributes:
        study: The study.
        model: Of the study.
        silos: Their rows.
        test: Rows declared public, or None.
        names: Of the model's parameters.
        ledgers: Silo name -> ledger of the site's own; other silos get one in the run directory.
        noise_seed: None in real life. A seed makes noise that can be repeated: everything is stamped NOT PRIVATE.
    """

    study: Study
    model: AbstractModel
    silos: Sequence[Silo]
    test: Silo | None
    names: tuple[str, ...]
    ledgers: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    noise_seed: int | None = None


def run(inputs: Inputs, out: Path, progress: Callable[[Progress], None] | None = None) -> Any:
    """A new run in the directory `out`; everything that can be refused is refused before anything is charged."""
    settings, budget, plan = _prepare(inputs)
    names = [silo.name for silo in inputs.silos]
    run_id = secrets.token_hex(8)
    facts = {
        "run_id": run_id,
        "silos": [_public_size(inputs.study, silo) for silo in inputs.silos],
        "settings": {key: _plain(value) for key, value in dataclasses.asdict(settings).items()},
        "releases": _releases(plan),
        "version": __version__,
        "ledgers": ledger_places(names, LEDGERS, inputs.ledgers),
        "noise": _noise_source(inputs),
    }
    RunDirectory.require_new(Path(out))
    if budget is not None:
        places = [Path(out) / facts["ledgers"][name] for name in names]
        bills = _bills(plan, places, [name not in inputs.ledgers for name in names])
        check(bills, budget=budget, account=_account(inputs, run_id))
    directory = RunDirectory.create(Path(out), inputs.study.to_dict(), inputs.study.hash, facts)
    return _go_on(directory, inputs, settings, budget, plan, progress)


def resume(inputs: Inputs, out: Path, progress: Callable[[Progress], None] | None = None) -> Any:
    """Go on with the run in `out`; a finished one is only read.

    Guarantees:
        - a resumed run ends where an uninterrupted one does, and charges once
        - a changed study or other public sizes are refused
        - a resumed run remembers the site's own ledger
        - an unfinished run that lost a ledger, its checkpoint or its trace is refused
        - a run whose ledgers hold its charges does not start again, whatever its files say
        - a run goes on with the kind of noise that it was started with, and is never called private otherwise
        - a run that died after its certificate loses its private state
    """
    directory = RunDirectory.open(Path(out), inputs.study.hash)
    if directory.is_finished:
        directory.remove_state()
        return Posterior.load(directory.path, model=inputs.model)
    if directory.facts["silos"] != [_public_size(inputs.study, silo) for silo in inputs.silos]:
        fix = "Resume with the rows that the run was started with."
        raise InvalidInput("silos", "the silos of the run, with as many rows", "others", fix)
    known = directory.ledgers
    for name, path in inputs.ledgers.items():
        place = known.get(name)
        if place is None or Path(path).resolve() != place.resolve():
            fix = "What was charged is written there: leave --ledger out, or bring that file back."
            raise InvalidInput("ledgers", f"the ledger that the run was started with, {place}", str(path), fix)
    _check_noise(directory.facts.get("noise"), _noise_source(inputs))
    return _go_on(directory, inputs, *_prepare(inputs), progress)


def _prepare(inputs: Inputs) -> tuple[Any, Budget | None, Plan]:
    study = inputs.study
    names = [silo.name for silo in inputs.silos]
    if len(set(names)) != len(names):
        raise InvalidInput("silos", "different names", names, "Rename the silos.")
    sizes = tuple(sizes_of(study, silo) for silo in inputs.silos)
    situation = Situation.of(study, inputs.model, inputs.names, sizes)
    return situation.settings, situation.budget, plan_of(situation)


def sizes_of(study: Study, silo: Silo) -> Sizes:
    """What a plan may know of a silo."""
    return Sizes(
        rows=study.public_rows(silo),
        persons=silo.num_persons if study.privacy.unit is Unit.PERSON and silo.persons is not None else None,
        has_persons=silo.persons is not None,
        num_features=silo.num_features,
    )


def _public_size(study: Study, silo: Silo) -> dict[str, Any]:
    """What everybody may know of a silo's size: how many rows its persons have is theirs unless it is declared."""
    return {"name": silo.name} | ({"rows": silo.num_rows} if study.tells_rows else {"persons": silo.num_persons})


def _go_on(
    directory: RunDirectory,
    inputs: Inputs,
    settings: Any,
    budget: Budget | None,
    plan: Plan,
    progress: Callable[[Progress], None] | None,
) -> Any:
    started = time.monotonic()
    with directory.lock():
        account = _account(inputs, directory.facts["run_id"])
        if budget is not None:
            _look_for_charges(directory, inputs)
        study = inputs.study
        parties = LocalParties(plan, inputs.silos, lambda silo, visit: None, study.aggregation, study.hash)
        state, parties.states, step = directory.load(plan.server.init(), parties.states)
        if budget is not None and step > 0 and not directory.has_charged:
            fix = "Bring back run.json and the ledgers, or start a new run."
            raise InvalidInput("ledgers", f"what paid for {step} released steps", "no charge of this run", fix)
        doors = None
        if budget is not None:
            doors = _pay(directory, inputs, budget, plan, account, (state, parties.states), step)
            parties.door_of = doors.at
        clock = _Clock(directory, parties)
        with clock:
            for visit in plan.visits[step:]:
                state = make_visit(plan, parties, state, visit)
                line = {"visited": [inputs.silos[m].name for m in visit.silos], **plan.server.info(state)}
                clock.tick(state, {"step": visit.number + 1, **line})
                if progress is not None:
                    progress(_progress(inputs, plan, visit, doors))
        certificate = _certificate(inputs, budget, doors, directory, account) | plan.server.facts(state)
        posterior: Any = plan.server.posterior(state).with_provenance(certificate)
        posterior = posterior.with_units(inputs.study.encoding.feature_units)
        posterior.save(directory.path)
        metrics = {} if inputs.test is None else evaluate(posterior, inputs.test)
        timing = {"total_s": time.monotonic() - started}
        crossed = communications(plan, getattr(settings, "rounds", 1), study.aggregation)
        directory.finish({"metrics": metrics, "communications": crossed, "timing": timing}, certificate)
    return posterior


class _Clock:
    """Commits once a second, and when the run ends or is interrupted.

    What was shown or left the process is never drawn again; what was not may be: its draws died with the process. So
    there is one commit point for server and silos together, and syncs do not bound a visit.
    """

    def __init__(self, directory: RunDirectory, parties: LocalParties) -> None:
        self.directory, self.parties = directory, parties
        self.last = time.monotonic()
        self.made: tuple[Any, list[Any], list[dict[str, Any]]] = (None, [], [])

    def tick(self, state: Any, line: dict[str, Any]) -> None:
        """A visit was made."""
        # At once: an interrupt may come at any line, and a state that is ahead of its step would be moved twice.
        self.made = (state, list(self.parties.states), [*self.made[2], line])
        if time.monotonic() - self.last >= _COMMIT_S:
            self.commit()

    def commit(self) -> None:
        """Keep all visits so far."""
        server, silos, lines = self.made
        if lines:
            self.made = (server, silos, [])
            self.directory.commit(server, silos, lines[-1]["step"], lines)
        self.last = time.monotonic()

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self.commit()


def _account(inputs: Inputs, run_id: str, noise: str | None = None) -> str:
    """The account of a run with such noise; by default with that of `inputs`."""
    is_private = (noise or _noise_source(inputs)) == claims.FROM_SYSTEM
    return claims.account_name(inputs.study.study.name, inputs.study.hash, run_id, is_private=is_private)


def _noise_source(inputs: Inputs) -> str | None:
    if inputs.study.privacy.mode is Mode.NONE:
        return None
    return claims.FROM_SYSTEM if inputs.noise_seed is None else claims.FROM_SEED


def _check_noise(started: object, now: str | None) -> None:
    """Steps with fixed noise protect nobody, whatever noise the others have."""
    if now is not None and started != now:
        fix = "Pass noise_seed to fit() if, and only if, the run was started with one; otherwise start a new run."
        raise InvalidInput("noise_seed", f"the noise that the run was started with: {started}", now, fix)


def _look_for_charges(directory: RunDirectory, inputs: Inputs) -> None:
    """Ledgers know better than `run.json` whether this run was charged, and for which kind of noise."""
    run_id, now = directory.facts["run_id"], _noise_source(inputs)
    kinds = {_account(inputs, run_id, kind): kind for kind in (claims.FROM_SYSTEM, claims.FROM_SEED)}
    for account in charged_accounts(directory.ledgers.values()) & kinds.keys():
        _check_noise(kinds[account], now)
        directory.begin_to_charge()


def _bills(plan: Plan, places: Sequence[Path], may_create: Sequence[bool]) -> list[Bill]:
    return [
        Bill(ledger=place, events=events, may_create=new)
        for place, events, new in zip(places, plan.total_events, may_create, strict=True)
    ]


def _pay(
    directory: RunDirectory, inputs: Inputs, budget: Budget, plan: Plan, account: str, states: Any, step: int
) -> Doors:
    past = visits_per_silo(plan.visits[:step], len(plan.seats))
    done = [plan.events(silo, count) for silo, count in enumerate(past)]
    known = directory.ledgers
    places = [known[silo.name] for silo in inputs.silos]
    own = directory.path / LEDGERS
    bills = _bills(plan, places, [not directory.has_charged and place.is_relative_to(own) for place in places])

    def begin() -> None:
        directory.keep_start(*states)
        directory.begin_to_charge()

    return Doors.pay(
        bills,
        done,
        budget=budget,
        account=account,
        noise_seed=inputs.noise_seed,
        begin=begin,
    )


def _progress(inputs: Inputs, plan: Plan, visit: Visit, doors: Doors | None) -> Progress:
    spent = {} if doors is None else {s.name: p for s, p in zip(inputs.silos, doors.spent, strict=True) if p}
    return Progress(
        step=visit.number + 1,
        num_steps=len(plan.visits),
        visited=tuple(inputs.silos[m].name for m in visit.silos),
        epsilons={name: price.epsilon for name, price in spent.items()},
        epsilons_left={name: price.epsilon_left for name, price in spent.items()},
    )


def _certificate(
    inputs: Inputs,
    budget: Budget | None,
    doors: Doors | None,
    directory: RunDirectory,
    account: str,
) -> dict[str, Any]:
    common = {
        "study": inputs.study.study.name,
        "study_hash": inputs.study.hash,
        "is_private": doors is not None and inputs.noise_seed is None,
        "stamp": None,
        "versions": {
            "silobayes": __version__,
            "started_with": directory.facts["version"],
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("jax", "numpy", "scipy")},
        },
    }
    if budget is None or doors is None:
        return {**common, "stamp": claims.NO_PRIVACY, "mode": Mode.NONE.value}
    if inputs.noise_seed is not None:
        common["stamp"] = claims.FIXED_NOISE
    silos = []
    for silo, spent, events in zip(inputs.silos, doors.spent, doors.events, strict=True):
        if spent is not None:
            place = Path(directory.facts["ledgers"][silo.name])
            ledger = place.name if place.is_absolute() else str(place)  # published: no paths of the site's machine
            paid = [to_json(event) for event in events]
            silos.append({"name": silo.name, "epsilon": spent.epsilon, "ledger": ledger, "events": paid})
    charged = [event for events in doors.events for event in events]
    section = inputs.study.aggregation
    return {
        **common,
        "mode": Mode.DP.value,
        "account": account,
        "epsilon": max(silo["epsilon"] for silo in silos),
        "delta": budget.delta,
        "relation": budget.relation.value,
        "unit": budget.unit.value,
        "method": inputs.study.method.privatise,
        "intervals": inputs.study.method.intervals.value,
        "sampler": claims.sampler_of(charged),
        "noise": claims.noise_in_words(charged),
        "aggregation": {"kind": section.kind.value, "colluding": section.num_colluding},
        "accountant": claims.ACCOUNTANT,
        "silos": silos,
    }


def _releases(plan: Plan) -> list[int]:
    """How many releases a silo has made after 0, 1, 2, ... visits."""
    longest = max(visits_per_silo(plan.visits, len(plan.seats)))
    return [sum(event.count for event in plan.events(0, visits)) for visits in range(longest + 1)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value.value if isinstance(value, Enum) else value
