"""How answers are added up, as a study describes it, and what that makes silos send."""

from typing import Any

from silobayes.privacy.queries import AbstractQuery
from silobayes.protocols.roles import Plan
from silobayes.secure.sums import AbstractSum, PairwiseMaskSum, PlainSum, SecretSharingSum
from silobayes.studies.study import AggregationKind, AggregationSection


def sum_of(section: AggregationSection, query: AbstractQuery, num_silos: int, identity: str) -> AbstractSum:
    """The sum that a study of so many silos describes; over the silos of a visit, who keep their numbers."""
    common: dict[str, Any] = {"num_clients": num_silos, "colluding": section.num_colluding}
    modulus, study = query.modulus, bytes.fromhex(identity)
    assert modulus is not None
    if section.kind is AggregationKind.TRUSTED:
        return PlainSum(**common)
    if section.kind is AggregationKind.SECRET_SHARING:
        return SecretSharingSum(**common, modulus=modulus, compute_nodes=section.compute_nodes or 3, study_hash=study)
    return PairwiseMaskSum(**common, modulus=modulus, study_hash=study)


def communications(plan: Plan, num_rounds: int, aggregation: AggregationSection) -> dict[str, int]:
    """What crosses between silos and server; what compute nodes tell each other does not reach a silo.

    An exchange is one broadcast down, of as many float64 numbers as the natural parameters, and its answer up: as many
    numbers in one message, or what the aggregator says that a silo sends for a sum of so many. A round visits every
    silo (`sampled`: a subset) once, be it together or one after the other; a visit of several steps has as many
    exchanges, and each counts as a round. Visits before the first round are one each.
    """
    exchanges = sum(visit.steps * len(visit.silos) for visit in plan.visits)
    messages, up = 1, 8 * plan.numbers
    last = plan.visits[-1]
    query = plan.silos[last.part].query
    if query.modulus is not None:
        sums = sum_of(aggregation, query, len(last.silos), "0" * 64)
        messages, up = sums.messages_per_client, sums.bytes_per_client(plan.numbers)
    return {
        "rounds": last.steps * num_rounds,
        "messages": (1 + messages) * exchanges,
        "bytes": (8 * plan.numbers + up) * exchanges,
    }
