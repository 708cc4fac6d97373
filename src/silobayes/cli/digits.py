"""Numbers for people: what is read as a bound is still a bound."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def round_up(value: float, digits: int = 6) -> str:
    """`value` to so many significant digits, never below it."""
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))):.{digits}g}"


def round_down(value: float, digits: int = 6) -> str:
    """`value` to so many significant digits, never above it."""
    return f"{float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(repr(float(value)))):.{digits}g}"
