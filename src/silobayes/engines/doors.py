"""One door per silo: its ledger pays for the whole study before the first draw, and a resumed run pays nothing again.

The account is named after the run, so a ledger can tell what this run has paid, whatever else is in it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from silobayes.core.errors import BudgetExceeded, InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.ledger import Account, Budget, Ledger, Spent
from silobayes.privacy.prepaid import Prepaid

# Ledgers are written side by side: each waits for its own syncs, and a disk does many of them at once.
_WRITERS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What one silo pays in total, where, and whether the ledger may still have to be created."""

    ledger: Path
    events: tuple[AbstractEvent, ...]
    may_create: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Doors:
    """The doors of all silos of a run; `accounts[m]` is None where silo m releases nothing.

    Guarantees:
        Every silo has paid for the whole study before the first draw.
        A resumed run charges nothing again and cannot draw more than was paid.
        A ledger that cannot pay is found before any other is charged.
        Fixed noise is stamped as not private.
    """

    accounts: tuple[Account | None, ...]
    events: tuple[tuple[AbstractEvent, ...], ...]
    prepaid: tuple[Prepaid | None, ...]
    spent: tuple[Spent | None, ...]
    noise_seed: int | None
    _entropies: dict[int, Entropy]

    @classmethod
    def pay(
        cls,
        bills: Sequence[Bill],
        done: Sequence[tuple[AbstractEvent, ...]],
        *,
        budget: Budget,
        account: str,
        noise_seed: int | None,
        begin: Callable[[], None],
    ) -> "Doors":
        """Open or create the ledgers and charge what was not charged yet.

        Args:
            bills: What each silo pays in total; a silo without events needs no ledger.
            done: What of that each silo has already released.
            budget: The study's, and that of ledgers that are created.
            account: The name of the run.
            noise_seed: None in real life; a seed makes noise that can be repeated and protects nobody.
            begin: Called when every ledger is there and has room, before the first is charged.
        """
        ledgers = check(bills, budget=budget, account=account)
        ledgers = _all(lambda pair: _create(*pair, budget), list(zip(ledgers, bills, strict=True)))
        begin()
        paid = _all(lambda pair: _pay(*pair, budget, account), list(zip(ledgers, bills, strict=True)))
        accounts = tuple(own for own, _ in paid)
        return cls(
            accounts=accounts,
            events=tuple(bill.events for bill in bills),
            prepaid=tuple(
                None if own is None else Prepaid.of(own, bill.events, taken)
                for own, bill, taken in zip(accounts, bills, done, strict=True)
            ),
            spent=tuple(spent for _, spent in paid),
            noise_seed=noise_seed,
            _entropies={},
        )

    def at(self, client: int, step: int) -> Door:
        """The door of a silo for one step."""
        account = self.prepaid[client]
        assert account is not None, "a visited silo has paid"
        if self.noise_seed is not None:
            digest = hashlib.sha256(f"{self.noise_seed}/{client}/{step}".encode()).digest()
            return Door(account, FreshDraws(Entropy.not_private(int.from_bytes(digest[:8], "big"))))
        if client not in self._entropies:
            self._entropies[client] = Entropy.from_os()
        return Door(account, FreshDraws(self._entropies[client]))


def ledger_places(names: Sequence[str], folder: str, given: Mapping[str, Path]) -> dict[str, str]:
    """Where each silo's ledger is: the absolute path of the site's own, otherwise a file in `folder`."""
    for name in given:
        if name not in names:
            raise InvalidInput("ledgers", f"silos of the study: {', '.join(names)}", name, "Correct the name.")
    places = {name: str(Path(given[name]).resolve()) for name in names if name in given}
    if len(set(places.values())) != len(places):
        fix = "Two silos cannot pay into one account; merge them, or give each its own ledger."
        raise InvalidInput("ledgers", "a ledger of its own for each silo", sorted(places.values()), fix)
    return {name: places.get(name, f"{folder}/{_file_name(name)}.ledger") for name in names}


def _file_name(name: str) -> str:
    """The silo's name where it can be a file's; otherwise a digest of it."""
    if name and all(letter.isalnum() or letter in "-_" for letter in name) and len(name) <= 100:
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def check(bills: Sequence[Bill], *, budget: Budget, account: str) -> list[Ledger | None]:
    """The ledger of each bill, None where it is to be created; refuse if one cannot pay. Nothing is written.

    A ledger that may not be created is opened whatever is owed, so that a wrong path is refused.
    """
    ledgers = _all(_open, bills)
    for ledger, bill in zip(ledgers, bills, strict=True):
        _check_room(ledger, bill, budget, account)
    return ledgers


def charged_accounts(places: Iterable[Path]) -> set[str]:
    """The names of all accounts that were charged in those of the ledgers that are there."""
    ledgers = _all(Ledger.open, [place for place in places if place.exists()])
    return {entry.study for ledger in ledgers for entry in ledger.entries()}


def _open(bill: Bill) -> Ledger | None:
    return None if bill.may_create and not bill.ledger.exists() else Ledger.open(bill.ledger)


def _check_room(ledger: Ledger | None, bill: Bill, budget: Budget, account: str) -> None:
    total, entries = (budget, ()) if ledger is None else (ledger.budget, ledger.entries())
    for key in ("relation", "unit"):
        if getattr(total, key) is not getattr(budget, key):
            fix = "A ledger protects one unit under one relation; the study must use the same."
            raise InvalidInput(
                f"privacy.{key}",
                f"{getattr(total, key).value}, as {bill.ledger} says",
                getattr(budget, key).value,
                fix,
            )
    if not _missing(bill, [entry.event for entry in entries if entry.study == account]):
        return
    events = [*(entry.event for entry in entries), *bill.events]
    delta = accounting.delta_at(events, relation=total.relation, epsilon=total.epsilon)
    if not delta <= total.delta:
        raise BudgetExceeded(
            f"budget of {bill.ledger}: expected room for epsilon {budget.epsilon:g} within {total.epsilon:g} at delta "
            f"{total.delta:g}, got too little left. Lower privacy.epsilon. No silo was charged."
        )


def _missing(bill: Bill, paid: list[AbstractEvent]) -> tuple[AbstractEvent, ...]:
    """A bill is paid as a whole, or not yet."""
    if paid and paid != list(bill.events):
        fix = "The study or this version prices it differently; start a new run."
        raise InvalidInput("ledger", f"the charges of this run in {bill.ledger}", f"{len(paid)} others", fix)
    return () if paid else bill.events


def _create(ledger: Ledger | None, bill: Bill, budget: Budget) -> Ledger | None:
    return Ledger.create(bill.ledger, budget) if ledger is None and bill.events else ledger


def _pay(ledger: Ledger | None, bill: Bill, budget: Budget, account: str) -> tuple[Account, Spent] | tuple[None, None]:
    if not bill.events:
        return None, None
    assert ledger is not None, "every ledger was opened or created"
    terms = {"epsilon": budget.epsilon, "delta": budget.delta}
    missing = _missing(bill, [entry.event for entry in ledger.entries(account)])
    own = ledger.pay(account, missing, **terms) if missing else ledger.account(account, **terms)
    return own, own.spent()


def _all(act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`act` on every item, in threads; the first error is raised and what has not begun is left."""
    with ThreadPoolExecutor(max_workers=_WRITERS) as writers:
        return list(writers.map(act, items))
