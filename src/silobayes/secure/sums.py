"""Sums over clients in one process, by the same role machines that would run across machines (SPEC 4).

All three kinds take client numbers to int64 counts and return the exact int64 sum, so one can stand for another; with
fewer than M - T vectors they raise and nothing is decoded. A `sum_index` may be used once.

A sum may be over some of the clients (`among`): they keep their numbers, and M is how many they are.

Guarantees:
    - The three kinds give the same sums to the last bit, over all clients (`test_all_kinds_agree`) or some
      (`test_sums_over_some_of_the_clients`).
    - Fewer than M - T vectors, a stranger's, or unequal lengths raise (`test_sums_refuse`).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from silobayes.core.errors import InvalidInput, SiloBayesError
from silobayes.secure import pairwise_masks as masks
from silobayes.secure import roster as rosters
from silobayes.secure import secret_sharing as sharing
from silobayes.secure.fixed_point import Counts, Modulus, Residues
from silobayes.secure.machine import Abort, AbortCode, Continue, Finish
from silobayes.secure.shamir import SHARE_BYTES
from silobayes.secure.streams import KEY_BYTES

CHUNK_BYTES = 1 << 20
"""How much of the clients' vectors is split and handed to the nodes at a time: shares stay in the cache."""


class SumAborted(SiloBayesError):
    """A sum ended without a result; nothing was decoded."""

    code: ClassVar[str] = "sum_aborted"

    def __init__(self, reason: str) -> None:
        super().__init__(f"The sum was aborted: {reason}.")
        self.reason = reason


class AbstractSum(ABC):
    """Sum of integer vectors over clients, of which only the total is seen."""

    @abstractmethod
    def total(self, vectors: Mapping[int, Counts], *, sum_index: int, among: Sequence[int] | None = None) -> Counts:
        """The exact sum of counts by client number; who is absent of those asked (None: all) has dropped out."""

    @property
    @abstractmethod
    def messages_per_client(self) -> int:
        """How many messages one client sends for one sum without drop-outs."""

    @abstractmethod
    def bytes_per_client(self, dimension: int) -> int:
        """What one client sends for one sum without drop-outs, in vectors, shares and seeds (no framing)."""


@dataclass(frozen=True, kw_only=True)
class PlainSum(AbstractSum):
    """The aggregator adds vectors that it sees: for a trusted one, and the reference for the others."""

    num_clients: int
    colluding: int = 0

    def __post_init__(self) -> None:
        sharing.require_floor(self.num_clients, self.colluding)

    def total(self, vectors: Mapping[int, Counts], *, sum_index: int, among: Sequence[int] | None = None) -> Counts:
        """See `AbstractSum`."""
        asked = tuple(range(self.num_clients) if among is None else sorted(among))
        sharing.require_some(asked, self.num_clients)
        sharing.require_floor(len(asked), self.colluding)
        check_vectors(vectors, asked)
        if len(vectors) < len(asked) - self.colluding:
            raise SumAborted(AbortCode.BELOW_FLOOR)
        return np.add.reduce(list(vectors.values()), axis=0)

    @property
    def messages_per_client(self) -> int:
        """The vector."""
        return 1

    def bytes_per_client(self, dimension: int) -> int:
        """See `AbstractSum`."""
        return 8 * dimension


class SecretSharingSum(AbstractSum):
    """DCA with `compute_nodes` nodes (`secret_sharing.py`)."""

    def __init__(
        self, *, modulus: Modulus, num_clients: int, colluding: int, compute_nodes: int, study_hash: bytes
    ) -> None:
        self._plan = sharing.SharingPlan(
            study_hash=study_hash,
            modulus=modulus,
            num_clients=num_clients,
            colluding=colluding,
            compute_nodes=compute_nodes,
        )
        self._nodes = [sharing.NodeState(plan=self._plan, node_index=k) for k in range(compute_nodes)]

    def total(self, vectors: Mapping[int, Counts], *, sum_index: int, among: Sequence[int] | None = None) -> Counts:
        """See `AbstractSum`."""
        dimension = check_vectors(vectors, range(self._plan.num_clients) if among is None else among)
        modulus = self._plan.modulus
        rows = max(1, CHUNK_BYTES // (dimension * modulus.dtype.itemsize))
        senders = np.fromiter(vectors, dtype=np.int64, count=len(vectors))
        values = list(vectors.values())

        def chunks() -> Iterator[tuple[NDArray[np.int64], Residues]]:
            for start in range(0, len(values), rows):
                yield senders[start : start + rows], modulus.encode(np.stack(values[start : start + rows]))

        residues = self.total_of_chunks(chunks(), dimension=dimension, sum_index=sum_index, among=among)
        return modulus.decode(residues)

    def total_of_chunks(
        self,
        chunks: Iterable[tuple[NDArray[np.int64], Residues]],
        *,
        dimension: int,
        sum_index: int,
        among: Sequence[int] | None = None,
    ) -> Residues:
        """The same for vectors that come in pieces (client numbers, rows of residues); each piece is one window."""
        plan = self._plan.among(among)
        nodes = [replace(node, plan=plan) for node in self._nodes]
        self._nodes = [_state(sharing.open_sum(node, sum_index=sum_index, dimension=dimension)) for node in nodes]
        for senders, residues in chunks:
            key = os.urandom(KEY_BYTES)
            for k, values in enumerate(sharing.split(residues, plan.modulus, num_nodes=plan.compute_nodes, key=key)):
                shares = sharing.Shares(
                    study_hash=plan.study_hash, sum_index=sum_index, node_index=k, senders=senders, values=values
                )
                self._nodes[k] = _state(sharing.receive(self._nodes[k], shares))
            closed = [_step(sharing.close_window(node)) for node in self._nodes]
            lists = [message for step in closed for message in step.messages]
            self._nodes = [_state(sharing.agree(step.state, lists)) for step in closed]
        published = [_step(sharing.publish(node)) for node in self._nodes]
        self._nodes = [step.state for step in published]
        return _result(sharing.collect(plan, [message for step in published for message in step.messages]))

    @property
    def messages_per_client(self) -> int:
        """A share to each node."""
        return self._plan.compute_nodes

    def bytes_per_client(self, dimension: int) -> int:
        """See `AbstractSum`."""
        return self._plan.compute_nodes * dimension * self._plan.modulus.num_bytes


class PairwiseMaskSum(AbstractSum):
    """One server and masks that cancel (`pairwise_masks.py`).

    Clients meet at the first sum that they are asked in: every pair agrees on a key, which a plan of a study need not
    wait for. In one process the identities are drawn here; across machines they are in the study.
    """

    def __init__(self, *, modulus: Modulus, num_clients: int, colluding: int, study_hash: bytes) -> None:
        identities = [Ed25519PrivateKey.generate() for _ in range(num_clients)]
        self._roster = rosters.Roster(
            study_hash=study_hash,
            identities=tuple(identity.public_key().public_bytes_raw() for identity in identities),
            colluding=colluding,
            modulus=modulus,
        )
        self._identities = identities
        self._server = masks.ServerState(roster=self._roster)
        self._clients: dict[int, masks.ClientState] = {}

    @cached_property
    def _joined(self) -> list[Continue[rosters.JoiningState]]:
        return [
            rosters.join(self._roster, i, identity=identity, random_bytes=os.urandom)
            for i, identity in enumerate(self._identities)
        ]

    def _meet(self, roster: rosters.Roster) -> None:
        """Those who are asked meet, by the keys that they announced once; what sums they have begun stays begun."""
        announcements = [self._joined[i].messages[0] for i in roster.numbers]
        for i in roster.numbers:
            member = _state(rosters.meet(replace(self._joined[i].state, roster=roster), announcements))
            known = self._clients.get(i)
            self._clients[i] = masks.ClientState(member=member) if known is None else replace(known, member=member)
        self._server = replace(self._server, roster=roster)

    def total(self, vectors: Mapping[int, Counts], *, sum_index: int, among: Sequence[int] | None = None) -> Counts:
        """See `AbstractSum`. A client without a vector drops out after it has dealt its shares."""
        roster = self._roster.among(among)
        dimension = check_vectors(vectors, roster.numbers)
        if not self._clients or roster != self._server.roster:
            self._meet(roster)
        modulus, clients = roster.modulus, self._clients
        server = _state(masks.open_sum(self._server, sum_index=sum_index, dimension=dimension))
        for i in roster.numbers:
            step = _step(masks.share(clients[i], sum_index=sum_index, random_bytes=os.urandom))
            clients[i] = step.state
            server = _state(masks.receive_upload(server, step.messages[0]))
        delivered = _step(masks.deliver(server))
        server = delivered.state
        for delivery in delivered.messages:
            i = delivery.receiver
            if i in vectors:
                step = _step(masks.mask(clients[i], delivery, modulus.encode(vectors[i])))
                clients[i] = step.state
                server = _state(masks.receive_masked(server, step.messages[0]))
        self._server = server  # an abort leaves the sum begun, so that its index is used up
        requested = _step(masks.request_unmask(server))
        server, (request,) = requested.state, requested.messages
        for i in request.survivors:
            step = _step(masks.unmask(clients[i], request))
            clients[i] = step.state
            server = _state(masks.receive_answer(server, step.messages[0]))
        self._server = server
        return modulus.decode(_result(masks.finish(server)))

    @property
    def messages_per_client(self) -> int:
        """Sealed shares of its mask, the masked vector, and the shares that the server asks for in the end."""
        return 3

    def bytes_per_client(self, dimension: int) -> int:
        """See `AbstractSum`."""
        peers = self._roster.num_clients - 1
        sealed = masks.NONCE_BYTES + 2 * SHARE_BYTES + masks.TAG_BYTES
        dealt = peers * (sealed + KEY_BYTES) + masks.TAG_BYTES
        return dealt + dimension * self._roster.modulus.num_bytes + (peers + 1) * SHARE_BYTES


def check_vectors(vectors: Mapping[int, Counts], asked: Sequence[int]) -> int:
    """The common length of int64 vectors of clients that are asked; anything else is refused before a sum begins."""
    lengths = {np.shape(vector) for vector in vectors.values()}
    if len(lengths) != 1 or len(shape := lengths.pop()) != 1 or shape[0] < 1:
        raise InvalidInput("vectors", "vectors of one length", "others", "Every client sends the same coordinates.")
    if any(np.asarray(vector).dtype != np.int64 for vector in vectors.values()):
        raise InvalidInput("vectors", "int64 counts", "another type", "Round to the grid first.")
    if not vectors.keys() <= set(asked):
        fix = "Use the study's numbering."
        raise InvalidInput("vectors", f"numbers of the {len(asked)} clients that are asked", "others", fix)
    return shape[0]


def _step(step: Any) -> Continue[Any]:
    """A step that must go on: in one process every party follows the protocol, so a refusal is a misuse."""
    if isinstance(step, Abort):
        raise SumAborted(step.code)
    assert isinstance(step, Continue)
    if step.refusal is not None:
        raise SumAborted(step.refusal)
    return step


def _state(step: Any) -> Any:
    return _step(step).state


def _result(step: Any) -> Any:
    if isinstance(step, Abort):
        raise SumAborted(step.code)
    assert isinstance(step, Finish)
    return step.result
