"""The exhaustive sweep: every head alone, on every item. Dear, and the truth that a search is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.outcomes import Item


def sweep(
    measurer: Measurer, shape: ModelShape, items: Mapping[str, Sequence[Item]], floor: float = 8.0
) -> dict[str, NDArray[np.float64]]:
    """Damage of every single head on every item.

    Args:
        measurer: asks the model.
        shape: the model's geometry.
        items: by task.
        floor: cap on the damage of one request, in nats; see ``MeasurementTable.damage``.

    Returns:
        By task, ``[items, n_heads]`` in nats.
    """
    alone = [Ablation.of([head]) for head in shape.all_heads()]
    baseline = [measurer.request(item, Ablation()) for task in items for item in items[task]]
    # Head by head, so that requests under the same ablation share their few-shot prefix in the cache.
    swept = [measurer.request(item, ablation) for ablation in alone for task in items for item in items[task]]
    before = np.array([outcome.score for outcome in measurer.measure(baseline, "baseline")])
    after = np.array([outcome.score for outcome in measurer.measure(swept, "sweep")])
    damage = np.minimum(before[None, :] - after.reshape(len(alone), -1), floor)
    ends = np.cumsum([len(items[task]) for task in items])
    return {task: part.T for task, part in zip(items, np.split(damage, ends[:-1], axis=1), strict=True)}
