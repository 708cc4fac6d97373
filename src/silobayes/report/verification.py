"""Recompute the price of a run from its ledgers alone, by two methods, and compare with what the certificate claims.

Nothing of the certificate is trusted; its words are checked in `report.words`. For each silo the ledger's chain is
checked, the study's charges are priced by privacy loss distributions (upper and lower bound) and once more through
Renyi divergences, which share no code with the former. A claim below the lower bound is refuted; a claim is confirmed
only if it is at least an upper bound.

The Renyi bound is looser by nature. If it alone lies within the budget, the budget holds by two independent proofs;
otherwise the two methods must still not contradict each other: lower bound of the one <= upper bound of the other.

Guarantees:
    An honest run passes.
    A claim below the price of the ledger is refuted.
    A claim or a price above the study's budget is refused.
    A changed study file is noticed.
    A damaged posterior, or one of another study, is noticed.
    A damaged or missing ledger is a failed check, not a crash.
    A charge for other neighbours or another unit than the study's is noticed.
    A silo that released and is not certified is noticed.
    More releases than were paid are noticed.
    Private state that a crash left behind is noticed.
    Two silos that pay into one ledger are noticed, and a silo that paid under two names of one run.
    A posterior with another certificate is noticed.
    Every word is that of study, ledgers and run directory (`report.words`).
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silobayes.core.digits import epsilon_text
from silobayes.core.errors import InvalidInput, SiloBayesError
from silobayes.posteriors import Posterior
from silobayes.privacy import accounting
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.ledger import Account, Ledger
from silobayes.privacy.relation import Relation
from silobayes.report import words
from silobayes.report.run_files import RunFiles
from silobayes.report.words import Check, number
from silobayes.runs import checkpoint
from silobayes.runs.directory import LEDGERS, private_place
from silobayes.study import Mode, PrivacySection, Study

# A claim is a float that went through JSON, so it comes back exactly; the margin is for another machine's mathematics.
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class SiloPrice:
    """The price of one silo's charges, by both methods, at the study's delta."""

    silo: str
    claimed: float
    epsilon: float
    epsilon_lower: float
    epsilon_rdp: float
    charges: int


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All checks and the recomputed prices."""

    checks: tuple[Check, ...]
    prices: tuple[SiloPrice, ...]
    says_private: bool

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and something was checked."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: a bound that does not exist is null."""
        return {
            "passed": self.passed,
            "is_private": self.passed and self.says_private,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "silos": [
                {key: _finite(value) for key, value in dataclasses.asdict(price).items()} for price in self.prices
            ],
        }


def verify(run: RunFiles) -> Verification:
    """Check the certificate of `run` against its study and its ledgers."""
    checks: list[Check] = []
    prices: list[SiloPrice] = []
    says_private = run.certificate.get("is_private") is True
    study = _check_study(run, checks)
    if study is None:
        return Verification(checks=tuple(checks), prices=(), says_private=says_private)
    checks += words.check_files(run)
    _check_posterior(run, checks)
    _check_private_state(run, checks)
    checks += words.check_words(run, study)
    if study.privacy.mode is Mode.NONE:
        checks += words.check_open(run)
        return Verification(checks=tuple(checks), prices=(), says_private=says_private)
    checks += words.check_origin(run, study)
    paid: dict[str, list[AbstractEvent]] = {}
    for silo in _silos(run, study, checks):
        events = _charged(run, study, silo, checks)
        if events:
            paid[str(silo.get("name"))] = events
            prices.append(_check_silo(run, study, silo, events, checks))
    checks += words.check_noise(run, study, paid)
    _check_other_ledgers(run, study, checks)
    _check_total(run.certificate, prices, checks)
    return Verification(checks=tuple(checks), prices=tuple(prices), says_private=says_private)


def _check_study(run: RunFiles, checks: list[Check]) -> Study | None:
    try:
        study = Study.from_dict(run.study)
    except InvalidInput as error:
        checks.append(Check(name="study", passed=False, detail=f"study.json is not a study: {error}"))
        return None
    claimed = run.certificate.get("study_hash")
    passed = claimed == run.study_hash
    detail = "the certificate is about this study" if passed else "study.json is not the study that was certified"
    checks.append(Check(name="study hash", passed=passed, detail=detail))
    return study


def _check_posterior(run: RunFiles, checks: list[Check]) -> None:
    """Its provenance is the certificate, as far as that could be known before the files were complete."""
    try:
        found = Posterior.load(run.directory).provenance
    except InvalidInput as error:
        checks.append(Check(name="posterior", passed=False, detail=str(error)))
        return
    passed = words.same(found, {key: value for key, value in run.certificate.items() if key != "files"})
    checks.append(Check(name="posterior", passed=passed, detail="intact, and with this certificate"))


def _check_private_state(run: RunFiles, checks: list[Check]) -> None:
    left = [path.name for path in checkpoint.files(run.directory, private_place(run.directory))]
    detail = f"{', '.join(left)} left by a crash: `silobayes resume` removes it" if left else "none is left"
    checks.append(Check(name="private state", passed=not left, detail=detail))


def _silos(run: RunFiles, study: Study, checks: list[Check]) -> list[Mapping[str, Any]]:
    """The silos of the certificate; all that released something must be there, and no others."""
    silos = words.listed_silos(run.certificate)
    names, released = [str(silo.get("name")) for silo in silos], set(_visits(run))
    declared = study.description.silo_names or names  # rows handed over in Python bring their own names
    passed = bool(names) and len(set(names)) == len(names) and set(names) == released <= set(declared)
    checks.append(Check(name="silos", passed=passed, detail=f"{len(names)} certified, {len(released)} released"))
    paths = {_ledger_path(run, silo).resolve() for silo in silos}
    detail = f"{len(paths)} ledgers of {len(silos)} silos"
    checks.append(Check(name="ledgers", passed=len(paths) == len(silos), detail=detail))
    return silos


def _visits(run: RunFiles) -> Counter[str]:
    """How often each silo released, as the trace says."""
    visited = [line.get("visited") for line in run.trace]
    return Counter(str(name) for names in visited if isinstance(names, list) for name in names)


def _charged(run: RunFiles, study: Study, silo: Mapping[str, Any], checks: list[Check]) -> list[AbstractEvent]:
    """What a silo's ledger charged for this run; nothing if that cannot be known."""
    name = str(silo.get("name"))
    try:
        ledger = Ledger.open(_ledger_path(run, silo))
        account = _account(ledger, str(run.certificate.get("account")))
        entries = account.entries()
        others = _other_accounts(run, ledger, account.study)
    except (SiloBayesError, OSError) as error:
        checks.append(Check(name=f"{name}: ledger", passed=False, detail=" ".join(str(error).split())))
        return []
    checks.append(Check(name=f"{name}: ledger", passed=True, detail=f"chain intact, {len(entries)} charges"))
    privacy = study.privacy
    same = all(entry.relation is privacy.relation and entry.unit is privacy.unit for entry in entries)
    checks.append(Check(name=f"{name}: terms", passed=same, detail="charged for the study's neighbours and unit"))
    detail = f"charged under another name too: {', '.join(others)}" if others else "charged under one name"
    checks.append(Check(name=f"{name}: account", passed=not others, detail=detail))
    if not entries:
        checks.append(Check(name=f"{name}: charges", passed=False, detail="nothing was charged for this study"))
    return [entry.event for entry in entries]


def _other_accounts(run: RunFiles, ledger: Ledger, account: str) -> list[str]:
    """Accounts of this run by another name: of noise from a seed, or of another study file."""
    run_id = str(run.facts.get("run_id"))
    return sorted({entry.study for entry in ledger.entries() if run_id in entry.study.split()} - {account})


def _check_other_ledgers(run: RunFiles, study: Study, checks: list[Check]) -> None:
    """Silos that paid and that the certificate does not name."""
    names = {str(silo.get("name")) for silo in words.listed_silos(run.certificate)}
    certified = {_ledger_path(run, silo).resolve() for silo in words.listed_silos(run.certificate)}
    known = {(run.directory / str(place)).resolve(): name for name, place in words.ledger_places(run).items()}
    there = {path.resolve(): path.stem for path in (run.directory / LEDGERS).glob("*.ledger")}
    charged = set()
    for path, name in {**there, **known}.items():
        if path not in certified and path.exists():
            try:
                entries = Ledger.open(path).entries(str(run.certificate.get("account")))
            except SiloBayesError as error:
                checks.append(Check(name=f"{name}: ledger", passed=False, detail=" ".join(str(error).split())))
                continue
            charged |= {name} if entries else set()
    checks.append(words.check_other_silos(run, study, names, charged))


def _check_silo(
    run: RunFiles, study: Study, silo: Mapping[str, Any], events: list[AbstractEvent], checks: list[Check]
) -> SiloPrice:
    name, privacy = str(silo.get("name")), study.privacy
    assert privacy.epsilon is not None  # in mode dp a study has all four
    checks += words.check_silo_words(run, silo, events)
    checks.append(_check_releases(run, study, name, events))
    price = _price(name, silo, events, privacy)
    checks += _judge(price, privacy.epsilon)
    return price


def _check_releases(run: RunFiles, study: Study, name: str, events: list[AbstractEvent]) -> Check:
    """No more noise was drawn than was paid for: steps of an optimisation are paid one by one."""
    released = words.releases_of(run, study, _visits(run)[name])
    paid = sum(event.count for event in events)
    return Check(name=f"{name}: releases", passed=released <= paid, detail=f"{released} released, {paid} paid")


def _ledger_path(run: RunFiles, silo: Mapping[str, Any]) -> Path:
    """A site's own ledger lies elsewhere; the certificate, which is published, does not say where."""
    name, said = str(silo.get("name")), str(silo.get("ledger"))
    return run.directory / str(words.ledger_places(run).get(name, said))


def _account(ledger: Ledger, study: str) -> Account:
    for account in ledger.accounts():
        if account.study == study:
            return account
    raise InvalidInput("ledger", "the account of the run", f"none of {study}", "Pass the directory of the run.")


def _price(name: str, silo: Mapping[str, Any], events: list[AbstractEvent], privacy: PrivacySection) -> SiloPrice:
    assert privacy.delta is not None
    assert privacy.relation is not None
    epsilon, epsilon_lower, epsilon_rdp = _bounds(accounting.merge(events), privacy.relation, privacy.delta)
    return SiloPrice(
        silo=name,
        claimed=number(silo.get("epsilon")),
        epsilon=epsilon,
        epsilon_lower=epsilon_lower,
        epsilon_rdp=epsilon_rdp,
        charges=len(events),
    )


@functools.lru_cache(maxsize=64)  # hundreds of silos have a handful of different bills
def _bounds(events: tuple[AbstractEvent, ...], relation: Relation, delta: float) -> tuple[float, float, float]:
    pld = accounting.price(events, relation=relation, delta=delta)
    try:
        rdp = accounting.price(events, relation=relation, delta=delta, accountant="rdp").epsilon
    except InvalidInput:  # some events have no Renyi bound
        rdp = math.inf
    return pld.epsilon, pld.epsilon_lower, rdp


def _judge(price: SiloPrice, budget: float) -> list[Check]:
    best = min(price.epsilon, price.epsilon_rdp)
    return [
        Check(
            name=f"{price.silo}: claim",
            passed=price.claimed >= best * (1.0 - _SAME),  # false for NaN
            detail=f"claimed {epsilon_text(price.claimed)}, recomputed at most {epsilon_text(best)}",
        ),
        Check(
            name=f"{price.silo}: budget",
            passed=price.claimed <= budget and best <= budget,
            detail=f"budget {budget:g}, recomputed at most {epsilon_text(best)}",
        ),
        Check(
            name=f"{price.silo}: second method",
            passed=price.epsilon_rdp >= price.epsilon_lower * (1.0 - _SAME),
            detail=f"Renyi bound {epsilon_text(price.epsilon_rdp)}"
            + (", within the budget too" if price.epsilon_rdp <= budget else ", looser by nature; no contradiction"),
        ),
    ]


def _check_total(certificate: Mapping[str, Any], prices: list[SiloPrice], checks: list[Check]) -> None:
    claimed = number(certificate.get("epsilon"))
    worst = max((price.claimed for price in prices), default=math.nan)
    checks.append(
        Check(
            name="largest epsilon",
            passed=claimed >= worst,
            detail=f"claimed {epsilon_text(claimed)}, silos {epsilon_text(worst)}",
        )
    )


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None
