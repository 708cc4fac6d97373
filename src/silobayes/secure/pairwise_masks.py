"""Pairwise masks: one server adds up masked vectors and learns their sum (Bonawitz et al. 2017, SPEC 4).

Client i sends y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij) mod 2^k. Pair masks cancel in the
sum; b_i hides y_i even from who knows all s_ij. To take masks away when clients drop out, client i deals Shamir
shares of b_i and of a recovery key r_i, and leaves with the server its seeds s_ij locked under r_i. In the end the
survivors give shares of b_i for a survivor and of r_i for a drop-out, never of both. Threshold and floor are M - T.

A sum has three rounds: `share` (deal), `mask` (masked vector), `unmask` (answer once). Every seed is for one sum: b_i
and r_i are drawn anew, s_ij comes by HKDF from the pair's secret, the study and the sum's index. Opening a drop-out's
seeds therefore says nothing about its masks in any other sum.

Where we differ from Bonawitz et al.: they deal shares of a client's X25519 secret key, which therefore must be new for
each sum; recovering it would open all sums of a key kept longer. We deal shares of r_i, which opens the seeds of one
sum alone, so that key agreement and signatures happen once for a study (`roster.py`) and a sum costs only symmetric
cryptography. What the server learns of a drop-out is the same: its pair seeds of this sum. We leave out their round of
signed survivor lists, so the server is trusted to tell all clients the same lists (semi-honest). If it does not, it
still sees no single client's vector as long as M > 3T: it would need M - T answers of each kind about one client, that
is 2 (M - T) <= M + T because only the T colluders answer twice. It could then decode a sum of fewer than M - T clients
(more than M - 2T), whose noise is less than was priced; that is the trust that is left.

Guarantees:
    - Every drop-out pattern of at most T clients, in whichever rounds, gives the exact sum of those whose masked
      vector arrived; T+1 aborts with nothing decoded (`test_every_drop_out_pattern_up_to_t`).
    - A client answers one unmask request per sum, ever (`test_second_unmask_request_is_refused`).
    - It refuses lists that overlap, are no partition, or are below the floor
      (`test_lying_unmask_requests_are_refused`).
    - Unknown sender, duplicate, replay, wrong sum, study, receiver or length: refused, state unchanged
      (`test_server_refuses_and_keeps_its_state`, `test_client_refuses_and_keeps_its_state`).
    - A masked vector is uniform to whoever misses one seed (`test_masked_vectors_are_uniform`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from silobayes.secure.fixed_point import Modulus, Residues
from silobayes.secure.machine import Abort, AbortCode, Continue, Finish, RandomBytes, Refusal, refuse
from silobayes.secure.roster import Member, Roster, sum_label
from silobayes.secure.shamir import PRIME, SHARE_BYTES, combine, recovery_weights, split_secret
from silobayes.secure.streams import KEY_BYTES, expand

NONCE_BYTES = 12
TAG_BYTES = 16
_ONCE = bytes(NONCE_BYTES)  # for keys that encrypt a single message


@dataclass(frozen=True, kw_only=True)
class SharesUpload:
    """Client to server: for each peer a sealed pair of shares, and the sender's seeds under its recovery key."""

    study_hash: bytes
    sum_index: int
    sender: int
    sealed: Mapping[int, bytes] = field(repr=False)
    locked_seeds: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class SharesDelivery:
    """Server to client: what each peer sealed for it. Who is not in it takes no part in this sum."""

    study_hash: bytes
    sum_index: int
    receiver: int
    sealed: Mapping[int, bytes] = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedVector:
    """Client to server: the vector under all its masks."""

    study_hash: bytes
    sum_index: int
    sender: int
    values: Residues = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest:
    """Server to survivors: whose vectors are in the sum, and whose are not."""

    study_hash: bytes
    sum_index: int
    survivors: tuple[int, ...]
    dropouts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnmaskAnswer:
    """Survivor to server: shares of the survivors' self seeds and of the drop-outs' recovery keys."""

    study_hash: bytes
    sum_index: int
    sender: int
    self_shares: Mapping[int, int] = field(repr=False)
    recovery_shares: Mapping[int, int] = field(repr=False)


class Phase(StrEnum):
    """Where a client or the server stands in a sum."""

    IDLE = "idle"
    SHARING = "sharing"
    MASKING = "masking"
    UNMASKING = "unmasking"


# Client


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """A client between rounds. `held[j]` are its shares of client j's self seed and recovery key in this sum."""

    member: Member
    phase: Phase = Phase.IDLE
    sum_index: int = -1
    self_seed: bytes = field(default=b"", repr=False, compare=False)
    pair_seeds: Mapping[int, bytes] = field(default_factory=dict, repr=False, compare=False)
    held: Mapping[int, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)


def share(state: ClientState, *, sum_index: int, random_bytes: RandomBytes) -> Continue[ClientState]:
    """Begin a sum: draw its seeds and deal shares of them. An index at or below an earlier one is refused."""
    if sum_index <= state.sum_index:
        return refuse(state, Refusal.WRONG_SUM)
    member, roster = state.member, state.member.roster
    me, numbers = member.number, roster.numbers
    self_seed, recovery_key = random_bytes(KEY_BYTES), random_bytes(KEY_BYTES)
    count, threshold = roster.num_clients, roster.floor
    self_shares = split_secret(self_seed, num_shares=count, threshold=threshold, random_bytes=random_bytes)
    key_shares = split_secret(recovery_key, num_shares=count, threshold=threshold, random_bytes=random_bytes)
    places = {j: place for place, j in enumerate(numbers)}
    pair_seeds = {j: member.seed(j, sum_index) for j in numbers if j != me}
    label = sum_label(roster.study_hash, sum_index)
    upload = SharesUpload(
        study_hash=roster.study_hash,
        sum_index=sum_index,
        sender=me,
        sealed={
            j: _seal(member.pair(j).seal, self_shares[place], key_shares[place], _address(label, me, j), random_bytes)
            for j, place in places.items()
            if j != me
        },
        locked_seeds=ChaCha20Poly1305(recovery_key).encrypt(_ONCE, b"".join(pair_seeds.values()), label),
    )
    fresh = ClientState(
        member=member,
        phase=Phase.SHARING,
        sum_index=sum_index,
        self_seed=self_seed,
        pair_seeds=pair_seeds,
        held={me: (self_shares[places[me]], key_shares[places[me]])},
    )
    return Continue(state=fresh, messages=(upload,))


def mask(state: ClientState, delivery: SharesDelivery, residues: Residues) -> Continue[ClientState]:
    """Open the peers' shares and send the vector under a self mask and a mask for each peer that dealt shares."""
    member, roster = state.member, state.member.roster
    refusal = _wrong_address(state, delivery)
    if refusal is None and delivery.receiver != member.number:
        refusal = Refusal.WRONG_RECEIVER
    if refusal is None and state.phase is not Phase.SHARING:
        refusal = Refusal.WRONG_PHASE
    if refusal is None and not delivery.sealed.keys() <= state.pair_seeds.keys():
        refusal = Refusal.UNKNOWN_SENDER
    if refusal is None and len(delivery.sealed) + 1 < roster.floor:
        refusal = Refusal.BELOW_FLOOR
    if refusal is not None:
        return refuse(state, refusal)
    label = sum_label(roster.study_hash, state.sum_index)
    held = dict(state.held)
    for j, sealed in delivery.sealed.items():
        shares = _open(member.pair(j).seal, sealed, _address(label, j, member.number))
        if shares is None:
            return refuse(state, Refusal.BAD_SEAL)
        held[j] = shares
    modulus = roster.modulus
    values = residues + expand(state.self_seed, modulus, residues.size)
    for j in delivery.sealed:
        _add_pair_mask(values, modulus, state.pair_seeds[j], sender=member.number, peer=j)
    vector = MaskedVector(
        study_hash=roster.study_hash, sum_index=state.sum_index, sender=member.number, values=modulus.reduce(values)
    )
    # What masked this vector is dropped: the client can neither mask a second one nor give the seeds away.
    fresh = ClientState(member=member, phase=Phase.MASKING, sum_index=state.sum_index, held=held)
    return Continue(state=fresh, messages=(vector,))


def unmask(state: ClientState, request: UnmaskRequest) -> Continue[ClientState]:
    """Answer the one request of this sum: shares of b_i for survivors, of r_i for drop-outs, never of both."""
    roster, me = state.member.roster, state.member.number
    survivors, dropouts = set(request.survivors), set(request.dropouts)
    refusal = _wrong_address(state, request)
    if refusal is None and state.phase is Phase.IDLE:
        refusal = Refusal.ALREADY_ANSWERED
    if refusal is None and state.phase is not Phase.MASKING:
        refusal = Refusal.WRONG_PHASE
    if refusal is None and survivors & dropouts:
        refusal = Refusal.OVERLAP
    if refusal is None and sorted((*request.survivors, *request.dropouts)) != list(roster.numbers):
        refusal = Refusal.NOT_A_PARTITION
    if refusal is None and len(survivors) < roster.floor:
        refusal = Refusal.BELOW_FLOOR
    if refusal is None and not (me in survivors and survivors <= state.held.keys()):
        refusal = Refusal.NOT_A_SURVIVOR
    if refusal is not None:
        return refuse(state, refusal)
    answer = UnmaskAnswer(
        study_hash=roster.study_hash,
        sum_index=state.sum_index,
        sender=me,
        self_shares={j: state.held[j][0] for j in sorted(survivors)},
        recovery_shares={j: state.held[j][1] for j in sorted(dropouts & state.held.keys())},
    )
    return Continue(state=ClientState(member=state.member, sum_index=state.sum_index), messages=(answer,))


def _wrong_address(state: ClientState, message: SharesDelivery | UnmaskRequest) -> Refusal | None:
    if message.study_hash != state.member.roster.study_hash:
        return Refusal.WRONG_STUDY
    return Refusal.WRONG_SUM if message.sum_index != state.sum_index else None


# Server


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerState:
    """The server in one sum: who dealt shares, whose vectors are in the total, and what survivors answered."""

    roster: Roster
    phase: Phase = Phase.IDLE
    sum_index: int = -1
    uploads: Mapping[int, SharesUpload] = field(default_factory=dict, repr=False)
    masked: Residues = field(default_factory=lambda: np.zeros(0, np.uint8), repr=False)
    survivors: frozenset[int] = frozenset()
    answers: Mapping[int, UnmaskAnswer] = field(default_factory=dict, repr=False)


def open_sum(state: ServerState, *, sum_index: int, dimension: int) -> Continue[ServerState]:
    """Begin a sum with an index above all earlier ones."""
    if sum_index <= state.sum_index:
        return refuse(state, Refusal.WRONG_SUM)
    masked = np.zeros(dimension, dtype=state.roster.modulus.dtype)
    return Continue(state=ServerState(roster=state.roster, phase=Phase.SHARING, sum_index=sum_index, masked=masked))


def receive_upload(state: ServerState, upload: SharesUpload) -> Continue[ServerState]:
    """Keep a client's sealed shares."""
    refusal = _refusal(state, upload, Phase.SHARING, state.uploads)
    peers = set(state.roster.numbers) - {upload.sender}
    if refusal is None and upload.sealed.keys() != peers:
        refusal = Refusal.NOT_A_PARTITION
    if refusal is None and len(upload.locked_seeds) != KEY_BYTES * len(peers) + TAG_BYTES:
        refusal = Refusal.WRONG_LENGTH
    if refusal is not None:
        return refuse(state, refusal)
    return Continue(state=replace(state, uploads={**state.uploads, upload.sender: upload}))


def deliver(state: ServerState) -> Continue[ServerState] | Abort:
    """Close the dealing and pass on to each client what the others sealed for it."""
    if state.phase is not Phase.SHARING:
        return refuse(state, Refusal.WRONG_PHASE)
    if len(state.uploads) < state.roster.floor:
        return Abort(code=AbortCode.BELOW_FLOOR)
    deliveries = tuple(
        SharesDelivery(
            study_hash=state.roster.study_hash,
            sum_index=state.sum_index,
            receiver=i,
            sealed={j: upload.sealed[i] for j, upload in sorted(state.uploads.items()) if j != i},
        )
        for i in sorted(state.uploads)
    )
    return Continue(state=replace(state, phase=Phase.MASKING), messages=deliveries)


def receive_masked(state: ServerState, vector: MaskedVector) -> Continue[ServerState]:
    """Add a masked vector to the running total."""
    refusal = _refusal(state, vector, Phase.MASKING, state.survivors)
    if refusal is None and vector.sender not in state.uploads:
        refusal = Refusal.UNKNOWN_SENDER
    if refusal is None and vector.values.dtype != state.roster.modulus.dtype:
        refusal = Refusal.MALFORMED
    if refusal is None and vector.values.shape != state.masked.shape:
        refusal = Refusal.WRONG_LENGTH
    if refusal is not None:
        return refuse(state, refusal)
    survivors = state.survivors | {vector.sender}
    return Continue(state=replace(state, masked=state.masked + vector.values, survivors=survivors))


def request_unmask(state: ServerState) -> Continue[ServerState] | Abort:
    """Close the masking and ask the survivors for shares; with fewer than the floor, stop."""
    if state.phase is not Phase.MASKING:
        return refuse(state, Refusal.WRONG_PHASE)
    if len(state.survivors) < state.roster.floor:
        return Abort(code=AbortCode.BELOW_FLOOR)
    request = UnmaskRequest(
        study_hash=state.roster.study_hash,
        sum_index=state.sum_index,
        survivors=tuple(sorted(state.survivors)),
        dropouts=tuple(sorted(set(state.roster.numbers) - state.survivors)),
    )
    return Continue(state=replace(state, phase=Phase.UNMASKING), messages=(request,))


def receive_answer(state: ServerState, answer: UnmaskAnswer) -> Continue[ServerState]:
    """Keep a survivor's shares."""
    refusal = _refusal(state, answer, Phase.UNMASKING, state.answers)
    if refusal is None and answer.sender not in state.survivors:
        refusal = Refusal.NOT_A_SURVIVOR
    if refusal is None and (
        answer.self_shares.keys() != state.survivors or answer.recovery_shares.keys() != _to_recover(state)
    ):
        refusal = Refusal.NOT_A_PARTITION
    shares = (*answer.self_shares.values(), *answer.recovery_shares.values())
    if refusal is None and not all(0 <= value < PRIME for value in shares):
        refusal = Refusal.MALFORMED
    if refusal is not None:
        return refuse(state, refusal)
    return Continue(state=replace(state, answers={**state.answers, answer.sender: answer}))


def finish(state: ServerState) -> Continue[ServerState] | Finish[Residues] | Abort:
    """The sum of the survivors' vectors, from M - T answers; with fewer there is none."""
    if state.phase is not Phase.UNMASKING:
        return refuse(state, Refusal.WRONG_PHASE)
    roster, modulus = state.roster, state.roster.modulus
    if len(state.answers) < roster.floor:
        return Abort(code=AbortCode.BELOW_FLOOR)
    chosen = sorted(state.answers.items())[: roster.floor]
    places = {number: place for place, number in enumerate(roster.numbers)}
    weights = recovery_weights([places[number] + 1 for number, _ in chosen])
    total = state.masked.copy()
    for i in sorted(state.survivors):
        self_seed = combine(weights, [answer.self_shares[i] for _, answer in chosen])
        if self_seed is None:
            return Abort(code=AbortCode.RECOVERY_FAILED)
        total -= expand(self_seed, modulus, total.size)
    for j in sorted(_to_recover(state)):
        recovery_key = combine(weights, [answer.recovery_shares[j] for _, answer in chosen])
        seeds = _unlock(recovery_key, state.uploads[j], roster)
        if seeds is None:
            return Abort(code=AbortCode.RECOVERY_FAILED)
        for i in sorted(state.survivors):
            # What the drop-out would have added for this peer is what the peer's mask lacks to cancel.
            _add_pair_mask(total, modulus, seeds[i], sender=j, peer=i)
    return Finish(result=modulus.reduce(total))


def _to_recover(state: ServerState) -> set[int]:
    """Who dealt shares, so that the others masked against it, and then sent no vector."""
    return state.uploads.keys() - state.survivors


def _refusal(
    state: ServerState,
    message: SharesUpload | MaskedVector | UnmaskAnswer,
    phase: Phase,
    heard: frozenset[int] | Mapping,
) -> Refusal | None:
    if message.study_hash != state.roster.study_hash:
        return Refusal.WRONG_STUDY
    if message.sum_index != state.sum_index:
        return Refusal.WRONG_SUM
    if message.sender not in state.roster.numbers:
        return Refusal.UNKNOWN_SENDER
    if message.sender in heard:
        return Refusal.DUPLICATE
    return Refusal.WRONG_PHASE if state.phase is not phase else None


# Masks and seals


def _add_pair_mask(values: Residues, modulus: Modulus, seed: bytes, *, sender: int, peer: int) -> None:
    """Add to `values` what `sender` adds for `peer`: the pair's stream, with the sign that makes the two cancel."""
    stream = expand(seed, modulus, values.size)
    if sender < peer:
        values += stream
    else:
        values -= stream


def _address(label: bytes, sender: int, receiver: int) -> bytes:
    return label + sender.to_bytes(4, "little") + receiver.to_bytes(4, "little")


def _seal(key: bytes, self_share: int, key_share: int, address: bytes, random_bytes: RandomBytes) -> bytes:
    # A drawn nonce, because the pair's key seals messages of both directions and all sums.
    nonce = random_bytes(NONCE_BYTES)
    text = self_share.to_bytes(SHARE_BYTES, "little") + key_share.to_bytes(SHARE_BYTES, "little")
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, address)


def _open(key: bytes, sealed: bytes, address: bytes) -> tuple[int, int] | None:
    if len(sealed) != NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES:
        return None
    try:
        text = ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], address)
    except InvalidTag:
        return None
    return int.from_bytes(text[:SHARE_BYTES], "little"), int.from_bytes(text[SHARE_BYTES:], "little")


def _unlock(recovery_key: bytes | None, upload: SharesUpload, roster: Roster) -> dict[int, bytes] | None:
    """The drop-out's seeds by peer."""
    if recovery_key is None:
        return None
    try:
        label = sum_label(roster.study_hash, upload.sum_index)
        seeds = ChaCha20Poly1305(recovery_key).decrypt(_ONCE, upload.locked_seeds, label)
    except InvalidTag:
        return None
    peers = (j for j in roster.numbers if j != upload.sender)
    return {j: seeds[KEY_BYTES * place :][:KEY_BYTES] for place, j in enumerate(peers)}
