"""What ablations do to tasks, with intervals, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from cs_localize.confirm.stats import mcnemar_exact, paired_bootstrap, wilson
from cs_localize.findings import Interval
from cs_localize.seeds import stream

_RESAMPLES = 2000


@dataclass(frozen=True)
class AblationEffect:
    """What an ablation does to one task.

    Attributes:
        task: the task.
        items: items asked.
        baseline: accuracy of the unmodified model.
        accuracy: accuracy under the ablation.
        drop: baseline minus accuracy, with its 95% paired bootstrap interval.
        ci: that interval.
        accuracy_ci: 95% Wilson interval of the accuracy.
        p: exact McNemar p-value.
    """

    task: str
    items: int
    baseline: float
    accuracy: float
    drop: float
    ci: Interval
    accuracy_ci: Interval
    p: float


@dataclass(frozen=True)
class ConditionEffect:
    """What one condition of a grid does to one task: a row of summary.csv.

    Attributes:
        model: the model as it was named.
        heads_of: name of the list of heads.
        kind: how the head set was made of it.
        part: which of that kind.
        heads: the heads, with commas between.
        size: how many.
        scale: what their outputs are multiplied by; None where their means are put in their place.
        intervention: the same as text: the scale, or ``mean``.
        task: the task measured.
        items: items asked.
        baseline: accuracy of the unmodified model.
        accuracy: accuracy under the ablation; where answers were scored, the share with every token ranked first.
        drop: baseline minus accuracy.
        drop_low: lower end of the drop's 95% paired bootstrap interval.
        drop_high: upper end.
        p: exact McNemar p-value, two-sided.
        p_holm: the same, Holm-corrected over the different tests of the grid, random controls among them.
        damage: mean score lost, in nats an item; None where answers were generated.
    """

    model: str
    heads_of: str
    kind: str
    part: str
    heads: str
    size: int
    scale: float | None
    intervention: str
    task: str
    items: int
    baseline: float
    accuracy: float
    drop: float
    drop_low: float
    drop_high: float
    p: float
    p_holm: float
    damage: float | None


SUMMARY_COLUMNS = tuple(field.name for field in fields(ConditionEffect))


def effect_on(task: str, before: Sequence[bool], after: Sequence[bool], seed: int, *purpose: str) -> AblationEffect:
    """Compares the answers to the same items without and with an ablation.

    Args:
        task: the task.
        before: whether each item was answered correctly without it.
        after: the same with it.
        seed: seed of the resamples.
        purpose: what tells this comparison from others of the same seed and task.
    """
    first, second = np.array(before), np.array(after)
    return AblationEffect(
        task=task,
        items=len(before),
        baseline=float(first.mean()),
        accuracy=float(second.mean()),
        drop=float(first.mean() - second.mean()),
        ci=paired_bootstrap(first, second, _RESAMPLES, stream(seed, "ablate", task, *purpose)),
        accuracy_ci=wilson(int(second.sum()), len(second)),
        p=mcnemar_exact(int((first & ~second).sum()), int((~first & second).sum())),
    )


def effects_json(effects: Sequence[AblationEffect] | Sequence[ConditionEffect]) -> str:
    """The effects as JSON, one object a task, or a condition and task."""
    return json.dumps([asdict(effect) for effect in effects], indent=1)


def effects_table(effects: Sequence[AblationEffect]) -> list[str]:
    """The effects as lines of text, for a terminal."""
    lines = [f"{'task':<20} {'items':>5} {'baseline':>9} {'ablated':>9} {'drop':>7}   95% interval        p"]
    for e in effects:
        lines.append(
            f"{e.task:<20} {e.items:>5} {e.baseline:>9.1%} {e.accuracy:>9.1%} {100 * e.drop:>7.1f}"
            f"   {100 * e.ci[0]:>6.1f} to {100 * e.ci[1]:>5.1f}   {e.p:.2g}"
        )
    return lines


def grid_table(effects: Sequence[ConditionEffect]) -> list[str]:
    """The effects of a grid as lines of text, for a terminal."""
    lines = [f"{'heads':<32} {'scale':>5}  {'task':<16} {'baseline':>9} {'ablated':>9} {'drop':>7}   95% interval"]
    for e in effects:
        name = " ".join(filter(None, (e.heads_of, e.kind, e.part)))
        lines.append(
            f"{name:<32} {e.intervention:>5}  {e.task:<16} {e.baseline:>9.1%} {e.accuracy:>9.1%} {100 * e.drop:>7.1f}"
            f"   {100 * e.drop_low:>6.1f} to {100 * e.drop_high:>5.1f}"
        )
    return lines
