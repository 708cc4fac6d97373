"""Public encoding: columns of a table -> rows of numbers, by declared ranges, categories and classes only.

How a column, or a product of columns, becomes features is in `columns.py`. A row holds those of the columns, then those
of further terms; a column of ones named "intercept" comes last if asked for. Centring matters: features far from zero
are nearly collinear with the intercept, and a mean-field posterior then needs many more rounds. Categories are not
scaled: in units of its spread a rare one would be an outlier, which takes all the noise and is clipped. Nothing is
learned from rows (PITFALLS: standardising, vocabularies and bounds from rows): a spread or a share is declared like a
range, so neighbouring tables are encoded alike.

Rules, cited by number in errors because the cells themselves may not be:
    1. the table has the columns that the study names, and no others
    2. the table has rows
    3. a number is finite
    4. a number is within its bounds (outside = "refuse"; with "clip" it is moved to the nearer bound, silently,
       because how many were moved is a fact about rows)
    5. a category is a listed one
    6. the target is a listed class, or a number
    7. a count is a whole number
    8. each row names its person

Guarantees:
    A row's norm is at most `max_row_norm`, and some row has that norm, but for rounding.
    Features without a declared spread lie in [-1, 1].
    `typical_moments` has the null space of the encoding: what vanishes on every row, and nothing else.
    If values are as declared, the root of a row's mean squared norm is at most `typical_row_norm`.
    A clipped or accepted target lies within its bounds.
    A row's encoding does not depend on the other rows, nor does it whether the row is accepted.
    No error text quotes a cell or a header.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd

from silobayes.core.errors import InvalidInput
from silobayes.core.hashing import stable_hashes
from silobayes.data.columns import Category, Column, Numeric, Term, independent_moments

INTERCEPT = "intercept"
# Beyond it not every whole number is a float64.
_LARGEST_WHOLE = 2.0**53


class Outside(StrEnum):
    """What happens to a number outside its declared bounds."""

    REFUSE = "refuse"
    CLIP = "clip"


@dataclass(frozen=True, kw_only=True)
class ClassTarget:
    """A target with listed classes; labels are their positions."""

    name: str
    classes: tuple[Category, ...]


@dataclass(frozen=True, kw_only=True)
class RealTarget:
    """A real target with its public range; it keeps its own scale."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class CountTarget:
    """A target of whole numbers with its public range."""

    name: str
    low: float
    high: float


Target = ClassTarget | RealTarget | CountTarget


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a table becomes numbers.

    Attributes:
        columns: The features, in order.
        target: What is explained; None for models of the features alone (`y` is then zero).
        person: The column that says whose row it is, if the unit of privacy is a person.
        unused: Columns that the table may hold and that are not read here.
        outside: What happens to a number outside its bounds.
        intercept: Whether a column of ones is appended.
        terms: Products of columns that follow them.
    """

    columns: tuple[Column, ...]
    target: Target | None
    person: str | None
    unused: tuple[str, ...]
    outside: Outside
    intercept: bool
    terms: tuple[Term, ...] = ()

    @property
    def all_terms(self) -> tuple[Term, ...]:
        """The columns by themselves, then the products; in the order of `x`."""
        return (*(Term(factors=((column, 1),)) for column in self.columns), *self.terms)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The name of each column of `x`."""
        names = tuple(name for term in self.all_terms for name in term.feature_names)
        return (*names, INTERCEPT) if self.intercept else names

    @property
    def feature_units(self) -> tuple[float, ...]:
        """How far one unit of its column moves each column of `x`: a coefficient times it is one per year, per mmHg."""
        units = tuple(unit for term in self.all_terms for unit in term.feature_units)
        return (*units, 1.0) if self.intercept else units

    @property
    def max_row_norm(self) -> float:
        """Public bound of a row's L2 norm, over all rows that the encoding accepts."""
        return math.sqrt(math.fsum(term.max_square for term in self.all_terms) + self.intercept)

    @property
    def typical_row_norm(self) -> float:
        """Public size of a row: the root of its mean squared norm, if values are as declared."""
        return math.sqrt(math.fsum(term.typical_square for term in self.all_terms) + self.intercept)

    @property
    def typical_moments(self) -> np.ndarray:
        """Public guess of E[x x'], from declarations alone.

        Numbers are normal around zero, with their spread or a third of the farther end of their range; categories have
        their shares or are equally frequent; columns are independent.
        """
        constant = np.zeros((int(self.intercept), len(self.columns)), int)
        places = [term.places(self.columns) for term in self.all_terms]
        return independent_moments(self.columns, np.concatenate([*places, constant]))

    def encode(self, frame: pd.DataFrame, silo: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(x, y, persons) of the table of `silo`; a person's number depends on their id only."""
        named = [self.target.name] if self.target else []
        self._check_columns(frame, silo, [*named, *([self.person] if self.person else [])])
        x = self._features(frame, silo)
        y = (
            np.zeros(len(frame), np.float32)
            if self.target is None
            else self._target(cells_of(frame, self.target.name), silo)
        )
        return x, y, None if self.person is None else _persons(cells_of(frame, self.person), silo)

    def encode_features(self, frame: pd.DataFrame) -> np.ndarray:
        """`x` of new rows, for predictions; the target may be there and is not read."""
        self._check_columns(frame, "new rows", [])
        return self._features(frame, "new rows")

    def assemble(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """`x` from the encoded columns by name."""
        num_rows = len(next(iter(parts.values())))
        ones = np.ones((num_rows, int(self.intercept)), np.float32)
        return np.concatenate([*(term.encode(parts) for term in self.all_terms), ones], axis=1)

    def _check_columns(self, frame: pd.DataFrame, silo: str, others: list[str]) -> None:
        needed = [column.name for column in self.columns] + others
        missing = [name for name in needed if name not in frame.columns]
        if missing:
            key = "data.target" if self.target and missing[0] == self.target.name else "data.features"
            fix = "Correct the name in the study, or the table."
            raise InvalidInput(key, f"column {missing[0]!r} in {silo}", "a table without it", fix)
        possible = {*needed, *self.unused, self.person, self.target.name if self.target else None}
        extra = sum(name not in possible for name in frame.columns)
        if extra or not frame.columns.is_unique:
            # Not by name: the "header" of a file that has none is a row.
            got = f"{extra} more columns" if extra else "a column twice"
            fix = "Name those that are not to be used in data.ignore, and check that the file has a header."
            raise InvalidInput("data.features", f"only columns named in the study in {silo}", got, fix)
        if len(frame) == 0:
            raise InvalidInput("data", f"rows in {silo}", "an empty table", "Add rows or remove the silo.")

    def _features(self, frame: pd.DataFrame, silo: str) -> np.ndarray:
        parts = {}
        for column in self.columns:
            key = f"data.bounds.{column.name}"
            if isinstance(column, Numeric):
                values = self._numbers(cells_of(frame, column.name), key, column.low, column.high, silo)
            else:
                fix = f"List the category in {key}, or correct the cells."
                values = _codes(cells_of(frame, column.name), column.categories, key, "listed categories", silo, fix)
            parts[column.name] = column.encode(values)
        return self.assemble(parts)

    def _target(self, cells: pd.Series, silo: str) -> np.ndarray:
        target, key = self.target, "data.target"
        if isinstance(target, ClassTarget):
            fix = "List the class in data.classes, or correct the cells."
            return _codes(cells, target.classes, key, "listed classes", silo, fix).astype(np.int32)
        assert target is not None
        values = self._numbers(cells, key, target.low, target.high, silo)
        if isinstance(target, CountTarget) and np.any(values != np.rint(values)):
            raise _refusal(key, "whole numbers", target.name, silo, "Correct the cells.")
        return clip_target(target, values)

    def _numbers(self, cells: pd.Series, key: str, low: float, high: float, silo: str) -> np.ndarray:
        values = _as_float(cells)
        if not np.isfinite(values).all():
            fix = "Fill, correct or drop them beforehand."
            raise _refusal(key, "finite numbers", str(cells.name), silo, fix)
        if self.outside is Outside.REFUSE and not np.all((low <= values) & (values <= high)):
            fix = 'Widen the bounds, or set data.outside = "clip".'
            raise _refusal(key, f"numbers in [{low:g}, {high:g}]", str(cells.name), silo, fix)
        return np.clip(values, low, high)


def _refusal(key: str, expected: str, column: str, silo: str, fix: str, *, got: str = "another cell") -> InvalidInput:
    """Without the cell itself, which is private."""
    return InvalidInput(key, f"{expected} in column {column!r} of {silo}", got, fix)


def _codes(
    cells: pd.Series, categories: Sequence[Category], key: str, expected: str, silo: str, fix: str
) -> np.ndarray:
    codes = codes_of(cells, categories)
    unknown = cells.to_numpy(object)[codes < 0]
    if pd.isna(unknown).any() or np.any(unknown == ""):
        fix = "Fill or drop those rows beforehand, or list a category for them."
        raise _refusal(key, expected, str(cells.name), silo, fix, got="an empty cell")
    if len(unknown):
        raise _refusal(key, expected, str(cells.name), silo, fix)
    return codes


def _as_float(cells: pd.Series) -> np.ndarray:
    """float64 with NaN for whatever is not a number; dates and durations are not numbers."""
    if cells.dtype.kind in "cmM":
        return np.full(len(cells), np.nan)
    if cells.dtype.kind not in "fiub":
        try:
            cells = pd.Series(pd.to_numeric(cells.astype(object), errors="coerce"))
        except TypeError:  # cells that are lists or tables; its text quotes them
            return np.full(len(cells), np.nan)
    return cells.to_numpy(np.float64, na_value=np.nan)


def clip_target(target: RealTarget | CountTarget, values: np.ndarray) -> np.ndarray:
    """Numbers as float32 within the target's range.

    float32 may round past a bound that someone promised; the nearest float32 inside the range does not.
    """
    return np.clip(values.astype(np.float32), _inside(target.low, target.high), _inside(target.high, target.low))


def cells_of(frame: pd.DataFrame, name: str) -> pd.Series:
    """One column of a frame whose column names differ."""
    cells = frame[name]
    assert isinstance(cells, pd.Series)
    return cells


def codes_of(cells: pd.Series, categories: Sequence[Category]) -> np.ndarray:
    """The position of each cell in the list, -1 for a cell that is not listed.

    Listed numbers are compared as numbers. Listed texts are compared with texts, with whole numbers as they are
    written in decimal, and with truth values as "true" and "false".
    """
    if not isinstance(categories[0], str):
        return pd.Index(np.array(categories, np.float64)).get_indexer(pd.Index(_as_float(cells)))
    written = np.empty(len(cells), object)
    written[:] = [_written(cell) for cell in cells.to_numpy(object)]
    try:
        return pd.Index(np.array(categories, object)).get_indexer(pd.Index(written))
    except TypeError:  # cells that are lists or tables; its text quotes them
        return np.full(len(cells), -1)


def _written(cell: object) -> object:
    """A whole number and a truth value as text, anything else as it is.

    Cell by cell: the type of a column is decided by all its rows together, and one text among whole numbers would
    change how all of them are read.
    """
    if isinstance(cell, (bool, np.bool_)):
        return "true" if cell else "false"
    return str(cell) if isinstance(cell, (int, np.integer)) else cell


def _persons(cells: pd.Series, silo: str) -> np.ndarray:
    """A number for each person that depends on their own id only: numbering in order of appearance would not.

    Two persons share one of 2^64 numbers by chance; they would then be protected as one.
    """
    if cells.isna().any() or np.any(cells.to_numpy(object) == ""):
        raise _refusal("data.unit", "a person for each row", str(cells.name), silo, "Fill or drop those rows.")
    ids = [text for text in map(_id_text, cells) if text is not None]
    if len(ids) < len(cells):
        fix = "Write ids as texts or as whole numbers."
        raise _refusal("data.unit", "texts or whole numbers", str(cells.name), silo, fix)
    return np.array(stable_hashes(ids), dtype=np.int64)


def _id_text(cell: object) -> str | None:
    """An id as text; None if it is a number that is not whole, or too large for a float to tell from its neighbour.

    One such number turns a column of whole numbers into floats, and then everybody's id would be written differently.
    """
    if isinstance(cell, (float, np.floating)):
        return str(int(cell)) if float(cell).is_integer() and abs(cell) < _LARGEST_WHOLE else None
    return str(cell)


def _inside(bound: float, towards: float) -> np.float32:
    """The float32 nearest to `bound` that does not lie beyond it, as seen from `towards`."""
    rounded = np.float32(bound)
    beyond = float(rounded) < bound if towards > bound else float(rounded) > bound
    return np.nextafter(rounded, np.float32(towards)) if beyond else rounded
