"""Names heads: tries the candidates in order of specificity, zeroed together, on search items of task and controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import SelectConfig
from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Measurer
from cs_localize.outcomes import Item, Outcome
from cs_localize.recover import adds_specific_damage

_FLOOR = 8.0  # nats: one destroyed item must not decide what is named


@dataclass
class Naming:
    """The heads of one task, as they are being chosen.

    Attributes:
        task: the task.
        waiting: candidates not tried yet, most specific first.
        target: search items of the task and their unablated outcomes.
        controls: search items of its controls, a few of each, and theirs.
        kept: heads named so far.
        passed_over: heads tried and not named.
        curve: mean damage to the target in nats with the first k kept heads zeroed, k = 0, 1, ….
        accuracy: share of target items right with the kept heads zeroed.
        requests: requests spent.
        tokens: their tokens.
    """

    task: str
    waiting: list[Head]
    target: list[tuple[Item, Outcome]]
    controls: list[tuple[Item, Outcome]]
    kept: list[Head] = field(default_factory=list)
    passed_over: list[Head] = field(default_factory=list)
    curve: list[float] = field(default_factory=lambda: [0.0])
    accuracy: float = 1.0
    requests: int = 0
    tokens: int = 0
    _damage: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def __post_init__(self) -> None:
        self.accuracy = self.baseline

    @property
    def baseline(self) -> float:
        """Share of target items right without an ablation."""
        return float(np.mean([outcome.correct for _, outcome in self.target]))

    def open(self, select: SelectConfig) -> bool:
        """Whether another candidate is to be tried."""
        taken = self.accuracy <= (1 - select.share) * self.baseline
        return bool(self.waiting) and len(self.kept) < select.limit and not taken

    def next(self) -> tuple[Ablation, list[Item]]:
        """The next candidate on top of the kept heads, and the items to ask."""
        return Ablation.of([*self.kept, self.waiting[0]]), [item for item, _ in (*self.target, *self.controls)]

    def decide(self, outcomes: Sequence[Outcome], ratio: float) -> None:
        """Keeps the candidate or passes it over, given what ``next`` asked for."""
        head = self.waiting.pop(0)
        split = len(self.target)
        target = _damage(self.target, outcomes[:split])
        controls = _damage(self.controls, outcomes[split:])
        before = self._damage or (np.zeros(len(target)), np.zeros(len(controls)))
        self.requests += len(outcomes)
        self.tokens += sum(outcome.tokens for outcome in outcomes)
        if not adds_specific_damage(target - before[0], controls - before[1], ratio):
            self.passed_over.append(head)
            return
        self.kept.append(head)
        self._damage = (target, controls)
        self.curve.append(float(target.mean()))
        self.accuracy = float(np.mean([outcome.correct for outcome in outcomes[:split]]))

    def reason(self, select: SelectConfig) -> str:
        """Why these heads and no others, in one sentence."""
        tried = len(self.kept) + len(self.passed_over)
        if not self.kept:
            return f"none of the first {tried} of the ranking adds damage to the task without adding it to the controls"
        took = f"zeroed together they take the accuracy on {len(self.target)} search items from {self.baseline:.0%} to "
        why = took + f"{self.accuracy:.0%}"
        if self.passed_over:
            names = ", ".join(map(str, self.passed_over))
            why += f"; {names} tried and passed over, for damage too small or to the controls"
        if len(self.kept) == select.limit:
            why += f"; select.limit allows no more than {select.limit}"
        return why


def name_heads(namings: Iterable[Naming], select: SelectConfig, measurer: Measurer) -> None:
    """Chooses the heads of all tasks side by side, one candidate a task and round.

    Raises:
        MeasurementError: if an outcome cannot be measured.
    """
    while rounds := [naming for naming in namings if naming.open(select)]:
        asked = [naming.next() for naming in rounds]
        requests = [measurer.request(item, ablation) for ablation, items in asked for item in items]
        outcomes = iter(measurer.measure(requests, "naming"))
        for naming, (_, items) in zip(rounds, asked, strict=True):
            naming.decide([next(outcomes) for _ in items], select.ratio)


def start_naming(
    task: str,
    candidates: Sequence[Head],
    items: Mapping[str, Sequence[Item]],
    baseline: Mapping[str, Sequence[Outcome]],
    controls: Sequence[str],
    select: SelectConfig,
) -> Naming:
    """A task's naming before its first round.

    Args:
        task: the task.
        candidates: most specific first.
        items: search items by task.
        baseline: their unablated outcomes.
        controls: the tasks that control this one; ``select.items`` items are shared among them.
        select: how many items and heads.
    """
    pairs = {name: list(zip(items[name], baseline[name], strict=True)) for name in (task, *controls)}
    each = -(-select.items // len(controls)) if controls else 0
    shared = [pair for name in controls for pair in pairs[name][:each]]
    return Naming(task, list(candidates), pairs[task][: select.items], shared)


def _damage(asked: Sequence[tuple[Item, Outcome]], after: Sequence[Outcome]) -> NDArray[np.float64]:
    drops = [before.score - now.score for (_, before), now in zip(asked, after, strict=True)]
    return np.minimum(np.array(drops, dtype=np.float64), _FLOOR)
