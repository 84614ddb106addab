"""How sure the named heads are: their tests, and how often resamples select them."""

from __future__ import annotations

from collections.abc import Iterable

from cs_localize.findings import HeadsFile, TaskFinding
from cs_localize.recover import expected_null_selections
from cs_localize.report.numbers import MISSING, fixed, p_value, percent, plural, span

_OFTEN = 0.75  # in the middle of what Meinshausen and Bühlmann recommend


def sureness(findings: Iterable[TaskFinding]) -> tuple[str, str]:
    """Smallest to largest q of the named heads, and the same of their selection frequencies; a dash where unknown."""
    named = [entry for finding in findings for entry in finding.ranking if entry.head in finding.named]
    q = [entry.q for entry in named if entry.q is not None]
    frequency = [entry.frequency for entry in named if entry.frequency is not None]
    return span(q, p_value) if q else MISSING, span(frequency, percent) if frequency else MISSING


def often_selected(heads: HeadsFile, task: str) -> str:
    """How many heads most resamples select, beside how many without an effect may be expected among them.

    Where whole KV groups were knocked out, groups are counted.
    """
    known = [entry.frequency for entry in heads.tasks[task].ranking if entry.frequency is not None]
    if not known:
        return ""
    width, what = (heads.heads // heads.kv_heads, "KV group") if heads.knock_out == "kv_group" else (1, "head")
    often = sum(frequency >= _OFTEN for frequency in known) // width
    expected = fixed(expected_null_selections(_OFTEN, len(known) // width), 2)
    return (
        f"{plural(often, what)} selected in at least {percent(_OFTEN)} of the resamples. If {what}s without an effect "
        f"were exchangeable, at most {expected} of them would be expected there: a yardstick, not a promise."
    )
