"""Who speaks when: fixed before the first row is read, so that the price is too (SPEC 2).

A schedule is a list of steps; in each step the server broadcasts once and the visited clients answer together. Under
`asynchronous` a client answers to an older broadcast: `lag` steps ago, which is what applying updates on arrival means.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from silobayes.core.errors import InvalidInput


class Schedule(StrEnum):
    """How a round visits the clients."""

    SYNCHRONOUS = "synchronous"
    SEQUENTIAL = "sequential"
    SAMPLED = "sampled"
    ASYNCHRONOUS = "asynchronous"


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Clients that answer together, to the broadcast of `lag` steps ago."""

    clients: tuple[int, ...]
    lag: int = 0


def visits(
    schedule: Schedule, *, num_clients: int, num_rounds: int, clients_per_round: int | None, seed: int
) -> tuple[Visit, ...]:
    """All steps of `num_rounds` rounds.

    Args:
        schedule: synchronous (all at once), sequential (one after the other), sampled (a fresh uniform subset a round)
            or asynchronous (each client once a round in random order, answering to a broadcast of 0..3 steps ago).
        num_clients: How many there are.
        num_rounds: How often a client is visited (`sampled`: how many subsets).
        clients_per_round: Size of a subset; needed for, and only for, `sampled`.
        seed: Of the public random choices.
    """
    if (schedule is Schedule.SAMPLED) != (clients_per_round is not None):
        raise InvalidInput(
            "protocol.clients_per_round",
            "a number with schedule = sampled and only there",
            clients_per_round,
            "Set it.",
        )
    if clients_per_round is not None and not 1 <= clients_per_round <= num_clients:
        raise InvalidInput("protocol.clients_per_round", f"1..{num_clients}", clients_per_round, "Pass fewer clients.")
    rng = np.random.default_rng(seed)
    everybody = tuple(range(num_clients))
    steps: list[Visit] = []
    for _ in range(num_rounds):
        if schedule is Schedule.SYNCHRONOUS:
            steps.append(Visit(clients=everybody))
        elif schedule is Schedule.SEQUENTIAL:
            steps.extend(Visit(clients=(client,)) for client in everybody)
        elif schedule is Schedule.SAMPLED:
            steps.append(
                Visit(clients=tuple(sorted(rng.choice(num_clients, clients_per_round, replace=False).tolist())))
            )
        else:
            order = rng.permutation(num_clients).tolist()
            steps.extend(Visit(clients=(client,), lag=int(rng.integers(4))) for client in order)
    return tuple(steps)


def visits_per_client(steps: tuple[Visit, ...], num_clients: int) -> tuple[int, ...]:
    """How often each client is visited: what it has to pay for."""
    counts = np.bincount([client for step in steps for client in step.clients], minlength=num_clients)
    return tuple(int(count) for count in counts)
