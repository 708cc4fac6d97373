"""Every word of a certificate, derived again from the study, the ledgers' events and the files of the run.

A certificate is written by whoever ran the study, so what it says counts for nothing here. What a word must be follows
from `study.json` (the name of the account, in the ledgers' hash chain, has the study's hash), from what was charged,
and from `run.json`. Runs of earlier versions have neither that name nor digests of files: what can be derived is
checked all the same, and that their noise was noise is not confirmed.

Guarantees:
    A word that does not follow from study, ledgers and run directory is noticed.
    Noise of another kind than the method draws is noticed.
    A run with fixed noise is not confirmed as private, whatever its certificate and run.json say.
    A file that changed after its certificate was written is noticed.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silobayes import __version__
from silobayes.plans.rules import PublicFacts, settings_of
from silobayes.privacy.events import (
    AbstractEvent,
    Scheme,
    SkellamEvent,
    to_json,
)
from silobayes.report.explain import clients_per_round, sends_shares
from silobayes.report.run_files import RunFiles
from silobayes.runs import claims
from silobayes.runs.directory import CERTIFIED, digests
from silobayes.study import Mode, Study

_PROMISES = ("epsilon", "delta", "relation", "unit", "account", "method", "intervals", "sampler", "noise", "silos")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was checked."""

    name: str
    passed: bool
    detail: str


def same(said: object, meant: object) -> bool:
    """Whether two values are the same JSON; 1 is not true."""
    return json.dumps(said, sort_keys=True) == json.dumps(meant, sort_keys=True)


def is_earlier(run: RunFiles) -> bool:
    """Whether the run is of a version that did not say where its noise came from."""
    return "noise" not in run.facts


def check_files(run: RunFiles) -> list[Check]:
    """The files are those that the certificate was written for."""
    said = run.certificate.get("files")
    if said is None and is_earlier(run):
        return []
    said, now = said if isinstance(said, Mapping) else {}, digests(run.directory)
    changed = [name for name in CERTIFIED if name not in now or said.get(name) != now[name]]
    detail = f"{', '.join(changed)}: not as certified" if changed else f"{len(CERTIFIED)} files as certified"
    return [Check(name="files", passed=not changed, detail=detail)]


def check_words(run: RunFiles, study: Study) -> list[Check]:
    """What follows from the study and from run.json alone."""
    certificate, privacy = run.certificate, study.privacy
    meant: dict[str, Any] = {"study": study.study.name, "mode": privacy.mode.value}
    if privacy.mode is Mode.DP:
        assert privacy.relation is not None
        assert privacy.unit is not None
        section = study.aggregation
        meant |= {
            "delta": privacy.delta,
            "relation": privacy.relation.value,
            "unit": privacy.unit.value,
            "method": study.method.privatise,
            "aggregation": {"kind": section.kind.value, "colluding": section.num_colluding},
            "accountant": claims.ACCOUNTANT,
        }
        if "intervals" in certificate:  # those of earlier versions say nothing of them
            meant["intervals"] = study.method.intervals.value
    checks = [
        Check(
            name=key,
            passed=same(certificate.get(key), value),
            detail=f"study: {value}, certificate: {certificate.get(key)}",
        )
        for key, value in meant.items()
    ]
    return [*checks, _check_run(run, study), _check_versions(run), _check_released(run)]


def _check_run(run: RunFiles, study: Study) -> Check:
    settings = run.facts.get("settings")
    method = settings.get("privatise") if isinstance(settings, Mapping) else None
    passed = run.facts.get("study_hash") == run.study_hash and method == study.method.privatise
    return Check(name="run.json", passed=passed, detail="of this study, and of its method")


def _check_versions(run: RunFiles) -> Check:
    versions = run.certificate.get("versions")
    known = versions if isinstance(versions, Mapping) else {}
    started = run.facts.get("version")
    passed = started is not None and started in (known.get("silobayes"), known.get("started_with"))
    return Check(name="versions", passed=passed or is_earlier(run), detail=f"started with {started}")


def _check_released(run: RunFiles) -> Check:
    last = run.trace[-1] if run.trace else {}
    passed = same(run.certificate.get("released"), last.get("released"))
    return Check(name="released", passed=passed, detail="what was made public besides the posterior, as in the trace")


def check_open(run: RunFiles) -> list[Check]:
    """A run without privacy says so, and promises nothing."""
    stamp, detail = run.certificate.get("stamp"), "a run without privacy must say that it is not private"
    passed = run.certificate.get("is_private") is False and _is_stamp(stamp)
    promised = [key for key in _PROMISES if run.certificate.get(key) is not None]
    return [
        Check(name="stamp", passed=passed, detail=detail),
        Check(name="promises", passed=not promised, detail=", ".join(promised) or "none without privacy"),
    ]


def check_origin(run: RunFiles, study: Study) -> list[Check]:
    """Whether the noise was noise, as the account's name says: it is that of the ledgers."""
    said, run_id = run.certificate.get("account"), str(run.facts.get("run_id"))
    names = {
        claims.account_name(study.study.name, run.study_hash, run_id, is_private=is_private): is_private
        for is_private in (True, False)
    }
    earlier = is_earlier(run) and said == claims.earlier_account_name(study.study.name, run_id)
    is_private = names.get(str(said), False)
    source = claims.FROM_SYSTEM if is_private else claims.FROM_SEED
    agrees = str(said) in names and run.facts.get("noise") == source
    claimed, stamp = run.certificate.get("is_private"), run.certificate.get("stamp")
    if earlier:
        detail = "a run of an earlier version does not say where its noise came from: not confirmed as private"
    else:
        detail = f"account: {'noise of the operating system' if is_private else 'not that of a private run'}"
    return [
        Check(name="account", passed=earlier or agrees, detail="that of this run and this study, as run.json has it"),
        Check(name="is private", passed=claimed is is_private, detail=detail),
        Check(
            name="stamp",
            passed=stamp is None if claimed is True else _is_stamp(stamp),
            detail="there if, and only if, the certificate does not say private",
        ),
    ]


def _is_stamp(stamp: object) -> bool:
    return isinstance(stamp, str) and stamp.startswith("NOT PRIVATE")


def check_silo_words(run: RunFiles, silo: Mapping[str, Any], events: Sequence[AbstractEvent]) -> list[Check]:
    """What the certificate says of one silo besides its price."""
    name = str(silo.get("name"))
    paid = [to_json(event) for event in events]
    place = Path(str(ledger_places(run).get(name, silo.get("ledger"))))
    published = place.name if place.is_absolute() else str(place)
    return [
        Check(name=f"{name}: events", passed=same(silo.get("events"), paid), detail="those that the ledger charged"),
        Check(name=f"{name}: place", passed=silo.get("ledger") == published, detail=f"the ledger is {published}"),
    ]


def check_noise(run: RunFiles, study: Study, paid: Mapping[str, Sequence[AbstractEvent]]) -> list[Check]:
    """Kind of noise and of batches: those of the study's method, and those that every silo was charged for."""
    meant, sampler = noise_of(study), _sampler(study)
    odd = [name for name, events in paid.items() if {type(event) for event in events} != meant]
    badly = [name for name, events in paid.items() if claims.sampler_of(events) != sampler]
    events = [event for own in paid.values() for event in own]
    words, said = claims.noise_in_words(events), run.certificate.get("noise")
    kinds = ", ".join(sorted(kind.mechanism for kind in meant))
    return [
        Check(name="noise", passed=said == words, detail=f"charged: {words}, certificate: {said}"),
        Check(
            name="method's noise",
            passed=not odd,
            detail=f"{kinds}, as the method draws" + (f"; not so: {', '.join(odd)}" if odd else ""),
        ),
        Check(
            name="sampler",
            passed=not badly and run.certificate.get("sampler") == sampler,
            detail=f"study: {sampler}, certificate: {run.certificate.get('sampler')}",
        ),
    ]


def noise_of(study: Study) -> frozenset[type[AbstractEvent]]:
    """The kinds of events that a study's method is charged for."""
    return frozenset({SkellamEvent}) if sends_shares(study) else study.method.noise


def _sampler(study: Study) -> str | None:
    return (getattr(study.protocol, "sampler", None) or Scheme.POISSON).value if study.method.loops else None


def releases_of(run: RunFiles, study: Study, visits: int) -> float:
    """How many releases so many visits of a silo are: by the study, and no fewer than run.json says."""
    method, planned = study.method, run.facts.get("releases")
    made: float = visits
    if method.loops:
        once = min(visits, method.first_releases)
        free = min(visits - once, method.free_visits)
        made = once + (visits - once - free) * _steps(run, study)
    if not isinstance(planned, list) or not visits < len(planned):
        return math.inf  # more visits than were planned
    numbers = [made, number(planned[visits])]
    return math.inf if any(math.isnan(value) for value in numbers) else max(numbers)


def _steps(run: RunFiles, study: Study) -> int | float:
    """Of one visit; where the study leaves them to the rule, an earlier version's rule may have been another."""
    steps = getattr(study.protocol, "steps", None)
    if steps is not None:
        return steps
    if run.facts.get("version") == __version__:
        # The number of steps depends on neither the rows nor the parameters of a private run, only on the study.
        facts = PublicFacts(silo_rows=(1,) * max(1, len(listed_silos(run.facts))), num_parameters=1)
        return settings_of(study, facts).steps
    settings = run.facts.get("settings")
    return number(settings.get("steps")) if isinstance(settings, Mapping) else math.inf


def check_other_silos(run: RunFiles, study: Study, certified: Iterable[str], charged: Iterable[str]) -> Check:
    """Nobody is left out: neither a silo of the run that every schedule but `sampled` visits, nor one that paid.

    Args:
        run: The run.
        study: Its study.
        certified: The silos of the certificate.
        charged: Silos that paid for the run and are not among them.
    """
    unnamed = set(charged)
    if clients_per_round(study) is None:
        unnamed |= {str(silo.get("name")) for silo in listed_silos(run.facts)} - set(certified)
    detail = f"left out: {', '.join(sorted(unnamed))}" if unnamed else "every silo that paid is certified"
    return Check(name="other silos", passed=not unnamed, detail=detail)


def listed_silos(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The objects under `silos`."""
    silos = content.get("silos")
    return [silo for silo in silos if isinstance(silo, Mapping)] if isinstance(silos, list) else []


def ledger_places(run: RunFiles) -> Mapping[str, Any]:
    """Silo name -> where run.json says its ledger is."""
    places = run.facts.get("ledgers")
    return places if isinstance(places, Mapping) else {}


def number(value: object) -> float:
    """A number, or NaN."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
