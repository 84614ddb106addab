"""The interface of the methods."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cs_localize.baselines.counting import CountingMeasurer
from cs_localize.errors import UsageError
from cs_localize.heads import Head, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.outcomes import Item
from cs_localize.recover import heads_in_order, rank_heads, specificity

Items = Mapping[str, Sequence[Item]]
Relatives = Mapping[str, Collection[str]]


@dataclass(frozen=True)
class Localization:
    """What a method found and spent.

    Attributes:
        ranking: by task, all heads, the one the method would name first in front.
        requests: by task, different masked requests.
        baseline_requests: by task, different unablated requests.
    """

    ranking: dict[str, tuple[Head, ...]]
    requests: dict[str, int]
    baseline_requests: dict[str, int]


class Method(Protocol):
    """Ranks the heads of all tasks of a study, which control each other. What it is told besides is its options."""

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Measures and ranks.

        Args:
            measurer: asks the model.
            shape: the model's geometry.
            items: search items by task.
            relatives: by task, the tasks that do not control it.

        Raises:
            UsageError: if there are no items, or an option does not fit them or the model.
            MeasurementError: if an outcome cannot be measured.
        """
        ...


def check_items(items: Items) -> None:
    """Raises UsageError unless there are tasks and each has items."""
    empty = [task for task, asked in items.items() if not asked]
    if empty or not items:
        raise UsageError(f"task '{empty[0]}' has no search items" if empty else "there is no task to localize")


def by_specificity(
    effects: NDArray[np.float64], shape: ModelShape, tasks: Sequence[str], relatives: Relatives
) -> dict[str, tuple[Head, ...]]:
    """By task, all heads, most specific first, from effects ``[n_tasks, n_heads]`` in nats."""
    order = rank_heads(specificity(effects, tasks, relatives).strongest, effects)
    return heads_in_order(order, shape, tasks)


def spent(ranking: dict[str, tuple[Head, ...]], counter: CountingMeasurer) -> Localization:
    """A ranking with what the counter saw, 0 for a task of which it saw nothing."""
    return Localization(
        ranking,
        {task: counter.requests[task] for task in ranking},
        {task: counter.baseline_requests[task] for task in ranking},
    )
