"""Who takes part in sums with pairwise masks, and the secrets each pair agrees on once for a study.

Identity keys (Ed25519) are in the study; a client announces one X25519 key for the study, signed with its identity; a
signature is checked against the study's key and never against one that came with a message, so the server that relays
announcements cannot sit in the middle. From X25519 and HKDF-SHA256 (RFC 7748, 5869) each pair gets two secrets: one
that per-sum mask seeds are derived from, and one that seals messages from one to the other.

Guarantees:
    - Both ends of a pair derive the same secrets, and no two pairs or studies share any (`test_pairs_agree`).
    - A roster with a forged, missing, doubled or foreign announcement is refused (`test_lying_rosters_are_refused`).
    - In a sum over some of the clients they keep their numbers and their pairs' secrets
      (`test_some_of_the_clients_keep_their_numbers_and_secrets`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from silobayes.core.errors import InvalidInput
from silobayes.secure.fixed_point import Modulus
from silobayes.secure.machine import Continue, RandomBytes, Refusal, refuse
from silobayes.secure.secret_sharing import require_floor, require_hash, require_some

_LABEL = b"silobayes pairwise masks 1 "


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The study's word on who takes part: `identities[i]` is client i's Ed25519 public key.

    `only` names the clients of a sum over some of them, in ascending order; None: all. They keep their numbers, so that
    a pair has the same secrets in every sum.
    """

    study_hash: bytes
    identities: tuple[bytes, ...]
    colluding: int
    modulus: Modulus
    only: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_some(self.only, len(self.identities))
        require_floor(self.num_clients, self.colluding)
        require_hash(self.study_hash)
        if len(set(self.identities)) != len(self.identities):
            raise InvalidInput("identities", "one key for each client", "a key twice", "Give each client its own.")
        if 2 * self.colluding >= self.num_clients:
            expected = f"less than half of {self.num_clients} clients"
            raise InvalidInput("colluding", expected, self.colluding, "Colluders could pool enough shares of a seed.")

    def among(self, clients: Sequence[int] | None) -> "Roster":
        """The same for a sum over some of the clients (None: over all)."""
        return replace(self, only=None if clients is None else tuple(sorted(clients)))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Who takes part, in ascending order; a client's place among them is that of its shares."""
        return tuple(range(len(self.identities))) if self.only is None else self.only

    @property
    def num_clients(self) -> int:
        """M: how many take part."""
        return len(self.identities) if self.only is None else len(self.only)

    @property
    def floor(self) -> int:
        """The fewest clients whose sum may be seen, and as many shares recover a seed."""
        return self.num_clients - self.colluding


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A client's X25519 public key for the study, under its identity's signature."""

    sender: int
    public_key: bytes
    signature: bytes


@dataclass(frozen=True, kw_only=True)
class PairSecrets:
    """What one pair of clients shares for the whole study. Neither leaves the two clients."""

    mask: bytes = field(repr=False, compare=False)
    seal: bytes = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A client that has met the others: `pairs[j]` are its secrets with client j."""

    roster: Roster
    number: int
    pairs: Mapping[int, PairSecrets] = field(repr=False, compare=False)

    def pair(self, other: int) -> PairSecrets:
        """The secrets with client `other`."""
        return self.pairs[other]

    def seed(self, other: int, sum_index: int) -> bytes:
        """The mask seed of this client and `other` in one sum."""
        return mask_seed(self.pair(other), self.roster.study_hash, sum_index, self.number, other)


@dataclass(frozen=True, kw_only=True)
class JoiningState:
    """A client that has announced its key and waits for the others'."""

    roster: Roster
    number: int
    secret_key: bytes = field(repr=False, compare=False)


def join(
    roster: Roster, number: int, *, identity: Ed25519PrivateKey, random_bytes: RandomBytes
) -> Continue[JoiningState]:
    """Draw this client's key for the study and announce it."""
    secret_key = random_bytes(32)
    public_key = X25519PrivateKey.from_private_bytes(secret_key).public_key().public_bytes_raw()
    announcement = Announcement(
        sender=number, public_key=public_key, signature=identity.sign(signed_text(roster, number, public_key))
    )
    return Continue(state=JoiningState(roster=roster, number=number, secret_key=secret_key), messages=(announcement,))


def meet(state: JoiningState, announcements: Sequence[Announcement]) -> Continue[JoiningState] | Continue[Member]:
    """Check everybody's announcement and agree on the secrets with each other client."""
    roster = state.roster
    numbers = [item.sender for item in announcements]
    if len(set(numbers)) != len(numbers):
        return refuse(state, Refusal.DUPLICATE)
    if not set(numbers) <= set(roster.numbers):
        return refuse(state, Refusal.UNKNOWN_SENDER)
    if len(numbers) != roster.num_clients:
        return refuse(state, Refusal.NOT_A_PARTITION)
    secret_key = X25519PrivateKey.from_private_bytes(state.secret_key)
    pairs: dict[int, PairSecrets] = {}
    for item in sorted(announcements, key=lambda item: item.sender):
        text = signed_text(roster, item.sender, item.public_key)
        if not is_signed(roster.identities[item.sender], text, item.signature):
            return refuse(state, Refusal.BAD_SIGNATURE)
        if item.sender == state.number:
            if item.public_key != secret_key.public_key().public_bytes_raw():
                return refuse(state, Refusal.MALFORMED)
            continue
        try:
            shared = secret_key.exchange(X25519PublicKey.from_public_bytes(item.public_key))
        except ValueError:  # not 32 bytes, or of low order
            return refuse(state, Refusal.MALFORMED)
        pairs[item.sender] = pair_secrets(shared, roster.study_hash, state.number, item.sender)
    return Continue(state=Member(roster=roster, number=state.number, pairs=pairs))


def signed_text(roster: Roster, sender: int, public_key: bytes) -> bytes:
    """What an identity signs: the study, who speaks, and the key."""
    return _LABEL + b"key" + roster.study_hash + _word(sender) + public_key


@lru_cache(maxsize=4096)  # a simulation has every client check the same announcements
def is_signed(identity: bytes, text: bytes, signature: bytes) -> bool:
    """Whether the owner of the Ed25519 key `identity` signed `text`."""
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, text)
    except InvalidSignature:
        return False
    return True


def pair_secrets(shared: bytes, study_hash: bytes, one: int, other: int) -> PairSecrets:
    """HKDF of an X25519 secret, for this study and this pair."""
    info = _word(min(one, other)) + _word(max(one, other))
    both = HKDF(hashes.SHA256(), length=64, salt=study_hash, info=_LABEL + b"pair" + info).derive(shared)
    return PairSecrets(mask=both[:32], seal=both[32:])


def mask_seed(pair: PairSecrets, study_hash: bytes, sum_index: int, one: int, other: int) -> bytes:
    """The seed of the mask that this pair uses in this sum and in no other."""
    info = sum_label(study_hash, sum_index) + _word(min(one, other)) + _word(max(one, other))
    return HKDFExpand(hashes.SHA256(), length=32, info=_LABEL + b"mask" + info).derive(pair.mask)


def sum_label(study_hash: bytes, sum_index: int) -> bytes:
    """The bytes that tie a message or a key to one sum of one study."""
    return study_hash + sum_index.to_bytes(8, "little")


def _word(number: int) -> bytes:
    return number.to_bytes(4, "little")
