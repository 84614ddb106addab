"""Which heads matter to one task and not to its controls, and which matter to all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError
from cs_localize.heads import Head, ModelShape


@dataclass(frozen=True)
class SpecificityResult:
    """Specificity of every head for every task, in spreads. A spread is the standard deviation of a task's effects.

    Attributes:
        strongest: ``[n_tasks, n_heads]`` effect in spreads, minus that on the control the head hurts most.
        mean: ``[n_tasks, n_heads]`` effect in spreads, minus the mean of those on the controls.
        control: ``[n_tasks, n_heads]`` int, the task that is hurt most among the controls; -1 where a task has none.
    """

    strongest: NDArray[np.float64]
    mean: NDArray[np.float64]
    control: NDArray[np.int64]


def specificity(
    effects: NDArray[np.float64], tasks: Sequence[str], relatives: Mapping[str, Collection[str]]
) -> SpecificityResult:
    """Compares each head's effect on a task with its effects on the task's controls.

    Controls of a task are all others but its relatives; being related goes both ways, and names that are not in
    ``tasks`` are passed over. A task without controls keeps its effect in spreads.

    Args:
        effects: ``[n_tasks, n_heads]`` damage in nats.
        tasks: names of the rows.
        relatives: for a task, the tasks too close to it to be its controls.

    Raises:
        UsageError: if rows and names differ in number.
    """
    if effects.ndim != 2 or len(effects) != len(tasks):
        raise UsageError(f"effects have shape {effects.shape}; expected one row for each of {len(tasks)} tasks")
    scaled = _in_spreads(effects)
    strongest, mean = scaled.copy(), scaled.copy()
    control = np.full(scaled.shape, -1, dtype=np.int64)
    for row, others in enumerate(controls_by_row(tasks, relatives)):
        if others:
            strongest[row] -= scaled[others].max(axis=0)
            mean[row] -= scaled[others].mean(axis=0)
            control[row] = np.array(others)[scaled[others].argmax(axis=0)]
    return SpecificityResult(strongest, mean, control)


def controls_by_row(tasks: Sequence[str], relatives: Mapping[str, Collection[str]]) -> list[list[int]]:
    """For every task the positions of its controls among them; see ``specificity``."""
    return [
        [
            other
            for other, name in enumerate(tasks)
            if other != row and name not in relatives.get(task, ()) and task not in relatives.get(name, ())
        ]
        for row, task in enumerate(tasks)
    ]


def universal_heads(effects: NDArray[np.float64], threshold: float = 2.0, share: float = 0.8) -> NDArray[np.int64]:
    """Heads that hurt nearly every task: at least ``threshold`` spreads on at least ``share`` of the tasks.

    A single task cannot tell universal heads from its own, and has none.

    Args:
        effects: ``[n_tasks, n_heads]`` damage in nats.
        threshold: smallest effect on a task, in spreads of that task's effects.
        share: smallest share of the tasks, rounded up to whole tasks and never fewer than two.

    Returns:
        Positions of the heads, the one with the largest mean effect in spreads first.

    Raises:
        UsageError: if the threshold is not above 0 or the share not above 0 and at most 1.
    """
    if not (threshold > 0 and 0 < share <= 1):
        raise UsageError(f"universal heads need a threshold above 0 and a share in (0, 1], not {threshold}, {share}")
    scaled = _in_spreads(effects)
    needed = max(2, int(np.ceil(share * len(effects) - 1e-9)))
    found = np.flatnonzero((scaled >= threshold).sum(axis=0) >= needed)
    return found[np.argsort(-scaled[:, found].mean(axis=0), kind="stable")]


def rank_heads(scores: NDArray[np.float64], effects: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each task the heads by specificity, highest first; ties go to the larger effect, then the earlier head.

    Args:
        scores: ``[n_tasks, n_heads]`` specificity.
        effects: ``[n_tasks, n_heads]`` damage in nats.

    Returns:
        ``[n_tasks, n_heads]`` int, positions of heads.
    """
    return np.stack([np.lexsort((-effect, -score)) for score, effect in zip(scores, effects, strict=True)])


def heads_in_order(order: NDArray[np.int64], shape: ModelShape, tasks: Sequence[str]) -> dict[str, tuple[Head, ...]]:
    """What ``rank_heads`` returns, as heads by task."""
    return {task: tuple(shape.head(int(i)) for i in row) for task, row in zip(tasks, order, strict=True)}


def _in_spreads(effects: NDArray[np.float64]) -> NDArray[np.float64]:
    spread = effects.std(axis=1, keepdims=True)
    return np.asarray(np.divide(effects, spread, out=np.zeros(effects.shape), where=spread > 0))
