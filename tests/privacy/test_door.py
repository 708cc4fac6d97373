"""The door: order of charge and draw, units, events that say what ran, noise of the right size."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from silobayes.core.errors import BudgetExceeded, InvalidInput
from silobayes.privacy.clipping import clip, clip_blocks, general, non_negative, psd
from silobayes.privacy.discrete import discrete_gaussian, rounded_laplace
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import (
    DiscreteGaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Sampling,
    Scheme,
    SkellamEvent,
    from_json,
    to_json,
)
from silobayes.privacy.mechanisms import GaussianMechanism, LaplaceMechanism, SkellamMechanism
from silobayes.privacy.relation import Relation, Terms, Unit
from silobayes.privacy.sampling import FixedSizeSampler, PoissonSampler
from silobayes.privacy.skellam import skellam
from silobayes.testing import FreeAccount

ALARM = 1e-6  # false-alarm rate of each statistical assertion; keys are fixed


class Refusing:
    relation, unit = Relation.SUBSTITUTE, Unit.ROW

    def charge(self, event):
        raise BudgetExceeded("nothing left")


class Watched(FreshDraws):
    """Says whether anything was drawn."""

    def noisy_counts(self, mechanism, bounded, event):
        raise AssertionError("drew before the charge")

    answers = loop = noisy_counts


def a_door(relation=Relation.SUBSTITUTE, unit=Unit.ROW, seed=1) -> Door:
    return Door(FreeAccount(relation, unit), FreshDraws(Entropy.not_private(seed)))


def test_a_refused_charge_draws_nothing_and_releases_nothing():
    door = Door(Refusing(), Watched(Entropy.from_os()))
    bounded = clip(general(np.ones((2, 2))), 1.0)
    with pytest.raises(BudgetExceeded):
        door.release(GaussianMechanism(noise_multiplier=1.0), bounded)
    with pytest.raises(BudgetExceeded):
        door.randomise(np.zeros(3, dtype=int), categories=2, gamma=0.5)


def test_every_release_is_charged_before_its_noise_is_drawn():
    order = []

    class Account(FreeAccount):
        def charge(self, event):
            order.append("charge")

    class Draws(FreshDraws):
        def noisy_counts(self, mechanism, bounded, event):
            order.append("draw")
            return super().noisy_counts(mechanism, bounded, event)

    door = Door(Account(Relation.SUBSTITUTE, Unit.ROW), Draws(Entropy.from_os()))
    release = door.release(GaussianMechanism(noise_multiplier=1.0), clip(general(np.ones((2, 2))), 1.0))
    assert order == ["charge", "draw"]
    assert release.is_private


def test_a_sum_clipped_for_another_unit_is_refused():
    bounded = clip(general(np.ones((2, 2))), 1.0, unit=Unit.CLIENT)
    with pytest.raises(InvalidInput, match="unit"):
        a_door().release(GaussianMechanism(noise_multiplier=1.0), bounded)
    with pytest.raises(InvalidInput, match="unit"):
        a_door(unit=Unit.CLIENT).randomise(np.zeros(4, dtype=int), categories=2, gamma=0.5)


def test_a_fixed_seed_is_stamped_on_the_release():
    release = a_door().release(GaussianMechanism(noise_multiplier=1.0), clip(general(np.ones((2, 2))), 1.0))
    assert not release.is_private


@pytest.mark.parametrize(
    ("mechanism", "order", "law"),
    [
        (GaussianMechanism(noise_multiplier=3.0), 2, stats.norm(scale=6.0)),
        (SkellamMechanism(noise_multiplier=3.0, num_shares=1), 2, stats.norm(scale=6.0)),
        (LaplaceMechanism(noise_multiplier=3.0), 1, stats.laplace(scale=6.0)),
    ],
    ids=["gaussian", "skellam", "laplace"],
)
def test_released_noise_has_the_stated_law_and_no_other(mechanism, order, law):
    """KS test at 1e-6: accepted at the right scale, rejected at 2/3 and 3/2 of it."""
    bounded = clip(general(np.zeros((1, 20_000))), 2.0, order=order)
    release = a_door(seed=3).release(mechanism, bounded)
    assert stats.kstest(release.value, law.cdf).pvalue > ALARM
    for factor in (2 / 3, 3 / 2):
        assert stats.kstest(release.value * factor, law.cdf).pvalue < ALARM
    assert release.stddevs[0] == pytest.approx(law.std())


def test_shares_add_up_to_the_priced_noise():
    """The sum of M - T - 1 shares has the variance of the event; one share alone has less and is not a release."""
    shares, size = 4, 20_000
    mechanism = SkellamMechanism(noise_multiplier=3.0, num_shares=shares)
    bounded = clip(general(np.zeros((1, size))), 1.0)
    door = a_door(seed=4)
    drawn = [door.share(mechanism, bounded) for _ in range(shares)]
    total = np.sum([share.counts for share in drawn], axis=0) * bounded.grid
    event = drawn[0].event
    assert isinstance(event, SkellamEvent)
    assert stats.kstest(total, stats.norm(scale=event.std).cdf).pvalue > ALARM
    assert stats.kstest(drawn[0].counts * bounded.grid, stats.norm(scale=event.std).cdf).pvalue < ALARM
    with pytest.raises(InvalidInput, match="num_shares"):
        door.release(mechanism, bounded)


@pytest.mark.parametrize("mechanism", [GaussianMechanism, SkellamMechanism, LaplaceMechanism])
def test_noise_is_drawn_with_the_very_numbers_that_are_priced(mechanism):
    """The same stream, asked for the exact law of the event: a thousandth less noise would be other numbers."""
    skellam_like = mechanism is SkellamMechanism
    order, own = (1 if mechanism is LaplaceMechanism else 2), {"num_shares": 3} if skellam_like else {}
    for noise_multiplier in (1e-5, 0.37, 2.0):
        one = mechanism(noise_multiplier=noise_multiplier, **own)
        bounded = clip(general(np.zeros((1, 2000))), 1.0, order=order)
        event, entropy = one.event(bounded, Relation.SUBSTITUTE), Entropy.not_private(7)
        cells = Fraction(event.scale if isinstance(event, LaplaceEvent) else event.std) / Fraction(bounded.grid)
        if mechanism is GaussianMechanism:
            expected = discrete_gaussian(entropy, cells, 2000)
        elif mechanism is LaplaceMechanism:
            expected = rounded_laplace(entropy, cells, 2000)
        else:
            variance = Fraction(np.nextafter(float(cells) ** 2 / 3, np.inf))
            assert cells**2 <= 3 * variance <= cells**2 * (1 + Fraction(1, 2**50))
            expected = skellam(entropy, variance, 2000)
        np.testing.assert_array_equal(one.noise(Entropy.not_private(7), bounded), expected)


@pytest.mark.parametrize(
    "mechanism", [GaussianMechanism(noise_multiplier=3.0), SkellamMechanism(noise_multiplier=3.0, num_shares=1)]
)
def test_each_block_has_the_noise_that_it_says(mechanism):
    """A posterior that knows of its noise is wrong by the ratio of clip norms if blocks are mixed up."""
    zeros, clip_norms = general(np.zeros((1, 5000))), (0.5, 4.0, 30.0)
    release = a_door(seed=8).release(mechanism, clip_blocks([zeros] * 3, clip_norms))
    for block, stddev, clip_norm in zip(release.blocks, release.stddevs, clip_norms, strict=True):
        assert stddev == pytest.approx(3.0 * clip_norm)
        assert stats.kstest(block, stats.norm(scale=stddev).cdf).pvalue > ALARM
        for factor in (2 / 3, 3 / 2):
            assert stats.kstest(block * factor, stats.norm(scale=stddev).cdf).pvalue < ALARM


def test_a_share_is_private_only_if_its_noise_is_unknown():
    class PrivateDraws(FreshDraws):
        @property
        def is_private(self):
            return True

    mechanism, bounded = SkellamMechanism(noise_multiplier=3.0, num_shares=1), clip(general(np.ones((2, 2))), 1.0)
    known = a_door()
    secret = Door(known.account, PrivateDraws(Entropy.not_private(2)))
    assert [door.share(mechanism, bounded).is_private for door in (secret, known)] == [True, False]


def test_releases_sit_on_the_grid():
    bounded = clip(general(np.random.default_rng(0).normal(size=(9, 5))), 1.7)
    value = a_door().release(GaussianMechanism(noise_multiplier=1.0), bounded).value
    cells = value / (bounded.grid * 1.7)
    np.testing.assert_allclose(cells, np.rint(cells), atol=1e-6)


def test_float_artefacts_cannot_tell_neighbours_apart():
    """PITFALLS: float noise puts 25.7 % of outputs off a coarse grid for one neighbour and 0 % for the other."""
    door, mechanism = a_door(seed=5), GaussianMechanism(noise_multiplier=1.0)
    for row in ([[0.0]], [[1.0]], [[1 / 3]]):
        bounded = clip(general(np.array(row)), 1.0)
        values = [door.release(mechanism, bounded).value[0] / bounded.grid for _ in range(200)]
        assert all(value == int(value) for value in values)


class TestEvents:
    def test_one_block_is_stated_in_its_own_units(self):
        bounded = clip(non_negative(np.ones((3, 4))), 5.0)
        event = GaussianMechanism(noise_multiplier=2.0).event(bounded, Relation.SUBSTITUTE)
        assert isinstance(event, DiscreteGaussianEvent)
        assert event.std == 10.0
        assert event.clip_norm == pytest.approx(5.0, rel=1e-4)
        assert event.clip_norm >= 5.0
        assert event.terms is Terms.NON_NEGATIVE
        assert event.dimension == 4

    @pytest.mark.parametrize(("relation", "sensitivity"), [("substitute", math.sqrt(6)), ("add_remove", math.sqrt(2))])
    def test_blocks_are_priced_jointly(self, relation, sensitivity):
        x = np.ones((3, 2))
        bounded = clip_blocks([general(x), psd(x)], [5.0, 7.0])
        event = GaussianMechanism(noise_multiplier=2.0).event(bounded, Relation(relation))
        assert isinstance(event, DiscreteGaussianEvent)
        assert event.std == 2.0
        assert event.l2_sensitivity(Relation(relation)) == pytest.approx(sensitivity, rel=1e-4)

    def test_mixed_blocks_of_a_poisson_batch_keep_the_absent_term(self):
        batch = a_door().batch(PoissonSampler(sample_rate=0.5, max_rows=3))
        x = np.ones((len(batch.indices), 2))
        bounded = clip_blocks([general(x), psd(x)], [1.0, 1.0], batch=batch)
        event = GaussianMechanism(noise_multiplier=2.0).event(bounded, Relation.SUBSTITUTE)
        assert isinstance(event, DiscreteGaussianEvent)
        assert event.clip_norm == pytest.approx(math.sqrt(2), rel=1e-4)
        assert event.terms is Terms.GENERAL
        assert event.sampling == batch.sampling

    @pytest.mark.parametrize("relation", list(Relation))
    def test_shards_are_priced_as_replaced(self, relation):
        bounded = clip(general(np.ones((3, 2))), 2.0, sharded=True)
        event = GaussianMechanism(noise_multiplier=1.0).event(bounded, relation)
        assert isinstance(event, DiscreteGaussianEvent)
        assert event.l2_sensitivity(relation) == pytest.approx(4.0, rel=1e-4)

    def test_laplace_wants_an_l1_norm_and_gaussian_an_l2_norm(self):
        x = general(np.ones((3, 2)))
        event = LaplaceMechanism(noise_multiplier=2.0).event(clip(x, 3.0, order=1), Relation.SUBSTITUTE)
        assert isinstance(event, LaplaceEvent)
        assert event.l1_sensitivity(Relation.SUBSTITUTE) == pytest.approx(6.0, rel=1e-4)
        with pytest.raises(InvalidInput, match="order"):
            LaplaceMechanism(noise_multiplier=2.0).event(clip(x, 3.0), Relation.SUBSTITUTE)
        with pytest.raises(InvalidInput, match="order"):
            GaussianMechanism(noise_multiplier=2.0).event(clip(x, 3.0, order=1), Relation.SUBSTITUTE)

    def test_randomised_answers_cost_what_one_answer_costs(self):
        door = a_door()
        release = door.randomise(np.arange(4), categories=4, gamma=0.25)
        assert release.event == RandomisedResponseEvent(categories=4, gamma=0.25)
        for bad in (np.array([7]), np.array([0.5, 1.2])):
            with pytest.raises(InvalidInput, match="answers"):
                door.randomise(bad, categories=4, gamma=0.25)
        assert len(door.account.charged) == 1

    def test_events_survive_their_json(self):
        bounded = clip(general(np.ones((3, 2))), 2.0)
        for mechanism in (
            GaussianMechanism(noise_multiplier=1.0),
            SkellamMechanism(noise_multiplier=1.0, num_shares=3),
        ):
            event = mechanism.event(bounded, Relation.ADD_REMOVE)
            assert from_json(to_json(event)) == event


class TestSamplers:
    def test_the_sampler_writes_its_own_event(self):
        poisson = PoissonSampler(sample_rate=0.01, max_rows=1000)
        assert poisson.sampling.scheme is Scheme.POISSON
        assert poisson.sampling.rate == 0.01
        fixed = FixedSizeSampler(batch_size=10, max_rows=1000)
        assert fixed.sampling == Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=0.01)

    @pytest.mark.parametrize(("rate", "rows"), [(0.01, 1000), (0.5, 10), (1.0, 10), (1e-4, 10**6)])
    def test_overflow_of_the_padded_batch_is_charged(self, rate, rows):
        sampler = PoissonSampler(sample_rate=rate, max_rows=rows)
        assert stats.binom.sf(sampler.capacity, rows, rate) <= sampler.sampling.overflow <= 1e-19
        assert sampler.capacity <= rows
        assert sampler.capacity <= rate * rows + 15 * math.sqrt(rate * rows) + 15  # padding, not everybody

    @pytest.mark.parametrize(("rate", "rows"), [(0.01, 1000), (0.5, 10), (1.0, 10), (1e-4, 10**6)])
    def test_a_loop_hardly_ever_has_a_batch_of_unusual_size(self, rate, rows):
        sampler = PoissonSampler(sample_rate=rate, max_rows=rows)
        usual = sampler.usual_size(1000)
        assert 1000 * stats.binom.sf(usual, rows, rate) <= 1e-4
        assert usual == 0 or 1000 * stats.binom.sf(usual - 1, rows, rate) > 1e-4
        assert usual <= sampler.capacity

    def test_batches_have_no_repeats_and_fit_their_capacity(self):
        door = a_door(seed=6)
        for sampler in (
            PoissonSampler(sample_rate=0.3, max_rows=50),
            FixedSizeSampler(batch_size=7, max_rows=50),
        ):
            for _ in range(50):
                indices = door.batch(sampler).indices
                assert len(set(indices)) == len(indices) <= sampler.capacity
                assert indices.min(initial=0) >= 0
                assert indices.max(initial=0) < 50

    def test_bad_rates_are_named(self):
        with pytest.raises(InvalidInput, match="sample_rate"):
            PoissonSampler(sample_rate=1.5, max_rows=10)
        with pytest.raises(InvalidInput, match="batch_size"):
            FixedSizeSampler(batch_size=11, max_rows=10)
