"""DCA: additive secret sharing of a sum among several compute nodes (004 I Alg. 1, Corrigan-Gibbs and Boneh 2017).

A client splits its vector into one uniform share per node; a node adds up what it received; the sum of node sums is the
result. Any set of nodes but all of them sees uniform noise. Channels between clients and nodes are authenticated and
encrypted by the engine, and every node but one may be curious; all run this program.

Where we differ from 004 I: integers mod 2^k instead of fixed-point reals, and the agreement on who is included (its
section 3.1.3 leaves it open). A share that reached only some nodes must not be in any node's sum, and a node that keeps
only a running sum cannot take it out again. So shares are taken in in *windows*: nodes hold the shares of one window,
exchange the lists of its senders, add the rows that reached every node and forget the rest. A client speaks once in a
sum; who was heard by only some nodes is missing. A study with few clients has one window; 10^6 clients of length 10^3
go through windows of a megabyte. A node's sum leaves it only if at most `colluding` clients are missing.

Sets of clients are integers whose bit i stands for client i: immutable, and small for a million clients.

Guarantees:
    - Any M-1 shares are uniform, whatever the vector (`test_all_but_one_share_are_uniform`).
    - The collected sum is exact (`test_sums_of_shares_are_exact`).
    - Every set of at most T missing clients gives the exact sum of the others; T+1 aborts
      (`test_every_drop_out_pattern_up_to_t`).
    - A client heard by only some nodes is in nobody's sum (`test_partly_delivered_clients_are_left_out`).
    - An unknown sender, duplicate, replay, wrong sum, study, node or length is refused and changes nothing
      (`test_node_refuses_and_keeps_its_state`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from silobayes.core.errors import InvalidInput, require_count
from silobayes.secure.fixed_point import Modulus, Residues
from silobayes.secure.machine import Abort, AbortCode, Continue, Finish, Refusal, refuse
from silobayes.secure.streams import expand


@dataclass(frozen=True, kw_only=True)
class SharingPlan:
    """What the study says of its sums. Nodes and clients take it from the study, never from a message.

    `num_clients` is how many the study has; `only` names those of a sum over some of them, who keep their numbers.
    """

    study_hash: bytes
    modulus: Modulus
    num_clients: int
    colluding: int
    compute_nodes: int
    only: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_hash(self.study_hash)
        require_some(self.only, self.num_clients)
        require_floor(self.num_asked, self.colluding)
        require_count("compute_nodes", self.compute_nodes, at_least=2, fix="One node alone would see every message.")

    def among(self, clients: Sequence[int] | None) -> "SharingPlan":
        """The same for a sum over some of the clients (None: over all)."""
        return replace(self, only=None if clients is None else tuple(sorted(clients)))

    @property
    def num_asked(self) -> int:
        """How many take part."""
        return self.num_clients if self.only is None else len(self.only)

    @property
    def floor(self) -> int:
        """The fewest clients whose sum may be seen."""
        return self.num_asked - self.colluding

    @cached_property
    def strangers(self) -> int:
        """The set of clients that do not take part."""
        return 0 if self.only is None else ((1 << self.num_clients) - 1) & ~client_set(np.array(self.only))


def require_hash(study_hash: bytes) -> None:
    """Refuse anything but 32 bytes: labels are joined without separators, so lengths must be fixed."""
    if not isinstance(study_hash, bytes) or len(study_hash) != 32:
        raise InvalidInput("study_hash", "32 bytes", type(study_hash).__name__, "Pass the study's SHA-256 digest.")


def require_floor(num_clients: int, colluding: int) -> None:
    """Refuse a study whose smallest sum would be that of one client."""
    require_count("num_clients", num_clients, at_least=2, fix="A sum over one client hides nothing.")
    require_count("colluding", colluding, at_least=0, fix="Pass how many clients may collude or drop out.")
    if num_clients - colluding < 2:
        raise InvalidInput("colluding", f"at most {num_clients - 2}", colluding, "Two clients must remain in a sum.")


def require_some(only: tuple[int, ...] | None, num_clients: int) -> None:
    """Refuse anything but client numbers in ascending order, or None."""
    if only is not None and not (only == tuple(sorted(set(only))) and set(only) <= set(range(num_clients))):
        raise InvalidInput("only", f"ascending numbers in [0, {num_clients})", only, "Use the study's numbering.")


def split(residues: Residues, modulus: Modulus, *, num_nodes: int, key: bytes) -> list[Residues]:
    """Shares of `residues`, one per node, that sum to it mod 2^bits; all but the last are the stream of `key` in turn.

    `key` is fresh for each call: two vectors split with one key would give away their difference.
    """
    stream = expand(key, modulus, (num_nodes - 1) * residues.size)
    shares = list(stream.reshape(num_nodes - 1, *residues.shape))
    last = residues.copy()
    for share in shares:
        last -= share
    return [*shares, modulus.reduce(last)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """Shares for one node: row r of `values` is that of client `senders[r]`. A client alone sends one row."""

    study_hash: bytes
    sum_index: int
    node_index: int
    senders: NDArray[np.int64]
    values: Residues = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class WindowList:
    """Whose shares a node received in one window."""

    study_hash: bytes
    sum_index: int
    window_index: int
    node_index: int
    senders: int


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeSum:
    """What a node publishes, once for a sum: the sum of its shares of the included clients."""

    study_hash: bytes
    sum_index: int
    node_index: int
    included: int
    values: Residues


class NodePhase(StrEnum):
    """Where a node stands in a sum."""

    CLOSED = "closed"
    RECEIVING = "receiving"
    AGREEING = "agreeing"


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeState:
    """A compute node: its running sum, whom it has heard and included, and the shares of the open window."""

    plan: SharingPlan
    node_index: int
    phase: NodePhase = NodePhase.CLOSED
    sum_index: int = -1
    window_index: int = 0
    heard: int = 0
    included: int = 0
    window: tuple[Shares, ...] = field(default=(), repr=False)
    window_senders: int = 0
    running: Residues = field(default_factory=lambda: np.zeros(0, np.uint8), repr=False)


def open_sum(state: NodeState, *, sum_index: int, dimension: int) -> Continue[NodeState]:
    """Begin a sum; its index must be above every index this node has begun, so that none is ever answered twice."""
    if sum_index <= state.sum_index:
        return refuse(state, Refusal.WRONG_SUM)
    running = np.zeros(dimension, dtype=state.plan.modulus.dtype)
    fresh = NodeState(plan=state.plan, node_index=state.node_index, phase=NodePhase.RECEIVING, sum_index=sum_index)
    return Continue(state=replace(fresh, running=running))


def receive(state: NodeState, shares: Shares) -> Continue[NodeState]:
    """Take in shares of clients not heard before in this sum: all of the message's rows or none."""
    if shares.study_hash != state.plan.study_hash:
        return refuse(state, Refusal.WRONG_STUDY)
    if shares.sum_index != state.sum_index:
        return refuse(state, Refusal.WRONG_SUM)
    if shares.node_index != state.node_index:
        return refuse(state, Refusal.WRONG_RECEIVER)
    if state.phase is not NodePhase.RECEIVING:
        return refuse(state, Refusal.WRONG_PHASE)
    senders, values = shares.senders, shares.values
    if values.dtype != state.plan.modulus.dtype or senders.dtype != np.int64:
        return refuse(state, Refusal.MALFORMED)
    if senders.ndim != 1 or not senders.size or values.shape != (senders.size, state.running.size):
        return refuse(state, Refusal.WRONG_LENGTH)
    if not (senders.min() >= 0 and senders.max() < state.plan.num_clients):
        return refuse(state, Refusal.UNKNOWN_SENDER)
    group = client_set(senders)
    if group & state.plan.strangers:
        return refuse(state, Refusal.UNKNOWN_SENDER)
    if group.bit_count() != senders.size or group & state.heard:
        return refuse(state, Refusal.DUPLICATE)
    return Continue(
        state=replace(
            state,
            heard=state.heard | group,
            window=(*state.window, shares),
            window_senders=state.window_senders | group,
        )
    )


def close_window(state: NodeState) -> Continue[NodeState]:
    """Stop receiving and tell the other nodes whose shares are here."""
    if state.phase is not NodePhase.RECEIVING:
        return refuse(state, Refusal.WRONG_PHASE)
    message = WindowList(
        study_hash=state.plan.study_hash,
        sum_index=state.sum_index,
        window_index=state.window_index,
        node_index=state.node_index,
        senders=state.window_senders,
    )
    return Continue(state=replace(state, phase=NodePhase.AGREEING), messages=(message,))


def agree(state: NodeState, lists: Sequence[WindowList]) -> Continue[NodeState]:
    """Add the shares of the clients that every node has heard in this window, forget the others, open the next."""
    if state.phase is not NodePhase.AGREEING:
        return refuse(state, Refusal.WRONG_PHASE)
    if any(item.study_hash != state.plan.study_hash for item in lists):
        return refuse(state, Refusal.WRONG_STUDY)
    if any((item.sum_index, item.window_index) != (state.sum_index, state.window_index) for item in lists):
        return refuse(state, Refusal.WRONG_SUM)
    if sorted(item.node_index for item in lists) != list(range(state.plan.compute_nodes)):
        return refuse(state, Refusal.UNKNOWN_SENDER)
    agreed = state.window_senders
    for item in lists:
        agreed &= item.senders
    running = state.running
    for shares in state.window:
        values = shares.values
        if agreed != state.window_senders:
            values = values[is_member(agreed, shares.senders)]
        running = running + np.add.reduce(values, axis=0, dtype=values.dtype)
    return Continue(
        state=replace(
            state,
            phase=NodePhase.RECEIVING,
            window_index=state.window_index + 1,
            included=state.included | agreed,
            window=(),
            window_senders=0,
            running=running,
        )
    )


def publish(state: NodeState) -> Continue[NodeState] | Abort:
    """Publish this node's sum, once; below the floor it stays here for ever."""
    if state.phase is not NodePhase.RECEIVING or state.window:
        return refuse(state, Refusal.WRONG_PHASE)
    if state.included.bit_count() < state.plan.floor:
        return Abort(code=AbortCode.BELOW_FLOOR)
    message = NodeSum(
        study_hash=state.plan.study_hash,
        sum_index=state.sum_index,
        node_index=state.node_index,
        included=state.included,
        values=state.plan.modulus.reduce(state.running),
    )
    closed = NodeState(plan=state.plan, node_index=state.node_index, sum_index=state.sum_index)
    return Continue(state=closed, messages=(message,))


def collect(plan: SharingPlan, sums: Sequence[NodeSum]) -> Finish[Residues] | Abort:
    """The sum over the included clients, from every node's sum of the same clients."""
    if sorted(item.node_index for item in sums) != list(range(plan.compute_nodes)):
        return Abort(code=AbortCode.NODES_DISAGREE)
    about = {(item.study_hash, item.sum_index, item.included, item.values.shape, item.values.dtype) for item in sums}
    if len(about) != 1 or sums[0].study_hash != plan.study_hash or sums[0].values.dtype != plan.modulus.dtype:
        return Abort(code=AbortCode.NODES_DISAGREE)
    if sums[0].included.bit_count() < plan.floor:
        return Abort(code=AbortCode.BELOW_FLOOR)
    return Finish(
        result=plan.modulus.reduce(np.add.reduce([item.values for item in sums], axis=0, dtype=plan.modulus.dtype))
    )


def client_set(senders: NDArray[np.int64]) -> int:
    """The set of these client numbers, as bits."""
    lowest = int(senders.min())
    flags = np.zeros(int(senders.max()) - lowest + 1, dtype=np.uint8)
    flags[senders - lowest] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little") << lowest


def is_member(clients: int, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of `numbers` are in the set `clients`."""
    width = max(clients.bit_length(), int(numbers.max()) + 1)
    octets = np.frombuffer(clients.to_bytes((width + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(octets, bitorder="little")[numbers].astype(np.bool_)
