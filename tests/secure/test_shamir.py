from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.secure.shamir import PRIME, combine, recovery_weights, split_secret
from tests.privacy.goodness import fits_uniform
from tests.secure.cases import fixed_bytes, scripted_bytes, vectors


def recover(shares: dict[int, int]) -> bytes | None:
    return combine(recovery_weights(tuple(shares)), tuple(shares.values()))


def test_the_modulus_is_the_least_prime_above_2_to_the_256():
    def is_prime(n):  # Miller-Rabin with 24 bases: a composite passes with probability below 4^-24
        shift = (n - 1 & 1 - n).bit_length() - 1
        for base in range(2, 26):
            x = pow(base, n - 1 >> shift, n)
            if x in (1, n - 1):
                continue
            if not any((x := x * x % n) == n - 1 for _ in range(shift - 1)):
                return False
        return True

    assert is_prime(PRIME)
    assert not any(is_prime(2**256 + k) for k in range(PRIME - 2**256))


@pytest.mark.parametrize("case", vectors("shamir"), ids=str)
def test_shamir_vectors(case):
    if case.get("bad") == "points":
        with pytest.raises(InvalidInput, match="points"):
            recovery_weights(case["points"])
        return
    secret, threshold = bytes.fromhex(case["secret"]), case["threshold"]
    if "bad" in case:
        with pytest.raises(InvalidInput, match=case["bad"]):
            split_secret(secret, num_shares=case["num_shares"], threshold=threshold, random_bytes=fixed_bytes(""))
        return
    expected = [int(share, 16) for share in case["shares"]]
    source = scripted_bytes(bytes.fromhex(case["pool"]), name="no more")
    shares = split_secret(secret, num_shares=len(expected), threshold=threshold, random_bytes=source)
    assert list(shares) == expected
    assert recover({k + 1: expected[k] for k in range(len(expected))[-threshold:]}) == secret


@settings(max_examples=40)
@given(secret=st.binary(min_size=32, max_size=32), num_shares=st.integers(1, 8), data=st.data())
def test_any_threshold_shares_recover(secret, num_shares, data):
    threshold = data.draw(st.integers(1, num_shares))
    shares = split_secret(secret, num_shares=num_shares, threshold=threshold, random_bytes=fixed_bytes("any"))
    for chosen in combinations(range(num_shares), threshold):
        assert recover({k + 1: shares[k] for k in chosen}) == secret
    if threshold > 1:
        wrong = {k + 1: shares[k] for k in range(threshold)}
        wrong[1] = (wrong[1] + 1) % PRIME
        assert recover(wrong) != secret


def test_shares_of_no_seed_are_noticed():
    assert combine((1,), (2**256,)) is None
    assert combine((1,), (2**256 - 1,)) == b"\xff" * 32


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
@pytest.mark.parametrize("chosen", list(combinations(range(4), 2)))
def test_fewer_than_threshold_shares_are_uniform(secret, chosen):
    """Low and high nibbles of two of four shares (threshold 3) against uniform on 256 cells; false alarm 1e-6."""
    source = fixed_bytes("uniform")
    draws = [split_secret(secret, num_shares=4, threshold=3, random_bytes=source) for _ in range(5000)]
    low = np.array([[shares[k] % 16 for k in chosen] for shares in draws])
    high = np.array([[min(shares[k] >> 252, 15) for k in chosen] for shares in draws])
    assert fits_uniform(low @ [16, 1], 256)
    assert fits_uniform(high @ [16, 1], 256)


def test_a_polynomial_of_too_low_degree_is_not_uniform():
    """The same test rejects two shares of a sharing whose threshold is one too low."""
    source = fixed_bytes("broken")
    draws = [split_secret(bytes(32), num_shares=4, threshold=2, random_bytes=source) for _ in range(5000)]
    low = np.array([[shares[k] % 16 for k in (0, 1)] for shares in draws])
    assert not fits_uniform(low @ [16, 1], 256)
