"""Checks of the solvers' parameters."""

from __future__ import annotations

from cs_localize.errors import UsageError


def check_above_zero(**values: object) -> None:
    """Raises UsageError for the first value that is not a finite number above 0."""
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < float(str(value)) < float("inf")):
            raise UsageError(f"solver option '{name}' is {value!r}; give a number above 0")


def check_flag(**values: object) -> None:
    """Raises UsageError for the first value that is not true or false."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UsageError(f"solver option '{name}' is {value!r}; give true or false")
