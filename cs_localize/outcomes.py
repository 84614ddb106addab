"""What was asked and what came back. NumPy only: this is all that the solvers ever see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape

Boundary = Literal["strict", "lm-eval"]


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its reference answer.

    Attributes:
        task: name of the task that owns it.
        id: unique within the task and stable across versions of the item list.
        prompt: the whole text before the answer, few-shot prefix included.
        answer: the reference answer exactly as it continues the prompt, leading space included.
        choices: of a multiple-choice question every choice, as the prompt it follows and the text that continues it; a
            request scores them all. Empty where the model is not given any.
        gold: positions of the right ones among ``choices``.
        stop: generated text ends before the first of these strings.
        max_tokens: most tokens to generate; None for two more than twice the reference answer's. 0 means that nothing
            is ever generated: the task's metric, too, is read from scored answers.
        boundary: ``strict`` demands that the answer's tokens continue the prompt's; ``lm-eval`` cuts the tokens of
            both together where the prompt's own end, whether or not they agree, as lm-evaluation-harness does.
    """

    task: str
    id: str
    prompt: str
    answer: str
    choices: tuple[tuple[str, str], ...] = ()
    gold: tuple[int, ...] = ()
    stop: tuple[str, ...] = ("\n",)
    max_tokens: int | None = None
    boundary: Boundary = "strict"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request brought back.

    Attributes:
        score: log-probability (nats, summed over tokens) of the reference answer, teacher-forced. NaN when generated.
            Of a multiple-choice question its margin: that of the right choice minus that of the best wrong one.
        correct: scored: every answer token ranked first. Generated, or a question of which nothing is ever generated:
            the task's own metric. Engines do not know tasks; what they generate comes back as False, to be graded.
        text: what the model wrote; empty when the answer was only scored.
        tokens: tokens of the request: prompt plus answer or generated ones, whether or not a cache served them; of a
            multiple-choice question those of all choices with their prompts.
        count: of a task whose metric counts, how many it found in ``text``; None for all others and from engines.
        parts: what the metric was read from, where nothing was generated: one outcome, or one for every choice; empty
            from engines.
    """

    score: float
    correct: bool
    text: str
    tokens: int
    count: int | None = None
    parts: tuple[Outcome, ...] = ()


@dataclass(frozen=True)
class MeasurementTable:
    """Scored outcomes in long form, one row a request. Rows of different tasks may mix in any order.

    Attributes:
        shape: the model's geometry.
        tasks: task names; ``task`` indexes into them.
        task: ``[rows]`` int, the task of each row.
        item: ``[rows]`` int, the item of each row, numbered across all tasks.
        masks: ``[rows, n_heads]`` bool, True where the head was knocked out.
        score: ``[rows]`` float, log-probability of the reference answer in nats.
        baseline: ``[rows]`` float, score of the same item without an ablation.
        correct: ``[rows]`` bool, every answer token ranked first.
        tokens: ``[rows]`` int, tokens of each request.
    """

    shape: ModelShape
    tasks: tuple[str, ...]
    task: NDArray[np.int64]
    item: NDArray[np.int64]
    masks: NDArray[np.bool_]
    score: NDArray[np.float64]
    baseline: NDArray[np.float64]
    correct: NDArray[np.bool_]
    tokens: NDArray[np.int64]

    def __post_init__(self) -> None:
        rows = len(self.task)
        if self.masks.shape != (rows, self.shape.n_heads):
            raise UsageError(f"masks have shape {self.masks.shape}, expected {(rows, self.shape.n_heads)}")
        for name in ("item", "score", "baseline", "correct", "tokens"):
            if len(getattr(self, name)) != rows:
                raise UsageError(f"'{name}' has {len(getattr(self, name))} rows, 'task' has {rows}")
        if rows and not (self.task.min() >= 0 and self.task.max() < len(self.tasks)):
            raise UsageError("a row names a task that the table does not list")

    def __len__(self) -> int:
        return len(self.task)

    def damage(self, floor: float = 8.0) -> NDArray[np.float64]:
        """Score lost to the ablation, baseline minus score, in nats, capped at ``floor``.

        The cap keeps a few destroyed items from dominating; gains are kept as they are. Shape ``[rows]``.
        """
        return np.minimum(self.baseline - self.score, floor)

    def rows_of(self, task: str) -> NDArray[np.int64]:
        """Row numbers of one task.

        Raises:
            UsageError: if the table has no such task.
        """
        if task not in self.tasks:
            raise UsageError(f"no task '{task}' in this table; it has {', '.join(self.tasks)}")
        return np.flatnonzero(self.task == self.tasks.index(task))

    def take(self, rows: NDArray[np.int64]) -> MeasurementTable:
        """The table of the given rows, in that order; task names are kept."""
        return MeasurementTable(
            self.shape,
            self.tasks,
            self.task[rows],
            self.item[rows],
            self.masks[rows],
            self.score[rows],
            self.baseline[rows],
            self.correct[rows],
            self.tokens[rows],
        )
