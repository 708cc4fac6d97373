"""Clipping: the only way from rows to a `Bounded` sum (SPEC 0, "One door").

Each unit's term is clipped, put on an integer grid and added up in integers, so that the sum does not depend on the
order of the rows and its sensitivity includes the rounding. Several statistics of the same rows are *blocks*: each
has its own clip norm, is divided by it, and all of them together are one vector, released and priced as one mechanism.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from silobayes.core.errors import InvalidInput, require_number
from silobayes.privacy.events import Sampling
from silobayes.privacy.relation import Relation, Terms, Unit, l1_sensitivity, l2_sensitivity
from silobayes.privacy.sampling import Batch

# Rounding raises a norm by at most half a cell in each coordinate; this many bits keep that below 2^-17 of the norm.
GRID_BITS = 16
# Terms are processed in slices of about this many numbers, so memory does not grow with the rows.
_CHUNK = 1 << 21
# Float64 sums of squares are exact to about 1e-16 a term; the declared norm is this much above, never below.
FLOAT_SLACK = 1.0 + 1e-9

# Only modules that prove what a term can move know it.
MADE_BY_CLIPPING = object()


class AbstractTerms(ABC):
    """One term per row, computed slice by slice."""

    kind: Terms
    num_rows: int
    size: int

    @abstractmethod
    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """The terms of these rows as a float64 array (rows, size)."""


@dataclass(frozen=True, eq=False)
class RowTerms(AbstractTerms):
    """Terms given as a matrix, one row each."""

    values: np.ndarray = field(repr=False)
    kind: Terms

    def __post_init__(self) -> None:
        if np.ndim(self.values) != 2:
            raise InvalidInput("terms", "a matrix with one row per term", np.shape(self.values), "Reshape it.")

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """How many rows there are."""
        return len(self.values)

    @property
    def size(self) -> int:  # type: ignore[override]
        """Numbers in one term."""
        return self.values.shape[1]

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """See `AbstractTerms`; negative entries of non-negative terms are hostile and become zero."""
        values = np.asarray(self.values[index], dtype=np.float64)
        return np.maximum(values, 0.0) if self.kind is Terms.NON_NEGATIVE else values


@dataclass(frozen=True, eq=False)
class OuterTerms(AbstractTerms):
    """Terms `weight * x x'`, packed by `pack_symmetric` so that the L2 norm is the Frobenius norm."""

    x: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    kind: Terms = Terms.PSD

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """How many rows there are."""
        return len(self.x)

    @property
    def size(self) -> int:  # type: ignore[override]
        """Numbers in one packed matrix."""
        return self.x.shape[1] * (self.x.shape[1] + 1) // 2

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """See `AbstractTerms`; a negative weight is hostile and becomes zero."""
        x = np.asarray(self.x[index], dtype=np.float64)
        weights = np.maximum(np.asarray(self.weights[index], dtype=np.float64), 0.0)
        upper, lower = np.triu_indices(x.shape[1])
        return weights[:, None] * x[:, upper] * x[:, lower] * np.where(upper == lower, 1.0, math.sqrt(2.0))


def general(values: np.ndarray) -> RowTerms:
    """Terms of any sign: substitution moves their sum by up to 2 C."""
    return RowTerms(np.asarray(values), Terms.GENERAL)


def non_negative(values: np.ndarray) -> RowTerms:
    """Terms with entries >= 0: substitution moves their sum by up to sqrt(2) C."""
    return RowTerms(np.asarray(values), Terms.NON_NEGATIVE)


def psd(x: np.ndarray, weights: np.ndarray | None = None) -> OuterTerms:
    """Terms `weight * x x'`: substitution moves their sum by up to sqrt(2) C in the Frobenius norm."""
    x = np.asarray(x)
    if x.ndim != 2:
        raise InvalidInput("x", "a matrix with one row per term", x.shape, "Reshape it.")
    return OuterTerms(x, np.ones(len(x)) if weights is None else np.asarray(weights))


def pack_symmetric(matrix: np.ndarray) -> np.ndarray:
    """Upper triangle with the off-diagonal times sqrt(2): the vector's L2 norm is the matrix's Frobenius norm."""
    upper, lower = np.triu_indices(matrix.shape[-1])
    return matrix[..., upper, lower] * np.where(upper == lower, 1.0, math.sqrt(2.0))


def unpack_symmetric(packed: np.ndarray) -> np.ndarray:
    """Inverse of `pack_symmetric`; noise of variance v on the vector is v on the diagonal, v/2 off it."""
    dim = (math.isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    upper, lower = np.triu_indices(dim)
    matrix = np.zeros((*packed.shape[:-1], dim, dim))
    matrix[..., upper, lower] = packed / np.where(upper == lower, 1.0, math.sqrt(2.0))
    matrix[..., lower, upper] = matrix[..., upper, lower]
    return matrix


@dataclass(frozen=True, kw_only=True)
class Block:
    """One statistic within a joint vector. `norm` is in units of `clip_norm`, after rounding: a little above 1."""

    clip_norm: float
    terms: Terms
    size: int
    norm: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounded:
    """A sum of clipped terms on the grid; made only by this module and by `products`.

    `total` holds integers: entry i of block b stands for `total[i] * grid * clip_norm_b`. `order` is the norm that
    was clipped: 2 for Gaussian-like noise, 1 for Laplace. `sharded`: one changed unit replaces a term, whatever the
    relation (see `clip`).
    """

    total: np.ndarray = field(repr=False)
    blocks: tuple[Block, ...]
    grid: float
    order: int
    unit: Unit
    sharded: bool
    sampling: Sampling | None
    proof: object = field(repr=False)

    def __post_init__(self) -> None:
        if self.proof is not MADE_BY_CLIPPING:
            raise InvalidInput("Bounded", "a value made by clip()", "a direct call", "Use privacy.clip(...).")

    @property
    def norm(self) -> float:
        """Norm bound of one unit's joint term, in units of the blocks' clip norms."""
        return math.sqrt(sum(block.norm**2 for block in self.blocks)) if self.order == 2 else self.blocks[0].norm

    def sensitivity(self, relation: Relation) -> float:
        """How far the joint sum moves between neighbours, in units of the blocks' clip norms (no default relation)."""
        if self.sharded:
            # Persons are dealt by their own id: another person may go to another shard, and then two terms change.
            terms = 2.0 if self.unit is Unit.PERSON and relation is Relation.SUBSTITUTE else 1.0
            return terms * self._distance(Relation.SUBSTITUTE)
        return self._distance(relation)

    def _distance(self, relation: Relation) -> float:
        if self.order == 1:
            return l1_sensitivity(self.blocks[0].norm, relation)
        return math.sqrt(sum(l2_sensitivity(block.norm, block.terms, relation) ** 2 for block in self.blocks))

    def with_norms(self, clip_norms: Sequence[float] | None) -> "Bounded":
        """A sum of the same layout whose blocks were clipped to other norms (None: to the same)."""
        if clip_norms is None or [*clip_norms] == [block.clip_norm for block in self.blocks]:
            return self
        norms = zip(self.blocks, clip_norms, strict=True)
        return replace(self, blocks=tuple(replace(block, clip_norm=float(norm)) for block, norm in norms))

    def decode(self, counts: np.ndarray) -> tuple[np.ndarray, ...]:
        """Grid counts -> one float64 vector per block, in the statistic's own units."""
        rest, parts = np.asarray(counts, dtype=np.float64), []
        for block in self.blocks[:-1]:
            parts.append(rest[: block.size])
            rest = rest[block.size :]
        sizes = zip([*parts, rest], self.blocks, strict=True)
        return tuple(part * (self.grid * block.clip_norm) for part, block in sizes)


def clip(
    terms: AbstractTerms,
    clip_norm: float,
    *,
    unit: Unit = Unit.ROW,
    persons: np.ndarray | None = None,
    sharded: bool = False,
    batch: Batch | None = None,
    order: int = 2,
) -> Bounded:
    """Clip each unit's term to L2 (or, with `order=1`, L1) norm `clip_norm` and sum.

    Args:
        terms: One term per row: `general(...)`, `non_negative(...)` or `psd(...)`.
        clip_norm: Bound of one unit's contribution.
        unit: What one neighbouring change touches. `person` adds up the rows of a person before clipping (`persons`
            names the person of each row); `client` clips the whole sum as one term.
        persons: Needed for, and only for, `unit=person`.
        sharded: The terms are not those of units but of fixed shards that hold many units each. A shard that loses a
            unit changes but does not vanish, so even under add_remove its term is *replaced*: up to 2 C. Persons
            are dealt by their own id, so substituting one for another changes up to two shards: up to 4 C.
        batch: The sampler's own record when the rows are a sample; its law goes into the price.
        order: 2, or 1 for Laplace noise.

    Guarantees:
        norm(clip(x, c)) <= declared norm, rounding included.
        A row with NaN or infinity contributes zero.
        The sum does not depend on the order of the rows.
        One changed unit moves the sum by at most `sensitivity(relation)`.
    """
    return clip_blocks([terms], [clip_norm], unit=unit, persons=persons, sharded=sharded, batch=batch, order=order)


def clip_blocks(
    blocks: Sequence[AbstractTerms],
    clip_norms: Sequence[float],
    *,
    unit: Unit = Unit.ROW,
    persons: np.ndarray | None = None,
    sharded: bool = False,
    batch: Batch | None = None,
    order: int = 2,
) -> Bounded:
    """Clip several statistics of the same rows, each to its own norm, as one joint vector (arguments as `clip`)."""
    _check_blocks(blocks, clip_norms, order)
    num_rows = blocks[0].num_rows
    _check_units(num_rows, unit, persons, batch, sharded)
    total_size = sum(block.size for block in blocks)
    grid = 2.0 ** -(GRID_BITS + math.ceil(math.log2(total_size) / 2 if order == 2 else math.log2(total_size)))
    sums, declared = [], []
    for terms, clip_norm in zip(blocks, clip_norms, strict=True):
        rounding = grid * (math.sqrt(terms.size) if order == 2 else terms.size) / 2
        if terms.kind is Terms.PSD:
            rounding *= math.sqrt(2.0)  # rounded terms are PSD only up to the rounding: sqrt(2)(1+r') >= sqrt(2)+2r
        norm = (1.0 + rounding) * FLOAT_SLACK
        cells = np.zeros(terms.size, dtype=np.int64)
        with np.errstate(all="ignore"):  # a warning about overflow would tell that somebody's row overflows
            for unit_terms in _unit_terms(terms, Unit.ROW if sharded else unit, persons):
                cells += _clip_to_grid(unit_terms / clip_norm, grid, order).sum(axis=0)
        sums.append(cells)
        declared.append(Block(clip_norm=float(clip_norm), terms=terms.kind, size=terms.size, norm=norm))
    return Bounded(
        total=np.concatenate(sums),
        blocks=tuple(declared),
        grid=grid,
        order=order,
        unit=unit,
        sharded=sharded,
        sampling=None if batch is None else batch.sampling,
        proof=MADE_BY_CLIPPING,
    )


def bounded_loop_sum(
    partial_sums: np.ndarray, clip_norm: float, *, chunk: int, batch: Batch, capacity: int, unit: Unit = Unit.ROW
) -> Bounded:
    """The sum of a batch whose terms float32 code has already clipped to `clip_norm` (loops.clip_factors).

    `partial_sums` holds one row for each `chunk` rows' terms. `capacity` counts units: rows, or persons, the norms of
    whose rows' terms add up to at most `clip_norm`. Summing c terms in float32, in any order, errs by at most
    (c + 8) 2^-24 of the sum of their norms (8 for the products before), so the whole sum errs by at most that share of
    `capacity` clip norms; both neighbours may err, and both are rounded to the grid once.
    """
    total = np.asarray(partial_sums, dtype=np.float64).sum(axis=0) / clip_norm
    size = total.size
    grid = 2.0 ** -(GRID_BITS + math.ceil(math.log2(size) / 2))
    error = capacity * (chunk + 8) * 2.0**-24 + grid * math.sqrt(size) / 2
    block = Block(clip_norm=float(clip_norm), terms=Terms.GENERAL, size=size, norm=(1.0 + 2 * error) * FLOAT_SLACK)
    return Bounded(
        total=np.rint(total / grid).astype(np.int64),
        blocks=(block,),
        grid=grid,
        order=2,
        unit=unit,
        sharded=False,
        sampling=batch.sampling,
        proof=MADE_BY_CLIPPING,
    )


def clip_places(terms: AbstractTerms, clip_norm: float) -> Bounded:
    """Clip each row's term to L2 norm `clip_norm`, and keep it in a place of its own instead of summing.

    What rows would publish of themselves in the local model. A changed row changes its own place only, so the
    sensitivity is that of one row. Under add_remove a removed row must leave its place empty (zeros): where others move
    up, every place changes and no price holds.

    Guarantees:
        One changed row moves the whole by at most `sensitivity(relation)`.
        A row with NaN or infinity is zero.
    """
    _check_blocks([terms], [clip_norm], 2)
    grid = 2.0 ** -(GRID_BITS + math.ceil(math.log2(terms.size) / 2))
    norm = (1.0 + grid * math.sqrt(terms.size) / 2) * FLOAT_SLACK
    with np.errstate(all="ignore"):
        places = [_clip_to_grid(rows / clip_norm, grid, 2) for rows in _unit_terms(terms, Unit.ROW, None)]
    total = np.concatenate([np.zeros(0, np.int64), *(part.reshape(-1) for part in places)])
    block = Block(clip_norm=float(clip_norm), terms=Terms.GENERAL, size=total.size, norm=norm)
    return Bounded(
        total=total,
        blocks=(block,),
        grid=grid,
        order=2,
        unit=Unit.ROW,
        sharded=False,
        sampling=None,
        proof=MADE_BY_CLIPPING,
    )


def _clip_to_grid(values: np.ndarray, grid: float, order: int) -> np.ndarray:
    """Rows of `values` clipped to norm 1 and rounded to integers times `grid`; hostile rows become zero."""
    # Dividing by the largest entry first keeps a row like 1e200 from overflowing into a norm of infinity.
    largest = np.max(np.abs(values), axis=1, initial=0.0, keepdims=True)
    usable = np.isfinite(largest) & (largest > 0.0)
    shape = np.where(usable, values, 0.0) / np.where(usable, largest, 1.0)
    shape_norm = np.maximum(np.linalg.norm(shape, ord=order, axis=1, keepdims=True), np.finfo(float).tiny)
    length = np.minimum(1.0, np.where(usable, largest, 0.0) * shape_norm)
    return np.rint(shape * (length / shape_norm) / grid).astype(np.int64)


def _unit_terms(terms: AbstractTerms, unit: Unit, persons: np.ndarray | None) -> Iterator[np.ndarray]:
    """The term of each unit, slice by slice; rows that are not finite count as zero before they are added up."""
    step = max(1, _CHUNK // max(terms.size, 1))
    if unit is Unit.ROW:
        for start in range(0, terms.num_rows, step):
            yield terms.rows(slice(start, start + step))
        return
    if unit is Unit.CLIENT:
        whole = np.zeros((1, terms.size))
        for start in range(0, terms.num_rows, step):
            whole += _finite_rows(terms.rows(slice(start, start + step))).sum(axis=0)
        yield whole
        return
    assert persons is not None
    order = np.argsort(persons, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.asarray(persons)[order][1:] != np.asarray(persons)[order][:-1]])
    ends = np.r_[starts[1:], len(order)]
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + step, side="right")))
        chosen = order[starts[first] : ends[last - 1]]
        yield np.add.reduceat(_finite_rows(terms.rows(chosen)), starts[first:last] - starts[first], axis=0)
        first = last


def _finite_rows(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values).all(axis=1, keepdims=True), values, 0.0)


def _check_blocks(blocks: Sequence[AbstractTerms], clip_norms: Sequence[float], order: int) -> None:
    if len(blocks) == 0 or len(blocks) != len(clip_norms):
        raise InvalidInput("clip_norms", f"one per block ({len(blocks)})", list(clip_norms), "Pass one norm per block.")
    for clip_norm in clip_norms:
        require_number("clip_norm", clip_norm, above=0.0, fix="Pass the norm bound of one unit's term.")
    if order not in (1, 2) or (order == 1 and len(blocks) > 1):
        raise InvalidInput("order", "2, or 1 with a single block", order, "Blocks are joined in L2 only.")
    if len({block.num_rows for block in blocks}) != 1:
        raise InvalidInput(
            "blocks", "statistics of the same rows", [block.num_rows for block in blocks], "Pass equal row counts."
        )


def _check_units(num_rows: int, unit: Unit, persons: np.ndarray | None, batch: Batch | None, sharded: bool) -> None:
    if sharded and (persons is not None or batch is not None):
        raise InvalidInput("sharded", "neither persons nor a batch", sharded, "Deal persons to shards beforehand.")
    if not sharded and (unit is Unit.PERSON) != (persons is not None):
        raise InvalidInput(
            "persons", "person ids with unit=person and only there", unit.value, "Pass persons=, one id per row."
        )
    if persons is not None and np.shape(persons) != (num_rows,):
        raise InvalidInput("persons", f"one id for each of {num_rows} rows", np.shape(persons), "Pass one id per row.")
    if batch is not None and unit is not Unit.ROW:
        raise InvalidInput("batch", "sampled rows only with unit=row", unit.value, "Sum each person's rows beforehand.")
    if batch is not None and num_rows > len(batch.indices):
        raise InvalidInput("batch", f"at most {len(batch.indices)} rows", num_rows, "Pass the rows of this batch.")
