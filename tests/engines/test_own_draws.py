"""Every silo's sums have its own batches, rate and noise, whatever shape it shares with others.

Draws are written by the test: silo m takes the first so many rows and its noise is a number of its own. All rows are
alike and longer than any clip norm, so the length of a sum counts the rows of the batch that it is over.
"""

import dataclasses

import numpy as np
import pytest

from silobayes.data.silo import Silo
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.privacy.door import Door, FreshDraws, LoopDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import PoissonSampler
from silobayes.protocols.schedule import Schedule
from silobayes.study import AggregationKind, AggregationSection, Clipping
from silobayes.testing import FreeAccount
from tests.engines.harness import Privatise, ProtocolKind, Run, Settings

DIM, NUM_STEPS = 3, 3
SIZES = (40, 100, 38, 96, 40)  # two buckets, and numbers of silos that are not their places in them
TAKEN = (2, 7, 3, 11, 5)
NOISE = (5.0, 9.0, 7.0, 3.0, 11.0)
RATES = (0.9, 0.1, 0.2, 0.8, 0.5)
CLIP_NORM = 0.6
MODEL = LogisticRegression(num_features=DIM)
SETTINGS = Settings(
    privatise=Privatise.DP_OPTIMISATION,
    rounds=1,
    damping=0.5,
    steps=NUM_STEPS,
    step_size=0.1,
    sample_rate=0.3,
    clip_norm=CLIP_NORM,
    clipping=Clipping.ORDINARY,
)
METHODS = {
    "dp_optimisation": SETTINGS,
    "dp_optimisation, some silos": dataclasses.replace(SETTINGS, schedule=Schedule.SAMPLED, clients_per_round=3),
    "bcm": dataclasses.replace(SETTINGS, kind=ProtocolKind.BCM, damping=1.0),
    "global_vi": dataclasses.replace(SETTINGS, kind=ProtocolKind.GLOBAL_VI, damping=1.0),
}


class OwnDraws(FreshDraws):
    """The draws of silo m; `sums` and `releases` are those of its loops, `shared` what it puts into secure sums."""

    def __init__(self, m: int) -> None:
        super().__init__(Entropy.not_private(m))
        self.__dict__.update(m=m, sums=[], releases=[], shared=[])

    def batch(self, sampler):
        return np.arange(TAKEN[self.m])

    def noise(self, shape) -> np.ndarray:
        """Of this silo and of each step another number."""
        return np.broadcast_to(self.m + 1.0 + 0.01 * np.arange(shape[0])[:, None], shape).astype(np.float32)

    def loop(self, sampler, dimension, event):
        return LoopDraws(
            batches=[self.batch(sampler)] * event.count,
            noise=self.noise((event.count, dimension)).copy(),
            replayed=np.full((event.count, dimension), np.nan, dtype=np.float32),  # so that sums are shown
        )

    def close_loop(self, sums, releases):
        self.sums.append(sums)
        self.releases.append(releases)

    def share(self, mechanism, bounded, event):
        (own,) = bounded.decode(bounded.total)
        self.shared.append(own)
        return bounded.total


def silo_of(m: int, persons: bool) -> Silo:
    x = np.full((SIZES[m], DIM), 50.0, dtype=np.float32)
    ids = np.arange(SIZES[m]) if persons else None
    return Silo(name=str(m), x=x, y=np.ones(SIZES[m], dtype=np.int32), persons=ids)


def planned(settings: Settings, unit: Unit, silos, rates=RATES) -> Run:
    """The method with a rate and a noise of its own for every silo."""
    by_person = unit is Unit.PERSON
    settings = dataclasses.replace(settings, rows_per_person=1 if by_person else None)
    budget = Budget(epsilon=2.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=unit)
    made = Run(MODEL, [silo_of(m, by_person) for m in silos], settings, budget)
    seats = tuple(
        dataclasses.replace(
            seat,
            noise_multiplier=NOISE[m],
            sampler=PoissonSampler(sample_rate=rates[m], max_rows=seat.sampler.max_rows),
        )
        for m, seat in zip(silos, made.plan.seats, strict=True)
    )
    made.plan = dataclasses.replace(made.plan, seats=seats)
    made.parties.plan = made.plan
    return made


def run(made: Run, doors) -> list[int]:
    made.doors = doors
    made.finish()
    return [m for visit in made.plan.visits for m in visit.silos]


OF_PERSONS = [("dp_optimisation", Unit.PERSON), ("global_vi", Unit.PERSON)]


@pytest.mark.parametrize(("name", "unit"), [*((name, Unit.ROW) for name in METHODS), *OF_PERSONS])
def test_every_silo_has_its_own_batch_and_noise(name, unit):
    made = planned(METHODS[name], unit, range(len(SIZES)))
    doors = [Door(FreeAccount(Relation.SUBSTITUTE, unit), OwnDraws(m)) for m in range(len(SIZES))]
    visited = run(made, doors)
    assert len(set(visited)) >= 3
    for m in set(visited):
        draws, (event,) = doors[m].draws, made.plan.events(m, 1)
        assert event.std == pytest.approx(NOISE[m] * CLIP_NORM, rel=1e-12)
        assert set(doors[m].account.charged) == {event}
        assert len(draws.sums) == visited.count(m)
        for sums, releases in zip(draws.sums, draws.releases, strict=True):
            # In the first step every gradient points the same way, and all are longer than the clip norm.
            assert np.linalg.norm(sums[0]) == pytest.approx(TAKEN[m] * CLIP_NORM, rel=1e-3)
            noise = draws.noise(sums.shape) * np.float32(event.std)
            np.testing.assert_array_equal(releases, sums + noise)


class SilentDraws(OwnDraws):
    """Without noise, so that rates are seen: Adam takes no notice of the size of what noise alone decides."""

    def noise(self, shape) -> np.ndarray:
        return np.zeros(shape, dtype=np.float32)


def test_every_silo_finds_what_it_finds_alone():
    """Rates too are its own: its factor after one visit is that of a study of this silo only."""

    small = dataclasses.replace(SETTINGS, clip_norm=0.03)

    def factors(silos, rates):
        made = planned(small, Unit.ROW, silos, rates)
        run(made, [Door(FreeAccount(Relation.SUBSTITUTE, Unit.ROW), SilentDraws(m)) for m in silos])
        return [state.eta_t for state in made.parties.states]

    together = factors(range(len(SIZES)), RATES)
    m = 3  # the second of its shape
    own, wrong = factors([m], RATES), factors([m], RATES[::-1])
    np.testing.assert_allclose(together[m].linear, own[0].linear, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(together[m].quadratic, own[0].quadratic, rtol=1e-3, atol=1e-4)
    assert np.abs(wrong[0].linear - own[0].linear).max() > 1e-2  # the rate can be seen


def test_every_silo_shares_the_sum_over_its_own_batch():
    """Global VI over a secure sum: one clip norm, and in each step a batch and a share of each silo."""
    section = AggregationSection(kind=AggregationKind.TRUSTED)
    settings = dataclasses.replace(METHODS["global_vi"], aggregation=section)
    budget = Budget(epsilon=2.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    made = Run(MODEL, [silo_of(m, False) for m in range(len(SIZES))], settings, budget)
    doors = [Door(FreeAccount(Relation.SUBSTITUTE, Unit.ROW), OwnDraws(m)) for m in range(len(SIZES))]
    run(made, doors)
    for m, door in enumerate(doors):
        assert len(door.draws.shared) == NUM_STEPS
        assert np.linalg.norm(door.draws.shared[0]) == pytest.approx(TAKEN[m] * settings.clip_norm, rel=1e-3)
