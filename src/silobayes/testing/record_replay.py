"""Record/replay: the cheapest strong check of a private method (PITFALLS, "The gate").

Run the method on D and record every release. Run it on a neighbour D' and feed back the *recorded* releases, so that
everything the outside could have seen is the same. Then the pre-noise sums may differ only as far as was priced, the
releases must be of the same number and kind, and every public result must be equal. A method is a function

    method(rows, door) -> anything made of arrays and numbers that it makes public

which runs as many rounds as it likes and lets values out through `door`. Of a sum over silos only the total is a
release: on D' it is fed back, while each silo's own share is drawn anew, so that a method whose state depends on an
unreleased message is caught.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

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
from silobayes.privacy.mechanisms import AbstractMechanism
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import Sampler
from silobayes.testing.neighbours import Pair, Rows

Method = Callable[[Rows, Door], Any]

# Compiled loops compute in float32, where the same sum over other rows may differ by this share of what is priced.
_FLOAT32_TOLERANCE = 1e-5
# The law of recorded batches is rejected with this probability for a sampler that does what it says.
BATCH_LAW_FALSE_ALARM = 1e-9


class PrivacyViolation(AssertionError):
    """The method let out more than it paid for."""


@dataclass
class FreeAccount:
    """An account of the tests: it refuses nothing and remembers what was charged."""

    relation: Relation
    unit: Unit
    charged: list[AbstractEvent] = field(default_factory=list)

    def charge(self, event: AbstractEvent) -> None:
        """Remember."""
        self.charged.append(event)


@dataclass
class Seen:
    """One release: its event, the pre-noise value in the event's own units, what came out, the batch slots."""

    event: AbstractEvent
    before_noise: np.ndarray
    released: np.ndarray
    batch: np.ndarray | None


@dataclass
class RecordingDraws(AbstractDraws):
    """Draws afresh and writes down everything."""

    inner: AbstractDraws
    log: list[Seen] = field(default_factory=list)
    batches: list[tuple[Sampler, np.ndarray]] = field(default_factory=list)
    totals: list[np.ndarray] = field(default_factory=list)

    @property
    def is_private(self) -> bool:
        """See `AbstractDraws`."""
        return False

    def batch(self, sampler: Sampler) -> np.ndarray:
        """See `AbstractDraws`."""
        indices = self.inner.batch(sampler)
        self.batches.append((sampler, indices))
        return indices

    def noisy_counts(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        counts = self.inner.noisy_counts(mechanism, bounded, event)
        self.log.append(Seen(event, _in_event_units(bounded), counts, self._batch_of(bounded)))
        return counts

    def share(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        return self.noisy_counts(mechanism, bounded, event)

    def total(self, counts: np.ndarray) -> np.ndarray:
        """See `AbstractDraws`."""
        self.totals.append(counts)
        return counts

    def _batch_of(self, bounded: Bounded) -> np.ndarray | None:
        if bounded.sampling is None:
            return None
        for sampler, batch in reversed(self.batches):
            if sampler.sampling == bounded.sampling:
                return batch
        raise PrivacyViolation("Expected a batch drawn by the door's sampler, got one made elsewhere.")

    def answers(self, answers: np.ndarray, event: RandomisedResponseEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        released = self.inner.answers(answers, event)
        self.log.append(Seen(event, np.array(answers), released, None))
        return released

    def loop(self, sampler: Sampler, dimension: int, event: AbstractEvent) -> LoopDraws:
        """See `AbstractDraws`."""
        draws = self.inner.loop(sampler, dimension, event)
        self.batches.extend((sampler, batch) for batch in draws.batches)

        def record(totals: np.ndarray, releases: np.ndarray) -> None:
            self.log.extend(map(Seen, [event] * len(totals), totals, releases, draws.batches))

        return LoopDraws(batches=draws.batches, noise=draws.noise, recorder=record)


@dataclass
class ReplayingDraws(AbstractDraws):
    """Feeds recorded batches and releases back, and writes down the pre-noise values of this run."""

    recording: RecordingDraws
    log: list[Seen] = field(default_factory=list)
    _batches: Iterator[tuple[Sampler, np.ndarray]] = field(init=False)
    _totals: Iterator[np.ndarray] = field(init=False)
    _opened: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._batches = iter(self.recording.batches)
        self._totals = iter(self.recording.totals)

    @property
    def is_private(self) -> bool:
        """See `AbstractDraws`."""
        return False

    def batch(self, sampler: Sampler) -> np.ndarray:
        """See `AbstractDraws`."""
        recorded, indices = next(self._batches, (None, np.zeros(0, dtype=int)))
        if recorded != sampler:
            raise PrivacyViolation(f"Expected the sampler of the other run ({recorded}), got {sampler}.")
        return indices

    def noisy_counts(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        return self._replay(event, _in_event_units(bounded))

    def share(self, mechanism: AbstractMechanism, bounded: Bounded, event: AbstractEvent) -> np.ndarray:
        """See `AbstractDraws`; not the recorded one: nobody has seen it."""
        self._replay(event, _in_event_units(bounded))
        return bounded.total + mechanism.noise(Entropy.from_os(), bounded)

    def total(self, counts: np.ndarray) -> np.ndarray:
        """See `AbstractDraws`."""
        recorded = next(self._totals, None)
        if recorded is None or recorded.shape != counts.shape:
            raise PrivacyViolation("Expected the sums of the other run, got others: control flow saw rows.")
        return recorded

    def answers(self, answers: np.ndarray, event: RandomisedResponseEvent) -> np.ndarray:
        """See `AbstractDraws`."""
        return self._replay(event, np.array(answers))

    def loop(self, sampler: Sampler, dimension: int, event: AbstractEvent) -> LoopDraws:
        """See `AbstractDraws`."""
        batches = [self.batch(sampler) for _ in range(event.count)]
        # Loops of several silos may be open at once; they are closed in the order in which they were opened.
        start = max(len(self.log), self._opened)
        self._opened = start + event.count
        recorded = [seen.released for seen in self.recording.log[start : start + event.count]]
        if len(recorded) != event.count:
            raise PrivacyViolation("Expected as many releases as in the other run, got more: control flow saw rows.")

        def record(totals: np.ndarray, releases: np.ndarray) -> None:
            for total in totals:
                self._replay(event, total)

        noise = np.zeros((event.count, dimension), dtype=np.float32)
        return LoopDraws(batches=batches, noise=noise, replayed=np.stack(recorded), recorder=record)

    def _replay(self, event: AbstractEvent, before_noise: np.ndarray) -> np.ndarray:
        if len(self.log) >= len(self.recording.log):
            raise PrivacyViolation("Expected as many releases as in the other run, got more: control flow saw rows.")
        released = self.recording.log[len(self.log)].released
        self.log.append(Seen(event, before_noise, released, None))
        return released


def record(method: Method, rows: Rows, relation: Relation, unit: Unit) -> tuple[Any, RecordingDraws]:
    """Run `method` on `rows`; returns what it made public and everything it did at the door."""
    draws = RecordingDraws(FreshDraws(Entropy.from_os()))
    return method(rows, Door(FreeAccount(relation, unit), draws)), draws


def check_pair(method: Method, pair: Pair, *, unit: Unit = Unit.ROW) -> RecordingDraws:
    """Record on one neighbour, replay on the other; raises `PrivacyViolation` if more moved than was priced."""
    public, recording = record(method, pair.rows, pair.relation, unit)
    replaying = ReplayingDraws(recording)
    other_public = method(pair.other, Door(FreeAccount(pair.relation, unit), replaying))
    if len(recording.log) != len(replaying.log):
        raise PrivacyViolation(
            f"Expected {len(recording.log)} releases as in the other run, got {len(replaying.log)}: "
            "control flow saw rows."
        )
    for number, (first, second) in enumerate(zip(recording.log, replaying.log, strict=True)):
        if first.event != second.event:
            raise PrivacyViolation(f"Release {number}: the price depends on rows: {first.event} != {second.event}.")
        _check_movement(number, first, second, pair)
    _check_equal(public, other_public)
    return recording


def check_method(method: Method, pairs: Iterable[Pair], *, unit: Unit = Unit.ROW) -> int:
    """The gate: every pair passes and the batches of all runs follow the law they were priced with.

    Returns how many pairs were checked.
    """
    batches: list[list[tuple[Sampler, np.ndarray]]] = []
    for pair in pairs:
        batches.append(check_pair(method, pair, unit=unit).batches)
    check_batch_law(batches)
    return len(batches)


def check_batch_law(runs: list[list[tuple[Sampler, np.ndarray]]]) -> None:
    """Reject batches that do not follow their declared law: size, and overlap of successive batches.

    Shuffled epochs have the right marginals but never repeat a row within an epoch; fresh batches at rate w overlap
    in a share w of their rows. Under the declared law both counts are binomial (without replacement: hypergeometric,
    less spread than the binomial), so exact tails decide.
    """
    tallies: dict[tuple[Sampler, str], tuple[int, int]] = {}

    def tally(sampler: Sampler, what: str, hits: int, trials: int) -> None:
        before = tallies.get((sampler, what), (0, 0))
        tallies[sampler, what] = (before[0] + hits, before[1] + trials)

    for run in runs:
        for number, (sampler, batch) in enumerate(run):
            if sampler.sampling.scheme is Scheme.POISSON:
                tally(sampler, "size", len(batch), sampler.max_rows)
            elif len(np.unique(batch)) != sampler.capacity:
                raise PrivacyViolation(f"Expected {sampler.capacity} different slots in a batch, got {len(batch)}.")
            if number > 0 and run[number - 1][0] == sampler:
                previous = run[number - 1][1]
                tally(sampler, "overlap with the batch before", len(np.intersect1d(previous, batch)), len(previous))
    for (sampler, what), (hits, trials) in tallies.items():
        rate = sampler.sampling.rate
        tail = 2 * min(stats.binom.cdf(hits, trials, rate), stats.binom.sf(hits - 1, trials, rate))
        if not tail * len(tallies) >= BATCH_LAW_FALSE_ALARM:
            raise PrivacyViolation(
                f"Expected a batch {what} of about {trials * rate:.1f} in {trials} trials, got {hits} "
                f"(p = {tail:.1e}): the batches were not drawn as priced. Take them from the door's sampler."
            )


def _check_movement(number: int, first: Seen, second: Seen, pair: Pair) -> None:
    event = first.event
    if first.before_noise.shape != second.before_noise.shape:
        raise PrivacyViolation(f"Release {number}: the shape depends on rows.")
    if isinstance(event, RandomisedResponseEvent):
        moved, allowed, tolerance = float(np.sum(first.before_noise != second.before_noise)), 1.0, 0.0
    else:
        assert isinstance(event, AbstractSumEvent)
        order = 1 if isinstance(event, LaplaceEvent) else 2
        difference = first.before_noise.astype(np.float64) - second.before_noise.astype(np.float64)
        moved = float(np.linalg.norm(difference, ord=order))
        allowed = priced_sensitivity(event, pair.relation)
        tolerance = (_FLOAT32_TOLERANCE if first.before_noise.dtype == np.float32 else 1e-9) * allowed
        if first.batch is not None and pair.changed not in first.batch:
            allowed = 0.0
    if not moved <= allowed + tolerance:
        raise PrivacyViolation(
            f"Release {number} ({event.mechanism}): expected the sum to move by at most {allowed:.6g} under "
            f"{pair.relation.value}, got {moved:.6g} (canary: {pair.name}). Clip each unit's term, or price what runs."
        )


def priced_sensitivity(event: AbstractSumEvent, relation: Relation) -> float:
    """The movement of the sum that the price of this event allows."""
    if isinstance(event, LaplaceEvent):
        return event.l1_sensitivity(relation)
    assert isinstance(event, AbstractGaussianLikeEvent)
    return event.l2_sensitivity(relation)


def _in_event_units(bounded: Bounded) -> np.ndarray:
    """As `mechanisms._grid_event` states them: one block in its own units, several in units of their clip norms."""
    unit = bounded.blocks[0].clip_norm if len(bounded.blocks) == 1 else 1.0
    return bounded.total * (bounded.grid * unit)


def _check_equal(public: Any, other: Any) -> None:
    """Everything made public is a function of releases, so it must be equal when they are."""
    first, second = list(_leaves(public)), list(_leaves(other))
    if len(first) != len(second):
        raise PrivacyViolation("Expected equal public results, got different shapes: control flow saw rows.")
    for left, right in zip(first, second, strict=True):
        if left.shape != right.shape or not _same(left, right):
            raise PrivacyViolation(
                "Expected public results that depend on releases only, got different ones on neighbours: "
                "something computed from rows went around the door."
            )


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    """Up to float32 arithmetic, which errs by a share of the array's largest number, not of each."""
    scale = np.nanmax(np.abs(right), initial=1.0, where=np.isfinite(right)) if right.dtype.kind == "f" else 1.0
    return bool(np.allclose(left, right, rtol=1e-5, atol=1e-6 * float(scale), equal_nan=True))


def _leaves(tree: Any) -> Iterator[np.ndarray]:
    if tree is None:
        return
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from _leaves(tree[key])
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            yield from _leaves(getattr(tree, name))
    elif isinstance(tree, str):
        yield np.frombuffer(tree.encode(), dtype=np.uint8)
    else:
        yield np.asarray(tree)
