"""The short plain-text table a command prints at its end."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cs_localize.findings import ConfirmFile, CrosscheckFile, HeadsFile
from cs_localize.report.headline import headline
from cs_localize.report.losses import task_loss
from cs_localize.report.numbers import MINUS, MISSING, percent, points
from cs_localize.report.sureness import sureness

WIDTH = 100

_COLUMNS = ("task", "named heads", "held-out accuracy", "controls", "random")
_WIDTHS = (20, 34, 18, 10, 10)
_NOT_TYPEABLE = str.maketrans({MINUS: "-", MISSING: "-"})


def summary_lines(
    heads: HeadsFile, confirm: ConfirmFile | None = None, crosscheck: CrosscheckFile | None = None
) -> list[str]:
    """What was found, in at most 100 columns of plain text.

    The columns: task, named heads, accuracy before and after on held-out items, mean points lost by the controls, and
    mean points the task loses to random heads.

    Args:
        heads: the finding.
        confirm: its confirmation, if there is one.
        crosscheck: the cross-check, if there is one.
    """
    lines = [_line(_COLUMNS), _line(["-" * width for width in _WIDTHS])]
    for task in heads.tasks:
        lines += _task_lines(heads, confirm, task)
    lines.append("")
    if confirm:
        lines += _wrapped("Accuracy before and after the named heads are zeroed; controls and random in points lost.")
    lines += _sure(heads)
    if heads.universal:
        lines += _wrapped(f"Universal heads, named for no task: {' '.join(heads.universal)}")
    for found in (crosscheck.tasks if crosscheck else {}).values():
        lines += _wrapped(found.verdict)
    for sentence in headline(heads, confirm)[1 if confirm else 0 :]:
        lines += _wrapped(sentence)
    for warning in heads.warnings:
        lines += _wrapped(f"Warning: {warning}")
    return [line.translate(_NOT_TYPEABLE) for line in lines]


def _task_lines(heads: HeadsFile, confirm: ConfirmFile | None, task: str) -> list[str]:
    loss = task_loss(confirm, task)
    accuracy = f"{percent(loss.before)} -> {percent(loss.drop.accuracy)}" if loss else MISSING
    controls = points(loss.controls) if loss and loss.controls is not None else MISSING
    random = points(loss.random.mean_drop) if loss and loss.random else MISSING
    name = task if len(task) <= _WIDTHS[0] else f"{task[: _WIDTHS[0] - 3]}..."
    first, *rest = textwrap.wrap(" ".join(heads.tasks[task].named), _WIDTHS[1]) or ["none"]
    return [_line([name, first, accuracy, controls, random]), *(_line(["", more, "", "", ""]) for more in rest)]


def _sure(heads: HeadsFile) -> list[str]:
    """One sentence on the named heads, and one on every task that has none."""
    q, frequency = sureness(heads.tasks.values())
    known = [f"q {q} by tests of each head alone"] if q != MISSING else []
    known += [f"selected in {frequency} of resamples"] if frequency != MISSING else []
    lines = _wrapped(f"Named heads: {', '.join(known)}.") if known else []
    for task, finding in heads.tasks.items():
        if not finding.named:
            lines += _wrapped(f"{task}: {finding.reason}.")
    return lines


def _line(values: Sequence[str]) -> str:
    """Text to the left, numbers to the right."""
    task, named, *numbers = values
    parts = [task.ljust(_WIDTHS[0]), named.ljust(_WIDTHS[1])]
    parts += [value.rjust(width) for value, width in zip(numbers, _WIDTHS[2:], strict=True)]
    return "  ".join(parts).rstrip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)
