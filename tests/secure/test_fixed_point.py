import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.privacy.skellam import skellam_survival
from silobayes.secure.fixed_point import (
    Modulus,
    from_grid,
    largest_count,
    modulus_for,
    noise_bound,
    to_grid,
)
from tests.secure.cases import vectors

BITS = st.sampled_from(range(8, 65, 8))


@pytest.mark.parametrize("case", vectors("codec"), ids=str)
def test_codec_vectors(case):
    if case.get("bad") == "bits":
        with pytest.raises(InvalidInput, match="bits"):
            Modulus(case["bits"])
        return
    modulus = Modulus(case["bits"])
    if case.get("bad") == "length":
        with pytest.raises(InvalidInput, match="data"):
            modulus.from_bytes(bytes.fromhex(case["bytes"]), count=case["count"])
        return
    counts = np.array(case["counts"], dtype=np.int64)
    residues = modulus.encode(counts)
    assert residues.tolist() == case["residues"]
    assert modulus.decode(residues).tolist() == case.get("decoded", case["counts"])
    if "bytes" in case:
        data = modulus.to_bytes(residues)
        assert data.hex() == case["bytes"]
        assert modulus.from_bytes(data, count=len(counts)).tolist() == case["residues"]


@pytest.mark.parametrize("case", vectors("modulus"), ids=str)
def test_modulus_vectors(case):
    case = dict(case)
    bits, bad = case.pop("bits", None), case.pop("bad", None)
    if bad:
        with pytest.raises(InvalidInput, match=bad):
            modulus_for(**case)
    else:
        assert modulus_for(**case).bits == bits


@given(bits=BITS, data=st.data())
def test_decode_inverts_encode(bits, data):
    half = 1 << (bits - 1)
    counts = np.array(data.draw(st.lists(st.integers(-half, half - 1), max_size=20)), dtype=np.int64)
    modulus = Modulus(bits)
    residues = modulus.encode(counts)
    assert residues.dtype == modulus.dtype
    assert modulus.decode(residues).tolist() == counts.tolist()
    assert modulus.from_bytes(modulus.to_bytes(residues), count=counts.size).tolist() == residues.tolist()


@given(bits=BITS, rows=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30))
def test_sums_equal_big_integers(bits, rows):
    modulus = Modulus(bits)
    total = modulus.reduce(np.add.reduce(modulus.encode(np.array(rows, dtype=np.int64)), dtype=modulus.dtype))
    exact = sum(rows)
    decoded = int(modulus.decode(np.array([total]))[0])
    assert (decoded - exact) % (1 << bits) == 0
    assert -(1 << (bits - 1)) <= decoded < 1 << (bits - 1)


@given(
    num_clients=st.integers(1, 10**6),
    largest=st.integers(0, 2**30),
    stddev=st.one_of(st.just(0.0), st.floats(0.01, 2.0**40)),
    dimension=st.integers(1, 10**6),
    num_sums=st.integers(1, 10**6),
)
def test_modulus_is_the_least(num_clients, largest, stddev, dimension, num_sums):
    modulus = modulus_for(
        num_clients=num_clients, largest_count=largest, noise_stddev=stddev, dimension=dimension, num_sums=num_sums
    )
    noise = noise_bound(noise_stddev=stddev, dimension=dimension, num_sums=num_sums) if stddev else 0
    worst = num_clients * largest + noise
    counts = np.array([worst, -worst], dtype=np.int64)
    assert modulus.decode(modulus.encode(counts)).tolist() == counts.tolist()
    if modulus.bits > 8:
        smaller = Modulus(modulus.bits - 8)
        assert smaller.decode(smaller.encode(counts)).tolist() != counts.tolist()


@pytest.mark.parametrize(("stddev", "is_tight"), [(0.25, False), (1.0, False), (7.5, True), (120.0, True)])
@pytest.mark.parametrize("coordinates", [1, 10**5])
def test_modulus_covers_the_exact_tail(stddev, is_tight, coordinates):
    """Against exact bounds of the Skellam law: at b the tail is small enough.

    At 2/3 of b it would not be, except where the law is nearly a point and Bernstein's bound loose.
    """
    bits = 160
    _, upper = skellam_survival(Fraction(stddev) ** 2, bits)
    allowed = (1 << (bits - 60)) // coordinates
    b = noise_bound(noise_stddev=stddev, dimension=coordinates, num_sums=1)

    def tail(k):  # 2^bits P(|X| >= k), rounded up; beyond the table it is below 1
        return upper[k - 1] if k <= len(upper) else 1

    assert tail(b) <= allowed
    assert (tail(b * 2 // 3) > allowed) == is_tight


@given(values=st.lists(st.floats(allow_nan=False), max_size=20), grid=st.floats(1e-6, 1e3), ratio=st.floats(1.0, 1e9))
def test_grid_saturates(values, grid, ratio):
    largest = grid * ratio
    counts = to_grid(np.array(values), grid=grid, largest=largest)
    limit = largest_count(grid=grid, largest=largest)
    for value, count in zip(values, counts.tolist(), strict=True):
        assert abs(count) <= limit
        if abs(value) / grid <= limit:
            assert abs(Fraction(count) - Fraction(value) / Fraction(grid)) <= Fraction(1, 2) + Fraction(1, 2**20)
        else:
            assert count == math.copysign(limit, value)
    assert from_grid(counts, grid=grid).tolist() == [count * grid for count in counts.tolist()]


def test_grid_refuses():
    with pytest.raises(InvalidInput, match="values"):
        to_grid(np.array([0.0, math.nan]), grid=1.0, largest=2.0)
    with pytest.raises(InvalidInput, match="grid"):
        to_grid(np.zeros(1), grid=1e-20, largest=1e20)
    with pytest.raises(InvalidInput, match="grid"):
        to_grid(np.zeros(1), grid=math.nan, largest=1.0)


def test_encode_refuses_floats():
    with pytest.raises(InvalidInput, match="int64"):
        Modulus(32).encode(np.zeros(2))
    with pytest.raises(InvalidInput, match="uint32"):
        Modulus(32).to_bytes(np.zeros(2, dtype=np.uint64))
