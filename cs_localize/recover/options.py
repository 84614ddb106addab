"""Checks of the parameters of solvers and methods."""

from __future__ import annotations

from cs_localize.errors import UsageError


def check_above_zero(**values: object) -> None:
    """Raises UsageError for the first value that is not a finite number above 0."""
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < float(str(value)) < float("inf")):
            raise UsageError(f"option '{name}' is {value!r}; give a number above 0")


def check_flag(**values: object) -> None:
    """Raises UsageError for the first value that is not true or false."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UsageError(f"option '{name}' is {value!r}; give true or false")


def check_whole(least: int, **values: object) -> None:
    """Raises UsageError for the first value that is not a whole number of at least ``least``."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"option '{name}' is {value!r}; give a whole number of at least {least}")


def check_share(**values: object) -> None:
    """Raises UsageError for the first value that is not a number from 0 to below 1."""
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= float(str(value)) < 1):
            raise UsageError(f"option '{name}' is {value!r}; give a number from 0 to below 1")
