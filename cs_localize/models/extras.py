"""Packages that only some models need, and the message when one is not there."""

from __future__ import annotations

import importlib.util

from cs_localize.errors import UsageError


def need(purpose: str, *packages: str) -> None:
    """Raises UsageError, naming the purpose, if one of the packages is not installed. Imports none of them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{purpose} needs {', '.join(missing)}: run 'pip install {' '.join(missing)}'")
