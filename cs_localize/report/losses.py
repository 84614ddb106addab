"""What the confirmation says of one task, in the form that headline, tables and summary share."""

from __future__ import annotations

from dataclasses import dataclass

from cs_localize.findings import ConfirmFile, Drop, HeadsFile, Interval, RandomHeads


@dataclass(frozen=True)
class TaskLoss:
    """Held-out accuracy of one task with its own named heads zeroed.

    Attributes:
        before: accuracy of the unmodified model, 0 to 1.
        drop: accuracy with the heads zeroed and what that is less than before.
        controls: mean drop of the task's controls; None where it has none.
        contrast: drop of the task minus that of its controls, and the bounds of its 95% interval.
        random: random heads of the same layers, if they were measured.
    """

    before: float
    drop: Drop
    controls: float | None
    contrast: tuple[float, float, float] | None
    random: RandomHeads | None

    @property
    def share(self) -> float:
        """Part of the accuracy that is gone; 0 where there was none to lose."""
        return self.drop.drop / self.before if self.before > 0 else 0.0

    @property
    def specific(self) -> bool:
        """Whether the task loses more than its controls, or at all where it has none, beyond the 95% interval."""
        bounds: Interval = self.contrast[1:] if self.contrast else self.drop.ci
        return bounds[0] > 0


def task_loss(confirm: ConfirmFile | None, task: str) -> TaskLoss | None:
    """The loss of a task under its own heads; None if that was not measured.

    The mean over controls is read off the contrast, which leaves out a task's relatives as the search did.
    """
    drop = confirm.matrix.get(task, {}).get(task) if confirm else None
    if confirm is None or drop is None:
        return None
    contrast = confirm.contrast.get(task)
    return TaskLoss(
        before=confirm.baseline[task],
        drop=drop,
        controls=drop.drop - contrast[0] if contrast else None,
        contrast=contrast,
        random=confirm.random.get(task),
    )


def sweep_requests(heads: HeadsFile, task: str) -> int:
    """Requests of a sweep: every head of the model alone, on every search item of the task."""
    return heads.layers * heads.heads * heads.tasks[task].items
