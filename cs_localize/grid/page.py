"""index.html: all studies of a grid on one page that opens offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from cs_localize.findings import write_text
from cs_localize.grid.recurrence import Recurrence, recurrences
from cs_localize.grid.state import CellResult
from cs_localize.report.environment import page_environment
from cs_localize.report.figures import stylesheet
from cs_localize.report.numbers import MISSING, count, listing, percent, plural, points

_UNFINISHED = (("failed", "failed"), ("waiting", "not run yet"))


@dataclass(frozen=True)
class TaskLine:
    """One task of one cell: its heads and what zeroing them takes from it on held-out items."""

    task: str
    heads: list[str]
    before: str
    gone: str
    controls: str


@dataclass(frozen=True)
class CellView:
    """One row of the list of studies."""

    result: CellResult
    link: str
    requests: str
    tasks: list[TaskLine]


@dataclass(frozen=True)
class SharedCell:
    """One cell of a matrix: its text, the same in words, and the strength of its colour, 0 to 1."""

    text: str
    hover: str
    tint: str


@dataclass(frozen=True)
class ModelView:
    """The heads of one model over all its studies."""

    recurrence: Recurrence
    sentence: str
    heads: list[tuple[str, list[SharedCell]]]
    tasks: list[tuple[str, list[SharedCell]]]
    universal: list[str]


def write_page(out: Path, results: Sequence[CellResult]) -> Path:
    """Writes ``index.html`` into a grid's folder. Equal results give equal pages, byte for byte.

    Returns:
        The path of the page.
    """
    path = out / "index.html"
    text = (
        page_environment("cs_localize.grid")
        .get_template("index.html.j2")
        .render(
            headline=_headline(results),
            cells=[_cell(out, result) for result in results],
            models=[_model(recurrence) for recurrence in recurrences(results)],
            style=Markup(stylesheet("figures.css") + stylesheet("page.css")),
        )
    )
    write_text(path, text)
    return path


def _headline(results: Sequence[CellResult]) -> str:
    number = {status: sum(r.status == status for r in results) for status in ("finished", "failed", "waiting")}
    studies = f"{count(len(results))} {'study' if len(results) == 1 else 'studies'}"
    parts = [f"{count(number['finished'])} of {studies} finished"]
    parts += [f"{count(number[status])} {word}" for status, word in _UNFINISHED if number[status]]
    return f"{listing(parts)}."


def _cell(out: Path, result: CellResult) -> CellView:
    lines = []
    for task in result.cell.study.tasks if result.status == "finished" else ():
        rows = [row for row in result.rows if row.task == task]
        first = rows[0] if rows else None
        lines.append(
            TaskLine(
                task,
                [row.head for row in rows],
                _known(result.baseline.get(task), percent),
                _known(first.accuracy_gone if first else None, points),
                _known(first.controls_gone if first else None, points),
            )
        )
    link = quote(f"{result.folder.relative_to(out).as_posix()}/report.html")
    return CellView(result, link, count(result.requests), lines)


def _known(value: float | None, write: Callable[[float], str]) -> str:
    return MISSING if value is None else write(value)


def _model(recurrence: Recurrence) -> ModelView:
    return ModelView(
        recurrence,
        _sentence(recurrence),
        [(head, [_naming(recurrence, head, task) for task in recurrence.tasks]) for head in recurrence.namings],
        [(task, [_sharing(recurrence, task, other) for other in recurrence.tasks]) for task in recurrence.tasks],
        [f"{head} ({number})" for head, number in recurrence.universal.items()],
    )


def _sentence(recurrence: Recurrence) -> str:
    named, recurring = len(recurrence.namings), recurrence.recurring
    if not named:
        return "No heads were named."
    if not recurring:
        return f"{plural(named, 'head')} named, each for one task only."
    most = next(iter(recurring))
    return (
        f"{len(recurring)} of {plural(named, 'head')} named for more than one task; "
        f"{most} for {listing(recurring[most])}."
    )


def _naming(recurrence: Recurrence, head: str, task: str) -> SharedCell:
    named, studies = recurrence.namings[head].get(task, 0), recurrence.studies[task]
    hover = f"{head} is named for {task} in {named} of {studies}"
    return SharedCell(f"{named} of {studies}" if named else "", hover, f"{named / studies:.2f}")


def _sharing(recurrence: Recurrence, task: str, other: str) -> SharedCell:
    both, either = recurrence.shared(task, other)
    if task == other:
        return SharedCell(count(both), f"{plural(both, 'head')} named for {task}", "0")
    hover = f"{task} and {other}: {both} in common of {either} named for either"
    return SharedCell(f"{both} of {either}" if both else "", hover, f"{both / either if either else 0:.2f}")
