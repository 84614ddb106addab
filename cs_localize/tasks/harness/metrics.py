"""Which of a task's metrics says whether an answer is right."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

import yaml

from cs_localize.errors import UsageError


def choose_metric(task: str, offered: Sequence[str], wanted: str | None) -> str:
    """The metric and filter that grade a task, such as ``exact_match,flexible-extract``.

    Args:
        task: the task's name.
        offered: its metrics with their filters, in its own order; at least one.
        wanted: what the study names: a metric with a filter, or a metric alone, which means its first filter.

    Raises:
        UsageError: if the task does not offer what is wanted.
    """
    if wanted is not None:
        for name in offered:
            if wanted in (name, name.partition(",")[0]):
                return name
        close = get_close_matches(wanted, offered, n=1, cutoff=0.4)
        hint = f"; did you mean '{close[0]}'?" if close else ";"
        raise UsageError(f"task '{task}' has no metric '{wanted}'{hint} it can be graded by {' or '.join(offered)}")
    usual = next((metric for pattern, metric in _usual().items() if fnmatchcase(task, pattern)), "")
    return usual if usual in offered else offered[0]


@cache
def _usual() -> dict[str, str]:
    table = files("cs_localize.tasks").joinpath("data", "metrics.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(table))
