"""Designs measured: from masks and items to the table that solvers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cs_localize.design import Design
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods.method import Items
from cs_localize.outcomes import MeasurementTable, Outcome


def measure_baseline(measurer: Measurer, items: Items) -> dict[str, list[Outcome]]:
    """The outcomes of all items unablated, by task in their order.

    Raises:
        MeasurementError: if an outcome cannot be measured.
    """
    requests = [measurer.request(item, Ablation()) for asked in items.values() for item in asked]
    outcomes = iter(measurer.measure(requests, "baseline"))
    return {task: [next(outcomes) for _ in asked] for task, asked in items.items()}


def measure_designs(
    measurer: Measurer,
    shape: ModelShape,
    items: Items,
    designs: Mapping[str, Design],
    baseline: Mapping[str, Sequence[Outcome]],
    stage: str,
) -> MeasurementTable:
    """Measures the requests of some designs.

    Args:
        measurer: asks the model.
        shape: the model's geometry.
        items: by task.
        designs: by task, which become the table's.
        baseline: by task, the outcomes of all its items unablated.
        stage: a word for the progress display.

    Raises:
        MeasurementError: if an outcome cannot be measured.
    """
    heads = list(shape.all_heads())
    requests = [
        measurer.request(items[task][item], Ablation.of(heads[i] for i in np.flatnonzero(mask)))
        for task, design in designs.items()
        for mask, item in zip(design.masks, design.items, strict=True)
    ]
    outcomes = measurer.measure(requests, stage)
    tasks = tuple(designs)
    first = dict(zip(tasks, np.cumsum([0, *(len(items[task]) for task in tasks)]), strict=False))
    return MeasurementTable(
        shape=shape,
        tasks=tasks,
        task=np.repeat(np.arange(len(tasks)), [len(design) for design in designs.values()]),
        item=np.concatenate([first[task] + design.items for task, design in designs.items()]),
        masks=np.concatenate([design.masks for design in designs.values()]),
        score=np.array([outcome.score for outcome in outcomes]),
        baseline=np.array([baseline[task][i].score for task, design in designs.items() for i in design.items]),
        correct=np.array([outcome.correct for outcome in outcomes]),
        tokens=np.array([outcome.tokens for outcome in outcomes]),
    )
