import copy
import os
import pickle
import threading
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from silobayes.core.errors import InvalidInput
from silobayes.privacy.entropy import Entropy
from tests.privacy.goodness import ScriptedEntropy, chi_square, fits_cdf, fits_uniform

LAST = (1 << 64) - 1


def _draw_in_fork(entropy: Entropy) -> bytes:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, entropy.random_bytes(32))
        os._exit(0)
    os.waitpid(child, 0)
    drawn = os.read(read, 32)
    os.close(read)
    os.close(write)
    return drawn


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_eight_forks_eight_draws():
    entropy = Entropy.from_os()
    entropy.random_bytes(5)
    drawn = [_draw_in_fork(entropy) for _ in range(8)] + [entropy.random_bytes(32)]
    assert all(len(item) == 32 for item in drawn)
    assert len(set(drawn)) == 9


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_fork_with_a_recycled_process_id_draws_afresh(monkeypatch):
    entropy = Entropy.from_os()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    entropy.random_bytes(1)
    assert len({_draw_in_fork(entropy), _draw_in_fork(entropy), entropy.random_bytes(32)}) == 3


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_fork_does_not_wait_for_a_lock_held_by_its_parent():
    entropy = Entropy.from_os()
    with entropy._stream.lock:
        assert len(_draw_in_fork(entropy)) == 32


def test_secrets_do_not_print_pickle_or_copy():
    entropy = Entropy.from_os()
    assert repr(entropy) == "Entropy(from_os)"
    assert repr(Entropy.not_private(1)) == "Entropy(NOT PRIVATE)"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process"):
            attempt(entropy)
    assert entropy != Entropy.from_os()
    assert Entropy.not_private(1) != Entropy.not_private(1)
    assert not hasattr(entropy, "__dict__")


def test_privacy_is_stated_and_cannot_be_claimed_later():
    assert Entropy.from_os().is_private
    fixed = Entropy.not_private(3)
    assert not fixed.is_private
    with pytest.raises(AttributeError):
        fixed.is_private = True  # pyright: ignore[reportAttributeAccessIssue]


def test_two_streams_from_the_system_differ():
    assert Entropy.from_os().random_bytes(32) != Entropy.from_os().random_bytes(32)


def test_frozen_stream():
    # The first block is AES-256(SHA-256("silobayes not private 7"), 0^16), checked with the openssl command line.
    assert Entropy.not_private(7).random_bytes(16).hex() == "8c5303f74a486cf4579e3a199879ed01"
    assert Entropy.not_private(7).uint64(2).tolist() == [17612531729548137356, 138900857683615319]
    assert Entropy.not_private(7).uniform_below(1000, 6).tolist() == [356, 319, 661, 624, 519, 531]
    # Logarithms and cosines may differ in the last place between processors.
    np.testing.assert_allclose(
        Entropy.not_private(7).normal_float32(4), [-0.210665, -1.3665032, 0.2194873, -2.8125496], rtol=1e-5
    )


def test_pieces_join_into_the_same_stream():
    whole, pieces = Entropy.not_private(4), Entropy.not_private(4)
    assert whole.random_bytes(600_000) == pieces.random_bytes(3) + pieces.random_bytes(599_997)


def test_threads_never_see_the_same_bytes():
    entropy = Entropy.from_os()
    seen: list[bytes] = []

    def work() -> None:
        seen.extend([entropy.random_bytes(16) for _ in range(2000)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == len(seen) == 8000


@pytest.mark.parametrize("bound", [2, 3, 10, 1000])
def test_uniform_below_is_uniform(bound):
    assert fits_uniform(Entropy.not_private(bound).uniform_below(bound, 200_000), bound)


def test_uniform_below_has_no_modulo_bias():
    # With bound 3 * 2^62 a plain modulo makes the first third twice as likely as the others.
    entropy = Entropy.not_private(11)
    bound = 3 << 62
    assert fits_uniform(entropy.uniform_below(bound, 100_000) >> np.uint64(62), 3)
    assert not fits_uniform(entropy.uint64(100_000) % np.uint64(bound) >> np.uint64(62), 3)


def test_uniform_below_rejects_exactly_the_unfair_words():
    assert ScriptedEntropy([LAST, LAST - 1]).uniform_below(3, 1).tolist() == [(LAST - 1) % 3]  # 2^64 = 1 mod 3
    assert ScriptedEntropy([LAST]).uniform_below(1 << 64, 1).tolist() == [LAST]
    assert ScriptedEntropy([LAST]).uniform_below(1, 1).tolist() == [0]


@pytest.mark.parametrize("bound", [0, -1, (1 << 64) + 1])
def test_uniform_below_refuses_other_bounds(bound):
    with pytest.raises(InvalidInput, match="bound"):
        Entropy.not_private(0).uniform_below(bound, 1)


@pytest.mark.parametrize("probability", [0.001, Fraction(1, 3), 0.9])
def test_bernoulli_has_its_probability(probability):
    count = 300_000
    heads = int(Entropy.not_private(5).bernoulli(probability, count).sum())
    right = float(probability) * count
    assert chi_square([heads, count - heads], [right, count - right]) > 1e-6
    for factor in (2 / 3, 3 / 2):
        wrong = min(factor * right, 0.999 * count)
        assert chi_square([heads, count - heads], [wrong, count - wrong]) < 1e-6


def test_bernoulli_is_exact_beyond_64_bits():
    third = (1 << 64) // 3  # 0101...: every word of 1/3 is this one
    answers = [
        ([third - 1], True),
        ([third + 1], False),
        ([third, third - 1], True),
        ([third, third, third + 1], False),
    ]
    for words, answer in answers:
        entropy = ScriptedEntropy(words)
        assert entropy.bernoulli(Fraction(1, 3), 1).tolist() == [answer]
        assert entropy.words == []
    assert ScriptedEntropy([1 << 63]).bernoulli(0.5, 1).tolist() == [False]
    assert ScriptedEntropy([(1 << 63) - 1]).bernoulli(0.5, 1).tolist() == [True]
    assert ScriptedEntropy([LAST]).bernoulli(1.0, 1).tolist() == [True]
    assert ScriptedEntropy([0]).bernoulli(0.0, 1).tolist() == [False]


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan"), float("inf")])
def test_bernoulli_refuses_what_is_not_a_probability(probability):
    with pytest.raises(InvalidInput, match="probability"):
        Entropy.not_private(0).bernoulli(probability, 1)


def test_coins_are_fair_and_of_any_count():
    entropy = Entropy.not_private(6)
    assert entropy.bits(0).size == 0
    assert entropy.bits(13).size == 13
    assert fits_uniform(entropy.bits(100_001), 2)


def test_normals_are_finite_and_reach_beyond_eight_sigma():
    # One word per radius, half a word per angle: the smallest radius word with angle 0, then the largest.
    assert ScriptedEntropy([0, 0]).normal_float32(1)[0] == pytest.approx(np.sqrt(128 * np.log(2)), rel=1e-6)
    assert ScriptedEntropy([LAST, 0]).normal_float32(2).tolist() == [0.0, 0.0]
    assert np.isfinite(Entropy.not_private(8).normal_float32(1_000_000)).all()


def test_normals_are_normal():
    draws = Entropy.not_private(9).normal_float32(200_000)
    assert draws.dtype == np.float32
    for scale, right in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        assert fits_cdf(draws, stats.norm(scale=scale).cdf) is right


def test_normals_of_one_pair_are_independent():
    # The two halves of a piece share radii: neither values nor squares may be correlated.
    first, second = Entropy.not_private(10).normal_float32((100, 2, 1 << 14)).astype(float).transpose(1, 0, 2)
    for left, right in ((first, second), (first**2, second**2), (np.abs(first), second)):
        correlation = np.corrcoef(left.ravel(), right.ravel())[0, 1]
        assert abs(correlation) * np.sqrt(left.size) < 4.9  # two-sided 1e-6


@pytest.mark.parametrize("shape", [(), 0, 1, 7, (3, 5), (1 << 15) + 3])
def test_normals_have_any_shape(shape):
    draws = Entropy.not_private(1).normal_float32(shape)
    assert draws.shape == np.empty(shape).shape
    assert (
        np.unique(draws).size >= 0.999 * draws.size
    )  # float32 values collide now and then; a repeated piece would not
