"""Who speaks when: fixed before the first row is read, so that the price is too (SPEC 2).

A schedule is a list of steps; in each step the server broadcasts once and the visited silos answer together. Under
`asynchronous` a silo answers to an older broadcast: `lag` steps ago, which is what applying updates on arrival means.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from silobayes.core.errors import InvalidInput


class Schedule(StrEnum):
    """How a round visits the silos."""

    SYNCHRONOUS = "synchronous"
    SEQUENTIAL = "sequential"
    SAMPLED = "sampled"
    ASYNCHRONOUS = "asynchronous"


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Silos that answer together.

    Attributes:
        silos: Who they are.
        number: Of all visits of the study, from 0.
        lag: They answer to what the server said so many visits ago.
        part: Which part of the method this is (a start, then rounds).
        steps: How often they are asked one after the other, one step of the server's optimiser each.
    """

    silos: tuple[int, ...]
    number: int = 0
    lag: int = 0
    part: int = 0
    steps: int = 1


def numbered(*parts: Sequence[Visit]) -> tuple[Visit, ...]:
    """All visits of a method whose parts follow each other."""
    every = [dataclasses.replace(visit, part=part) for part, own in enumerate(parts) for visit in own]
    return tuple(dataclasses.replace(visit, number=number) for number, visit in enumerate(every))


def visits(
    schedule: Schedule, *, num_silos: int, num_rounds: int, silos_per_round: int | None, seed: int
) -> tuple[Visit, ...]:
    """All visits of `num_rounds` rounds.

    Args:
        schedule: synchronous (all at once), sequential (one after the other), sampled (a fresh uniform subset a round)
            or asynchronous (each silo once a round in random order, answering to a broadcast of 0..3 steps ago).
        num_silos: How many there are.
        num_rounds: How often a silo is visited (`sampled`: how many subsets).
        silos_per_round: Size of a subset; needed for, and only for, `sampled`.
        seed: Of the public random choices.
    """
    if (schedule is Schedule.SAMPLED) != (silos_per_round is not None):
        raise InvalidInput(
            "protocol.clients_per_round",
            "a number with schedule = sampled and only there",
            silos_per_round,
            "Set it.",
        )
    if silos_per_round is not None and not 1 <= silos_per_round <= num_silos:
        raise InvalidInput("protocol.clients_per_round", f"1..{num_silos}", silos_per_round, "Pass fewer silos.")
    rng = np.random.default_rng(seed)
    everybody = tuple(range(num_silos))
    found: list[Visit] = []
    for _ in range(num_rounds):
        if schedule is Schedule.SYNCHRONOUS:
            found.append(Visit(silos=everybody))
        elif schedule is Schedule.SEQUENTIAL:
            found.extend(Visit(silos=(silo,)) for silo in everybody)
        elif schedule is Schedule.SAMPLED:
            found.append(Visit(silos=tuple(sorted(rng.choice(num_silos, silos_per_round, replace=False).tolist()))))
        else:
            order = rng.permutation(num_silos).tolist()
            found.extend(Visit(silos=(silo,), lag=int(rng.integers(4))) for silo in order)
    return tuple(found)


def visits_per_silo(found: tuple[Visit, ...], num_silos: int) -> tuple[int, ...]:
    """How often each silo is visited: what it has to pay for."""
    counts = np.bincount([silo for visit in found for silo in visit.silos], minlength=num_silos)
    return tuple(int(count) for count in counts)
