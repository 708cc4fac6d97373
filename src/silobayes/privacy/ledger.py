"""The ledger: what one data holder has allowed and what has been spent on one data set (DESIGN 3, SPEC 0).

The order is charge, durable, draw, release. The budget belongs to the data set and spans all studies; each study has an
account with a cap of its own inside it. A charge is accepted iff all charges so far and the new one together satisfy
`delta(epsilon of the budget) <= delta of the budget`, for the study and for the site. `ledger_file.py` says how the
records stay safe on disk.

What composition promises: the price holds for mechanisms fixed beforehand (a study file), whose inputs may depend on
earlier releases. A data holder who chooses the next study's *noise* in the light of earlier releases needs a privacy
filter, which this bound is for Gaussian events but not in general.

Guarantees:
    Every charge that returned is counted, whatever crashes afterwards.
    A refused charge changes nothing.
    Several charges are paid together or not at all.
    Concurrent processes never jointly exceed a budget.
    A missing ledger is not an empty one.
    A study's cap is fixed by its first use.
    A price that is not a number is refused.
"""

import dataclasses
import functools
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from silobayes.core.errors import BudgetExceeded, InvalidInput, SiloBayesError, require_member, require_number
from silobayes.privacy import accounting
from silobayes.privacy.events import AbstractEvent, canonical, from_json
from silobayes.privacy.ledger_file import Draft, LedgerFile, LedgerUnavailable, Record, canonical_json, damaged
from silobayes.privacy.relation import Relation, Unit

_GENESIS, _ACCOUNT, _CHARGE = "ledger", "account", "charge"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What may be spent: (epsilon, delta) for one `unit` under one `relation`."""

    epsilon: float
    delta: float
    relation: Relation
    unit: Unit

    def __post_init__(self) -> None:
        epsilon = require_number("epsilon", self.epsilon, above=0.0, fix="Pass the epsilon that may be spent in total.")
        delta = accounting.require_delta(self.delta)
        relation = require_member("relation", self.relation, Relation, "Say which data sets are neighbours.")
        unit = require_member("unit", self.unit, Unit, "Say whom the budget protects.")
        for key, value in (("epsilon", epsilon), ("delta", delta), ("relation", relation), ("unit", unit)):
            object.__setattr__(self, key, value)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """An upper bound of the epsilon spent at the budget's delta, and what that leaves.

    `epsilon_left` is their difference, for people: epsilons of different events do not add, so a charge decides by the
    price of everything together, and an event that alone costs more than `epsilon_left` often still fits.
    """

    epsilon: float
    delta: float
    epsilon_left: float
    charges: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One accepted charge."""

    sequence: int
    study: str
    event: AbstractEvent
    relation: Relation
    unit: Unit
    time: str
    hash: str


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Proof of a charge, with the delta of all charges at the epsilon of the study's cap and of the budget."""

    sequence: int
    study: str
    event: AbstractEvent
    hash: str
    study_delta: float
    site_delta: float


class Priced(Protocol):
    """What a price must tell."""

    @property
    def epsilon(self) -> float:
        """An upper bound."""
        ...


class Pricing(Protocol):
    """Upper bounds for a composition: the module `accounting`, unless a test brings a cheaper one."""

    def delta_at(self, events: Sequence[AbstractEvent], *, relation: Relation, epsilon: float) -> float:
        """A delta for which all events together are (epsilon, delta)-DP."""
        ...

    def price(self, events: Sequence[AbstractEvent], *, relation: Relation, delta: float) -> Priced:
        """An epsilon for which all events together are (epsilon, delta)-DP."""
        ...


class Ledger:
    """The ledger of one data set of one data holder. Any number of processes may have it open."""

    def __init__(self, file: LedgerFile, budget: Budget, pricing: Pricing) -> None:
        self.budget = budget
        self._file = file
        self._pricing = pricing

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        budget: Budget,
        *,
        pricing: Pricing = accounting,
        storage: Callable[[str | os.PathLike[str]], LedgerFile] = LedgerFile,
    ) -> "Ledger":
        """Write a new ledger; refuse if there is one, or the rest of one, at `path`."""
        if not isinstance(budget, Budget):
            raise InvalidInput("budget", "a Budget", budget, "Pass Budget(epsilon=, delta=, relation=, unit=).")
        file = storage(path)
        body = {"id": secrets.token_hex(16), "epsilon": budget.epsilon, "delta": budget.delta}
        file.create(_draft(_GENESIS, "", canonical_json(body), budget))
        return cls.open(path, pricing=pricing, storage=storage)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        pricing: Pricing = accounting,
        storage: Callable[[str | os.PathLike[str]], LedgerFile] = LedgerFile,
    ) -> "Ledger":
        """Open and verify an existing ledger."""
        file = storage(path)
        genesis, *_ = file.open()
        return cls(file, _budget(file, genesis), pricing)

    def account(self, study: str, *, epsilon: float, delta: float) -> "Account":
        """The account of `study`, capped at (epsilon, delta); its first use records the cap for good."""
        cap = self._cap(study, epsilon, delta)
        self._file.append(lambda records: self._opening(study, cap, records))
        return Account(self, study, cap)

    def pay(self, study: str, events: Sequence[AbstractEvent], *, epsilon: float, delta: float) -> "Account":
        """The account of `study` with all `events` charged, in one durable write: all of them or nothing.

        Raises: see `Account.charge`.
        """
        cap = self._cap(study, epsilon, delta)
        self._charge(study, cap, events)
        return Account(self, study, cap)

    def accounts(self) -> tuple["Account", ...]:
        """The accounts of all studies, in the order of their first use."""
        return tuple(Account(self, study, cap) for study, cap in self._caps(self._file.records()).items())

    def entries(self, study: str | None = None) -> tuple[Entry, ...]:
        """All charges, or those of one study, in the order they were accepted."""
        return tuple(
            Entry(
                sequence=record.sequence,
                study=record.study,
                event=self._event(record),
                relation=Relation(record.relation),
                unit=Unit(record.unit),
                time=record.time,
                hash=record.hash,
            )
            for record in self._file.records()
            if record.kind == _CHARGE and study in (None, record.study)
        )

    def spent(self) -> Spent:
        """What all studies together have spent."""
        return self._spent(self.entries(), self.budget)

    def _spent(self, entries: Sequence[Entry], budget: Budget) -> Spent:
        epsilon = self._epsilon([entry.event for entry in entries], budget)
        return Spent(
            epsilon=epsilon,
            delta=budget.delta,
            epsilon_left=max(0.0, budget.epsilon - epsilon),
            charges=len(entries),
        )

    def _epsilon(self, events: Sequence[AbstractEvent], budget: Budget) -> float:
        """Epsilon at the budget's delta; infinite where no finite one is known."""
        if not events:
            return 0.0
        try:
            epsilon = self._pricing.price(events, relation=budget.relation, delta=budget.delta).epsilon
        except SiloBayesError:
            return math.inf
        return epsilon if epsilon >= 0.0 else math.inf

    def _cap(self, study: str, epsilon: float, delta: float) -> Budget:
        if not (isinstance(study, str) and study.strip() == study != "" and study.isprintable() and len(study) <= 200):
            raise InvalidInput("study", "1 to 200 printable characters", study, "Pass the name of the study.")
        cap = dataclasses.replace(self.budget, epsilon=epsilon, delta=delta)
        for key in ("epsilon", "delta"):
            if not (getattr(cap, key) <= getattr(self.budget, key)):
                raise InvalidInput(
                    key,
                    f"at most the site's {getattr(self.budget, key):g} for study {study}",
                    getattr(cap, key),
                    "A study's cap lies inside the budget of the data set.",
                )
        return cap

    def _opening(self, study: str, cap: Budget, records: tuple[Record, ...]) -> list[Draft]:
        """What opens the account: nothing if it is open already, with the same cap."""
        known = self._caps(records).get(study)
        if known is None:
            body = canonical_json({"epsilon": cap.epsilon, "delta": cap.delta})
            return [_draft(_ACCOUNT, study, body, self.budget)]
        for key in ("epsilon", "delta"):
            if getattr(known, key) != getattr(cap, key):
                raise InvalidInput(
                    key,
                    f"{getattr(known, key)!r}, the cap that study {study} was opened with",
                    getattr(cap, key),
                    "Pass the recorded cap, or give a new study a new name.",
                )
        return []

    def _charge(self, study: str, cap: Budget, events: Sequence[AbstractEvent]) -> tuple[Receipt, ...]:
        bodies = [_body(event) for event in events]
        deltas: list[float] = []

        def decide(records: tuple[Record, ...]) -> list[Draft]:
            charges = [record for record in records if record.kind == _CHARGE]
            site = [self._event(record) for record in charges]
            own = [self._event(record) for record in charges if record.study == study]
            deltas[:] = [
                self._check(f"study {study}", own, events, cap),
                self._check("the site", site, events, self.budget),
            ]
            drafts = [_draft(_CHARGE, study, body, self.budget) for body in bodies]
            return [*self._opening(study, cap, records), *drafts]

        records = self._file.append(decide)
        return tuple(
            Receipt(
                sequence=record.sequence,
                study=study,
                event=event,
                hash=record.hash,
                study_delta=deltas[0],
                site_delta=deltas[1],
            )
            for event, record in zip(events, records[len(records) - len(events) :], strict=True)
        )

    def _check(self, whose: str, before: list[AbstractEvent], events: Sequence[AbstractEvent], budget: Budget) -> float:
        delta = self._pricing.delta_at([*before, *events], relation=budget.relation, epsilon=budget.epsilon)
        if 0.0 <= delta <= budget.delta:  # false for NaN
            return delta
        asked, spent, total = (self._epsilon(some, budget) for some in (events, before, [*before, *events]))
        raise BudgetExceeded(
            f"budget of {whose}: expected at most epsilon {budget.epsilon:g} at delta {budget.delta:g} "
            f"({budget.relation.value}, per {budget.unit.value}); asked {asked:.6g}, spent {spent:.6g}, left "
            f"{max(0.0, budget.epsilon - spent):.6g}, together {total:.6g}. Use more noise, fewer steps or a smaller "
            "sampling rate; what is spent never comes back. Nothing was charged."
        )

    def _caps(self, records: Iterable[Record]) -> dict[str, Budget]:
        return {record.study: _budget(self._file, record) for record in records if record.kind == _ACCOUNT}

    def _event(self, record: Record) -> AbstractEvent:
        try:
            return _read_event(record.body)
        except InvalidInput as error:
            raise LedgerUnavailable(
                f"ledger {self._file.path}: expected events that this installation can price, got record "
                f"{record.sequence}: {error} Import the module or install the version that wrote it. "
                "Nothing was charged."
            ) from error


class Account:
    """A study's part of a ledger: the same relation and unit, a cap of its own."""

    def __init__(self, ledger: Ledger, study: str, cap: Budget) -> None:
        self.ledger = ledger
        self.study = study
        self.cap = cap

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours."""
        return self.cap.relation

    @property
    def unit(self) -> Unit:
        """Whom the budget protects."""
        return self.cap.unit

    def charge(self, event: AbstractEvent) -> Receipt:
        """Pay for `event`; returns only when the charge is durable.

        Raises:
            BudgetExceeded: the study's cap or the site's budget would be exceeded; nothing was charged.
            InvalidInput: not an event, or one that cannot be priced; nothing was charged.
            DamagedLedger: the files are not what was written; nothing was charged.
            LedgerUnavailable: the disk or the lock failed; nothing may be released, the charge may be counted.
        """
        (receipt,) = self.ledger._charge(self.study, self.cap, (event,))
        return receipt

    def entries(self) -> tuple[Entry, ...]:
        """The charges of this study."""
        return self.ledger.entries(self.study)

    def spent(self) -> Spent:
        """What this study has spent of its cap."""
        return self.ledger._spent(self.entries(), self.cap)


@functools.lru_cache(maxsize=65536)
def _read_event(text: str) -> AbstractEvent:
    return from_json(json.loads(text))


def _body(event: AbstractEvent) -> str:
    """The event as stored; refused unless reading it back gives the same event."""
    if not isinstance(event, AbstractEvent):
        raise InvalidInput("event", "an event", type(event).__name__, "Pass the event that the mechanism returns.")
    body = canonical(event)
    if from_json(json.loads(body)) != event:
        raise InvalidInput("event", "an event that its JSON form describes fully", body, "Register it with @event.")
    return body


def _draft(kind: str, study: str, body: str, budget: Budget) -> Draft:
    return Draft(kind=kind, study=study, body=body, relation=budget.relation.value, unit=budget.unit.value)


def _budget(file: LedgerFile, record: Record) -> Budget:
    try:
        data: dict[str, Any] = json.loads(record.body)
        return Budget(
            epsilon=data["epsilon"], delta=data["delta"], relation=Relation(record.relation), unit=Unit(record.unit)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(file.path, f"record {record.sequence} without a readable budget") from error
