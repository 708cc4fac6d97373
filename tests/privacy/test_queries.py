"""The contract of queries: what silos write, what a total says, what it costs, and how much noise is in it.

Statistical tests have fixed keys and raise a false alarm once in 10^6 runs; 2/3 and 3/2 of the right noise is rejected.
"""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from silobayes.core.errors import InvalidInput
from silobayes.privacy.clipping import Bounded, clip, clip_blocks, general, non_negative
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.mechanisms import AbstractMechanism, GaussianMechanism, SkellamMechanism
from silobayes.privacy.queries import Message, OpenSum, PrivateSum, Total
from silobayes.privacy.relation import Relation, Unit
from silobayes.secure.fixed_point import noise_bound
from silobayes.secure.sums import PlainSum, SecretSharingSum
from silobayes.testing import FreeAccount

FALSE_ALARM = 1e-6
NUM_SILOS, COLLUDING, CLIP_NORMS = 5, 1, (0.5, 3.0)
NUM_SHARES = NUM_SILOS - COLLUDING - 1
OWN_NOISE = 2.0
# Of a sum: as many shares as are priced have the variance of as many noises of silos' own.
NOISE = OWN_NOISE * NUM_SHARES**0.5
OWN = GaussianMechanism(noise_multiplier=OWN_NOISE)
SHARED = SkellamMechanism(noise_multiplier=NOISE, num_shares=NUM_SHARES)
BOTH = pytest.mark.parametrize("mechanism", [OWN, SHARED], ids=["own noise", "shares"])


class NoNoise(FreshDraws):
    """A door that adds nothing, so that all arithmetic around the noise is seen."""

    def noisy_counts(self, mechanism, bounded, event):
        return bounded.total


def door(key: int, *, noise: bool = True, relation: Relation = Relation.SUBSTITUTE) -> Door:
    draws = FreshDraws if noise else NoNoise
    return Door(FreeAccount(relation, Unit.ROW), draws(Entropy.not_private(key)))


def bounded(seed: int = 0, clip_norms=CLIP_NORMS, *, num_terms: int = 4, width: int = 3) -> Bounded:
    """Terms of two statistics, far beyond their norms."""
    rng = np.random.default_rng(seed)
    terms = [general(9.0 * rng.normal(size=(num_terms, width))), non_negative(9.0 * rng.random((num_terms, 2)))]
    return clip_blocks(terms, clip_norms)


def query_of(mechanism: AbstractMechanism, layout: Bounded, *, num_terms: int = 4, **changes) -> PrivateSum:
    fields = {
        "relation": Relation.SUBSTITUTE,
        "layouts": (layout,) * NUM_SILOS,
        "mechanisms": (mechanism,) * NUM_SILOS,
        "num_terms": num_terms,
        "num_sums": 10,
        "together": NUM_SILOS,
    }
    return PrivateSum(**fields | changes)


def total_of(messages: dict[int, Message]) -> Total:
    return Total(payload=np.sum([own.payload for own in messages.values()], axis=0), members=tuple(messages))


def p_value(values: np.ndarray, stddev: float) -> float:
    statistic = np.sum((values / stddev) ** 2)
    return 2 * min(stats.chi2.cdf(statistic, values.size), stats.chi2.sf(statistic, values.size))


# Noise.


def blank(width: int) -> Bounded:
    """No terms: what is released of it is noise."""
    return clip_blocks([general(np.zeros((0, width))), non_negative(np.zeros((0, width)))], CLIP_NORMS)


@functools.cache
def noise_in_totals(mechanism: AbstractMechanism, num_members: int) -> tuple[np.ndarray, ...]:
    """The blocks of a wide total of nothing."""
    layout = blank(1500)
    query = query_of(mechanism, layout)
    written = {m: query.write(door(10 * num_members + m), m, layout) for m in range(num_members)}
    return query.read(total_of(written)).blocks


@BOTH
@pytest.mark.parametrize("num_members", [1, NUM_SHARES, NUM_SILOS])
def test_a_total_holds_the_noise_that_it_says(mechanism, num_members):
    query = query_of(mechanism, blank(1500))
    stddevs = query.noise_of(range(num_members))
    for values, stddev in zip(noise_in_totals(mechanism, num_members), stddevs, strict=True):
        assert p_value(values, stddev) > FALSE_ALARM
        for wrong in (2 / 3, 3 / 2):
            assert p_value(values, wrong * stddev) < FALSE_ALARM


@pytest.mark.parametrize("num_members", [1, NUM_SHARES, NUM_SILOS])
def test_own_noise_and_shares_of_as_many_silos_have_the_same_variance_in_the_total(num_members):
    """Said, and drawn: the ratio of two variances is F-distributed."""
    own, shared = (query_of(mechanism, blank(1500)).noise_of(range(num_members)) for mechanism in (OWN, SHARED))
    assert own == pytest.approx(shared, rel=1e-12)
    assert own == pytest.approx([OWN_NOISE * norm * num_members**0.5 for norm in CLIP_NORMS], rel=1e-12)
    pairs = zip(noise_in_totals(OWN, num_members), noise_in_totals(SHARED, num_members), strict=True)
    for left, right in pairs:
        law, ratio = stats.f(left.size, right.size), np.sum(left**2) / np.sum(right**2)

        def two_sided(ratio: float, law=law) -> float:
            return 2 * min(law.cdf(ratio), law.sf(ratio))

        assert two_sided(ratio) > FALSE_ALARM
        for wrong in (2 / 3, 3 / 2):
            assert two_sided(ratio * wrong**2) < FALSE_ALARM


def test_the_shares_that_are_priced_hold_the_priced_noise_and_all_of_them_more():
    query = query_of(SHARED, bounded())
    assert query.noise_of(range(NUM_SHARES)) == pytest.approx([NOISE * norm for norm in CLIP_NORMS], rel=1e-12)
    more = np.array(query.noise_of(range(NUM_SILOS))) / query.noise_of(range(NUM_SHARES))
    assert more == pytest.approx((NUM_SILOS / NUM_SHARES) ** 0.5, rel=1e-12)


def test_variances_of_silos_with_noises_of_their_own_add_up_over_those_in_the_total():
    noises = (1.0, 2.0, 3.0, 4.0, 5.0)
    mechanisms = tuple(GaussianMechanism(noise_multiplier=noise) for noise in noises)
    query = query_of(OWN, bounded(), mechanisms=mechanisms)
    for members in ((0,), (1, 3), (4, 0, 2)):
        size = sum(noises[m] ** 2 for m in members) ** 0.5
        assert query.noise_of(members) == pytest.approx([size * norm for norm in CLIP_NORMS], rel=1e-12)
        total = Total(payload=np.zeros(5), members=members)
        assert query.read(total).stddevs == query.noise_of(members)


# Totals.


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), members=st.sets(st.integers(0, NUM_SILOS - 1), min_size=4))
def test_a_total_of_shares_is_decoded_exactly(seed, members):
    """Noise and all: the integers of the silos in it, added up by a secure sum, times the grid."""
    layout = bounded(seed)
    query = query_of(SHARED, layout)
    written = {m: query.write(door(m), m, bounded(seed + m)) for m in sorted(members)}
    modulus = query.modulus
    assert modulus is not None
    sums = SecretSharingSum(
        modulus=modulus, num_clients=NUM_SILOS, colluding=COLLUDING, compute_nodes=2, study_hash=bytes(32)
    )
    payload = sums.total({m: own.payload for m, own in written.items()}, sum_index=0)
    counts = sum(written[m].payload.astype(object) for m in written)
    assert payload.tolist() == counts.tolist()
    answer = query.read(Total(payload=payload, members=tuple(written)))
    for block, exact in zip(answer.blocks, layout.decode(counts.astype(np.int64)), strict=True):
        assert np.array_equal(block, exact)


@BOTH
@given(seed=st.integers(0, 10_000))
def test_without_noise_a_total_is_the_sum_of_clipped_terms(mechanism, seed):
    own = [bounded(seed + m) for m in range(NUM_SILOS)]
    query = query_of(mechanism, own[0])
    written = {m: query.write(door(m, noise=False), m, own[m]) for m in range(NUM_SILOS)}
    exact = [np.sum(parts, axis=0) for parts in zip(*(one.decode(one.total) for one in own), strict=True)]
    for block, expected in zip(query.read(total_of(written)).blocks, exact, strict=True):
        np.testing.assert_allclose(block, expected, rtol=1e-12, atol=1e-12)


@BOTH
def test_totals_are_read_in_units_of_the_norms_that_silos_clipped_to(mechanism):
    """Norms that are chosen on the way: the layout knows those of the rule only."""
    chosen, members = (0.02, 40.0), (0, 2, 3)
    own = {m: bounded(m, chosen) for m in members}
    query = query_of(mechanism, bounded())
    total = total_of({m: query.write(door(m, noise=False), m, own[m]) for m in members})
    answer = query.read(total, chosen)
    exact = [np.sum(parts, axis=0) for parts in zip(*(one.decode(one.total) for one in own.values()), strict=True)]
    for block, expected in zip(answer.blocks, exact, strict=True):
        np.testing.assert_allclose(block, expected, rtol=1e-12, atol=1e-12)
    scale = np.array(chosen) / CLIP_NORMS
    assert answer.stddevs == pytest.approx(scale * query.noise_of(members), rel=1e-12)
    assert query.read(total, CLIP_NORMS).stddevs == query.read(total).stddevs
    if query.is_shared:  # counts say nothing without their norms
        for block, right, factor in zip(query.read(total).blocks, answer.blocks, scale, strict=True):
            np.testing.assert_allclose(block * factor, right, rtol=1e-12)


def test_one_block_has_a_value_and_two_have_none():
    layout = clip(general(np.ones((2, 3))), 1.0)
    query = query_of(OWN, layout)
    written = {m: query.write(door(m), m, layout) for m in range(2)}
    answer = query.read(total_of(written))
    assert np.array_equal(answer.value, answer.blocks[0])
    assert np.array_equal(answer.value, written[0].value + written[1].value)
    with pytest.raises(ValueError, match="too many values"):
        _ = query_of(OWN, bounded()).read(Total(payload=np.zeros(5), members=(0,))).value


def test_a_share_is_shown_to_nobody():
    """What a silo's own noise covers is a release; a share is a payload without a value, and neither is printed."""
    layout = bounded()
    share = query_of(SHARED, layout).write(door(0), 0, layout)
    assert share.value is None
    assert share.payload.dtype == np.int64
    release = query_of(OWN, layout).write(door(0), 0, layout)
    assert np.array_equal(release.value, release.payload)
    for message in (share, release):
        assert repr(message) == "Message()"
    assert "payload" not in repr(total_of({0: release}))


# Prices.


@BOTH
@pytest.mark.parametrize("relation", Relation)
def test_events_equal_those_of_the_mechanism_and_what_the_door_charges(mechanism, relation):
    """Whatever rows are in the answer, and whatever norms are chosen on the way."""
    layout = bounded()
    query = query_of(mechanism, layout, relation=relation)
    event = mechanism.event(layout, relation)
    for m in range(NUM_SILOS):
        assert query.event(m) == event
    for own in (layout, bounded(7), bounded(7, (1e-3, 50.0)), clip_blocks_of_nobody()):
        paying = door(0, relation=relation)
        query.write(paying, 1, own)
        assert paying.account.charged == [event]
    other = dataclasses.replace(mechanism, noise_multiplier=2 * mechanism.noise_multiplier)
    assert dataclasses.replace(query, mechanisms=(other,) * NUM_SILOS).event(0) != event


def clip_blocks_of_nobody() -> Bounded:
    return clip_blocks([general(np.zeros((0, 3))), non_negative(np.zeros((0, 2)))], CLIP_NORMS)


def test_silos_with_noises_of_their_own_have_prices_of_their_own():
    mechanisms = tuple(GaussianMechanism(noise_multiplier=1.0 + m) for m in range(NUM_SILOS))
    query = query_of(OWN, bounded(), mechanisms=mechanisms)
    assert [query.event(m).std for m in range(NUM_SILOS)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    paying = door(0)
    query.write(paying, 3, bounded(3))
    assert paying.account.charged == [query.event(3)]


def test_nothing_is_written_for_another_unit_than_the_account_protects():
    layout = clip(general(np.ones((2, 3))), 1.0, unit=Unit.CLIENT)
    for mechanism in (OWN, SHARED):
        with pytest.raises(InvalidInput, match="unit"):
            query_of(mechanism, layout).write(door(0), 0, layout)


def test_open_numbers_cost_nothing():
    assert OpenSum().event(0) is None
    assert OpenSum(together=4).event(3) is None


# Moduli.


@pytest.mark.parametrize("num_terms", [1, 40, 5000])
@pytest.mark.parametrize("noise", [0.1, 30.0, 1e5])
def test_moduli_never_wrap_around(num_terms, noise):
    """All silos' terms alike, on one coordinate, and noise of probability 2^-60 on top (of all silos' shares)."""
    mechanism = SkellamMechanism(noise_multiplier=noise, num_shares=NUM_SHARES)
    for sign in (1.0, -1.0):
        rows = np.zeros((num_terms, 3))
        rows[:, 1] = sign * 7.0
        own = clip(general(rows), 0.3)
        query = query_of(mechanism, own, num_terms=num_terms)
        modulus = query.modulus
        assert modulus is not None
        assert np.abs(own.total).max() >= num_terms / own.grid * (1 - 1e-4)  # it is the worst case
        stddev = noise / own.grid * (NUM_SILOS / NUM_SHARES) ** 0.5
        tail = noise_bound(noise_stddev=stddev, dimension=3, num_sums=query.num_sums)
        worst = NUM_SILOS * own.total + int(sign) * tail
        assert np.array_equal(modulus.decode(modulus.encode(worst)), worst)
        fewer = dataclasses.replace(modulus, bits=modulus.bits - 8)
        assert not np.array_equal(fewer.decode(fewer.encode(worst)), worst)  # it could fail


def test_a_modulus_grows_with_silos_terms_and_sums_and_is_for_shares_only():
    query = query_of(SHARED, bounded())
    assert query_of(OWN, bounded()).modulus is None
    assert OpenSum().modulus is None
    for change in ({"num_terms": 10**6}, {"together": 10**6}):
        assert dataclasses.replace(query, **change).modulus.bits > query.modulus.bits

    def bits(noise: float, num_sums: int) -> int:
        loud = SkellamMechanism(noise_multiplier=noise, num_shares=NUM_SHARES)
        return query_of(loud, bounded(), num_sums=num_sums).modulus.bits

    # Bits come in eights: of noises that differ by a bit, one must tell.
    told = [bits(2.0**k, 10**300) - bits(2.0**k, 10) for k in range(8, 16)]
    assert min(told) == 0
    assert max(told) == 8


@pytest.mark.parametrize("together", [2, 10, 4000])
def test_open_numbers_never_wrap_around_in_a_sum(together):
    query = OpenSum(together=together)
    modulus = query.modulus
    assert modulus is not None
    for extreme in (1e300, -1e300, np.inf, -np.inf):
        message = query.write(np.array([extreme]))
        residues = modulus.encode(message.payload)
        total = modulus.reduce(np.sum([residues] * together, axis=0, dtype=residues.dtype))
        assert query.read(Total(payload=modulus.decode(total), members=(0,))) == together * message.value


# Numbers that are private already.

numbers = st.floats(allow_nan=False, allow_infinity=True)


@given(rows=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=6))
def test_the_value_of_an_open_message_is_what_the_total_contains_of_it(rows):
    """To the last bit, in any order, and within half a cell of what the silo had to say."""
    query = OpenSum(together=len(rows))
    messages = {m: query.write(np.array(row)) for m, row in enumerate(rows)}
    payload = PlainSum(num_clients=len(rows)).total({m: own.payload for m, own in messages.items()}, sum_index=0)
    total = query.read(Total(payload=payload, members=tuple(messages)))
    for order in (1, -1):
        assert np.array_equal(total, np.sum([own.value for own in list(messages.values())[::order]], axis=0))
    for row, own in zip(rows, messages.values(), strict=True):
        inside = np.clip(row, -(2.0**34), 2.0**34)
        assert np.all(np.abs(own.value - inside) <= 2.0**-17)


@given(row=st.lists(st.floats(-1e30, 1e30), min_size=3, max_size=3))
def test_outside_of_sums_open_numbers_are_as_they_are(row):
    message = OpenSum().write(np.array(row))
    assert message.value.tolist() == message.payload.tolist() == row
    assert OpenSum().read(total_of({0: message})).tolist() == row


def test_what_is_not_a_number_is_refused_in_a_sum():
    with pytest.raises(InvalidInput, match="nan"):
        OpenSum(together=3).write(np.array([0.0, np.nan]))
