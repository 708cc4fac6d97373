"""Audits of a secure sum by its own members (004 I, Theorem 1): M = 6 silos, of which T = 3 may collude or drop out.

Silo 0 holds the canary. The adversary is a curious silo (the last) with T others: they subtract the shares that they
drew, or drop out of the sum. What is left is the noise of M - T - 1 = 2 silos. n = 2e4 runs a side, alpha = 1e-6: the
written false-alarm rate of every assertion that a claim is not refuted; keys are fixed.
"""

import numpy as np
import pytest

from silobayes.plans.aggregation import sum_of
from silobayes.privacy.accounting import price
from silobayes.privacy.clipping import Bounded, clip, general
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.mechanisms import SkellamMechanism
from silobayes.privacy.queries import PrivateSum, Total
from silobayes.privacy.relation import Relation, Unit
from silobayes.study import AggregationKind, AggregationSection
from silobayes.testing import FreeAccount, audit

NUM_CLIENTS, COLLUDING, NOISE = 6, 3, 2.0
RUNS, ALPHA, DELTA = 20_000, 1e-6, 1e-5
SECTION = AggregationSection(kind=AggregationKind.SECRET_SHARING, colluding=COLLUDING, compute_nodes=2)
SIZED = SkellamMechanism(noise_multiplier=NOISE, num_shares=SECTION.num_shares(NUM_CLIENTS))
NAIVE = SkellamMechanism(noise_multiplier=NOISE, num_shares=NUM_CLIENTS)  # planted: shares of std / sqrt(M)


def runs_of(value: float) -> Bounded:
    """`RUNS` sums of one clipped scalar, as one vector with independent noise."""
    scalar = clip(general(np.array([[value]])), 1.0)
    wide = clip(general(np.zeros((1, RUNS))), 1.0)
    object.__setattr__(wide, "grid", scalar.grid)
    object.__setattr__(wide, "total", np.full(RUNS, scalar.total[0]))
    return wide


def claimed(mechanism: SkellamMechanism) -> float:
    event = mechanism.event(clip(general(np.array([[1.0]])), 1.0), Relation.SUBSTITUTE)
    return price([event], relation=Relation.SUBSTITUTE, delta=DELTA).epsilon


def scores(mechanism: SkellamMechanism, value: float, knowing: int, missing: int) -> np.ndarray:
    """What is left of the total when `knowing` silos take their shares away and `missing` ones never sent theirs."""
    doors = [
        Door(FreeAccount(Relation.SUBSTITUTE, Unit.ROW), FreshDraws(Entropy.not_private(k + 10 * (value > 0))))
        for k in range(NUM_CLIENTS)
    ]
    bounded = [runs_of(value), *[runs_of(0.0)] * (NUM_CLIENTS - 1)]
    query = PrivateSum(
        relation=Relation.SUBSTITUTE,
        layouts=tuple(bounded),
        mechanisms=(mechanism,) * NUM_CLIENTS,
        num_terms=1,
        num_sums=1,
        together=NUM_CLIENTS,
    )
    written = {m: query.write(doors[m], m, bounded[m]).payload for m in range(NUM_CLIENTS)}
    sent = {m: written[m] for m in range(NUM_CLIENTS - missing)}
    colluders = sorted(sent)[len(sent) - knowing :]
    known = np.sum([sent[m] for m in colluders], axis=0) if colluders else np.zeros(RUNS, dtype=np.int64)
    payload = sum_of(SECTION, query, NUM_CLIENTS, "0" * 64).total(sent, sum_index=0)
    total = query.read(Total(payload=payload, members=tuple(sent)))
    return total.value - bounded[0].decode(known)[0]


def found(mechanism: SkellamMechanism, knowing: int, missing: int):
    sides = (scores(mechanism, value, knowing, missing) for value in (1.0, -1.0))
    return audit(*sides, delta=DELTA, alpha=ALPHA)


@pytest.mark.parametrize("missing", [0, 1, COLLUDING])
def test_colluders_that_subtract_their_noise_or_drop_out_stay_below_the_claim(missing):
    result = found(SIZED, 1 + COLLUDING - missing, missing)
    assert not result.refutes(claimed(SIZED))
    assert result.gaussian_epsilon > 0.8 * claimed(SIZED)  # all the noise that is priced is needed: it could fail


@pytest.mark.parametrize("missing", [0, COLLUDING])
def test_naive_shares_are_flagged(missing):
    result = found(NAIVE, 1 + COLLUDING - missing, missing)
    assert result.refutes(claimed(NAIVE))
    assert result.gaussian_epsilon > 1.3 * claimed(NAIVE)


def test_one_colluder_more_than_the_study_says_is_flagged():
    """T is a promise: with one more colluder one share is left, half of the priced variance."""
    assert found(SIZED, 2 + COLLUDING, 0).refutes(claimed(SIZED))


def test_to_the_outside_even_naive_shares_are_enough():
    """Why nobody notices: who knows no share sees all M of them, which is the noise that was priced."""
    assert not found(NAIVE, 0, 0).refutes(claimed(NAIVE))
