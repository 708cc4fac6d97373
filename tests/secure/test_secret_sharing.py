from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.secure import secret_sharing as sharing
from silobayes.secure.fixed_point import Modulus
from silobayes.secure.machine import Abort, AbortCode, Continue, Finish, Refusal
from silobayes.secure.secret_sharing import NodeState, SharingPlan
from tests.privacy.goodness import fits_uniform
from tests.secure.cases import OTHER_STUDY, STUDY, message, vectors

PLAN = SharingPlan(study_hash=STUDY, modulus=Modulus(32), num_clients=5, colluding=2, compute_nodes=3)


def key(name: int) -> bytes:
    return name.to_bytes(32, "little")


def open_nodes(plan=PLAN, *, sum_index=4, dimension=3) -> list[NodeState]:
    nodes = [NodeState(plan=plan, node_index=k) for k in range(plan.compute_nodes)]
    return [sharing.open_sum(node, sum_index=sum_index, dimension=dimension).state for node in nodes]


def agree_all(nodes):
    steps = [sharing.close_window(node) for node in nodes]
    lists = [step.messages[0] for step in steps]
    return [sharing.agree(step.state, lists).state for step in steps]


def snapshot(node: NodeState):
    return {**vars(node), "running": node.running.tolist(), "window": [s.values.tolist() for s in node.window]}


@pytest.mark.parametrize("case", vectors("shares"), ids=lambda case: f"{case['bits']} bits")
def test_share_vectors(case):
    modulus = Modulus(case["bits"])
    residues = np.array(case["residues"], dtype=modulus.dtype)
    count = len(case["shares"])
    shares = sharing.split(residues, modulus, num_nodes=count, key=bytes.fromhex(case["key"]))
    assert [modulus.to_bytes(share).hex() for share in shares] == case["shares"]


@pytest.mark.parametrize("case", vectors("node_messages"), ids=str)
def test_node_refuses_and_keeps_its_state(case):
    node = open_nodes()[1]
    node = sharing.receive(node, message([2], np.full((1, 3), 9, np.uint32), node_index=1)).state
    before = snapshot(node)
    values = np.ones((len(case["senders"]), case["length"]), dtype=case["dtype"])
    step = sharing.receive(
        node,
        message(
            case["senders"],
            values,
            sum_index=case["sum_index"],
            node_index=case["node_index"],
            study_hash=bytes.fromhex(case["study"]),
        ),
    )
    assert step.refusal == case["refusal"]
    assert (step.state is node) == (case["refusal"] is not None)
    assert snapshot(node) == before


@settings(max_examples=60)
@given(
    bits=st.sampled_from(range(8, 65, 8)),
    num_nodes=st.integers(2, 6),
    rows=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2), min_size=2, max_size=8),
)
def test_sums_of_shares_are_exact(bits, num_nodes, rows):
    modulus = Modulus(bits)
    plan = replace(PLAN, modulus=modulus, num_clients=len(rows), colluding=0, compute_nodes=num_nodes)
    nodes = open_nodes(plan, dimension=2)
    for i, row in enumerate(rows):  # every second client opens a new window
        parts = sharing.split(modulus.encode(np.array([row])), modulus, num_nodes=num_nodes, key=key(i))
        nodes = [
            sharing.receive(n, message([i], p, node_index=k)).state
            for k, (n, p) in enumerate(zip(nodes, parts, strict=True))
        ]
        nodes = agree_all(nodes) if i % 2 else nodes
    nodes = agree_all(nodes)
    steps = [sharing.publish(node) for node in nodes]
    result = sharing.collect(plan, [step.messages[0] for step in steps if isinstance(step, Continue)])
    assert isinstance(result, Finish)
    assert result.result.tolist() == [sum(column) % (1 << bits) for column in zip(*rows, strict=True)]


ALL, NOBODY, SOME = range(3)


def run(deliveries, values):
    """Each node's last step, when client i reaches all nodes, none, or only node i % 3."""
    nodes = open_nodes()
    for i, delivery in enumerate(deliveries):
        parts = sharing.split(values[i : i + 1], PLAN.modulus, num_nodes=3, key=key(i))
        for k, part in enumerate(parts):
            if delivery == ALL or (delivery == SOME and k == i % 3):
                nodes[k] = sharing.receive(nodes[k], message([i], part, node_index=k)).state
    return [sharing.publish(node) for node in agree_all(nodes)]


VALUES = np.random.default_rng(1).integers(0, 1 << 32, (5, 3)).astype(np.uint32)


@pytest.mark.parametrize("deliveries", list(product((ALL, NOBODY), repeat=5)), ids=str)
def test_every_drop_out_pattern_up_to_t(deliveries):
    check_pattern(deliveries)


@pytest.mark.parametrize("deliveries", [p for p in product((ALL, NOBODY, SOME), repeat=5) if SOME in p][::5], ids=str)
def test_partly_delivered_clients_are_left_out(deliveries):
    check_pattern(deliveries)


def check_pattern(deliveries):
    steps = run(deliveries, VALUES)
    heard = [i for i in range(5) if deliveries[i] == ALL]
    if len(heard) < PLAN.floor:
        assert steps == [Abort(code=AbortCode.BELOW_FLOOR)] * 3
        return
    messages = [step.messages[0] for step in steps]
    assert {item.included for item in messages} == {sum(1 << i for i in heard)}
    result = sharing.collect(PLAN, messages).result
    assert result.tolist() == [sum(int(VALUES[i, c]) for i in heard) % 2**32 for c in range(3)]


def test_a_batch_is_taken_in_part_when_a_row_is_missing_elsewhere():
    nodes = open_nodes()
    parts = sharing.split(VALUES, PLAN.modulus, num_nodes=3, key=key(9))
    for k, part in enumerate(parts):
        rows = [0, 1, 2, 3, 4] if k != 1 else [0, 2, 4]
        nodes[k] = sharing.receive(nodes[k], message(rows, part[rows], node_index=k)).state
    messages = [sharing.publish(node).messages[0] for node in agree_all(nodes)]
    assert sharing.collect(PLAN, messages).result.tolist() == VALUES[[0, 2, 4]].sum(axis=0, dtype=np.uint32).tolist()


def test_in_a_sum_over_some_of_the_clients_the_others_are_strangers():
    plan = replace(PLAN, colluding=1, only=(0, 2, 4))
    (node, *_) = open_nodes(plan)
    rows = np.zeros((2, 3), dtype=PLAN.modulus.dtype)
    for senders in ((1, 3), (0, 1)):
        step = sharing.receive(node, message(senders, rows))
        assert step.refusal is Refusal.UNKNOWN_SENDER
        assert step.state is node
    assert sharing.receive(node, message((0, 4), rows)).refusal is None
    assert plan.floor == 2


def test_a_client_left_out_cannot_come_again():
    nodes = open_nodes()
    nodes[0] = sharing.receive(nodes[0], message([3], np.ones((1, 3), np.uint32))).state
    nodes = agree_all(nodes)
    again = sharing.receive(nodes[0], message([3], np.ones((1, 3), np.uint32)))
    assert again.refusal is Refusal.DUPLICATE
    assert nodes[0].included == 0


def test_a_node_answers_for_a_sum_once():
    node = run((ALL,) * 5, VALUES)[0].state
    before = snapshot(node)
    assert sharing.publish(node).refusal is Refusal.WRONG_PHASE
    assert sharing.open_sum(node, sum_index=4, dimension=3).refusal is Refusal.WRONG_SUM
    assert sharing.open_sum(node, sum_index=3, dimension=3).refusal is Refusal.WRONG_SUM
    assert sharing.receive(node, message([0], np.ones((1, 3), np.uint32))).refusal is Refusal.WRONG_PHASE
    assert snapshot(node) == before
    assert sharing.open_sum(node, sum_index=5, dimension=3).refusal is None


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda lists: lists[:2], Refusal.UNKNOWN_SENDER),
        (lambda lists: [*lists[:2], lists[0]], Refusal.UNKNOWN_SENDER),
        (lambda lists: [*lists, lists[0]], Refusal.UNKNOWN_SENDER),
        (lambda lists: [*lists[:2], replace(lists[2], window_index=1)], Refusal.WRONG_SUM),
        (lambda lists: [*lists[:2], replace(lists[2], sum_index=3)], Refusal.WRONG_SUM),
        (lambda lists: [*lists[:2], replace(lists[2], study_hash=OTHER_STUDY)], Refusal.WRONG_STUDY),
    ],
)
def test_bad_window_lists_are_refused(change, refusal):
    steps = [sharing.close_window(node) for node in open_nodes()]
    node = steps[0].state
    step = sharing.agree(node, change([step.messages[0] for step in steps]))
    assert step.refusal is refusal
    assert step.state is node


def test_steps_out_of_turn_are_refused():
    node = open_nodes()[0]
    assert sharing.agree(node, []).refusal is Refusal.WRONG_PHASE
    closed = sharing.close_window(node).state
    assert sharing.close_window(closed).refusal is Refusal.WRONG_PHASE
    assert sharing.publish(closed).refusal is Refusal.WRONG_PHASE
    assert sharing.receive(closed, message([0], np.ones((1, 3), np.uint32))).refusal is Refusal.WRONG_PHASE


def test_a_node_with_an_open_window_does_not_publish():
    node = sharing.receive(open_nodes()[0], message([0, 1, 2, 3], np.ones((4, 3), np.uint32))).state
    assert sharing.publish(node).refusal is Refusal.WRONG_PHASE


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda sums: sums[:2], AbortCode.NODES_DISAGREE),
        (lambda sums: [*sums[:2], sums[0]], AbortCode.NODES_DISAGREE),
        (lambda sums: [*sums[:2], replace(sums[2], included=0b01111)], AbortCode.NODES_DISAGREE),
        (lambda sums: [*sums[:2], replace(sums[2], sum_index=5)], AbortCode.NODES_DISAGREE),
        (lambda sums: [*sums[:2], replace(sums[2], values=sums[2].values[:2])], AbortCode.NODES_DISAGREE),
        (lambda sums: [replace(item, study_hash=OTHER_STUDY) for item in sums], AbortCode.NODES_DISAGREE),
        (lambda sums: [replace(item, included=0b11) for item in sums], AbortCode.BELOW_FLOOR),
    ],
)
def test_node_sums_that_do_not_fit_abort(change, code):
    sums = [step.messages[0] for step in run((ALL,) * 5, VALUES)]
    assert sharing.collect(PLAN, change(sums)) == Abort(code=code)


def looks_uniform(splitter, value: int) -> bool:
    """Whether every set of all but one of three shares of a constant byte looks uniform.

    Combinations with coefficients -1, 0, 1 on 256 cells, and top nibbles jointly, each at a false-alarm rate of 1e-6.
    """
    modulus = Modulus(8)
    shares = splitter(np.full(100_000, value, np.uint8), modulus)
    for pair in combinations(shares, 2):
        for signs in ((1, 0), (0, 1), (1, 1), (1, -1)):
            mixed = sum(s * share.astype(np.int64) for s, share in zip(signs, pair, strict=True)) % 256
            if not fits_uniform(mixed, 256):
                return False
        if not fits_uniform((pair[0] >> 4).astype(np.int64) * 16 + (pair[1] >> 4), 256):
            return False
    return True


@pytest.mark.parametrize("value", [0, 1, 200])
def test_all_but_one_share_are_uniform(value):
    assert looks_uniform(lambda residues, m: sharing.split(residues, m, num_nodes=3, key=key(77)), value)


def broken_narrow(residues, modulus):
    """Masks of seven bits only."""
    shares = sharing.split(residues, modulus, num_nodes=3, key=key(77))
    narrow = [share & np.uint8(0x7F) for share in shares[:2]]
    return [*narrow, residues - narrow[0] - narrow[1]]


def broken_reused(residues, modulus):
    """One stream for two nodes."""
    first = sharing.split(residues, modulus, num_nodes=3, key=key(77))[0]
    return [first, first, residues - first - first]


def broken_opposite(residues, modulus):
    """Masks that cancel between two nodes, so that they know the vector without the third."""
    first, second, _ = sharing.split(residues, modulus, num_nodes=3, key=key(77))
    return [residues + first, -first, second - second]


@pytest.mark.parametrize("splitter", [broken_narrow, broken_reused, broken_opposite])
def test_broken_splitters_are_rejected(splitter):
    assert not looks_uniform(splitter, 200)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_clients": 1}, "num_clients"),
        ({"colluding": 4}, "colluding"),
        ({"colluding": -1}, "colluding"),
        ({"compute_nodes": 1}, "compute_nodes"),
        ({"study_hash": b"short"}, "study_hash"),
    ],
)
def test_plans_that_hide_nothing_are_refused(change, word):
    with pytest.raises(InvalidInput, match=word):
        replace(PLAN, **change)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_client_sets(numbers):
    senders = np.array(sorted(numbers), dtype=np.int64)
    clients = sharing.client_set(senders)
    assert clients == sum(1 << i for i in numbers)
    assert sharing.is_member(clients, np.arange(320)).nonzero()[0].tolist() == sorted(numbers)
