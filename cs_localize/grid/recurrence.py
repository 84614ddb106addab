"""Which heads recur across the tasks of a model, and which tasks share heads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cs_localize.grid.state import CellResult
from cs_localize.heads import Head


@dataclass(frozen=True)
class Recurrence:
    """The named heads of one model over all its finished cells.

    Attributes:
        model: short name of the model.
        tasks: tasks localized in at least one cell, in the grid's order.
        studies: by task, how many cells localized it.
        namings: by head, then by task, in how many of these it was named; the most shared heads first.
        universal: by head, in how many cells it hurt nearly every task.
    """

    model: str
    tasks: tuple[str, ...]
    studies: dict[str, int]
    namings: dict[str, dict[str, int]]
    universal: dict[str, int]

    def heads_of(self, task: str) -> frozenset[str]:
        """Heads named for a task in at least one cell."""
        return frozenset(head for head, named in self.namings.items() if task in named)

    def shared(self, task: str, other: str) -> tuple[int, int]:
        """Heads named for both tasks, and heads named for either."""
        first, second = self.heads_of(task), self.heads_of(other)
        return len(first & second), len(first | second)

    @property
    def recurring(self) -> dict[str, tuple[str, ...]]:
        """Heads named for more than one task, with these tasks."""
        return {head: tuple(named) for head, named in self.namings.items() if len(named) > 1}


def recurrences(results: Sequence[CellResult]) -> list[Recurrence]:
    """One for every model with a finished cell, in the grid's order."""
    finished = [result for result in results if result.status == "finished"]
    models = dict.fromkeys(result.cell.model for result in finished)
    return [_recurrence(model, [result for result in finished if result.cell.model == model]) for model in models]


def _recurrence(model: str, results: Sequence[CellResult]) -> Recurrence:
    studies = dict(Counter(task for result in results for task in result.cell.study.tasks))
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for row in result.rows:
            counts[row.head][row.task] += 1
    order = sorted(counts, key=lambda head: (-len(counts[head]), -sum(counts[head].values()), Head.parse(head)))
    return Recurrence(
        model=model,
        tasks=tuple(studies),
        studies=studies,
        namings={head: {task: counts[head][task] for task in studies if task in counts[head]} for head in order},
        universal=dict(Counter(head for result in results for head in result.universal)),
    )
