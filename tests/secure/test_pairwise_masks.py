import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from silobayes.secure import pairwise_masks as masks
from silobayes.secure.fixed_point import Modulus
from silobayes.secure.machine import Abort, AbortCode, Finish, Refusal
from silobayes.secure.pairwise_masks import ClientState, Phase
from silobayes.secure.shamir import PRIME
from silobayes.secure.streams import expand
from tests.privacy.goodness import fits_uniform
from tests.secure.cases import (
    ANSWERS,
    MASKS,
    NEVER,
    OTHER_STUDY,
    SHARES,
    STUDY,
    after_mask,
    after_share,
    clients,
    fixed_bytes,
    roster,
    run_sum,
    scripted_bytes,
    vectors,
)

SUM = 7
FIVE = clients(roster(5, 1))
VALUES = list(np.random.default_rng(2).integers(0, 1 << 32, (5, 3)).astype(np.uint32))


@pytest.mark.parametrize("case", vectors("masked"), ids=lambda case: f"{case['bits']} bits")
def test_mask_vectors(case):
    """What each client sends and locks, to the byte, and the sum when some never send it."""
    rows = case["clients"]
    count, gone = len(rows), set(case["dropouts"])
    modulus = Modulus(case["bits"])
    group = clients(roster(count, len(gone), case["bits"]), [bytes.fromhex(row["x25519"]) for row in rows])
    server = masks.open_sum(
        masks.ServerState(roster=group[0].member.roster), sum_index=SUM, dimension=len(case["total"])
    ).state
    for i, row in enumerate(rows):
        drawn = (bytes.fromhex(row["self_seed"]), bytes.fromhex(row["recovery_key"]))
        step = masks.share(group[i], sum_index=case["sum_index"], random_bytes=scripted_bytes(*drawn, name=str(i)))
        group[i] = step.state
        assert step.messages[0].locked_seeds.hex() == row["locked"]
        server = masks.receive_upload(server, step.messages[0]).state
    delivered = masks.deliver(server)
    server = delivered.state
    for delivery in delivered.messages:
        i = delivery.receiver
        step = masks.mask(group[i], delivery, np.array(rows[i]["values"], dtype=modulus.dtype))
        group[i] = step.state
        assert step.messages[0].values.tolist() == rows[i]["masked"]
        if i not in gone:
            server = masks.receive_masked(server, step.messages[0]).state
    requested = masks.request_unmask(server)
    server = requested.state
    for i in requested.messages[0].survivors:
        server = masks.receive_answer(server, masks.unmask(group[i], requested.messages[0]).messages[0]).state
    result = masks.finish(server)
    assert isinstance(result, Finish)
    assert result.result.tolist() == case["total"]


@pytest.mark.parametrize("colluding", [0, 1, 2])
def test_every_drop_out_pattern_up_to_t(colluding):
    """All 4^5 ways in which five clients stop: never, after dealing, after masking, after answering."""
    group = clients(roster(5, colluding))
    for deeds in product((NEVER, SHARES, MASKS, ANSWERS), repeat=5):
        if deeds.count(ANSWERS) < 5 - colluding - 1:
            continue  # far below the floor: the next test
        last = run_sum(group, VALUES, deeds, sum_index=SUM)
        if deeds.count(ANSWERS) >= 5 - colluding:
            survivors = [i for i in range(5) if deeds[i] >= MASKS]
            exact = [sum(int(VALUES[i][c]) for i in survivors) % 2**32 for c in range(3)]
            assert isinstance(last, Finish)
            assert last.result.tolist() == exact
        else:
            assert last == Abort(code=AbortCode.BELOW_FLOOR)


@pytest.mark.parametrize("deeds", [(NEVER,) * 5, (SHARES,) * 5, (MASKS,) * 5, (MASKS, MASKS, NEVER, SHARES, ANSWERS)])
def test_far_below_the_floor_aborts(deeds):
    assert run_sum(FIVE, VALUES, deeds, sum_index=SUM) == Abort(code=AbortCode.BELOW_FLOOR)


@pytest.mark.parametrize("case", vectors("requests"), ids=str)
def test_lying_unmask_requests_are_refused(case):
    states, _, _ = after_mask(FIVE, sum_index=SUM, values=VALUES)
    state = states[1]
    before = frozen(state)
    request = masks.UnmaskRequest(
        study_hash=bytes.fromhex(case["study"]),
        sum_index=case["sum_index"],
        survivors=tuple(case["survivors"]),
        dropouts=tuple(case["dropouts"]),
    )
    step = masks.unmask(state, request)
    assert step.refusal == case["refusal"]
    assert (step.state is state) == (case["refusal"] is not None)
    assert frozen(state) == before
    if case["refusal"] is None:
        (answer,) = step.messages
        assert answer.self_shares.keys() == set(case["survivors"])
        assert answer.recovery_shares.keys() == set(case["dropouts"])
    else:
        assert step.messages == ()


def frozen(state) -> dict:
    """A deep copy of everything in a state, arrays as lists."""
    return {k: v.tolist() if isinstance(v, np.ndarray) else copy.deepcopy(v) for k, v in vars(state).items()}


def test_in_a_sum_over_some_of_the_clients_the_others_are_strangers():
    some = FIVE[1].member.roster.among((1, 2, 4))
    server = masks.open_sum(masks.ServerState(roster=some), sum_index=SUM, dimension=3).state
    _, uploads = after_share(FIVE, sum_index=SUM)
    for i, refusal in ((0, Refusal.UNKNOWN_SENDER), (1, Refusal.NOT_A_PARTITION)):  # client 1 dealt to all five
        step = masks.receive_upload(server, uploads[i])
        assert step.refusal is refusal
        assert step.state is server
    own = [replace(state, member=replace(state.member, roster=some)) for state in FIVE]
    states, server, _ = after_mask_of(own, server, some.numbers)
    request = masks.UnmaskRequest(study_hash=STUDY, sum_index=SUM, survivors=(1, 2, 4), dropouts=(0, 3))
    assert masks.unmask(states[1], request).refusal is Refusal.NOT_A_PARTITION
    assert masks.unmask(states[1], replace(request, dropouts=())).refusal is None


def after_mask_of(group, server, numbers):
    """The clients of these numbers, the server, and the deliveries, after each of them sent its masked vector."""
    states = dict(enumerate(group))
    for i in numbers:
        step = masks.share(states[i], sum_index=SUM, random_bytes=fixed_bytes(f"share {i}"))
        states[i] = step.state
        server = masks.receive_upload(server, step.messages[0]).state
    delivered = masks.deliver(server)
    for delivery in delivered.messages:
        states[delivery.receiver] = masks.mask(states[delivery.receiver], delivery, VALUES[delivery.receiver]).state
    return states, delivered.state, delivered.messages


def full_request(**change):
    right = {"study_hash": STUDY, "sum_index": SUM, "survivors": (0, 1, 2, 3, 4), "dropouts": ()}
    return masks.UnmaskRequest(**{**right, **change})


def test_second_unmask_request_is_refused():
    """The same lists or others, in this sum or once the next has begun: one answer, ever."""
    states, _, _ = after_mask(FIVE, sum_index=SUM, values=VALUES)
    answered = masks.unmask(states[0], full_request()).state
    for request in (full_request(), full_request(survivors=(0, 1, 2, 3), dropouts=(4,))):
        step = masks.unmask(answered, request)
        assert step.refusal is Refusal.ALREADY_ANSWERED
        assert step.state is answered
        assert step.messages == ()
    assert not answered.held
    moved_on = masks.share(answered, sum_index=SUM + 1, random_bytes=fixed_bytes("next")).state
    assert masks.unmask(moved_on, full_request()).refusal is Refusal.WRONG_SUM


def test_an_unmask_request_before_the_vector_is_sent_is_refused():
    states, _ = after_share(FIVE, sum_index=SUM)
    assert masks.unmask(states[0], full_request()).refusal is Refusal.WRONG_PHASE


def test_who_dealt_no_shares_is_no_survivor():
    """The server claims a vector of client 4, which never dealt shares."""
    states, uploads = after_share(FIVE, sum_index=SUM)
    sealed = {j: uploads[j].sealed[0] for j in (1, 2, 3)}
    delivery = masks.SharesDelivery(study_hash=STUDY, sum_index=SUM, receiver=0, sealed=sealed)
    state = masks.mask(states[0], delivery, VALUES[0]).state
    assert masks.unmask(state, full_request()).refusal is Refusal.NOT_A_SURVIVOR
    answer = masks.unmask(state, full_request(survivors=(0, 1, 2, 3), dropouts=(4,))).messages[0]
    assert answer.recovery_shares == {}


def right_delivery(uploads, receiver=0):
    sealed = {j: upload.sealed[receiver] for j, upload in enumerate(uploads) if j != receiver}
    return masks.SharesDelivery(study_hash=STUDY, sum_index=SUM, receiver=receiver, sealed=sealed)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda d: replace(d, study_hash=OTHER_STUDY), Refusal.WRONG_STUDY),
        (lambda d: replace(d, sum_index=SUM - 1), Refusal.WRONG_SUM),
        (lambda d: replace(d, receiver=1), Refusal.WRONG_RECEIVER),
        (lambda d: replace(d, sealed={**d.sealed, 5: d.sealed[1]}), Refusal.UNKNOWN_SENDER),
        (lambda d: replace(d, sealed={**d.sealed, 0: d.sealed[1]}), Refusal.UNKNOWN_SENDER),
        (lambda d: replace(d, sealed={j: d.sealed[j] for j in (1, 2)}), Refusal.BELOW_FLOOR),
        (lambda d: replace(d, sealed={**d.sealed, 1: d.sealed[2], 2: d.sealed[1]}), Refusal.BAD_SEAL),
        (lambda d: replace(d, sealed={**d.sealed, 1: d.sealed[1][:-1]}), Refusal.BAD_SEAL),
        (lambda d: replace(d, sealed={**d.sealed, 1: d.sealed[1][:-1] + b"\0"}), Refusal.BAD_SEAL),
    ],
)
def test_client_refuses_and_keeps_its_state(change, refusal):
    states, uploads = after_share(FIVE, sum_index=SUM)
    before = frozen(states[0])
    step = masks.mask(states[0], change(right_delivery(uploads)), VALUES[0])
    assert step.refusal is refusal
    assert step.state is states[0]
    assert frozen(states[0]) == before


def test_sealed_shares_of_another_sum_are_refused():
    """A replay: what client 1 sealed for sum 6, delivered in sum 7."""
    states, old = after_share(FIVE, sum_index=SUM - 1)
    states, uploads = after_share(states, sum_index=SUM)
    delivery = right_delivery(uploads)
    replayed = replace(delivery, sealed={**delivery.sealed, 1: old[1].sealed[0]})
    assert masks.mask(states[0], replayed, VALUES[0]).refusal is Refusal.BAD_SEAL


def test_a_client_masks_one_vector_in_a_sum():
    states, uploads = after_share(FIVE, sum_index=SUM)
    state = masks.mask(states[0], right_delivery(uploads), VALUES[0]).state
    assert masks.mask(state, right_delivery(uploads), VALUES[1]).refusal is Refusal.WRONG_PHASE
    assert not state.self_seed
    assert not state.pair_seeds
    assert masks.share(state, sum_index=SUM, random_bytes=fixed_bytes("again")).refusal is Refusal.WRONG_SUM


def server_in(phase: Phase):
    """A server that has heard from clients 0..3 in this phase, and each client's message for it."""
    states, server, vectors_sent = after_mask(FIVE, sum_index=SUM, values=VALUES)
    if phase is Phase.SHARING:
        _, messages = after_share(FIVE, sum_index=SUM)
        server = masks.open_sum(masks.ServerState(roster=server.roster), sum_index=SUM, dimension=3).state
        receive = masks.receive_upload
    elif phase is Phase.MASKING:
        messages, receive = vectors_sent, masks.receive_masked
    else:
        for vector in vectors_sent:
            server = masks.receive_masked(server, vector).state
        step = masks.request_unmask(server)
        server, receive = step.state, masks.receive_answer
        messages = [masks.unmask(state, step.messages[0]).messages[0] for state in states]
    for message in messages[:4]:
        server = receive(server, message).state
    return server, receive, messages


COMMON = [
    (lambda m: replace(m, study_hash=OTHER_STUDY), Refusal.WRONG_STUDY),
    (lambda m: replace(m, sum_index=SUM - 1), Refusal.WRONG_SUM),
    (lambda m: replace(m, sum_index=SUM + 1), Refusal.WRONG_SUM),
    (lambda m: replace(m, sender=5), Refusal.UNKNOWN_SENDER),
    (lambda m: replace(m, sender=-1), Refusal.UNKNOWN_SENDER),
    (lambda m: replace(m, sender=2), Refusal.DUPLICATE),
]
SPECIAL = {
    Phase.SHARING: [
        (lambda m: replace(m, sealed={j: m.sealed[j] for j in (0, 1, 2)}), Refusal.NOT_A_PARTITION),
        (lambda m: replace(m, sealed={**m.sealed, 4: b""}), Refusal.NOT_A_PARTITION),
        (lambda m: replace(m, locked_seeds=m.locked_seeds[1:]), Refusal.WRONG_LENGTH),
    ],
    Phase.MASKING: [
        (lambda m: replace(m, values=m.values[:2]), Refusal.WRONG_LENGTH),
        (lambda m: replace(m, values=m.values[None]), Refusal.WRONG_LENGTH),
        (lambda m: replace(m, values=m.values.astype(np.uint64)), Refusal.MALFORMED),
    ],
    Phase.UNMASKING: [
        (lambda m: replace(m, self_shares={j: m.self_shares[j] for j in (0, 1)}), Refusal.NOT_A_PARTITION),
        (lambda m: replace(m, recovery_shares={2: 1}), Refusal.NOT_A_PARTITION),
        (lambda m: replace(m, self_shares={**m.self_shares, 0: PRIME}), Refusal.MALFORMED),
        (lambda m: replace(m, self_shares={**m.self_shares, 0: -1}), Refusal.MALFORMED),
    ],
}


@pytest.mark.parametrize(
    ("phase", "change", "refusal"),
    [(phase, *row) for phase, rows in SPECIAL.items() for row in (*COMMON, *rows)],
)
def test_server_refuses_and_keeps_its_state(phase, change, refusal):
    server, receive, messages = server_in(phase)
    before = frozen(server)
    step = receive(server, change(messages[4]))
    assert step.refusal is refusal
    assert step.state is server
    assert frozen(server) == before
    assert receive(server, messages[4]).refusal is None


def test_server_steps_out_of_turn_are_refused():
    sharing, _, uploads = server_in(Phase.SHARING)
    masking, _, vectors_sent = server_in(Phase.MASKING)
    unmasking, _, answers = server_in(Phase.UNMASKING)
    for step, state in (
        (masks.request_unmask(sharing), sharing),
        (masks.finish(sharing), sharing),
        (masks.receive_masked(sharing, vectors_sent[4]), sharing),
        (masks.deliver(masking), masking),
        (masks.finish(masking), masking),
        (masks.receive_answer(masking, answers[4]), masking),
        (masks.deliver(unmasking), unmasking),
        (masks.request_unmask(unmasking), unmasking),
        (masks.open_sum(unmasking, sum_index=SUM, dimension=3), unmasking),
    ):
        assert step.refusal in (Refusal.WRONG_PHASE, Refusal.WRONG_SUM)
        assert step.state is state
    assert masks.receive_upload(masking, replace(uploads[4], sender=4)).refusal is Refusal.DUPLICATE


def test_a_late_vector_is_not_added():
    server, receive, messages = server_in(Phase.MASKING)
    closed = masks.request_unmask(server).state
    assert receive(closed, messages[4]).refusal is Refusal.WRONG_PHASE


@pytest.mark.parametrize("harm", ["self", "recovery", "locked"])
def test_damaged_recovery_never_passes_for_the_sum(harm):
    """A false recovery share or box aborts; a false self share gives noise. Neither passes for the sum of fewer."""
    states, server, vectors_sent = after_mask(FIVE, sum_index=SUM, values=VALUES)
    if harm == "locked":
        damaged = replace(server.uploads[4], locked_seeds=bytes(len(server.uploads[4].locked_seeds)))
        server = replace(server, uploads={**server.uploads, 4: damaged})
    for vector in vectors_sent[:4]:
        server = masks.receive_masked(server, vector).state
    step = masks.request_unmask(server)
    server = step.state
    for i in range(4):
        answer = masks.unmask(states[i], step.messages[0]).messages[0]
        if i == 0 and harm == "self":
            answer = replace(answer, self_shares={**answer.self_shares, 1: 12345})
        if i == 0 and harm == "recovery":
            answer = replace(answer, recovery_shares={4: 12345})
        server = masks.receive_answer(server, answer).state
    last = masks.finish(server)
    if harm == "self":
        assert isinstance(last, Finish)
        assert last.result.tolist() != np.add.reduce(VALUES[:4]).tolist()
    else:
        assert last == Abort(code=AbortCode.RECOVERY_FAILED)


def masked_bytes(value: int, *, known: str) -> np.ndarray:
    """Client 0's masked vector of a constant byte, minus the masks that the observer is said to know."""
    group = clients(roster(3, 1, bits=8))
    values = [np.full(50_000, value, np.uint8)] * 3
    shared, _ = after_share(group, sum_index=SUM)
    _, _, sent = after_mask(group, sum_index=SUM, values=values)
    seen = sent[0].values.copy()
    modulus = Modulus(8)
    if known in ("pairs", "all"):
        for j in (1, 2):
            seen -= expand(shared[0].pair_seeds[j], modulus, seen.size)
    if known in ("self and one pair", "all"):
        seen -= expand(shared[0].self_seed, modulus, seen.size)
    if known == "self and one pair":
        seen -= expand(shared[0].pair_seeds[1], modulus, seen.size)
    return seen


@pytest.mark.parametrize("known", ["nothing", "pairs", "self and one pair"])
@pytest.mark.parametrize("value", [0, 200])
def test_masked_vectors_are_uniform(known, value):
    """Chi-square on 256 cells at a false-alarm rate of 1e-6; who knows all seeds sees the constant."""
    assert fits_uniform(masked_bytes(value, known=known), 256)
    assert set(masked_bytes(value, known="all").tolist()) == {value}


def test_seeds_of_two_sums_differ():
    first, _ = after_share(FIVE, sum_index=SUM)
    second, _ = after_share(first, sum_index=SUM + 1)
    seeds = [seed for state in (first[0], second[0]) for seed in state.pair_seeds.values()]
    assert len(set(seeds)) == 8


def test_secrets_do_not_print():
    states, _ = after_share(FIVE, sum_index=SUM)
    text = repr(states[0])
    for secret in (states[0].self_seed, *states[0].pair_seeds.values(), states[0].member.pair(1).mask):
        assert repr(secret)[2:-1] not in text
    assert "held" not in text
    assert isinstance(states[0], ClientState)
