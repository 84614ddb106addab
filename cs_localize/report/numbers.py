"""How numbers are written, everywhere in the report: one rule for each kind of quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

MISSING = "\N{EN DASH}"
"""Stands where a number was not measured."""

MINUS = "\N{MINUS SIGN}"


def fixed(value: float, decimals: int) -> str:
    """A number with a fixed number of decimals and a typographic minus; never "-0.0"."""
    rounded = round(value, decimals) + 0.0
    return f"{rounded:,.{decimals}f}".replace("-", MINUS)


def count(value: int) -> str:
    """A whole number with thousands separators."""
    return fixed(value, 0)


def percent(share: float) -> str:
    """A level between 0 and 1, such as an accuracy: 0.77 is ``77.0%``."""
    return f"{fixed(100 * share, 1)}%"


def small_percent(share: float) -> str:
    """A share of well under one percent, such as that of the located neurons: 0.0013 is ``0.130%``."""
    return f"{fixed(100 * share, 3)}%"


def points(share: float) -> str:
    """A difference of two levels, in percentage points without a unit: 0.74 is ``74.0``."""
    return fixed(100 * share, 1)


def nats(value: float) -> str:
    """A log-probability or a difference of two."""
    return fixed(value, 3)


def spread(value: float) -> str:
    """A specificity, in spreads of a task's effects."""
    return fixed(value, 2)


def ratio(value: float) -> str:
    """A correlation, an overlap or another share that is not a level."""
    return fixed(value, 3)


def p_value(value: float) -> str:
    """A p-value; below a thousandth only that is said."""
    return "<0.001" if value < 0.001 else fixed(value, 3)


def interval(bounds: Sequence[float], write: Callable[[float], str]) -> str:
    """Two bounds, ``[70.1, 80.2]``, each written by the rule of its quantity."""
    return f"[{write(bounds[0])}, {write(bounds[-1])}]"


def or_dash(value: float | None, write: Callable[[float], str]) -> str:
    """The value written by the rule of its quantity; a dash where there is none."""
    return MISSING if value is None else write(value)


def span(values: Iterable[float], write: Callable[[float], str]) -> str:
    """Smallest to largest, or the one value if they are written alike."""
    known = list(values)
    low, high = write(min(known)), write(max(known))
    return low if low == high else f"{low} to {high}"


def plural(number: int, noun: str) -> str:
    """``1 head``, ``2 heads``."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def listing(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
