"""Measurement tables from the planted engine, with made-up items."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cs_localize.design import Design
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Item, MeasurementTable

SMALL_REAL = ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536)
TASKS = ("addition", "antonyms", "capitals", "counting", "past_tense", "plurals")


def planted_engine(shape: ModelShape = SMALL_REAL, seed: int = 0, tasks: Sequence[str] = TASKS) -> PlantedEngine:
    """A planted engine with default sizes."""
    return PlantedEngine(shape, PlantedOptions(tasks=tuple(tasks), seed=seed))


def request(task: str, number: int, ablation: Ablation, mode: str = "score") -> Request:
    """A request for item ``number`` of a task; two tokens of prompt and one of answer."""
    item = Item(task, f"item-{number}", f"{task} {number}:", f" {number}")
    if mode == "generate":
        return Request(item, (1, number), (2,), ablation, mode="generate")
    return Request(item, (1, number), (2,), ablation)


def measure_designs(engine: PlantedEngine, designs: dict[str, Design]) -> MeasurementTable:
    """Asks the engine every request of one design a task, and the items' baselines."""
    tasks = tuple(designs)
    heads = list(engine.shape.all_heads())
    task, item, masks, score, baseline, correct, tokens = [], [], [], [], [], [], []
    for index, (name, design) in enumerate(designs.items()):
        count = int(design.items.max()) + 1
        bare = engine.measure([request(name, number, Ablation()) for number in range(count)])
        ablations = [Ablation.of(heads[h] for h in np.flatnonzero(mask)) for mask in design.masks]
        pairs = zip(design.items, ablations, strict=True)
        outcomes = engine.measure([request(name, int(number), ablation) for number, ablation in pairs])
        task.append(np.full(len(design), index))
        item.append(design.items + 1000 * index)
        masks.append(design.masks)
        score.append([outcome.score for outcome in outcomes])
        baseline.append([bare[number].score for number in design.items])
        correct.append([outcome.correct for outcome in outcomes])
        tokens.append([outcome.tokens for outcome in outcomes])
    return MeasurementTable(
        engine.shape,
        tasks,
        np.concatenate(task),
        np.concatenate(item),
        np.concatenate(masks),
        np.concatenate(score),
        np.concatenate(baseline),
        np.concatenate(correct),
        np.concatenate(tokens),
    )
