"""Integers mod 2^k: how many bits a sum needs, and counts to residues to bytes and back (SPEC 4).

004 I takes "a fixed-point representation" without saying how large; here the modulus is computed when a study is read,
from public numbers alone, so that no sum of the study wraps around. Residues sit in the smallest unsigned type that
holds them (`Modulus.dtype`); its own wrap-around is harmless because 2^bits divides its modulus.

Guarantees:
    - decode(encode(x)) = x for x in [-2^(bits-1), 2^(bits-1)) (`test_decode_inverts_encode`).
    - A sum of residues decodes to the exact sum whenever it lies in that range (`test_sums_equal_big_integers`).
    - `modulus_for` leaves room for the worst sum plus noise of probability 2^-60
      (`test_modulus_covers_the_exact_tail`), and eight bits fewer would not (`test_modulus_is_the_least`).
    - `to_grid` never exceeds its bound, for any float (`test_grid_saturates`).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silobayes.core.errors import InvalidInput, require_count, require_number

Residues = NDArray[np.unsignedinteger[Any]]
Counts = NDArray[np.int64]

MAX_BITS = 64
_DTYPES = {bits: np.dtype(f"<u{1 << (bits // 8 - 1).bit_length()}") for bits in range(8, MAX_BITS + 1, 8)}
WRAP_BITS = 60
"""No sum of a study wraps around except with probability 2^-WRAP_BITS."""


@dataclass(frozen=True)
class Modulus:
    """Arithmetic mod 2^bits; `bits` is a multiple of 8, so that a residue is a whole number of bytes."""

    bits: int

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in range(8, MAX_BITS + 1, 8):
            raise InvalidInput("bits", "8, 16, ..., 64", self.bits, "Take it from `modulus_for`.")

    @property
    def num_bytes(self) -> int:
        """Bytes of one residue on a wire."""
        return self.bits // 8

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer type that holds a residue."""
        return _DTYPES[self.bits]

    def reduce(self, values: Residues) -> Residues:
        """Values of the residue type, reduced to [0, 2^bits)."""
        if self.bits == 8 * self.dtype.itemsize:
            return values
        return values & self.dtype.type((1 << self.bits) - 1)

    def encode(self, counts: Counts) -> Residues:
        """Signed counts mod 2^bits (two's complement)."""
        counts = np.asarray(counts)
        if counts.dtype != np.int64:
            raise InvalidInput("counts", "an int64 array", counts.dtype.name, "Round to the grid first.")
        return self.reduce(counts.astype("<i8", copy=False).view("<u8").astype(self.dtype))

    def decode(self, residues: Residues) -> Counts:
        """The representative in [-2^(bits-1), 2^(bits-1)) of each residue."""
        top = np.uint64(MAX_BITS - self.bits)
        # Moved to the top of a signed word and back: the shift down copies the sign bit.
        return (residues.astype(np.uint64) << top).view(np.int64) >> np.int64(top)

    def to_bytes(self, residues: Residues) -> bytes:
        """Little-endian, `num_bytes` each."""
        if residues.dtype != self.dtype:
            raise InvalidInput(
                "residues", f"an array of {self.dtype.name}", residues.dtype.name, "Encode counts first."
            )
        octets = np.ascontiguousarray(residues).reshape(-1, 1).view(np.uint8)
        return octets[:, : self.num_bytes].tobytes()

    def from_bytes(self, data: bytes | bytearray | memoryview | NDArray[np.uint8], *, count: int) -> Residues:
        """The `count` residues in `data`; any other length is refused."""
        octets = np.frombuffer(data, dtype=np.uint8)
        if octets.size != count * self.num_bytes:
            raise InvalidInput("data", f"{count * self.num_bytes} bytes", octets.size, "Send one whole vector.")
        if self.num_bytes == self.dtype.itemsize:
            return octets.view(self.dtype)
        wide = np.zeros((count, self.dtype.itemsize), dtype=np.uint8)
        wide[:, : self.num_bytes] = octets.reshape(count, self.num_bytes)
        return wide.view(self.dtype).reshape(count)


def noise_bound(*, noise_stddev: float, dimension: int, num_sums: int) -> int:
    """An integer b with P(|noise| >= b in some coordinate of some sum) <= 2^-60; proof in `modulus_for`."""
    log_odds = math.log(2.0) * (WRAP_BITS + 1) + math.log(dimension) + math.log(num_sums)
    tail = log_odds / 3.0 + math.sqrt((log_odds / 3.0) ** 2 + 2.0 * log_odds * noise_stddev**2)
    return math.ceil(tail * (1.0 + 1e-9))  # far above the rounding of a dozen float operations


def modulus_for(*, num_clients: int, largest_count: int, noise_stddev: float, dimension: int, num_sums: int) -> Modulus:
    """The least modulus in which no sum of the study wraps around, except with probability 2^-60 in the whole study.

    `largest_count` bounds each client's |count| before noise; `noise_stddev`, in counts, is that of the noise in the
    *whole* sum when every client arrives (the most there can be), each client's share being Skellam or discrete
    Gaussian. 0 means that counts already contain their noise.

    Proof. Let X be the summed noise of one coordinate, v = noise_stddev^2. Skellam shares sum to a Skellam variable,
    with log E exp(sX) = v (cosh s - 1). Since (2j)! >= 2 * 3^(2j-2) for j >= 1,
        cosh s - 1 = sum_j s^(2j) / (2j)! <= (s^2/2) sum_j (s/3)^(2j-2) <= (s^2/2) / (1 - s/3)   for 0 <= s < 3,
    which is Bernstein's condition with scale 1/3; hence P(|X| >= a) <= 2 exp(-a^2 / (2 (v + a/3))). (Discrete
    Gaussians have log E exp(sX) <= v s^2 / 2, which is smaller.) The right-hand side equals 2 e^-L at the positive root
    of a^2 = 2L (v + a/3), which is a = L/3 + sqrt(L^2/9 + 2Lv). With L = log(2 * 2^60 * dimension * num_sums) a union
    bound over all coordinates of all sums gives 2^-60. Otherwise every |sum| <= num_clients * largest_count + a, and
    `decode` is exact on |sum| <= 2^(bits-1) - 1. Drop-outs only take terms away. QED
    """
    fix = "Pass the study's public numbers."
    require_count("num_clients", num_clients, at_least=1, fix=fix)
    require_count("largest_count", largest_count, at_least=0, fix=fix)
    require_count("dimension", dimension, at_least=1, fix=fix)
    require_count("num_sums", num_sums, at_least=1, fix=fix)
    if noise_stddev != 0.0:
        require_number("noise_stddev", noise_stddev, above=0.0, at_most=2.0**64, fix=fix)
    noise = noise_bound(noise_stddev=noise_stddev, dimension=dimension, num_sums=num_sums) if noise_stddev else 0
    largest = num_clients * largest_count + noise
    bits = max(8, -(-(largest.bit_length() + 1) // 8) * 8)  # largest <= 2^(bits-1) - 1
    if bits > MAX_BITS:
        expected = f"sums below 2^{MAX_BITS - 1}"
        raise InvalidInput("aggregation", expected, f"up to {largest:.3g}", "Choose a coarser grid or less noise.")
    return Modulus(bits)


def to_grid(values: NDArray[np.float64], *, grid: float, largest: float) -> Counts:
    """Counts of `grid` nearest to `values`, clamped to |value| <= largest; for messages that are already private.

    Infinities are clamped. A NaN has no nearest count and is refused.
    """
    require_number("grid", grid, above=0.0, fix="Pass the distance of two neighbouring values.")
    require_number("largest", largest, above=0.0, fix="Pass a public bound of the values.")
    limit = largest_count(grid=grid, largest=largest)
    values = np.asarray(values, dtype=np.float64)
    if np.isnan(values).any():
        raise InvalidInput("values", "numbers", "nan", "The solver diverged; choose a smaller step size.")
    with np.errstate(over="ignore"):
        return np.rint(np.clip(values / grid, -float(limit), float(limit))).astype(np.int64)


def largest_count(*, grid: float, largest: float) -> int:
    """The largest |count| that `to_grid` returns."""
    ratio = largest / grid
    if not ratio <= 2.0**52:
        raise InvalidInput("grid", "at least largest / 2^52", grid, "Choose a coarser grid.")
    return math.floor(ratio)


def from_grid(counts: Counts, *, grid: float) -> NDArray[np.float64]:
    """The values that counts of `grid` stand for."""
    return counts.astype(np.float64) * grid
