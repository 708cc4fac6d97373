"""Audits: n = 2e5 a side, alpha = 1e-6 (the written false-alarm rate of every assertion here)."""

import math

import numpy as np
import pytest

from silobayes.privacy.accounting import price
from silobayes.privacy.batches import poisson_batches
from silobayes.privacy.clipping import clip, general
from silobayes.privacy.door import FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import GaussianEvent, RandomisedResponseEvent
from silobayes.privacy.mechanisms import GaussianMechanism, LaplaceMechanism, SkellamMechanism
from silobayes.privacy.relation import Relation
from silobayes.privacy.sampling import PoissonSampler
from silobayes.testing import audit, worst_case_streams

RUNS, ALPHA, DELTA = 200_000, 1e-6, 1e-5
DRAWS = FreshDraws(Entropy.not_private(20))


def repeated(mechanism, value: float, order: int = 2) -> np.ndarray:
    """Scores of `RUNS` releases of one clipped scalar, as one vector of independent noise."""
    bounded = clip(general(np.array([[value]])), 1.0, order=order)
    wide = clip(general(np.zeros((1, RUNS))), 1.0, order=order)
    object.__setattr__(wide, "grid", bounded.grid)
    return bounded.total[0] + mechanism.noise(DRAWS.entropy, wide).astype(np.float64)


def claim(mechanism, relation=Relation.SUBSTITUTE, order: int = 2) -> float:
    bounded = clip(general(np.array([[1.0]])), 1.0, order=order)
    return price([mechanism.event(bounded, relation)], relation=relation, delta=DELTA).epsilon


ADDITIVE = [
    (GaussianMechanism(noise_multiplier=1.0), 2, 0.8),
    (SkellamMechanism(noise_multiplier=1.0, num_shares=1), 2, 0.8),
    (LaplaceMechanism(noise_multiplier=1.0), 1, 0.5),
]


@pytest.mark.parametrize(("mechanism", "order", "tightness"), ADDITIVE, ids=lambda item: type(item).__name__)
def test_the_audit_stays_below_the_claim_and_close_to_it(mechanism, order, tightness):
    found = audit(repeated(mechanism, 1.0, order), repeated(mechanism, -1.0, order), delta=DELTA, alpha=ALPHA)
    claimed = claim(mechanism, order=order)
    bound = found.gaussian_epsilon if order == 2 else found.epsilon
    assert bound <= claimed
    assert found.epsilon <= claimed
    assert bound >= tightness * claimed


def test_a_factor_two_in_sensitivity_is_flagged():
    """Priced as add/remove (sensitivity 1), run on rows that are substituted (the sum moves by 2)."""
    mechanism = GaussianMechanism(noise_multiplier=1.0)
    found = audit(repeated(mechanism, 1.0), repeated(mechanism, -1.0), delta=DELTA, alpha=ALPHA)
    assert found.refutes(claim(mechanism, Relation.ADD_REMOVE))
    assert not found.refutes(claim(mechanism, Relation.SUBSTITUTE))


@pytest.mark.parametrize(("categories", "gamma"), [(2, 0.5), (4, 0.25)])
def test_randomised_response_is_audited_to_90_percent(categories, gamma):
    event = RandomisedResponseEvent(categories=categories, gamma=gamma)
    first = DRAWS.answers(np.zeros(RUNS, dtype=np.int64), event)
    second = DRAWS.answers(np.ones(RUNS, dtype=np.int64), event)
    found = audit((first == 0).astype(float), (second == 0).astype(float), delta=0.0, alpha=ALPHA)
    claimed = price([event], relation=Relation.SUBSTITUTE, delta=1e-9).epsilon
    assert 0.9 * claimed <= found.epsilon <= claimed
    assert claimed == pytest.approx(math.log((1 - gamma + gamma / categories) / (gamma / categories)), rel=1e-3)


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("name", ["constant", "one round", "opposite", "heavy shard"])
def test_sampled_sums_stay_below_the_claim_on_worst_case_streams(name, relation):
    """Ten Poisson batches with the noise of compiled loops, both from the door's own samplers."""
    num_steps, num_rows, std, runs = 10, 8, 1.0, RUNS // 10
    sampler = PoissonSampler(sample_rate=0.5, max_rows=num_rows)
    streams = worst_case_streams(num_steps, num_rows, relation)[name]

    def scores(stream: np.ndarray) -> np.ndarray:
        draws = runs * num_steps
        indices, offsets = poisson_batches(DRAWS.entropy, num_rows, sampler.sample_rate, draws)
        draw_of = np.repeat(np.arange(draws), np.diff(offsets))
        sums = np.bincount(draw_of, weights=stream[draw_of % num_steps, indices], minlength=draws)
        noisy = sums + std * DRAWS.entropy.normal_float32(draws)
        return noisy.reshape(runs, num_steps).sum(axis=1)

    event = GaussianEvent(clip_norm=1.0, std=std, sampling=sampler.sampling, count=num_steps)
    claimed = price([event], relation=relation, delta=DELTA).epsilon
    found = audit(scores(streams[0]), scores(streams[1]), delta=DELTA, alpha=ALPHA)
    assert found.epsilon <= claimed
    # It must see the canary (the crowd blurs it, and one step of ten is hard to see), or it could not fail.
    assert (found.epsilon > 0.05 * claimed) or name == "one round"
