"""Writes vectors/*.json: `python tests/secure/make_vectors.py`. Shares no code with the library.

Arithmetic is on Python integers, HKDF is RFC 5869 on `hmac`, key streams are AES-ECB of counter blocks, Shamir is plain
Lagrange interpolation. X25519 and ChaCha20-Poly1305 are `cryptography`'s, called as the RFCs' own examples are.
"""

import hashlib
import hmac
import json
import math
from decimal import Decimal, localcontext
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

HERE = Path(__file__).parent / "vectors"
P = 2**256 + 297
LABEL = b"silobayes pairwise masks 1 "
STUDY = hashlib.sha256(b"a study").digest()


def seeded(name: str, count: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(count)


def integers(name: str, count: int, low: int, high: int) -> list[int]:
    data = seeded(name, 16 * count)
    return [low + int.from_bytes(data[16 * i : 16 * i + 16], "little") % (high - low) for i in range(count)]


def aes_stream(key: bytes, count: int) -> bytes:
    blocks = b"".join(i.to_bytes(16, "big") for i in range(count // 16 + 1))
    return Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(blocks)[:count]


def residues_of(stream: bytes, bits: int) -> list[int]:
    step = bits // 8
    return [int.from_bytes(stream[i : i + step], "little") for i in range(0, len(stream), step)]


def to_hex(residues, bits: int) -> str:
    return b"".join(r.to_bytes(bits // 8, "little") for r in residues).hex()


def hkdf_expand(key: bytes, info: bytes, length: int) -> bytes:
    out = block = b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        out += block
    return out[:length]


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    return hkdf_expand(hmac.digest(salt, secret, "sha256"), info, length)


def check_hkdf() -> None:  # RFC 5869, test case 1
    out = hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert out.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def lagrange(points: dict[int, int], x: int) -> int:
    total = 0
    for k, value in points.items():
        numerator = denominator = 1
        for m in points:
            if m != k:
                numerator = numerator * (x - m) % P
                denominator = denominator * (k - m) % P
        total += value * numerator * pow(denominator, P - 2, P)
    return total % P


def codec() -> list[dict]:
    out = []
    for bits in (8, 16, 24, 32, 40, 48, 56, 64):
        half = 1 << (bits - 1)
        counts = [0, 1, -1, half - 1, -half, *integers(f"codec {bits}", 4, -half, half)]
        residues = [c % (1 << bits) for c in counts]
        out.append({"bits": bits, "counts": counts, "residues": residues, "bytes": to_hex(residues, bits)})
    wraps = [200, -129, 2**40, -(2**62)]
    out.append({"bits": 8, "counts": wraps, "residues": [c % 256 for c in wraps], "decoded": [-56, 127, 0, 0]})
    out += [{"bits": bits, "bad": "bits"} for bits in (0, 4, 12, 72, -8)]
    out += [
        {"bits": bits, "bad": "length", "bytes": "00" * size, "count": 3} for bits, size in ((8, 4), (24, 8), (64, 0))
    ]
    return out


def modulus() -> list[dict]:
    out = []
    for num_clients, largest, stddev, dimension, num_sums in (
        (10, 0, 0.5, 1, 1),
        (2, 63, 0.0, 1, 1),
        (2, 64, 0.0, 1, 1),
        (10, 4096, 900.0, 218, 1000),
        (200, 10**6, 3.0e4, 218, 15),
        (10**6, 2**20, 1.0e7, 1000, 1),
        (2, 2**61, 2.0**50, 10, 10),
        (4, 2**61, 0.0, 1, 1),
        (2, 2**61, 2.0**61, 10, 10),
        (10, 2**70, 1.0, 1, 1),
    ):
        with localcontext() as context:
            context.prec = 60
            log_odds = (Decimal(2) ** 61 * dimension * num_sums).ln()
            v = Decimal(stddev) ** 2
            tail = log_odds / 3 + (log_odds**2 / 9 + 2 * log_odds * v).sqrt() if stddev else Decimal(0)
        worst = num_clients * largest + math.ceil(tail)
        fitting = [bits for bits in range(8, 65, 8) if worst <= 2 ** (bits - 1) - 1]
        row = {
            "num_clients": num_clients,
            "largest_count": largest,
            "noise_stddev": stddev,
            "dimension": dimension,
            "num_sums": num_sums,
        }
        out.append({**row, "bits": fitting[0]} if fitting else {**row, "bad": "aggregation"})
    return out


def shares() -> list[dict]:
    out = []
    for bits, num_nodes, count in ((8, 2, 3), (16, 3, 5), (24, 3, 4), (32, 10, 6), (40, 4, 2), (64, 5, 7)):
        key = seeded(f"share key {bits}", 32)
        residues = integers(f"share values {bits}", count, 0, 1 << bits)
        step = count * bits // 8
        stream = aes_stream(key, step * (num_nodes - 1))
        parts = [residues_of(stream[k * step : (k + 1) * step], bits) for k in range(num_nodes - 1)]
        last = [(r - sum(column)) % (1 << bits) for r, *column in zip(residues, *parts, strict=True)]
        hexes = [to_hex(part, bits) for part in [*parts, last]]
        out.append({"bits": bits, "key": key.hex(), "residues": residues, "shares": hexes})
    return out


def node_messages() -> list[dict]:
    """One message to node 1 of 3 for sum 4, five clients of length 3, after client 2 has been heard."""
    right = {"study": STUDY.hex(), "sum_index": 4, "node_index": 1, "senders": [0], "length": 3, "dtype": "<u4"}
    changes = [
        ({}, None),
        ({"senders": [0, 4]}, None),
        ({"study": bytes(32).hex()}, "wrong_study"),
        ({"sum_index": 3}, "wrong_sum"),
        ({"sum_index": 5}, "wrong_sum"),
        ({"node_index": 0}, "wrong_receiver"),
        ({"senders": [5]}, "unknown_sender"),
        ({"senders": [-1]}, "unknown_sender"),
        ({"senders": [2]}, "duplicate"),
        ({"senders": [0, 0]}, "duplicate"),
        ({"senders": [1, 2]}, "duplicate"),
        ({"senders": []}, "wrong_length"),
        ({"length": 2}, "wrong_length"),
        ({"length": 4}, "wrong_length"),
        ({"dtype": "<u8"}, "malformed"),
        ({"dtype": "<f8"}, "malformed"),
    ]
    return [{**right, **change, "refusal": refusal} for change, refusal in changes]


def shamir() -> list[dict]:
    out = []
    for num_shares, threshold in ((2, 1), (2, 2), (3, 2), (5, 3), (7, 7), (10, 8), (12, 7)):
        secret = seeded(f"secret {num_shares}", 32)
        pool = seeded(f"pool {num_shares}", 64 * (threshold - 1))
        points = {0: int.from_bytes(secret, "little")}
        for k in range(1, threshold):
            points[k] = int.from_bytes(pool[64 * (k - 1) : 64 * k], "little") % P
        values = [lagrange(points, k) for k in range(1, num_shares + 1)]
        out.append(
            {"secret": secret.hex(), "pool": pool.hex(), "threshold": threshold, "shares": [hex(v) for v in values]}
        )
    top = (2**256 - 1).to_bytes(32, "little")
    out.append({"secret": top.hex(), "pool": "", "threshold": 1, "shares": [hex(2**256 - 1)] * 3})
    out += [
        {"bad": "secret", "secret": "00" * 31, "num_shares": 3, "threshold": 2},
        {"bad": "secret", "secret": "00" * 33, "num_shares": 3, "threshold": 2},
        {"bad": "threshold", "secret": "00" * 32, "num_shares": 3, "threshold": 0},
        {"bad": "threshold", "secret": "00" * 32, "num_shares": 3, "threshold": 4},
        {"bad": "points", "points": [1, 1]},
        {"bad": "points", "points": [0, 1]},
    ]
    return out


def word(number: int) -> bytes:
    return number.to_bytes(4, "little")


def pair_secrets(shared: bytes, one: int, other: int) -> tuple[bytes, bytes]:
    both = hkdf(shared, STUDY, LABEL + b"pair" + word(min(one, other)) + word(max(one, other)), 64)
    return both[:32], both[32:]


def mask_seed(mask: bytes, sum_index: int, one: int, other: int) -> bytes:
    info = STUDY + sum_index.to_bytes(8, "little") + word(min(one, other)) + word(max(one, other))
    return hkdf_expand(mask, LABEL + b"mask" + info, 32)


def public_key(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def exchange(secret: bytes, public: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))


def pairs() -> list[dict]:
    out = []
    for one, other, sum_index in ((0, 1, 0), (1, 0, 0), (0, 1, 1), (3, 2, 0), (0, 999, 2**40)):
        secrets = {k: seeded(f"x25519 {k}", 32) for k in (one, other)}
        shared = exchange(secrets[one], public_key(secrets[other]))
        mask, seal = pair_secrets(shared, one, other)
        out.append(
            {
                "one": one,
                "other": other,
                "sum_index": sum_index,
                "shared": shared.hex(),
                "mask": mask.hex(),
                "seal": seal.hex(),
                "seed": mask_seed(mask, sum_index, one, other).hex(),
            }
        )
    return out


def masked() -> list[dict]:
    """Whole sums: what each client sends and locks, and the sum of the survivors."""
    out = []
    for bits, num_clients, count, dropouts in (
        (8, 2, 4, []),
        (16, 3, 3, [1]),
        (24, 4, 2, [0]),
        (32, 5, 3, [0, 4]),
        (64, 5, 2, [2]),
    ):
        sum_index = 7
        name = f"masked {bits}"
        secrets = [seeded(f"{name} x25519 {i}", 32) for i in range(num_clients)]
        selves = [seeded(f"{name} self {i}", 32) for i in range(num_clients)]
        keys = [seeded(f"{name} recovery {i}", 32) for i in range(num_clients)]
        values = [integers(f"{name} values {i}", count, 0, 1 << bits) for i in range(num_clients)]
        seeds = {
            (i, j): mask_seed(pair_secrets(exchange(secrets[i], public_key(secrets[j])), i, j)[0], sum_index, i, j)
            for i in range(num_clients)
            for j in range(num_clients)
            if i != j
        }
        clients = []
        for i in range(num_clients):
            y = [
                v + s
                for v, s in zip(values[i], residues_of(aes_stream(selves[i], count * bits // 8), bits), strict=True)
            ]
            for j in range(num_clients):
                if j != i:
                    stream = residues_of(aes_stream(seeds[i, j], count * bits // 8), bits)
                    y = [a + (s if i < j else -s) for a, s in zip(y, stream, strict=True)]
            locked = ChaCha20Poly1305(keys[i]).encrypt(
                bytes(12),
                b"".join(seeds[i, j] for j in range(num_clients) if j != i),
                STUDY + sum_index.to_bytes(8, "little"),
            )
            clients.append(
                {
                    "x25519": secrets[i].hex(),
                    "self_seed": selves[i].hex(),
                    "recovery_key": keys[i].hex(),
                    "values": values[i],
                    "masked": [a % (1 << bits) for a in y],
                    "locked": locked.hex(),
                }
            )
        left = [values[i] for i in range(num_clients) if i not in dropouts]
        total = [sum(column) % (1 << bits) for column in zip(*left, strict=True)]
        out.append({"bits": bits, "sum_index": sum_index, "dropouts": dropouts, "clients": clients, "total": total})
    return out


def requests() -> list[dict]:
    """Requests to client 1 of 5 with T = 1 in sum 7, after all dealt shares and it sent its masked vector."""
    right = {"study": STUDY.hex(), "sum_index": 7, "survivors": [0, 1, 2, 3, 4], "dropouts": []}
    changes = [
        ({}, None),
        ({"survivors": [0, 1, 2, 3], "dropouts": [4]}, None),
        ({"survivors": [1, 0, 4, 3], "dropouts": [2]}, None),
        ({"study": bytes(32).hex()}, "wrong_study"),
        ({"sum_index": 6}, "wrong_sum"),
        ({"sum_index": 8}, "wrong_sum"),
        ({"dropouts": [4]}, "overlap"),
        ({"survivors": [0, 1, 2, 3], "dropouts": [3, 4]}, "overlap"),
        ({"survivors": [0, 1, 2, 3]}, "not_a_partition"),
        ({"survivors": [0, 1, 2, 3, 4, 4]}, "not_a_partition"),
        ({"survivors": [0, 1, 2, 3, 4, 5]}, "not_a_partition"),
        ({"survivors": [0, 1, 2, 3, -1], "dropouts": [4]}, "not_a_partition"),
        ({"survivors": [0, 1, 2], "dropouts": [3, 4]}, "below_floor"),
        ({"survivors": [], "dropouts": [0, 1, 2, 3, 4]}, "below_floor"),
        ({"survivors": [0, 2, 3, 4], "dropouts": [1]}, "not_a_survivor"),
    ]
    return [{**right, **change, "refusal": refusal} for change, refusal in changes]


def check_x25519() -> None:  # RFC 7748, section 6.1
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert exchange(alice, public_key(bob)).hex() == exchange(bob, public_key(alice)).hex() == shared


def check_aes() -> None:  # NIST SP 800-38A, F.5.5, whose counter starts at f0f1...: one block of it
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    block = Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(bytes(range(0xF0, 0x100)))
    assert block.hex() == "0bdf7df1591716335e9a8b15c860c502"


def check_aead() -> None:  # RFC 8439, section 2.8.2
    key, nonce = bytes(range(0x80, 0xA0)), bytes.fromhex("070000004041424344454647")
    text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    text += b"sunscreen would be it."
    out = ChaCha20Poly1305(key).encrypt(nonce, text, bytes.fromhex("50515253c0c1c2c3c4c5c6c7"))
    assert out[:16].hex() == "d31a8d34648e60db7b86afbc53ef7ec2"
    assert out[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"


MAKERS = (codec, modulus, shares, node_messages, shamir, pairs, masked, requests)


def main() -> None:
    check_hkdf()
    check_x25519()
    check_aes()
    check_aead()
    for make in MAKERS:
        rows = json.dumps(make(), indent=1)
        (HERE / f"{make.__name__}.json").write_text(rows + "\n")


if __name__ == "__main__":
    main()
