"""`data.terms`: products of columns as a study writes them, `age:ward`, `age^2`, `age^2:ward`.

Only products of columns and whole powers of numbers, so that what a feature may hold and typically holds follows from
declarations. A formula library would learn from rows (levels, means, splines), drop rows with gaps, and run what a
formula says as Python; docs/study-file.md tells what was tried.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.data.columns import Column, Numeric, Term

_HIGHEST_POWER = 4
_MOST_FEATURES = 1000
# As for the spread of a number: float32 has no digits for more.
_LARGEST_VALUE = 1e6
_KEY = "data.terms"


def one_spelling(text: str) -> str:
    """The same without spaces around signs."""
    return ":".join("^".join(piece.strip() for piece in part.split("^")) for part in text.split(":"))


def parse_terms(texts: Sequence[str], columns: Sequence[Column]) -> tuple[Term, ...]:
    """The terms of a study; one that cannot be is refused."""
    by_name = {column.name: column for column in columns}
    terms = tuple(_term(text, by_name) for text in texts)
    seen = set()
    for text, term in zip(texts, terms, strict=True):
        factors = frozenset((column.name, power) for column, power in term.factors)
        if factors in seen:
            raise InvalidInput(_KEY, "each product once", text, "Remove the repetition.")
        seen.add(factors)
    return terms


def _term(text: str, columns: Mapping[str, Column]) -> Term:
    factors = tuple(_factor(part, text, columns) for part in text.split(":"))
    names = [column.name for column, _ in factors]
    if len(set(names)) < len(names):
        raise InvalidInput(_KEY, "each column once in a product", text, "Write a power of a number as age^2.")
    if len(factors) == 1 and factors[0][1] == 1:
        fix = "Write a product, age:ward, or a power, age^2; columns by themselves are features already."
        raise InvalidInput(_KEY, "products of columns, or powers", text, fix)
    term = Term(factors=factors)
    if term.num_features > _MOST_FEATURES:
        fix = "Multiply columns with fewer categories."
        raise InvalidInput(_KEY, f"at most {_MOST_FEATURES} features of a term", f"{text}: {term.num_features}", fix)
    if not float(np.abs(term.extremes).max()) <= _LARGEST_VALUE:
        fix = "Declare larger spreads or narrower bounds, or take a lower power."
        raise InvalidInput(_KEY, f"features of at most {_LARGEST_VALUE:g}", text, fix)
    return term


def _factor(part: str, text: str, columns: Mapping[str, Column]) -> tuple[Column, int]:
    name, power = part, 1
    if part not in columns and "^" in part:
        name, _, exponent = part.rpartition("^")
        if exponent not in [str(k) for k in range(2, _HIGHEST_POWER + 1)]:
            raise InvalidInput(_KEY, f"powers from 2 to {_HIGHEST_POWER}", text, "Write age^2.")
        power = int(exponent)
    column = columns.get(name)
    if column is None:
        fix = "Name columns of data.features; write a product as age:ward and a power as age^2."
        raise InvalidInput(_KEY, f"columns among {', '.join(columns)}", f"{name!r} in {text!r}", fix)
    if power > 1 and not isinstance(column, Numeric):
        raise InvalidInput(_KEY, "powers of numbers", text, "A category is there or not; its powers are itself.")
    return column, power
