"""Batches and their price, with streams that take whom the test says: no batch is cut below its capacity."""

import math

import numpy as np
import pytest
from scipy import stats

from silobayes.inference.dp_vi import usual_part
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.loops import StepPlan, open_steps
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import FixedSizeSampler, PoissonSampler
from silobayes.testing import FreeAccount
from tests.privacy.test_loops import first_sum

TAKEN = (1 << 64) - 1  # a word that says "the next row"; 0 says "none for a long time"
SAMPLERS = [
    PoissonSampler(sample_rate=0.2, max_rows=100),
    PoissonSampler(sample_rate=0.05, max_rows=600),
    PoissonSampler(sample_rate=0.5, max_rows=12),
    PoissonSampler(sample_rate=0.9, max_rows=40),
    PoissonSampler(sample_rate=1e-3, max_rows=500),
]


class FirstRowsEntropy(Entropy):
    """Takes the first rows, so many of them, and nobody after; its noise is zero as long as it takes rows."""

    def __init__(self, num_taken: int) -> None:
        super().__init__(fixed_key=bytes(32))
        self.left = num_taken

    def uint64(self, size):
        words = np.zeros(size, dtype=np.uint64)
        flat = words.reshape(-1)
        flat[: self.left] = TAKEN
        self.left -= min(self.left, flat.size)
        return words


EVERYBODY = 10**9


def door_of(entropy: Entropy) -> Door:
    return Door(FreeAccount(Relation.SUBSTITUTE, Unit.ROW), FreshDraws(entropy))


def batch_of(num_taken: int, sampler: PoissonSampler) -> list[int]:
    return door_of(FirstRowsEntropy(num_taken)).batch(sampler).indices.tolist()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_batch_is_whole_up_to_its_capacity_and_cut_there(sampler):
    usual, capacity = sampler.usual_size(50), sampler.capacity
    for num_taken in sorted({0, 1, usual, usual + 1, capacity - 1, capacity, capacity + 1, sampler.max_rows}):
        num_taken = min(num_taken, sampler.max_rows)
        assert batch_of(num_taken, sampler) == list(range(min(num_taken, capacity)))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_what_is_charged_is_the_chance_that_a_batch_is_cut(sampler):
    """The cut is found by drawing, not by asking the sampler."""
    longest = len(batch_of(EVERYBODY, sampler))
    exact = math.fsum(stats.binom.pmf(range(longest + 1, sampler.max_rows + 1), sampler.max_rows, sampler.sample_rate))
    assert exact <= sampler.sampling.overflow <= 1e-19
    if longest < sampler.max_rows:
        assert sampler.sampling.overflow <= exact * (1 + 1e-3)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_loop_of_full_batches_keeps_them_whole(sampler):
    plan = StepPlan(sampler=sampler, num_steps=3, clip_norm=1.0, noise_multiplier=1.0, dimension=2)
    inputs = open_steps(door_of(FirstRowsEntropy(EVERYBODY)), plan)
    for indices, mask in zip(inputs.indices, inputs.mask, strict=True):
        assert indices[mask].tolist() == list(range(sampler.capacity))


def test_a_fixed_size_batch_is_never_cut():
    sampler = FixedSizeSampler(batch_size=7, max_rows=20)
    plan = StepPlan(sampler=sampler, num_steps=40, clip_norm=1.0, noise_multiplier=1.0, dimension=2)
    inputs = open_steps(door_of(Entropy.not_private(1)), plan)
    assert inputs.mask.all()
    assert inputs.mask.shape == (40, 7)
    assert sampler.sampling.overflow == 0.0


@pytest.mark.parametrize("which", ["local", "global"])
def test_a_compiled_sum_is_over_the_whole_batch_however_unusual(which):
    """All rows are alike and each is clipped: the length of the sum counts them."""
    sampler = SAMPLERS[1]
    assert usual_part(sampler.capacity) < sampler.capacity
    plan = StepPlan(sampler=sampler, num_steps=2, clip_norm=1.0, noise_multiplier=1.0, dimension=6)
    inputs = open_steps(door_of(FirstRowsEntropy(EVERYBODY)), plan)
    total = first_sum(which, inputs, num_rows=sampler.max_rows, clip_norm=1.0)
    assert np.linalg.norm(total) == pytest.approx(sampler.capacity, rel=2e-3)
