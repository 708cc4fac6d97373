"""Shamir's secret sharing of 32-byte seeds over GF(p), p = 2^256 + 297, the least prime above 2^256 (Shamir 1979).

A secret is f(0) of a uniformly random polynomial of degree < threshold; share k is f(k), k = 1..num_shares. Instead of
random coefficients we draw the values f(1), .., f(threshold - 1), which gives the same law (interpolation is a
bijection between values and coefficients) and leaves only num_shares - threshold + 1 values to compute: the thresholds
we use are close to the number of shares.

Draws are 64 bytes reduced mod p, within 2^-255 of uniform in total variation. Python integers do not run in constant
time; timing side channels are outside the threat model.

Guarantees:
    - Any `threshold` shares give the secret, whichever they are (`test_any_threshold_shares_recover`).
    - threshold - 1 shares are uniform whatever the secret (`test_fewer_than_threshold_shares_are_uniform`).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import comb, prod
from operator import mul

from silobayes.core.errors import InvalidInput
from silobayes.secure.machine import RandomBytes

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split_secret(secret: bytes, *, num_shares: int, threshold: int, random_bytes: RandomBytes) -> tuple[int, ...]:
    """Shares f(1), .., f(num_shares) of a 32-byte secret; any `threshold` of them recover it, fewer tell nothing."""
    if len(secret) != SECRET_BYTES:
        raise InvalidInput("secret", f"{SECRET_BYTES} bytes", len(secret), "Share a seed, not the data.")
    if not 1 <= threshold <= num_shares:
        raise InvalidInput("threshold", f"an integer in [1, {num_shares}]", threshold, "At most all shares are needed.")
    pool = random_bytes(64 * (threshold - 1))
    values = [int.from_bytes(secret, "little")]
    values += [int.from_bytes(pool[start : start + 64], "little") % PRIME for start in range(0, len(pool), 64)]
    further = [sum(map(mul, values, weights)) % PRIME for weights in _extension_weights(num_shares, threshold)]
    return (*values[1:], *further)


@lru_cache(maxsize=8)
def _extension_weights(num_shares: int, threshold: int) -> tuple[tuple[int, ...], ...]:
    """Lagrange weights of f(0), .., f(threshold - 1) in f(x), for x = threshold..num_shares.

    prod_{m != k} (x - m) / (k - m) over 0 <= m < t equals (-1)^(t-1-k) C(x, k) C(x-k-1, t-1-k), an integer.
    """
    last = threshold - 1
    return tuple(
        tuple((-1) ** (last - k) * comb(x, k) * comb(x - k - 1, last - k) % PRIME for k in range(threshold))
        for x in range(threshold, num_shares + 1)
    )


def recovery_weights(points: Sequence[int]) -> tuple[int, ...]:
    """Lagrange weights of f(0) in the values at distinct `points` > 0; the same for every secret shared alike."""
    if len(set(points)) != len(points) or min(points, default=0) < 1:
        raise InvalidInput("points", "distinct positive integers", "others", "Pass each share's number once.")
    return tuple(
        _product(-m for m in points if m != k) * pow(_product(k - m for m in points if m != k), -1, PRIME) % PRIME
        for k in points
    )


def _product(factors: Iterable[int]) -> int:
    """The product of integers mod PRIME, reduced a few factors at a time."""
    out, group = 1, []
    for factor in factors:
        group.append(factor)
        if len(group) == 32:  # differences of share numbers are small: 32 of them make a word-sized handful
            out, group = out * prod(group) % PRIME, []
    return out * prod(group) % PRIME


def combine(weights: Sequence[int], shares: Sequence[int]) -> bytes | None:
    """The secret from as many shares as it needs, or None if the shares are not those of a 32-byte secret."""
    value = sum(map(mul, weights, shares)) % PRIME
    return value.to_bytes(SECRET_BYTES, "little") if value < 1 << 8 * SECRET_BYTES else None
