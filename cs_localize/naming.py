"""Names heads: tries the candidates in order of specificity, zeroed together, on search items of task and controls.

It measures what the confirmation will measure, the task's own metric on generated answers, though on search items: a
model that writes the right word in another spelling has lost score and not the capability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import SelectConfig
from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Measurer
from cs_localize.outcomes import Item, Outcome
from cs_localize.recover import adds_specific_damage

_STAGE = "naming"


@dataclass
class Naming:
    """The heads of one task, as they are being chosen.

    Attributes:
        task: the task.
        waiting: candidates not tried yet, most specific first.
        target: search items of the task.
        controls: search items of its controls, a few of each.
        kept: heads named so far.
        idle: heads that did the task no damage when they were tried, with the number of heads kept then. A backup head
            does none before the head it stands in for is gone, so they are tried again once others were kept.
        passed_over: heads tried and not named for what they do to the controls.
        curve: share of target items right with the first k kept heads zeroed, k = 0, 1, ….
        requests: masked requests spent.
        baseline_requests: unablated requests on the target's items.
        tokens: tokens of both.
    """

    task: str
    waiting: list[Head]
    target: Sequence[Item]
    controls: Sequence[Item]
    kept: list[Head] = field(default_factory=list)
    idle: dict[Head, int] = field(default_factory=dict)
    passed_over: list[Head] = field(default_factory=list)
    curve: list[float] = field(default_factory=list)
    requests: int = 0
    baseline_requests: int = 0
    tokens: int = 0
    _target_right: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    _controls_right: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def start(self, target: Sequence[Outcome], controls: Sequence[Outcome]) -> None:
        """Takes the unablated outcomes of both kinds of items."""
        self._target_right, self._controls_right = _right(target), _right(controls)
        self.curve = [float(self._target_right.mean())]
        self.baseline_requests = len(target)
        self.tokens = sum(outcome.tokens for outcome in target)

    def open(self, select: SelectConfig) -> bool:
        """Whether another candidate is to be tried."""
        if not self.waiting:
            self.waiting = [head for head, kept in self.idle.items() if kept < len(self.kept)]
        taken = self.curve[-1] <= (1 - select.share) * self.curve[0]
        affordable = self.requests + len(self.target) + len(self.controls) <= select.requests
        return bool(self.waiting) and len(self.kept) < select.limit and affordable and not taken

    def next(self) -> Ablation:
        """The next candidate on top of the kept heads."""
        return Ablation.of([*self.kept, self.waiting[0]])

    def promising(self, target: Sequence[Outcome]) -> bool:
        """Whether the candidate takes accuracy from the target; if not, no control is asked."""
        self._spend(target)
        if adds_specific_damage(self._target_right - _right(target), np.empty(0)):
            return True
        self.idle[self.waiting.pop(0)] = len(self.kept)
        return False

    def decide(self, target: Sequence[Outcome], controls: Sequence[Outcome], ratio: float) -> None:
        """Keeps a promising candidate or passes it over, given what it does to the controls."""
        self._spend(controls)
        head = self.waiting.pop(0)
        self.idle.pop(head, None)
        now, others = _right(target), _right(controls)
        if not adds_specific_damage(self._target_right - now, self._controls_right - others, ratio):
            self.passed_over.append(head)
            return
        self.kept.append(head)
        self._target_right, self._controls_right = now, others
        self.curve.append(float(now.mean()))

    def reason(self, select: SelectConfig) -> str:
        """Why these heads and no others, in one sentence."""
        if self.curve[0] == 0:
            return (
                f"the unmodified model gets none of {len(self.target)} search items right, so nothing can be taken away"
            )
        tried = [*self.passed_over, *self.idle]
        if not self.kept:
            return f"none of the heads tried ({len(tried)}) takes away accuracy without taking it from the controls"
        why = (
            f"zeroed together they take the accuracy on {len(self.target)} search items "
            f"from {self.curve[0]:.0%} to {self.curve[-1]:.0%}"
        )
        if tried:
            why += f"; {', '.join(map(str, tried))} tried and passed over, for damage too small or to the controls"
        if len(self.kept) == select.limit:
            why += f"; select.limit allows no more than {select.limit}"
        return why

    def _spend(self, outcomes: Sequence[Outcome]) -> None:
        self.requests += len(outcomes)
        self.tokens += sum(outcome.tokens for outcome in outcomes)


def start_naming(
    task: str,
    candidates: Sequence[Head],
    items: Mapping[str, Sequence[Item]],
    controls: Sequence[str],
    select: SelectConfig,
) -> Naming:
    """A task's naming before its first round.

    Args:
        task: the task.
        candidates: most specific first.
        items: search items by task.
        controls: the tasks that control this one; ``select.control_items`` items are shared among them.
        select: how many items and heads.
    """
    each = -(-select.control_items // len(controls)) if controls else 0
    shared = [item for name in controls for item in items[name][:each]]
    return Naming(task, list(candidates[: select.candidates]), items[task][: select.items], shared)


def name_heads(
    namings: Sequence[Naming], select: SelectConfig, measurer: Measurer, note: Callable[[str], None] = lambda best: None
) -> None:
    """Chooses the heads of all tasks side by side, one candidate a task and round, and notes those kept so far.

    Raises:
        MeasurementError: if an outcome cannot be measured.
    """
    unablated = [Ablation()] * len(namings)
    targets = _ask([naming.target for naming in namings], unablated, measurer)
    controls = _ask([naming.controls for naming in namings], unablated, measurer)
    for naming, target, others in zip(namings, targets, controls, strict=True):
        naming.start(target, others)
    while rounds := [naming for naming in namings if naming.open(select)]:
        targets = _ask([naming.target for naming in rounds], [naming.next() for naming in rounds], measurer)
        promising = [(n, target) for n, target in zip(rounds, targets, strict=True) if n.promising(target)]
        controls = _ask([n.controls for n, _ in promising], [n.next() for n, _ in promising], measurer)
        for (naming, target), others in zip(promising, controls, strict=True):
            naming.decide(target, others, select.ratio)
        note("; ".join(" ".join([naming.task, *map(str, naming.kept)]) for naming in namings if naming.kept))


def _ask(items: Sequence[Sequence[Item]], ablations: Sequence[Ablation], measurer: Measurer) -> list[list[Outcome]]:
    requests = [
        measurer.request(item, ablation, "generate")
        for asked, ablation in zip(items, ablations, strict=True)
        for item in asked
    ]
    if not requests:
        return [[] for _ in items]
    outcomes = iter(measurer.measure(requests, _STAGE))
    return [[next(outcomes) for _ in asked] for asked in items]


def _right(outcomes: Sequence[Outcome]) -> NDArray[np.float64]:
    return np.array([outcome.correct for outcome in outcomes], dtype=np.float64)
