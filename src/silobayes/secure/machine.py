"""What one step of a role returns: a new state and messages, a result, or the end (SPEC 4).

Roles (client, compute node, server) are functions `(state, message) -> Continue | Finish | Abort` over frozen states.
They open no socket, read no clock and draw no randomness that was not handed to them, so one driver can run them in a
process (`sums.py`) and another across machines. A message that is refused leaves the state as it was: the step returns
the *same* state with a `Refusal`, because a stranger's message must not be able to end an honest sum. What ends a sum
is an `Abort`. Both carry fixed codes and no text: a text may quote a row.

A role that must survive its process stores the new state before it sends the messages made with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

StateT = TypeVar("StateT")
ResultT = TypeVar("ResultT")

RandomBytes = Callable[[int], bytes]
"""A source of uniform secret bytes: `os.urandom`, or a fixed stream in tests."""


class Refusal(StrEnum):
    """Why a message was not accepted; the state is the one before it came."""

    WRONG_STUDY = "wrong_study"
    WRONG_SUM = "wrong_sum"
    WRONG_RECEIVER = "wrong_receiver"
    WRONG_PHASE = "wrong_phase"
    WRONG_LENGTH = "wrong_length"
    UNKNOWN_SENDER = "unknown_sender"
    DUPLICATE = "duplicate"
    MALFORMED = "malformed"
    BAD_SIGNATURE = "bad_signature"
    BAD_SEAL = "bad_seal"
    OVERLAP = "overlap"
    NOT_A_PARTITION = "not_a_partition"
    NOT_A_SURVIVOR = "not_a_survivor"
    BELOW_FLOOR = "below_floor"
    ALREADY_ANSWERED = "already_answered"


class AbortCode(StrEnum):
    """Why a sum ended without a result; nothing was decoded."""

    BELOW_FLOOR = "below_floor"
    NODES_DISAGREE = "nodes_disagree"
    RECOVERY_FAILED = "recovery_failed"


@dataclass(frozen=True, kw_only=True)
class Continue(Generic[StateT]):
    """The role goes on from `state`; `messages` are to be sent. With a `refusal`, `state` is the old one."""

    state: StateT
    messages: tuple[Any, ...] = ()
    refusal: Refusal | None = None


@dataclass(frozen=True, kw_only=True)
class Finish(Generic[ResultT]):
    """The role is done and this is its result."""

    result: ResultT


@dataclass(frozen=True, kw_only=True)
class Abort:
    """The sum is over and has no result."""

    code: AbortCode


def refuse(state: StateT, refusal: Refusal) -> Continue[StateT]:
    """The unchanged state, and why the message was not accepted."""
    return Continue(state=state, refusal=refusal)
