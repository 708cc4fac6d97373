"""Do recorded draws follow the law that was priced? Batches, noise and randomised answers of many runs, together.

A sum that moves by no more than was priced protects nobody if its noise is a hundredth of what was paid, is the same in
two silos or in two steps, or is uniform where a Gaussian was priced; nor does a batch that is not drawn as it says.
Noise is turned into *normal scores*, which are independent standard normal under the priced law. Then: mean squares of
every single release and of all releases of one price (chi-square), the shape (counts beyond given edges), products of
any two releases, of two coordinates, and of noise with itself in any other run (given the one factor a sum of products
is normal, so each has exact tails). Batches: sizes, the share of every slot, overlaps in time and between silos.

All tests of one call together reject a right method with probability `FALSE_ALARM`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from scipy import special, stats

from silobayes.privacy.events import (
    AbstractEvent,
    AbstractGaussianLikeEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Scheme,
)
from silobayes.privacy.sampling import Sampler

FALSE_ALARM = 1e-9
# The shape of noise: how many scores lie beyond each of these, and how many are positive.
_EDGES = (0.25, 1.0, 2.0, 3.0)


class PrivacyViolation(AssertionError):
    """The method let out more than it paid for."""


class Released(Protocol):
    """What is needed of a release: `noise` in the event's own units is of `num_shares` equal shares one."""

    @property
    def event(self) -> AbstractEvent:
        """What was priced."""
        ...

    @property
    def noise(self) -> np.ndarray:
        """What was added; of randomised answers, which were changed."""
        ...

    @property
    def num_shares(self) -> int:
        """How many equal shares make up the noise that was priced."""
        ...


Batches = Sequence[tuple[Sampler, np.ndarray]]


@dataclass
class _Tests:
    """Probabilities of what was seen under the priced law, and what to say if one is too small."""

    found: list[tuple[float, str]]

    def add(self, tail: float, what: str) -> None:
        self.found.append((tail, what))

    def raise_if_unlikely(self, fix: str) -> None:
        for tail, what in self.found:
            if not tail * len(self.found) >= FALSE_ALARM:
                raise PrivacyViolation(f"{what} (p = {tail:.1e}). {fix}")


def check_noise_law(runs: Sequence[Sequence[Sequence[Released]]]) -> None:
    """Reject noise that does not follow its price: `runs[i][m]` are the releases of silo m in run i."""
    tests = _Tests([])
    columns: list[tuple[str, AbstractEvent, np.ndarray]] = []
    for silo in range(len(runs[0])):
        for number in range(len(runs[0][silo])):
            same = [run[silo][number] for run in runs]
            name = f"release {number} of silo {silo}"
            if isinstance(same[0].event, RandomisedResponseEvent):
                _test_answers(tests, same[0].event, np.concatenate([one.noise for one in same]), name)
            elif len({one.noise.shape for one in same}) == 1:
                columns.append((name, same[0].event, np.stack([_scores(one) for one in same])))
            else:  # rows handed over one by one: as many numbers as there are rows
                columns.append((name, same[0].event, np.concatenate([_scores(one) for one in same])[:, None]))
    for name, _, scores in columns:
        _test_size(tests, scores, name)
    for event in dict.fromkeys(event for _, event, _ in columns):
        pooled = np.concatenate([scores.ravel() for _, own, scores in columns if own == event])
        _test_size(tests, pooled, f"all releases ({event.mechanism})")
        _test_shape(tests, pooled, f"all releases ({event.mechanism})")
    _test_independence(tests, columns)
    tests.raise_if_unlikely("Draw the noise that is priced, through the door, afresh for every release of every silo.")


def _scores(one: Released) -> np.ndarray:
    event = one.event
    if isinstance(event, LaplaceEvent):
        ranks = stats.laplace.cdf(one.noise / event.scale)
        return special.ndtri(np.clip(ranks, 1e-300, 1.0 - 1e-16)).ravel()
    assert isinstance(event, AbstractGaussianLikeEvent)
    return (one.noise.astype(np.float64) * (np.sqrt(one.num_shares) / event.std)).ravel()


def _test_size(tests: _Tests, scores: np.ndarray, name: str) -> None:
    squares, count = float(np.sum(scores**2)), scores.size
    tail = 2 * min(float(stats.chi2.cdf(squares, count)), float(stats.chi2.sf(squares, count)))
    size = np.sqrt(squares / count)
    tests.add(tail, f"Expected noise as large as priced in {name}, got {size:.3g} of it in {count} numbers")


def _test_shape(tests: _Tests, scores: np.ndarray, name: str) -> None:
    _test_count(tests, int(np.sum(scores > 0.0)), scores.size, 0.5, f"positive noise in {name}")
    for edge in _EDGES:
        rate = 2.0 * float(special.ndtr(-edge))
        beyond = int(np.sum(np.abs(scores) > edge))
        _test_count(tests, beyond, scores.size, rate, f"noise beyond {edge:g} standard deviations in {name}")


def _test_independence(tests: _Tests, columns: list[tuple[str, AbstractEvent, np.ndarray]]) -> None:
    for width in {scores.shape for _, _, scores in columns}:
        alike = [(name, scores) for name, _, scores in columns if scores.shape == width]
        flat = np.stack([scores.ravel() for _, scores in alike])
        _test_products(tests, flat, lambda i, j, names=alike: f"{names[i][0]} and {names[j][0]}")
        by_coordinate = np.concatenate([scores for _, scores in alike]).T
        _test_products(tests, by_coordinate[:256], lambda i, j: f"coordinates {i} and {j} of all releases")
        by_run = np.concatenate([scores for _, scores in alike], axis=1)
        _test_products(tests, by_run[:256], lambda i, j: f"runs {i} and {j}")


def _test_products(tests: _Tests, rows: np.ndarray, name) -> None:
    """Any two rows: given the second, the sum of their products is normal with the second's squares as variance."""
    products = rows @ rows.T
    sizes = np.sqrt(np.maximum(np.diagonal(products), 1e-300))
    ratios = np.abs(products) / sizes
    for i, j in zip(*np.triu_indices(len(rows), 1), strict=True):
        tail = 2 * float(special.ndtr(-ratios[i, j]))
        tests.add(tail, f"Expected independent noise in {name(i, j)}, got noise that goes together")


def _test_answers(tests: _Tests, event: RandomisedResponseEvent, changed: np.ndarray, name: str) -> None:
    rate = event.gamma * (1.0 - 1.0 / event.categories)
    hits, trials = int(np.sum(changed)), changed.size
    _test_count(tests, hits, trials, rate, f"changed answers in {name}")


def _test_count(tests: _Tests, hits: int, trials: int, rate: float, what: str) -> None:
    tail = 2 * min(float(stats.binom.cdf(hits, trials, rate)), float(stats.binom.sf(hits - 1, trials, rate)))
    tests.add(tail, f"Expected {what} of about {trials * rate:.1f} in {trials} trials, got {hits}")


def check_batch_law(runs: Sequence[Sequence[Batches]]) -> None:
    """Reject batches that do not follow their declared law: `runs[i][m]` are those of silo m in run i.

    Shuffled epochs have the right marginals but never repeat a row within an epoch; fresh batches at rate w overlap in
    a share w of their rows, in time and between silos. Under the declared law all counts are binomial (without
    replacement: hypergeometric, less spread than the binomial), so exact tails decide.
    """
    tallies: dict[tuple[Sampler, str], tuple[int, int]] = {}

    def tally(sampler: Sampler, what: str, hits: int, trials: int) -> None:
        before = tallies.get((sampler, what), (0, 0))
        tallies[sampler, what] = (before[0] + hits, before[1] + trials)

    slots: dict[Sampler, np.ndarray] = {}
    draws: dict[Sampler, int] = {}
    for run in runs:
        for silo in run:
            for sampler, batch in silo:
                _check_slots(sampler, batch)
                tally(sampler, "a batch size", len(batch), sampler.max_rows)
                slots[sampler] = slots.get(sampler, 0) + np.bincount(batch, minlength=sampler.max_rows)
                draws[sampler] = draws.get(sampler, 0) + 1
            for (sampler, before), (other, batch) in pairwise(silo):
                if sampler == other:
                    tally(sampler, "an overlap with the batch before", _overlap(before, batch), len(before))
        for first, second in pairwise(run):
            for (sampler, one), (other, two) in zip(first, second, strict=False):
                if sampler == other:
                    tally(sampler, "an overlap with another silo's batch", _overlap(one, two), len(one))
    tests = _Tests([])
    for (sampler, what), (hits, trials) in tallies.items():
        _test_count(tests, hits, trials, sampler.sampling.rate, what)
    for sampler, hits in slots.items():
        for slot, own in enumerate(hits.tolist()):
            _test_count(tests, own, draws[sampler], sampler.sampling.rate, f"batches with slot {slot}")
    tests.raise_if_unlikely("The batches were not drawn as priced. Take them from the door's sampler.")


def _overlap(first: np.ndarray, second: np.ndarray) -> int:
    return len(np.intersect1d(first, second))


def _check_slots(sampler: Sampler, batch: np.ndarray) -> None:
    usable = len(np.unique(batch)) == len(batch) and (len(batch) == 0 or 0 <= batch.min() <= batch.max())
    if not usable or (len(batch) and batch.max() >= sampler.max_rows):
        raise PrivacyViolation(f"Expected different slots below {sampler.max_rows} in a batch, got others.")
    if sampler.sampling.scheme is not Scheme.POISSON and len(batch) != sampler.capacity:
        raise PrivacyViolation(f"Expected {sampler.capacity} slots in a batch, got {len(batch)}.")
