"""Keys of a section as data: what each may hold, what it means, and an example for the file that `init` writes."""

import dataclasses
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from silobayes.core.errors import InvalidInput, require_count, require_member, require_number

Check = Callable[[str, Any], Any]
_FIX = "Correct or remove the key."


def key(check: Check, meaning: str, example: str) -> Any:
    """A key that may be left out: None means that the method's default rule decides, from public facts alone."""
    return dataclasses.field(default=None, metadata={"check": check, "meaning": meaning, "example": example})


def count(highest: float = math.inf) -> Check:
    """A whole number from 1 on."""
    return lambda name, value: require_count(name, value, at_least=1, at_most=highest, fix=_FIX)


def number(highest: float = math.inf) -> Check:
    """A number above 0."""
    return lambda name, value: require_number(name, value, above=0.0, at_most=highest, fix=_FIX)


def member(members: type[StrEnum]) -> Check:
    """One of a few words."""
    return lambda name, value: require_member(name, value, members, _FIX)


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidInput(name, "true or false", value, _FIX)
    return value


def two_numbers(name: str, value: Any) -> tuple[float, float]:
    """One number for each part."""
    fix = "Write [linear part, quadratic part]."
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise InvalidInput(name, "two numbers", value, fix)
    first, second = (require_number(name, entry, above=0.0, fix=fix) for entry in value)
    return first, second


def check_keys(section: Any, where: str) -> None:
    """Every key that has a value holds what it may; values are kept as checked."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value is not None and "check" in field.metadata:
            object.__setattr__(section, field.name, field.metadata["check"](f"{where}.{field.name}", value))
