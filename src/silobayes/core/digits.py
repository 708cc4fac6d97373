"""Numbers for people: what is read as a bound is still a bound."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def round_up(value: float, digits: int = 6) -> str:
    """`value` to so many significant digits, never below it."""
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))):.{digits}g}"


def round_down(value: float, digits: int = 6) -> str:
    """`value` to so many significant digits, never above it."""
    return f"{float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(repr(float(value)))):.{digits}g}"


def epsilon_text(value: object) -> str:
    """Four significant digits, rounded upward; what is no finite number is called that."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "no number"
    return round_up(value, 4)
