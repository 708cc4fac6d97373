"""The one source of secret randomness: an AES-256-CTR key stream keyed by the operating system (DESIGN 6).

Noise, batch indices and randomised answers are drawn from here and from nowhere else. Model randomness (initial values,
Monte Carlo draws of a public posterior) has seeds and belongs to JAX; it never touches this file.

Guarantees:
    - Two objects, two processes, and a process and its forks never share a stream (`test_eight_forks_eight_draws`).
    - A stream does not print, pickle or copy (`test_secrets_do_not_print_pickle_or_copy`).
    - `uniform_below` and `bernoulli` are exact: rejection and lazily read bits, no rounding
      (`test_uniform_below_is_uniform`, `test_bernoulli_is_exact_beyond_64_bits`).
    - `normal_float32` is finite and its radius has 64 bits (`test_normals_are_finite_and_reach_beyond_eight_sigma`).
    - Threads may share one object (`test_threads_never_see_the_same_bytes`).
"""

import hashlib
import math
import os
import threading
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from silobayes.core.errors import InvalidInput, require_count

Size = int | tuple[int, ...]

_ZEROS = bytes(1 << 18)  # the plain text; encrypted in pieces that stay in the processor's cache
_PAIRS = 1 << 14  # Box-Muller pairs at a time, for the same reason
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


# The process id alone would repeat a stream where a grandchild gets the recycled id of its grandparent.
os.register_at_fork(after_in_child=_count_fork)


class _Stream:
    """One key's position. Replaced as a whole after a fork, lock included: the parent's lock may have been held."""

    __slots__ = ("cipher", "lock", "owner")

    def __init__(self, key: bytes) -> None:
        self.cipher: CipherContext = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self.lock = threading.Lock()
        self.owner = (os.getpid(), _forks)


class Entropy:
    """A cryptographic random stream. `Entropy.from_os()` is the normal way to get one.

    AES-256 in counter mode from a zero counter under a fresh 256-bit key: telling n bytes of it from true randomness
    succeeds with probability at most about (n / 16)^2 / 2^129 beyond breaking AES itself.
    """

    __slots__ = ("_is_private", "_stream")

    def __init__(self, *, fixed_key: bytes | None) -> None:
        self._is_private = fixed_key is None
        self._stream = _Stream(os.urandom(32) if fixed_key is None else fixed_key)

    @classmethod
    def from_os(cls) -> "Entropy":
        """A stream under a new key from the operating system; nobody can repeat it, not even its owner."""
        return cls(fixed_key=None)

    @classmethod
    def not_private(cls, seed: int) -> "Entropy":
        """A fixed stream for tests and demonstrations; what is made from it must be stamped NOT PRIVATE."""
        require_count("seed", seed, at_least=0, fix="Pass a non-negative integer.")
        return cls(fixed_key=hashlib.sha256(b"silobayes not private %d" % seed).digest())

    @property
    def is_private(self) -> bool:
        """False if the stream can be repeated by whoever knows the seed."""
        return self._is_private

    def __repr__(self) -> str:
        return "Entropy(from_os)" if self._is_private else "Entropy(NOT PRIVATE)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("Expected a stream that stays in its process. Call Entropy.from_os() where it is needed.")

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce__()

    def _fill(self, out: memoryview) -> None:
        stream = self._stream
        if self._is_private and stream.owner != (os.getpid(), _forks):
            stream = self._stream = _Stream(os.urandom(32))
        with stream.lock:
            for start in range(0, len(out), len(_ZEROS)):
                piece = out[start : start + len(_ZEROS)]
                stream.cipher.update_into(memoryview(_ZEROS)[: len(piece)], piece)

    def random_bytes(self, count: int) -> bytes:
        """`count` uniform bytes."""
        out = bytearray(require_count("count", count, at_least=0, fix="Pass a number of bytes."))
        self._fill(memoryview(out))
        return bytes(out)

    def uint64(self, size: Size) -> NDArray[np.uint64]:
        """Uniform 64-bit integers."""
        out = np.empty(size, dtype="<u8")
        self._fill(out.reshape(-1).view(np.uint8).data)
        return out.astype(np.uint64, copy=False)

    def bits(self, count: int) -> NDArray[np.uint8]:
        """`count` fair coins, 0 or 1."""
        return np.unpackbits(np.frombuffer(self.random_bytes((count + 7) // 8), dtype=np.uint8), count=count)

    def uniform_below(self, bound: int, size: Size) -> NDArray[np.uint64]:
        """Uniform integers in [0, bound), 1 <= bound <= 2^64, without modulo bias."""
        if not 1 <= bound <= 1 << 64:
            raise InvalidInput("bound", "an integer in [1, 2^64]", bound, "Pass the number of outcomes.")
        if bound == 1 << 64:
            return self.uint64(size)
        out = self.uint64(size)
        flat = out.reshape(-1)
        last_fair = np.uint64((1 << 64) - (1 << 64) % bound - 1)  # the largest value below a multiple of bound
        pending = np.flatnonzero(flat > last_fair)
        while pending.size:
            flat[pending] = self.uint64(pending.size)
            pending = pending[flat[pending] > last_fair]
        flat %= np.uint64(bound)
        return out

    def bernoulli(self, probability: Fraction | float, size: Size) -> NDArray[np.bool_]:
        """True with exactly the given probability (a float is read as the rational that it is)."""
        exact = Fraction(probability) if math.isfinite(probability) else Fraction(-1)
        if not 0 <= exact <= 1:
            raise InvalidInput("probability", "a number in [0, 1]", probability, "Pass a probability.")
        if exact == 1:
            return np.ones(size, dtype=np.bool_)
        threshold, rest = divmod(exact.numerator << 64, exact.denominator)
        head = self.uint64(size)
        out = head < np.uint64(threshold)
        if rest:
            ties = head == np.uint64(threshold)
            if ties.any():  # the first 64 bits agree: the next bits are compared with the rest of the probability
                out[ties] = self.bernoulli(Fraction(rest, exact.denominator), int(ties.sum()))
        return out

    def normal_float32(self, shape: Size) -> NDArray[np.float32]:
        """Standard normal floats for noise inside compiled loops, which is declared as float noise (DESIGN 6).

        Box-Muller with a 64-bit radius in float64 (tails reach 9.4) and a 32-bit angle in float32.
        """
        out = np.empty(shape, dtype=np.float32)
        flat = out.reshape(-1)
        pairs = min(_PAIRS, (flat.size + 1) // 2)
        # Room for all pieces, made once: the system hands out new pages more slowly than they are filled.
        wide, narrow = np.empty((2, pairs)), np.empty((2, pairs), dtype=np.float32)
        for start in range(0, flat.size, 2 * _PAIRS):
            self._fill_normals(flat[start : start + 2 * _PAIRS], wide, narrow)
        return out

    def _fill_normals(self, out: NDArray[np.float32], wide: NDArray[np.float64], narrow: NDArray[np.float32]) -> None:
        count = (out.size + 1) // 2
        (uniform, top), (radius, angle) = wide[:, :count], narrow[:, :count]
        words = self.uint64(count + (count + 1) // 2)
        # Read as signed, because processors convert nothing else quickly; then 2^64 more where the top bit is set.
        uniform[:] = words[:count].view(np.int64)
        top[:] = (words[:count] >> np.uint64(63)).view(np.int64)
        top *= 2.0**64
        uniform += top
        uniform += 1.0  # in (0, 2^64]: the logarithm below is finite
        uniform *= 2.0**-64
        np.log(uniform, out=uniform)
        uniform *= -2.0
        radius[:] = uniform
        np.sqrt(radius, out=radius)
        angle[:] = words[count:].view(np.int32)[:count]
        angle *= np.float32(math.pi / 2**31)
        first, second = out[:count], out[count:]
        np.cos(angle, out=first)
        first *= radius
        np.sin(angle[: second.size], out=second)
        second *= radius[: second.size]
