"""Who is protected and against which change: the words every guarantee must state (SPEC 0)."""

import math
from enum import StrEnum


class Relation(StrEnum):
    """Which data sets are neighbours. There is no default anywhere: the two differ by up to a factor of two."""

    SUBSTITUTE = "substitute"
    ADD_REMOVE = "add_remove"


class Unit(StrEnum):
    """What one neighbouring change touches: a row, all rows of one person, or a whole silo."""

    ROW = "row"
    PERSON = "person"
    CLIENT = "client"


class Terms(StrEnum):
    """What is known of the terms of a sum: non-negative or PSD terms have pairwise inner products >= 0."""

    GENERAL = "general"
    NON_NEGATIVE = "non_negative"
    PSD = "psd"


def l2_sensitivity(clip_norm: float, terms: Terms, relation: Relation) -> float:
    """L2 distance of two sums on neighbours when each unit's term has L2 norm <= `clip_norm`.

    Only for unsampled sums and fixed-size batches: under Poisson sampling the distance to the absent term matters too
    (SPEC 0), so the accountant prices that case from `clip_norm` and not from this number.
    """
    if relation is Relation.ADD_REMOVE:
        return clip_norm
    return (2.0 if terms is Terms.GENERAL else math.nextafter(math.sqrt(2.0), 2.0)) * clip_norm


def l1_sensitivity(clip_norm: float, relation: Relation) -> float:
    """The same in L1, where the sign of the terms buys nothing: two non-negative terms can load different entries."""
    return clip_norm if relation is Relation.ADD_REMOVE else 2.0 * clip_norm
