"""Tables on disk -> pandas frames, without guessing: every cell of a CSV file stays text until the encoding reads it.

Formats: CSV (also .csv.gz), Parquet, NPZ (a one-dimensional array is a column of its name, a matrix `x` gives columns
x_0, x_1, ...). Objects are never unpickled.

Guarantees:
    No error text quotes the file's contents (a parser's own message would).
    Rows that are longer or shorter than the header are refused.
"""

import csv
import gzip
import re
from pathlib import Path

import numpy as np
import pandas as pd

from silobayes.core.errors import InvalidInput

_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


def read_table(path: Path, key: str) -> pd.DataFrame:
    """The table at `path`; `key` is the key of the study that names it, for errors."""
    readers = {".csv": _read_csv, ".csv.gz": _read_csv, ".parquet": _read_parquet, ".npz": _read_npz}
    suffix = next((suffix for suffix in readers if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise InvalidInput(key, "a .csv, .csv.gz, .parquet or .npz file", str(path), "Convert the table.")
    if not path.is_file():
        raise InvalidInput(key, "a file", str(path), "Paths are relative to the study file.")
    try:
        frame = readers[suffix](path)
    except InvalidInput:
        raise
    except Exception:
        # Whatever a parser says may quote the row it stumbled over, so its text goes no further.
        raise _unreadable(key, path, suffix) from None
    if not frame.columns.is_unique:
        raise InvalidInput(key, "columns with different names", str(path), "Rename or drop the repeated column.")
    return frame


def _unreadable(key: str, path: Path, suffix: str) -> InvalidInput:
    fix = (
        "Check that it is complete, that the first line of a CSV file names the columns and that all lines are as long."
    )
    return InvalidInput(key, f"a readable {suffix} table in UTF-8", str(path), fix)


def _read_csv(path: Path) -> pd.DataFrame:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    compressed = path.name.lower().endswith(".gz")
    with (gzip.open if compressed else open)(path, "rt", encoding="utf-8-sig", newline="") as lines:
        header = next(csv.reader(lines, strict=True))
    as_text = arrow_csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False)
    multiline = arrow_csv.ParseOptions(newlines_in_values=True)
    return arrow_csv.read_csv(path, parse_options=multiline, convert_options=as_text).to_pandas()


def _read_parquet(path: Path) -> pd.DataFrame:
    from pyarrow import parquet

    # Without pandas' metadata no column hides in an index; an unnamed index that pandas stored is no column of anyone.
    frame = parquet.read_table(path).to_pandas(ignore_metadata=True)
    return frame[[name for name in frame.columns if not _PANDAS_INDEX.fullmatch(str(name))]]


def _read_npz(path: Path) -> pd.DataFrame:
    columns: dict[str, np.ndarray] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            array = arrays[name]
            parts = {name: array} if array.ndim == 1 else {f"{name}_{k}": array[:, k] for k in range(array.shape[1])}
            if columns.keys() & parts.keys():
                raise ValueError("two columns of one name")
            columns |= parts
    return pd.DataFrame(columns)
