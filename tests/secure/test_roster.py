from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silobayes.core.errors import InvalidInput
from silobayes.secure import roster as rosters
from silobayes.secure.machine import Refusal
from tests.secure.cases import OTHER_STUDY, STUDY, clients, identity, joined, roster, vectors


@pytest.mark.parametrize("case", vectors("pairs"), ids=lambda case: f"{case['one']}-{case['other']}")
def test_pair_vectors(case):
    pair = rosters.pair_secrets(bytes.fromhex(case["shared"]), STUDY, case["one"], case["other"])
    assert pair.mask.hex() == case["mask"]
    assert pair.seal.hex() == case["seal"]
    assert rosters.mask_seed(pair, STUDY, case["sum_index"], case["one"], case["other"]).hex() == case["seed"]


def test_pairs_agree():
    group = [state.member for state in clients(roster(4, 1))]
    seen = set()
    for i in range(4):
        for j in range(i):
            assert group[i].pair(j).mask == group[j].pair(i).mask
            assert group[i].pair(j).seal == group[j].pair(i).seal
            assert group[i].seed(j, 5) == group[j].seed(i, 5)
            seen |= {group[i].pair(j).mask, group[i].pair(j).seal, group[i].seed(j, 5), group[i].seed(j, 6)}
    assert len(seen) == 6 * 4
    other = rosters.pair_secrets(b"x" * 32, OTHER_STUDY, 0, 1)
    assert other.mask != rosters.pair_secrets(b"x" * 32, STUDY, 0, 1).mask


def test_some_of_the_clients_keep_their_numbers_and_secrets():
    whole = roster(5, 1)
    met = [state.member for state in clients(whole)]
    some = whole.among([4, 1, 2])
    assert (some.numbers, some.num_clients, some.floor) == ((1, 2, 4), 3, 2)
    assert some.among(None) == whole
    steps = [step for i, step in enumerate(joined(whole)) if i in some.numbers]
    announcements = [step.messages[0] for step in steps]
    for step in steps:
        member = rosters.meet(replace(step.state, roster=some), announcements).state
        assert member.pairs.keys() == {1, 2, 4} - {member.number}
        for j in member.pairs:
            assert member.pair(j).mask == met[member.number].pair(j).mask
            assert member.pair(j).seal == met[member.number].pair(j).seal


def test_a_client_that_is_not_asked_cannot_join_the_others():
    whole = roster(5, 1)
    steps = joined(whole)
    announcements = [step.messages[0] for step in steps]
    state = replace(steps[1].state, roster=whole.among((1, 2, 4)))
    for heard in (announcements, [announcements[i] for i in (0, 1, 2)]):
        assert rosters.meet(state, heard).refusal is Refusal.UNKNOWN_SENDER
    assert rosters.meet(state, announcements[1:3]).refusal is Refusal.NOT_A_PARTITION


@pytest.mark.parametrize("only", [(1, 0, 2), (1, 1, 2), (2, 3, 5), (-1, 0, 1), (1, 2), ()])
def test_some_of_the_clients_that_protect_nobody_are_refused(only):
    with pytest.raises(InvalidInput):
        replace(roster(5, 1), only=only)


def forged(number, *, signer, study=STUDY, key=None):
    public = key or X25519PrivateKey.from_private_bytes(b"m" * 32).public_key().public_bytes_raw()
    text = rosters.signed_text(replace(roster(4, 1), study_hash=study), number, public)
    return rosters.Announcement(sender=number, public_key=public, signature=identity(signer).sign(text))


LIES = [
    ("the server's own key under its own signature", lambda a: [*a[:3], forged(3, signer=99)], Refusal.BAD_SIGNATURE),
    ("another member's signature", lambda a: [*a[:3], forged(3, signer=2)], Refusal.BAD_SIGNATURE),
    ("another study's signature", lambda a: [*a[:3], forged(3, signer=3, study=OTHER_STUDY)], Refusal.BAD_SIGNATURE),
    ("the key exchanged", lambda a: [*a[:3], replace(a[3], public_key=a[2].public_key)], Refusal.BAD_SIGNATURE),
    ("a torn signature", lambda a: [*a[:3], replace(a[3], signature=a[3].signature[:-1])], Refusal.BAD_SIGNATURE),
    ("another's announcement", lambda a: [*a[:3], replace(a[2], sender=3)], Refusal.BAD_SIGNATURE),
    ("one missing", lambda a: a[:3], Refusal.NOT_A_PARTITION),
    ("one twice", lambda a: [*a, a[1]], Refusal.DUPLICATE),
    ("one twice, one missing", lambda a: [*a[:3], a[1]], Refusal.DUPLICATE),
    ("a stranger more", lambda a: [*a, forged(4, signer=4)], Refusal.UNKNOWN_SENDER),
    ("a stranger instead", lambda a: [*a[:3], forged(7, signer=7)], Refusal.UNKNOWN_SENDER),
    ("a negative number", lambda a: [*a[:3], replace(a[3], sender=-1)], Refusal.UNKNOWN_SENDER),
    ("another key of one's own", lambda a: [forged(0, signer=0), *a[1:]], Refusal.MALFORMED),
    ("a point of low order", lambda a: [*a[:3], forged(3, signer=3, key=b"\0" * 31 + b"\0")], Refusal.MALFORMED),
    ("a short key", lambda a: [*a[:3], forged(3, signer=3, key=b"short")], Refusal.MALFORMED),
]


@pytest.mark.parametrize(("change", "refusal"), [row[1:] for row in LIES], ids=[row[0] for row in LIES])
def test_lying_rosters_are_refused(change, refusal):
    steps = joined(roster(4, 1))
    state = steps[0].state
    step = rosters.meet(state, change([step.messages[0] for step in steps]))
    assert step.refusal is refusal
    assert step.state is state


@pytest.mark.parametrize(("num_clients", "colluding"), [(4, 2), (5, 3), (1, 0), (2, 1), (3, -1)])
def test_rosters_that_protect_nobody_are_refused(num_clients, colluding):
    with pytest.raises(InvalidInput):
        roster(num_clients, colluding)


def test_one_key_for_two_clients_is_refused():
    group = roster(3, 0)
    with pytest.raises(InvalidInput, match="identities"):
        replace(group, identities=(group.identities[0], *group.identities[:2]))
    with pytest.raises(InvalidInput, match="study_hash"):
        replace(group, study_hash=b"")
