"""Key streams: AES-256 in counter mode from a zero counter, one key for one stream.

Every key here is drawn or derived for one stream alone, which is why a constant counter start is right. `cryptography`
makes the stream; this file only shapes it into residues.
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from silobayes.secure.fixed_point import Modulus, Residues

KEY_BYTES = 32

_ZEROS = bytes(1 << 18)  # the plain text, encrypted in pieces that stay in the processor's cache
_START = modes.CTR(bytes(16))


def keystream(key: bytes, num_bytes: int) -> NDArray[np.uint8]:
    """The first `num_bytes` bytes of the stream of `key` (32 bytes)."""
    encryptor = Cipher(algorithms.AES256(key), _START).encryptor()
    if num_bytes <= len(_ZEROS):
        return np.frombuffer(encryptor.update(_ZEROS[:num_bytes]), dtype=np.uint8)
    out = np.empty(num_bytes, dtype=np.uint8)
    view = out.data
    for start in range(0, num_bytes, len(_ZEROS)):
        piece = view[start : start + len(_ZEROS)]
        encryptor.update_into(memoryview(_ZEROS)[: len(piece)], piece)
    return out


def expand(key: bytes, modulus: Modulus, count: int) -> Residues:
    """`count` uniform residues from the stream of `key`."""
    return modulus.from_bytes(keystream(key, count * modulus.num_bytes), count=count)
