"""Clipped sums of products of rows, as matrix products: for many rows and many columns (SPEC 0, "One door").

The norm of a term `a (x) x` is |a| |x|, that of `x x' (x) A` is |x|^2 |A|, so that clipping is a smaller weight of a
row and no term is ever built. Sums are added up in float64 and put on the grid once.

Sensitivity. A unit's terms are scaled so that their norms add up to at most the clip norm. Adding up n terms in
float64, in any order, errs by at most n 2^-53 of the sum of their norms, a few more for the products in them: at most
`capacity (capacity + 16) 2^-53` clip norms. Rounding to the grid errs by half a cell in each coordinate. Both
neighbours may err by both, so a block's norm is declared larger by twice that.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from silobayes.privacy.clipping import FLOAT_SLACK, GRID_BITS, MADE_BY_CLIPPING, Block, Bounded, pack_symmetric
from silobayes.privacy.relation import Terms, Unit

# Of a term's own products.
_OPERATIONS = 16


class AbstractProducts(ABC):
    """One statistic of rows; `clip_norm` bounds a unit's term, noise is counted in units of `scale`."""

    kind: Terms
    clip_norm: float
    scale: float

    @property
    @abstractmethod
    def size(self) -> int:
        """Numbers in the sum."""

    @abstractmethod
    def norms(self) -> np.ndarray:
        """Of each row's term."""

    @abstractmethod
    def of(self, chosen: np.ndarray) -> "AbstractProducts":
        """The same of some of the rows."""

    @abstractmethod
    def total(self, weights: np.ndarray) -> np.ndarray:
        """The sum of all rows' terms, each times its weight, as a vector."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Vectors(AbstractProducts):
    """Terms `a (x) x`, for a of a few numbers a row: as a matrix of features by these, row by row."""

    x: np.ndarray = field(repr=False)
    factors: np.ndarray = field(repr=False)
    clip_norm: float
    scale: float
    kind: Terms = Terms.GENERAL

    @property
    def size(self) -> int:
        """See `AbstractProducts`."""
        return self.x.shape[1] * self.factors.shape[1]

    def norms(self) -> np.ndarray:
        """See `AbstractProducts`."""
        return _lengths(self.factors) * _lengths(self.x)

    def of(self, chosen: np.ndarray) -> "Vectors":
        """See `AbstractProducts`."""
        return replace(self, x=self.x[chosen], factors=self.factors[chosen])

    def total(self, weights: np.ndarray) -> np.ndarray:
        """See `AbstractProducts`."""
        return (self.x.T @ (self.factors * weights[:, None])).ravel()


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrices(AbstractProducts):
    """Terms `x x' (x) A`, for a small PSD matrix A a row, packed so that the L2 norm is the Frobenius norm."""

    x: np.ndarray = field(repr=False)
    factors: np.ndarray = field(repr=False)
    clip_norm: float
    scale: float
    kind: Terms = Terms.PSD

    @property
    def size(self) -> int:
        """See `AbstractProducts`."""
        dim = self.x.shape[1] * self.factors.shape[1]
        return dim * (dim + 1) // 2

    def norms(self) -> np.ndarray:
        """See `AbstractProducts`."""
        lengths = _lengths(self.x)
        return _lengths(self.factors.reshape(len(lengths), self.factors.shape[1] ** 2)) * lengths * lengths

    def of(self, chosen: np.ndarray) -> "Matrices":
        """See `AbstractProducts`."""
        return replace(self, x=self.x[chosen], factors=self.factors[chosen])

    def total(self, weights: np.ndarray) -> np.ndarray:
        """See `AbstractProducts`."""
        d, k = self.x.shape[1], self.factors.shape[1]
        whole = np.zeros((d, k, d, k))
        x = self.x * np.sqrt(weights)[:, None]  # a small factor times a small weight would lose its last bits
        for a in range(k):
            for b in range(a, k):
                part = (x * self.factors[:, a, b, None]).T @ x
                whole[:, a, :, b] = whole[:, b, :, a] = part
        return pack_symmetric(whole.reshape(d * k, d * k))


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers(AbstractProducts):
    """Terms that are a number >= 0 each."""

    values: np.ndarray = field(repr=False)
    clip_norm: float
    scale: float
    kind: Terms = Terms.NON_NEGATIVE

    @property
    def size(self) -> int:
        """See `AbstractProducts`."""
        return 1

    def norms(self) -> np.ndarray:
        """See `AbstractProducts`."""
        return np.abs(self.values)

    def of(self, chosen: np.ndarray) -> "Numbers":
        """See `AbstractProducts`."""
        return replace(self, values=self.values[chosen])

    def total(self, weights: np.ndarray) -> np.ndarray:
        """See `AbstractProducts`."""
        return np.array([np.sum(np.maximum(self.values, 0.0) * weights)])


def _lengths(vectors: np.ndarray) -> np.ndarray:
    """L2 norms of rows; squares of small numbers would be zero, and what a large number makes of them unbounded."""
    largest = np.max(np.abs(vectors), axis=1, initial=0.0)
    parts = vectors / np.where(largest > 0.0, largest, 1.0)[:, None]
    return largest * np.sqrt(np.sum(parts**2, axis=1))


def clip_products(
    statistics: Sequence[AbstractProducts], *, capacity: int, unit: Unit = Unit.ROW, units: np.ndarray | None = None
) -> Bounded:
    """Several statistics of the same rows as one joint vector.

    Args:
        statistics: Of rows that are all finite.
        capacity: A public bound on the number of rows.
        unit: Whom it protects.
        units: The number of the person that each row is of; None: every row is a unit of its own.

    Guarantees:
        - the norms of a unit's terms add up to no more than the clip norm
        - one changed unit moves the sum by at most `sensitivity(relation)`
        - a row whose terms are not finite contributes nothing
    """
    total_size = sum(own.size for own in statistics)
    grid = 2.0 ** -(GRID_BITS + math.ceil(math.log2(total_size) / 2))
    sums, blocks = [], []
    for own in statistics:
        with np.errstate(all="ignore"):  # a warning about overflow would tell that somebody's row overflows
            finite = np.isfinite(own.norms())
            kept = own if finite.all() else own.of(finite)
            norms = kept.norms()
            if units is not None:
                persons = units[finite]
                norms = np.bincount(persons, weights=norms)[persons]
            total = kept.total(own.clip_norm / np.maximum(norms, own.clip_norm))
        share = own.clip_norm / own.scale
        error = capacity * (capacity + _OPERATIONS) * 2.0**-53 * share + grid * math.sqrt(own.size) / 2
        sums.append(np.rint(total / (own.scale * grid)).astype(np.int64))
        norm = (share + 2.0 * error) * FLOAT_SLACK
        blocks.append(Block(clip_norm=own.scale, terms=own.kind, size=own.size, norm=norm))
    return Bounded(
        total=np.concatenate(sums),
        blocks=tuple(blocks),
        grid=grid,
        order=2,
        unit=unit,
        sharded=False,
        sampling=None,
        proof=MADE_BY_CLIPPING,
    )
