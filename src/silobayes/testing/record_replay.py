"""Record/replay: the cheapest strong check of a private method (PITFALLS, "The gate").

Run the method on D and record every release. Run it on a neighbour D' and feed back the *recorded* releases, so that
everything the outside could have seen is the same. Then the pre-noise sums may differ only as far as was priced,
charges and releases must be the same, and every public result must be the same, to the last bit. A method is a function

    method(rows, door) -> anything made of arrays, numbers and texts that it makes public

which runs as many rounds as it likes and lets values out through `door`. With `num_silos` above 1 it gets a list of
doors: the rows are those of the first silo, all other silos have rows that never change, so their sums may not move at
all. Of a sum over silos only the total is a release: on D' it is fed back, while each silo's own share is drawn anew,
so that a method whose state depends on an unreleased message is caught.

Poisson batches are priced by the distance to the *absent* term, not only by the distance of two terms: a clip around a
public centre keeps the latter and not the former. So both neighbours run once more with the changed unit left out of
every batch of the first silo, and no sum may move by more than one clip norm (nor by anything where the unit was not in
the batch, or in another silo).

Over all pairs the draws must follow the laws they were priced with (`testing.laws`), and nothing may be drawn that was
not charged before.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import AbstractDraws, Door, FreshDraws, LoopDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import (
    AbstractEvent,
    AbstractGaussianLikeEvent,
    AbstractSumEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Scheme,
)
from silobayes.privacy.mechanisms import AbstractMechanism, SkellamMechanism
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import Sampler
from silobayes.testing.laws import PrivacyViolation, check_batch_law, check_noise_law
from silobayes.testing.neighbours import Pair, Rows

Method = Callable[[Rows, Any], Any]

# Norms are computed in float64 from sums that leave room for their own rounding.
_ROUNDING = 1.0 + 1e-12


@dataclass
class FreeAccount:
    """An account of the tests: it refuses nothing and remembers what was charged, and what of that was drawn."""

    relation: Relation
    unit: Unit
    charged: list[AbstractEvent] = field(default_factory=list)
    unused: Counter[AbstractEvent] = field(default_factory=Counter, repr=False)

    def charge(self, event: AbstractEvent) -> None:
        """Remember."""
        self.charged.append(event)
        self.unused[replace(event, count=1)] += event.count

    def draw(self, event: AbstractEvent) -> None:
        """Use up what was charged for `event`."""
        one = replace(event, count=1)
        if self.unused[one] < event.count:
            raise PrivacyViolation(f"Expected a charge before the draw, got none for {event}. Draw through the door.")
        self.unused[one] -= event.count


@dataclass
class Seen:
    """One release in the event's own units; `noise` is what was added, of `num_shares` equal shares one."""

    event: AbstractEvent
    before_noise: np.ndarray
    released: np.ndarray
    batch: np.ndarray | None
    num_shares: int = 1
    noise: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.event, RandomisedResponseEvent):
            self.noise = self.released != self.before_noise
        else:
            self.noise = np.asarray(self.released, np.float64) - np.asarray(self.before_noise, np.float64)


@dataclass
class Totals:
    """The sums over silos of one run, and the shares that go into the next."""

    found: list[np.ndarray] = field(default_factory=list)
    shares: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def add(self, counts: np.ndarray, colluding: int) -> None:
        """A total: of these shares, and with enough of them behind every silo's noise."""
        needed = max((num_shares for num_shares, _ in self.shares), default=1)
        if not needed <= len(self.shares) - 1 - colluding:
            raise PrivacyViolation(
                f"Expected noise that {len(self.shares) - 1 - colluding} of {len(self.shares)} silos have together "
                f"(one is curious, {colluding} collude), got shares for {needed}."
            )
        if not np.array_equal(counts, np.sum([own for _, own in self.shares], axis=0)):
            raise PrivacyViolation("Expected the sum of the silos' shares, got another total.")
        self.shares.clear()
        self.found.append(counts)


@dataclass
class RecordingDraws(AbstractDraws):
    """Draws afresh for one silo and writes down everything."""

    inner: AbstractDraws
    account: FreeAccount
    totals: Totals = field(default_factory=Totals)
    colluding: int = 0
    log: list[Seen] = field(default_factory=list)
    batches: list[tuple[Sampler, np.ndarray]] = field(default_factory=list)
    open_loops: deque[tuple[AbstractEvent, list[np.ndarray]]] = field(default_factory=deque)
    waiting: list[tuple[Sampler, np.ndarray]] = field(default_factory=list)

    @property
    def is_private(self) -> bool:
        """See `AbstractDraws`."""
        return False

    def batch(self, sampler: Sampler) -> np.ndarray:
        """See `AbstractDraws`."""
        indices = self.inner.batch(sampler)
        self.batches.append((sampler, indices))
        self.waiting.append((sampler, indices))
        return indices

    def noisy_counts(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        self.account.draw(event)
        return self._write(bounded, self.inner.noisy_counts(mechanism, bounded, event), event, 1)

    def share(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        self.account.draw(event)
        num_shares = shares_of(mechanism)
        counts = self._write(bounded, self.inner.share(mechanism, bounded, event), event, num_shares)
        self.totals.shares.append((num_shares, counts))
        return counts

    def total(self, counts: np.ndarray) -> np.ndarray:
        """See `AbstractDraws`."""
        self.totals.add(counts, self.colluding)
        return counts

    def _write(self, bounded: Bounded, counts: np.ndarray, event: AbstractEvent, num_shares: int) -> np.ndarray:
        unit = _event_unit(bounded)
        self.log.append(Seen(event, bounded.total * unit, counts * unit, self._batch_of(bounded), num_shares))
        return counts

    def _batch_of(self, bounded: Bounded) -> np.ndarray | None:
        if bounded.sampling is None:
            return None
        for place in reversed(range(len(self.waiting))):
            if self.waiting[place][0].sampling == bounded.sampling:
                return self.waiting.pop(place)[1]
        raise PrivacyViolation("Expected a batch drawn by the door's sampler for this release alone, got another one.")

    def check_end(self) -> None:
        """Every batch was released over: one that was thrown away was not drawn as priced, nor was the one kept."""
        if self.waiting:
            raise PrivacyViolation(
                f"Expected a release over every batch, got {len(self.waiting)} that were drawn and left: "
                "a batch that is chosen among several does not follow the law of the sampler."
            )

    def answers(self, answers: np.ndarray, event: RandomisedResponseEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        self.account.draw(event)
        released = self.inner.answers(answers, event)
        self.log.append(Seen(event, np.array(answers), released, None))
        return released

    def loop(self, sampler: Sampler, dimension: int, event: AbstractEvent) -> LoopDraws:
        """See `AbstractDraws`."""
        self.account.draw(event)
        draws = self.inner.loop(sampler, dimension, event)
        self.batches.extend((sampler, batch) for batch in draws.batches)
        self.open_loops.append((event, draws.batches))
        return replace(draws, replayed=np.full_like(draws.noise, np.nan))

    def close_loop(self, totals: np.ndarray, releases: np.ndarray) -> None:
        """See `AbstractDraws`."""
        event, batches = self.open_loops.popleft()
        self.log.extend(map(Seen, [event] * len(totals), totals, releases, batches))


@dataclass
class ReplayingDraws(AbstractDraws):
    """Feeds one silo's recorded batches and releases back, and writes down the pre-noise values of this run.

    Slot `without` is left out of every Poisson batch.
    """

    recording: RecordingDraws
    account: FreeAccount
    totals: Iterator[np.ndarray] = field(default_factory=lambda: iter(()))
    without: int | None = None
    log: list[Seen] = field(default_factory=list)
    _batches: Iterator[tuple[Sampler, np.ndarray]] = field(init=False)
    _opened: int = field(init=False, default=0)
    _open_loops: deque[AbstractEvent] = field(init=False, default_factory=deque)
    _widest: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._batches = iter(self.recording.batches)

    @property
    def is_private(self) -> bool:
        """See `AbstractDraws`."""
        return False

    def batch(self, sampler: Sampler) -> np.ndarray:
        """See `AbstractDraws`."""
        recorded, indices = next(self._batches, (None, np.zeros(0, dtype=int)))
        if recorded != sampler:
            raise PrivacyViolation(f"Expected the sampler of the other run ({recorded}), got {sampler}.")
        self._widest = max(self._widest, len(indices))
        if self.without is not None and sampler.sampling.scheme is Scheme.POISSON:
            return indices[indices != self.without]
        return indices

    def noisy_counts(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        unit = _event_unit(bounded)
        return np.rint(self._replay(event, bounded.total * unit) / unit).astype(bounded.total.dtype)

    def share(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`; not the recorded one: nobody has seen it."""
        self._replay(event, bounded.total * _event_unit(bounded))
        return bounded.total + mechanism.noise(Entropy.from_os(), bounded)

    def total(self, counts: np.ndarray) -> np.ndarray:
        """See `AbstractDraws`."""
        recorded = next(self.totals, None)
        if recorded is None or recorded.shape != counts.shape:
            raise PrivacyViolation("Expected the sums of the other run, got others: control flow saw rows.")
        return recorded

    def answers(self, answers: np.ndarray, event: RandomisedResponseEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        return self._replay(event, np.array(answers))

    def loop(self, sampler: Sampler, dimension: int, event: AbstractEvent) -> LoopDraws:
        """See `AbstractDraws`."""
        self.account.draw(event)
        self._widest = 0  # with a slot left out, the loop shall be padded and compiled as it was
        batches = [self.batch(sampler) for _ in range(event.count)]
        # A silo may open several loops before it closes the first; they are closed in the order of opening.
        start = max(len(self.log), self._opened)
        self._opened = start + event.count
        recorded = [seen.released for seen in self.recording.log[start : start + event.count]]
        if len(recorded) != event.count:
            raise PrivacyViolation("Expected as many releases as in the other run, got more: control flow saw rows.")

        self._open_loops.append(event)
        noise = np.zeros((event.count, dimension), dtype=np.float32)
        return LoopDraws(batches=batches, noise=noise, replayed=np.stack(recorded), widest=self._widest)

    def close_loop(self, totals: np.ndarray, releases: np.ndarray) -> None:
        """See `AbstractDraws`."""
        event = self._open_loops.popleft()
        for total in totals:
            self._next(event, total)

    def _replay(self, event: AbstractEvent, before_noise: np.ndarray) -> np.ndarray:
        self.account.draw(event)
        return self._next(event, before_noise)

    def _next(self, event: AbstractEvent, before_noise: np.ndarray) -> np.ndarray:
        number = len(self.log)
        if number >= len(self.recording.log):
            raise PrivacyViolation("Expected as many releases as in the other run, got more: control flow saw rows.")
        recorded = self.recording.log[number]
        if recorded.before_noise.shape != before_noise.shape:
            raise PrivacyViolation(f"Release {number}: the shape depends on rows.")
        self.log.append(Seen(event, before_noise, recorded.released, None))
        return recorded.released


@dataclass
class _Run:
    """What a method made public, and what each silo did at its door."""

    public: Any
    draws: list[RecordingDraws] | list[ReplayingDraws]
    accounts: list[FreeAccount]


def record(
    method: Method, rows: Rows, relation: Relation, unit: Unit, *, num_silos: int = 1, colluding: int = 0
) -> _Run:
    """Run `method` on `rows`; returns what it made public and everything it did at its doors."""
    totals, accounts = Totals(), [FreeAccount(relation, unit) for _ in range(num_silos)]
    draws = [RecordingDraws(FreshDraws(Entropy.from_os()), own, totals, colluding) for own in accounts]
    run = _Run(_call(method, rows, accounts, draws), draws, accounts)
    for own in draws:
        own.check_end()
    return run


def _replay(method: Method, rows: Rows, recording: _Run, *, without: int | None = None) -> _Run:
    """The same on other rows, with the recorded releases; the first silo's batches may lack a slot."""
    first = recording.accounts[0]
    accounts = [FreeAccount(first.relation, first.unit) for _ in recording.accounts]
    totals = iter(recording.draws[0].totals.found)  # type: ignore[union-attr]
    draws = [
        ReplayingDraws(recorded, own, totals, without if silo == 0 else None)  # type: ignore[arg-type]
        for silo, (recorded, own) in enumerate(zip(recording.draws, accounts, strict=True))
    ]
    return _Run(_call(method, rows, accounts, draws), draws, accounts)


def _call(method: Method, rows: Rows, accounts: Sequence[FreeAccount], draws: Sequence[AbstractDraws]) -> Any:
    doors = [Door(account, own) for account, own in zip(accounts, draws, strict=True)]
    try:
        return method(rows, doors[0] if len(doors) == 1 else doors)
    except PrivacyViolation:
        raise
    except Exception as error:
        raise PrivacyViolation(
            f"Expected a method that ends whatever a row holds, got {type(error).__name__}: "
            "that it stops tells of rows."
        ) from error


def check_pair(
    method: Method, pair: Pair, *, unit: Unit = Unit.ROW, num_silos: int = 1, colluding: int = 0
) -> list[RecordingDraws]:
    """Record on one neighbour, replay on the other; raises `PrivacyViolation` if more moved than was priced."""
    first = record(method, pair.rows, pair.relation, unit, num_silos=num_silos, colluding=colluding)
    second = _replay(method, pair.other, first)
    _check_run(first, second)
    for silo, number, one, two in _releases(first, second):
        allowed = 0.0
        if silo == 0 and (one.batch is None or pair.changed in one.batch):
            allowed = priced_distance(one.event, pair.relation)
        _check_movement(silo, number, one, two, allowed, pair)
    recorded = [own for own in first.draws if isinstance(own, RecordingDraws)]
    if any(sampler.sampling.scheme is Scheme.POISSON for sampler, _ in recorded[0].batches):
        _check_absent_term(method, pair, first, second)
    return recorded


def _check_absent_term(method: Method, pair: Pair, first: _Run, second: _Run) -> None:
    """With the changed unit left out of every batch each neighbour moves by its own term, and that is all."""
    for rows, whole in ((pair.rows, first), (pair.other, second)):
        thinned = _replay(method, rows, first, without=pair.changed)
        _check_run(first, thinned)
        is_gone = whole is second and pair.relation is Relation.ADD_REMOVE
        for silo, number, one, two in _releases(whole, thinned):
            batch = first.draws[silo].log[number].batch
            allowed = 0.0
            if silo == 0 and batch is not None and pair.changed in batch and not is_gone:
                allowed = priced_distance(one.event, Relation.ADD_REMOVE)
            _check_movement(silo, number, one, two, allowed, pair, "to the sum without the unit, ")


def check_method(
    method: Method, pairs: Iterable[Pair], *, unit: Unit = Unit.ROW, num_silos: int = 1, colluding: int = 0
) -> int:
    """The gate: every pair passes, and the draws of all runs follow the laws they were priced with.

    Args:
        method: Of rows and a door; with several silos, of the first silo's rows and a list of doors.
        pairs: Neighbours.
        unit: What a pair differs in.
        num_silos: How many doors the method gets.
        colluding: How many silos may pool their shares of a sum's noise (a further one is always curious).

    Returns:
        How many pairs were checked.

    Guarantees:
        - every right method passes
        - a planted bug is caught
    """
    found = [check_pair(method, pair, unit=unit, num_silos=num_silos, colluding=colluding) for pair in pairs]
    check_batch_law([[own.batches for own in silos] for silos in found])
    check_noise_law([[own.log for own in silos] for silos in found])
    return len(found)


def _check_run(first: _Run, second: _Run) -> None:
    """Charges, releases and public results are those of the other run."""
    for one, two in zip(first.accounts, second.accounts, strict=True):
        if one.charged != two.charged:
            raise PrivacyViolation("Expected the charges of the other run, got others: the price depends on rows.")
    for one, two in zip(first.draws, second.draws, strict=True):
        if len(one.log) != len(two.log):
            raise PrivacyViolation(
                f"Expected {len(one.log)} releases as in the other run, got {len(two.log)}: control flow saw rows."
            )
    if list(_public(first.public)) != list(_public(second.public)):
        raise PrivacyViolation(
            "Expected public results that depend on releases only, got different ones on neighbours: "
            "something computed from rows went around the door."
        )


def _releases(first: _Run, second: _Run) -> Iterator[tuple[int, int, Seen, Seen]]:
    for silo, (one, two) in enumerate(zip(first.draws, second.draws, strict=True)):
        for number, (left, right) in enumerate(zip(one.log, two.log, strict=True)):
            if left.event != right.event:
                raise PrivacyViolation(f"Release {number}: the price depends on rows: {left.event} != {right.event}.")
            yield silo, number, left, right


def _check_movement(
    silo: int, number: int, first: Seen, second: Seen, allowed: float, pair: Pair, what: str = ""
) -> None:
    event, where = first.event, "" if silo == 0 else f" of silo {silo}"
    if isinstance(event, RandomisedResponseEvent):
        moved = float(np.sum(first.before_noise != second.before_noise))
    else:
        order = 1 if isinstance(event, LaplaceEvent) else 2
        difference = first.before_noise.astype(np.float64) - second.before_noise.astype(np.float64)
        moved = float(np.linalg.norm(difference, ord=order))
    if not moved <= allowed * _ROUNDING:
        raise PrivacyViolation(
            f"Release {number}{where} ({event.mechanism}): {what}expected the sum to move by at most {allowed:.6g} "
            f"under {pair.relation.value}, got {moved:.6g} (canary: {pair.name}). "
            "Clip each unit's term, or price what runs."
        )


def priced_distance(event: AbstractEvent, relation: Relation) -> float:
    """How far the price of this event lets the sum move (randomised answers: how many answers may change)."""
    if isinstance(event, RandomisedResponseEvent):
        return 1.0
    assert isinstance(event, AbstractSumEvent)
    if isinstance(event, LaplaceEvent):
        return event.l1_sensitivity(relation)
    assert isinstance(event, AbstractGaussianLikeEvent)
    return event.l2_sensitivity(relation)


def shares_of(mechanism: AbstractMechanism) -> int:
    """Into how many equal shares a mechanism divides the noise that it prices."""
    return mechanism.num_shares if isinstance(mechanism, SkellamMechanism) else 1


def _event_unit(bounded: Bounded) -> float:
    """As `mechanisms._grid_fields` states them: one block in its own units, several in units of their clip norms."""
    return bounded.grid * (bounded.blocks[0].clip_norm if len(bounded.blocks) == 1 else 1.0)


def _public(tree: Any) -> Iterator[tuple]:
    """Everything that can be seen of a public result: values bit by bit, types, shapes, keys, their order."""
    if tree is None:
        yield (None,)
    elif isinstance(tree, (str, bytes)):
        yield (type(tree).__name__, tree)
    elif isinstance(tree, dict):
        yield ("dict", len(tree))
        for key, value in tree.items():
            yield from _public(key)
            yield from _public(value)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        yield (type(tree).__name__, len(tree))
        for item in sorted(tree, key=repr) if isinstance(tree, (set, frozenset)) else tree:
            yield from _public(item)
    elif hasattr(tree, "__dataclass_fields__"):
        yield (type(tree).__name__,)
        for name in tree.__dataclass_fields__:
            yield from _public(getattr(tree, name))
    else:
        array = np.asarray(tree)
        if array.dtype.kind not in "?biufcSU":
            raise PrivacyViolation(f"Expected arrays, numbers and texts in a public result, got {type(tree).__name__}.")
        yield (type(tree).__name__, array.dtype.str, array.shape, array.tobytes())
