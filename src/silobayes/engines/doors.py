"""One door per silo: its ledger pays for the whole study before the first draw, and a resumed run pays nothing again.

The account is named after the run, so a ledger can tell what this run has paid, whatever else is in it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from silobayes.core.errors import BudgetExceeded, InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.ledger import Account, Budget, Ledger, Spent
from silobayes.privacy.prepaid import Prepaid


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
        events: Sequence[tuple[AbstractEvent, ...]],
        done: Sequence[tuple[AbstractEvent, ...]],
        ledgers: Sequence[Path],
        *,
        budget: Budget,
        account: str,
        noise_seed: int | None,
    ) -> "Doors":
        """Open or create the ledgers and charge what was not charged yet.

        Args:
            events: What each silo pays in total.
            done: What of that each silo has already released.
            ledgers: Where each silo's ledger is, or will be created with `budget`.
            budget: The study's.
            account: The name of the run.
            noise_seed: None in real life; a seed makes noise that can be repeated and protects nobody.
        """
        opened: list[Account | None] = []
        for path, own_events in zip(ledgers, events, strict=True):
            opened.append(_open(path, budget, account, own_events) if own_events else None)
        prepaid: list[Prepaid | None] = []
        for own, own_events, taken in zip(opened, events, done, strict=True):
            if own is not None:
                for event in own_events[len(own.entries()) :]:
                    own.charge(event)
            prepaid.append(None if own is None else Prepaid.of(own, own_events, taken))
        return cls(
            accounts=tuple(opened),
            events=tuple(events),
            prepaid=tuple(prepaid),
            spent=tuple(None if own is None else own.spent() for own in opened),
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


def ledger_paths(names: Sequence[str], directory: Path, given: Mapping[str, Path]) -> list[Path]:
    """Each silo's own ledger where a site brings one, otherwise a file in `directory`."""
    for name in given:
        if name not in names:
            raise InvalidInput("ledgers", f"silos of the study: {', '.join(names)}", name, "Correct the name.")
    return [Path(given[name]) if name in given else directory / f"{_file_name(name)}.ledger" for name in names]


def _file_name(name: str) -> str:
    """The silo's name where it can be a file's; otherwise a digest of it."""
    if name and all(letter.isalnum() or letter in "-_" for letter in name) and len(name) <= 100:
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _open(path: Path, budget: Budget, account: str, events: Sequence[AbstractEvent]) -> Account:
    ledger = Ledger.open(path) if path.exists() else Ledger.create(path, budget)
    for key in ("relation", "unit"):
        if getattr(ledger.budget, key) is not getattr(budget, key):
            fix = "A ledger protects one unit under one relation; the study must use the same."
            raise InvalidInput(
                f"privacy.{key}",
                f"{getattr(ledger.budget, key).value}, as {path} says",
                getattr(budget, key).value,
                fix,
            )
    own = ledger.account(account, epsilon=budget.epsilon, delta=budget.delta)
    paid = [entry.event for entry in own.entries()]
    if paid != list(events[: len(paid)]):  # a run that was killed between two charges has paid the first ones
        fix = "The study or this version prices it differently; start a new run."
        raise InvalidInput("ledger", f"the charges of this run in {path}", f"{len(paid)} others", fix)
    earlier = [entry.event for entry in ledger.entries()]
    missing = list(events[len(paid) :])
    if missing and earlier:
        total = ledger.budget
        delta = accounting.delta_at([*earlier, *missing], relation=total.relation, epsilon=total.epsilon)
        if not delta <= total.delta:
            raise BudgetExceeded(
                f"budget of {path}: expected room for epsilon {budget.epsilon:g} within {total.epsilon:g} at delta "
                f"{total.delta:g}, got too little left. Lower privacy.epsilon. No silo was charged."
            )
    return own
