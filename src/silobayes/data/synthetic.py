"""Rows made up from what a study declares, for trying it out before anybody's rows are spent on it.

Numbers are normal around their typical value, with the declared spread or, without one, a third of the way to the
farther end of the range, and moved to the nearer end where they fall outside. Categories have their declared shares,
or equal ones. Columns are independent, but for one `correlation` that all numbers may share.

Guarantees:
    Made-up rows are as the study describes them.
    Nothing but declarations decides a made-up row.
"""

import math

import numpy as np
import pandas as pd

from silobayes.core.errors import InvalidInput
from silobayes.data.columns import Numeric
from silobayes.data.encoding import Encoding

# Of the distance to the farther end of the range, where no spread is declared.
_SPREAD = 1 / 3


def synthetic_table(
    encoding: Encoding,
    num_rows: int,
    rng: np.random.Generator,
    *,
    correlation: float = 0.0,
) -> pd.DataFrame:
    """A table of features that the encoding accepts.

    Args:
        encoding: Of the study.
        num_rows: How many rows.
        rng: Where they come from.
        correlation: Of every two numbers, before they are moved into their ranges; in [0, 1).
    """
    if not 0.0 <= correlation < 1.0:
        raise InvalidInput("correlation", "a number in [0, 1)", correlation, "0 makes columns independent.")
    common = rng.standard_normal(num_rows)
    cells: dict[str, np.ndarray] = {}
    for column in encoding.columns:
        if isinstance(column, Numeric):
            own = rng.standard_normal(num_rows)
            place = math.sqrt(correlation) * common + math.sqrt(1.0 - correlation) * own
            spread = _SPREAD * column.reach if column.spread is None else column.spread
            cells[column.name] = np.clip(column.typical + spread * place, column.low, column.high)
        else:
            shares = None if column.shares is None else np.array(column.shares) / math.fsum(column.shares)
            chosen = rng.choice(len(column.categories), size=num_rows, p=shares)
            cells[column.name] = np.array(column.categories)[chosen]
    return pd.DataFrame(cells)


def person_of_rows(num_rows: int, num_persons: int) -> np.ndarray:
    """A number for the person of each row: as even as can be, rows of one person side by side."""
    return np.arange(num_rows) * num_persons // num_rows
