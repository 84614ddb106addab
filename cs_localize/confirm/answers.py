"""Held-out answers under ablations, asked in one batch and graded by each task's own metric."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.confirm.stats import Flags, Pair, mean_drop, paired_bootstrap
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Measurer
from cs_localize.outcomes import Item
from cs_localize.seeds import stream

BASELINE = Ablation()
Cell = tuple[str, Ablation]


@dataclass(frozen=True)
class Answers:
    """Which held-out items were answered correctly, by task and ablation; the baseline is always among them.

    Attributes:
        correct: for every cell, ``[items of the task]`` bool in the order of the items.
        counts: for the cells of tasks whose metric counts, ``[items of the task]`` int in that order.
        requests: different requests asked.
        tokens: their tokens.
    """

    correct: Mapping[Cell, Flags]
    counts: Mapping[Cell, NDArray[np.int64]]
    requests: int
    tokens: int

    def accuracy(self, task: str, ablation: Ablation = BASELINE) -> float:
        """Share of the task's items answered correctly under the ablation."""
        return float(np.mean(self.correct[task, ablation]))

    def drop(self, task: str, ablation: Ablation) -> float:
        """Accuracy the task loses to the ablation."""
        return mean_drop(*self.pair(task, ablation))

    def pair(self, task: str, ablation: Ablation) -> Pair:
        """The task's flags in the baseline and under the ablation."""
        return self.correct[task, BASELINE], self.correct[task, ablation]

    def interval(self, task: str, ablation: Ablation, draws: int, seed: int) -> tuple[float, float]:
        """95% paired bootstrap interval of the drop: the same wherever the same ablation is reported."""
        return paired_bootstrap(*self.pair(task, ablation), draws, stream(seed, "drop", ablation.key, task))

    def mean_accuracy(self, tasks: Sequence[str], ablation: Ablation) -> float:
        """Mean accuracy of several tasks, each with the same weight."""
        return float(np.mean([self.accuracy(task, ablation) for task in tasks]))

    def mean_drop(self, tasks: Sequence[str], ablation: Ablation) -> float:
        """Mean drop of several tasks, each with the same weight."""
        return float(np.mean([self.drop(task, ablation) for task in tasks]))


def ask(measurer: Measurer, held_out: Mapping[str, Sequence[Item]], cells: Iterable[Cell], stage: str) -> Answers:
    """Generates and grades answers for every cell and for the baseline of every task, all in one batch.

    Args:
        measurer: who answers.
        held_out: items by task.
        cells: tasks and the ablations to measure them under; repeats cost nothing.
        stage: a word for the progress display.

    Raises:
        UsageError: if a task has no held-out items.
    """
    empty = [task for task, items in held_out.items() if not items]
    if empty:
        raise UsageError(f"task '{empty[0]}' has no held-out items; ask for at least 1")
    wanted = list(dict.fromkeys([*((task, BASELINE) for task in held_out), *cells]))
    requests = [measurer.request(item, ablation, "generate") for task, ablation in wanted for item in held_out[task]]
    outcomes = measurer.measure(requests, stage)
    flags = np.array([outcome.correct for outcome in outcomes], dtype=np.bool_)
    ends = np.cumsum([len(held_out[task]) for task, _ in wanted])
    tokens = {request.key: outcome.tokens for request, outcome in zip(requests, outcomes, strict=True)}
    counts = {
        cell: np.array([outcome.count for outcome in outcomes[end - len(held_out[cell[0]]) : end]], dtype=np.int64)
        for cell, end in zip(wanted, ends, strict=True)
        if outcomes[end - 1].count is not None
    }
    correct = dict(zip(wanted, np.split(flags, ends[:-1]), strict=True))
    return Answers(correct, counts, len(tokens), sum(tokens.values()))


def controls_of(task: str, tasks: Iterable[str], relatives: Mapping[str, Collection[str]]) -> list[str]:
    """The tasks that control this one: all others, except those that either side declares a relative."""
    return [
        other
        for other in tasks
        if other != task and other not in relatives.get(task, ()) and task not in relatives.get(other, ())
    ]
