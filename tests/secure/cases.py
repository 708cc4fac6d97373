"""Fixed randomness, whole groups of clients, and sums with drop-outs in chosen rounds."""

import hashlib
import json
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silobayes.secure import pairwise_masks as masks
from silobayes.secure import roster as rosters
from silobayes.secure.fixed_point import Modulus
from silobayes.secure.machine import Abort, Finish
from silobayes.secure.secret_sharing import Shares

STUDY = hashlib.sha256(b"a study").digest()
OTHER_STUDY = bytes(32)


def vectors(name: str) -> list[dict]:
    return json.loads((Path(__file__).parent / "vectors" / f"{name}.json").read_text())


def fixed_bytes(name: str):
    """A repeatable source of bytes, in place of the operating system's."""
    calls = 0

    def random_bytes(count: int) -> bytes:
        nonlocal calls
        calls += 1
        return hashlib.shake_256(f"{name} {calls}".encode()).digest(count)

    return random_bytes


def scripted_bytes(*first: bytes, name: str):
    """The given strings, then a fixed stream."""
    queue, rest = list(first), fixed_bytes(name)

    def random_bytes(count: int) -> bytes:
        if not queue:
            return rest(count)
        assert len(queue[0]) == count
        return queue.pop(0)

    return random_bytes


def identity(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"identity %d" % number).digest())


def roster(num_clients: int, colluding: int, bits: int = 32) -> rosters.Roster:
    keys = tuple(identity(i).public_key().public_bytes_raw() for i in range(num_clients))
    return rosters.Roster(study_hash=STUDY, identities=keys, colluding=colluding, modulus=Modulus(bits))


def joined(group: rosters.Roster, x25519=None):
    sources = [scripted_bytes(*([x25519[i]] if x25519 else []), name=f"join {i}") for i in range(group.num_clients)]
    return [rosters.join(group, i, identity=identity(i), random_bytes=source) for i, source in enumerate(sources)]


def clients(group: rosters.Roster, x25519=None) -> list[masks.ClientState]:
    steps = joined(group, x25519)
    announcements = [step.messages[0] for step in steps]
    return [masks.ClientState(member=rosters.meet(step.state, announcements).state) for step in steps]


def after_share(states, *, sum_index: int):
    """(states, uploads) after every client dealt its shares."""
    steps = [masks.share(s, sum_index=sum_index, random_bytes=fixed_bytes(f"share {i}")) for i, s in enumerate(states)]
    return [step.state for step in steps], [step.messages[0] for step in steps]


def after_mask(states, *, sum_index: int, values):
    """(states, server, masked vectors) after every client sent its masked vector and the server has none yet."""
    group = states[0].member.roster
    server = masks.open_sum(masks.ServerState(roster=group), sum_index=sum_index, dimension=len(values[0])).state
    states, uploads = after_share(states, sum_index=sum_index)
    for upload in uploads:
        server = masks.receive_upload(server, upload).state
    step = masks.deliver(server)
    steps = [masks.mask(states[d.receiver], d, values[d.receiver]) for d in step.messages]
    return [s.state for s in steps], step.state, [s.messages[0] for s in steps]


NEVER, SHARES, MASKS, ANSWERS = range(4)
"""The last thing a client does in a sum."""


def run_sum(states, values, last_deeds, *, sum_index: int):
    """The server's last step when client i stops after `last_deeds[i]`."""
    server = masks.ServerState(roster=states[0].member.roster)
    server = masks.open_sum(server, sum_index=sum_index, dimension=len(values[0])).state
    states = dict(enumerate(states))
    for i in states:
        if last_deeds[i] >= SHARES:
            step = masks.share(states[i], sum_index=sum_index, random_bytes=fixed_bytes(f"share {i}"))
            states[i] = step.state
            server = masks.receive_upload(server, step.messages[0]).state
    step = masks.deliver(server)
    if isinstance(step, Abort):
        return step
    server = step.state
    for delivery in step.messages:
        i = delivery.receiver
        if last_deeds[i] >= MASKS:
            masked = masks.mask(states[i], delivery, values[i])
            assert masked.refusal is None
            states[i] = masked.state
            server = masks.receive_masked(server, masked.messages[0]).state
    step = masks.request_unmask(server)
    if isinstance(step, Abort):
        return step
    server = step.state
    for i in step.messages[0].survivors:
        if last_deeds[i] >= ANSWERS:
            answer = masks.unmask(states[i], step.messages[0])
            assert answer.refusal is None
            server = masks.receive_answer(server, answer.messages[0]).state
    last = masks.finish(server)
    assert isinstance(last, Abort | Finish)
    return last


def message(senders, values, *, sum_index=4, node_index=0, study_hash=STUDY) -> Shares:
    return Shares(
        study_hash=study_hash,
        sum_index=sum_index,
        node_index=node_index,
        senders=np.asarray(senders, dtype=np.int64),
        values=values,
    )
