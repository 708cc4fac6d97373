"""What `plan` and `calibrate` share: how large the silos are, before any row is read."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from silobayes.core.errors import InvalidInput

if TYPE_CHECKING:
    from silobayes.study import Study


def size_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--rows` and `--persons`."""
    rows = "Training rows of all silos together, or N,N,... for each; by default the tables are counted, not read."
    persons = "Persons of all silos together, or N,N,... for each; by default as few as can have so many rows."
    return click.option("--rows", help=rows)(click.option("--persons", help=persons)(command))


def read_sizes(
    study: "Study", folder: Path, rows: str | None, persons: str | None
) -> tuple[list[int], list[int] | None]:
    """Rows, and persons if they were said, of each silo."""
    from silobayes.studies import sizes

    numbers = sizes.counted_rows(study, folder) if rows is None else _numbers("--rows", rows)
    people = None if persons is None else _numbers("--persons", persons)
    if rows is not None and len(numbers) == 1:
        numbers = sizes.silo_rows(study, numbers[0])
    if people is not None and len(people) == 1:
        people = sizes.silo_rows(study, people[0])
    return numbers, people


def _numbers(option: str, given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidInput(option, "a whole number, or one for each silo: N,N,...", given, f"E.g. {option} 20000.")
    return [int(part) for part in parts]
