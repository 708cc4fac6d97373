"""Errors that say what was expected, what came and what to do.

Each class has a fixed `code`: it is what crosses a wire or ends in an exit status, never the text, because a text may
quote a row.
"""

import math
from collections.abc import Iterable
from enum import Enum
from typing import Any, ClassVar, TypeVar


class SiloBayesError(Exception):
    """Base of every error this package raises on purpose."""

    code: ClassVar[str] = "error"


class InvalidInput(SiloBayesError, ValueError):
    """A value from a user is not acceptable; nothing was charged and nothing changed."""

    code: ClassVar[str] = "invalid_input"

    def __init__(self, key: str, expected: str, got: object, fix: str) -> None:
        super().__init__(f"{key}: expected {expected}, got {got!r}. {fix}")
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        """From its text, so that it can come back from another process; what came is not kept."""
        return _again, (type(self), str(self), self.key)


def _again(kind: type[InvalidInput], text: str, key: str) -> InvalidInput:
    error = kind.__new__(kind, text)
    error.key = key
    return error


class BudgetExceeded(SiloBayesError):
    """The charge would exceed a privacy budget; it was refused and nothing changed."""

    code: ClassVar[str] = "budget_exceeded"


class DamagedLedger(SiloBayesError):
    """The ledger on disk is not what was written; it is refused, never repaired by guessing."""

    code: ClassVar[str] = "damaged_ledger"


Member = TypeVar("Member", bound=Enum)


def require_number(key: str, value: object, *, above: float, fix: str, at_most: float = math.inf) -> float:
    """`value` as a float if it is a finite number in (above, at_most]; otherwise `InvalidInput` naming `key`."""
    closed = float(f"{at_most:g}") <= at_most  # the float before 1 is written as 1, which is refused
    interval = f"a number in ({above:g}, {at_most:g}{']' if closed else ')'}"
    if math.isinf(at_most):
        interval = f"a number > {above:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInput(key, interval, value, fix)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not (math.isfinite(number) and above < number <= at_most):
        raise InvalidInput(key, interval, value, fix)
    return number


def require_count(key: str, value: object, *, at_least: int, fix: str, at_most: float = math.inf) -> int:
    """`value` if it is an integer in [at_least, at_most]; otherwise `InvalidInput` naming `key`."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        bounds = f"an integer >= {at_least}" if math.isinf(at_most) else f"an integer in [{at_least}, {at_most}]"
        raise InvalidInput(key, bounds, value, fix)
    return value


def require_member(key: str, value: object, members: type[Member], fix: str) -> Member:
    """The member of the enum whose value is `value`; otherwise `InvalidInput` listing the choices."""
    if isinstance(value, members):
        return value
    choices = [member.value for member in members]
    if value not in choices:
        raise InvalidInput(key, "one of " + ", ".join(choices), value, fix)
    return members(value)


def refuse_unknown_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise `InvalidInput` for the first key that `where` does not know."""
    known = sorted(known)
    for key in given:
        if key not in known:
            raise InvalidInput(str(key), f"a key of {where}: {', '.join(known)}", key, "Remove or rename it.")
