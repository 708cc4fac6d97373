"""Pairs of neighbouring data sets, among them the worst known ones.

Rows are a dict of arrays with one entry per row in each. A black-box audit sees only what its canary exercises, so
this is a library: constant canaries, opposite rows, heavy rows, hostile values.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from silobayes.privacy.relation import Relation

Rows = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Two neighbours; they differ in slot `changed` only (with add_remove it is filled in `rows`, empty in `other`)."""

    rows: Rows = field(repr=False)
    other: Rows = field(repr=False)
    changed: int
    relation: Relation
    name: str


def _opposite(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return -column


def _constant(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.full_like(column, rng.choice([-1.0, 1.0]))


def _heavy(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.full_like(column, rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(1, 12))


def _one_feature(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    spike = np.zeros_like(column)
    spike.flat[rng.integers(spike.size)] = rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(0, 3)
    return spike


def _zero(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.zeros_like(column)


def _fresh(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.standard_normal(column.shape) * 10.0 ** rng.uniform(-2, 2), dtype=column.dtype)


def _nan(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.full_like(column, np.nan)


def _infinite(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.full_like(column, rng.choice([-np.inf, np.inf]))


CANARIES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "opposite": _opposite,
    "constant": _constant,
    "heavy": _heavy,
    "one feature": _one_feature,
    "zero": _zero,
    "fresh": _fresh,
    "nan": _nan,
    "infinite": _infinite,
}


def neighbours(
    rng: np.random.Generator,
    make_rows: Callable[[np.random.Generator], Rows],
    relation: Relation,
    count: int,
) -> Iterator[Pair]:
    """`count` random pairs, cycling through the canaries; each starts from rows of its own.

    A canary replaces every floating-point column of the changed row; integer columns (labels, ids) get the value of
    another row. Under add_remove the canary is the row that `rows` has and `other` lacks: the last one, so that the
    slots of all others stay the same.
    """
    names = list(CANARIES)
    for number in range(count):
        name = names[number % len(names)]
        base = {key: np.array(column) for key, column in make_rows(rng).items()}
        num_rows = len(next(iter(base.values())))
        changed = int(rng.integers(num_rows)) if relation is Relation.SUBSTITUTE else num_rows - 1
        donor = int(rng.integers(num_rows))
        canary = {key: np.array(column) for key, column in base.items()}
        for column in canary.values():
            if np.issubdtype(column.dtype, np.floating):
                column[changed] = CANARIES[name](np.atleast_1d(column[changed]), rng).reshape(column[changed].shape)
            else:
                column[changed] = column[donor]
        other = base if relation is Relation.SUBSTITUTE else {key: column[:-1] for key, column in base.items()}
        yield Pair(rows=canary, other=other, changed=changed, relation=relation, name=name)


def worst_case_streams(num_steps: int, num_rows: int, relation: Relation) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Streams of scalar terms in [-1, 1] for audits: for each name two arrays (steps, rows) of neighbours.

    Row 0 is the canary. `constant`: it pushes up in every step while all others push down (what exposes shuffled
    batches priced as Poisson). `one round`: it speaks once. `opposite`: +1 against -1 among silent rows.
    `heavy shard`: rows are shards and one of them holds everything.
    """
    crowd = -np.ones((num_steps, num_rows))
    silent = np.zeros((num_steps, num_rows))

    def with_canary(base: np.ndarray, canary: float, steps: slice = slice(None)) -> np.ndarray:
        stream = base.copy()
        stream[steps, 0] = canary
        return stream

    gone = -1.0 if relation is Relation.SUBSTITUTE else 0.0
    return {
        "constant": (with_canary(crowd, 1.0), with_canary(crowd, gone)),
        "one round": (with_canary(silent, 1.0, slice(0, 1)), with_canary(silent, gone, slice(0, 1))),
        "opposite": (with_canary(silent, 1.0), with_canary(silent, gone)),
        "heavy shard": (with_canary(-crowd, 1.0), with_canary(-crowd, gone)),
    }
