"""How large the silos of a study are, before any row is read: told, or counted from the length of its tables.

Guarantees:
    No cell of a table is looked at; a table is at most counted.
"""

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.data.description import SplitScheme
from silobayes.privacy.relation import Unit
from silobayes.studies.study import Study


def check_rows(study: Study, rows: Sequence[int]) -> tuple[str, ...]:
    """The names of silos of so many rows; refuses numbers that do not fit the study."""
    names = study.description.silo_names or tuple(f"silo-{k}" for k in range(len(rows)))
    if not rows or len(rows) != len(names) or any(count < 1 for count in rows):
        fix = "Pass the rows of all silos together, or one number for each."
        raise InvalidInput("rows", f"{len(names) or 'some'} positive numbers", list(rows), fix)
    return names


def silo_rows(study: Study, total: int) -> list[int]:
    """Rows of each silo when `total` training rows are dealt; a split by column is taken as even."""
    count = len(study.description.silo_names)
    if count == 0:
        raise InvalidInput("silos.count", "a number of silos", "nothing", "Name tables, or pass the rows of each silo.")
    if study.silos.scheme is SplitScheme.RHO_KAPPA and study.silos.rho is not None:
        shares = [1.0 - study.silos.rho] * (count // 2) + [1.0 + study.silos.rho] * (count - count // 2)
        return [int(total / count * share) for share in shares]
    return [total // count + (k < total % count) for k in range(count)]


def counted_rows(study: Study, folder: Path) -> list[int]:
    """Training rows of each silo from the length of the tables; the study declares these numbers public."""
    data = study.data
    held_out = data.test if isinstance(data.test, float) else 0.0
    if data.files is not None:
        lengths = [_length(folder / path, f"data.files.{name}") for name, path in data.files.items()]
        return [length - round(held_out * length) for length in lengths]
    if data.source is None:
        raise InvalidInput("rows", "the number of rows", "nothing", "Pass --rows: the study names no table.")
    length = _length(folder / data.source, "data.source")
    return silo_rows(study, length - round(held_out * length))


def counts_persons(study: Study) -> bool:
    """Whether the numbers of persons decide anything: batches are of persons, or the numbers of rows are not public."""
    return samples_persons(study) or not study.tells_rows


def samples_persons(study: Study) -> bool:
    """Whether batches are of persons."""
    return study.privacy.unit is Unit.PERSON and study.method.person_slots


def silo_units(study: Study, rows: Sequence[int], persons: Sequence[int] | None) -> list[int]:
    """Units of each silo: rows, or persons where their number decides something; by default as few as can be."""
    most = study.data.rows_per_person
    if not counts_persons(study) or most is None:
        if persons is not None:
            fix = "Remove it: nothing in this study depends on how many there are."
            raise InvalidInput("persons", "nothing for this study", list(persons), fix)
        return list(rows)
    fewest = [-(-count // most) for count in rows]
    if persons is None:
        return fewest
    sizes = list(zip(fewest, persons, rows, strict=False))
    if len(persons) != len(rows) or any(not low <= count <= high for low, count, high in sizes):
        expected = f"{len(rows)} numbers of persons with 1 to {most} rows each"
        raise InvalidInput("persons", expected, list(persons), "Correct them, or data.rows_per_person.")
    return list(persons)


def _length(path: Path, key: str) -> int:
    """Rows of a table, counted and not read."""
    name = path.name.lower()
    try:
        if name.endswith((".csv", ".csv.gz")):
            with (gzip.open if name.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig", newline="") as lines:
                return sum(1 for line in csv.reader(lines) if line) - 1
        if name.endswith(".parquet"):
            from pyarrow import parquet

            return parquet.read_metadata(path).num_rows
        with np.load(path, allow_pickle=False) as arrays:
            return len(arrays[arrays.files[0]])
    except Exception:  # a parser's own text may quote a row
        fix = "Pass --rows if the table is elsewhere."
        raise InvalidInput(key, "a table whose rows can be counted", str(path), fix) from None
