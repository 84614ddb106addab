"""A small world for the confirmation: tasks, heads and neurons that matter, and a measurer that answers from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cs_localize.config import ConfirmConfig, CrosscheckConfig
from cs_localize.confirm.crosscheck import crosscheck
from cs_localize.confirm.heads import confirm_heads
from cs_localize.confirm.interactions import head_interactions
from cs_localize.findings import ConfirmFile, CrosscheckFile, NeuronSet, OverlapMeasure
from cs_localize.heads import Ablation, Head, ModelShape, Neuron
from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item, Outcome

SHAPE = ModelShape(layers=6, heads=4, kv_heads=2, head_dim=8, ffn=32)
UNIVERSAL = Head(0, 1)

NAMED = {"antonyms": (Head(3, 2), Head(4, 0)), "plurals": (Head(2, 1),), "capitals": ()}
RANKING = {
    "antonyms": (Head(3, 2), Head(4, 0), Head(1, 1), Head(5, 3)),
    "plurals": (Head(2, 1), Head(5, 0), Head(4, 0)),
    "capitals": (Head(1, 0), Head(5, 1)),
}
RELATIVES = {"plurals": frozenset({"past_tense"})}
NEURONS = tuple(Neuron(layer, index) for layer, index in ((3, 7), (3, 8), (4, 1), (2, 30), (2, 31), (5, 0), (1, 9)))

HURTS: dict[str, dict[Head | Neuron, float]] = {
    "antonyms": {Head(3, 2): 0.5, Head(4, 0): 0.3, Neuron(3, 7): 0.4, Neuron(4, 1): 0.3},
    "plurals": {Head(2, 1): 0.6, Head(4, 0): 0.1, Neuron(3, 8): 0.2},
    "past_tense": {Head(2, 1): 0.5, Neuron(3, 8): 0.2},
    "capitals": {Head(5, 2): 0.1, Neuron(2, 30): 0.3},
    "copying": {Neuron(5, 0): 0.25},
}


def items_of(task: str, count: int) -> tuple[Item, ...]:
    return tuple(Item(task, f"{task}-{i}", f"{task} {i} ->", f" answer {i}") for i in range(count))


HELD_OUT = {task: items_of(task, 24 + 2 * i) for i, task in enumerate(HURTS)}


def share(text: str) -> float:
    """A number from 0 to 1 that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


@dataclass
class WorldMeasurer:
    """Answers correctly while an item's difficulty plus the damage done to its task stays below .9.

    Units that no task is said to depend on do a little damage as well, up to ``background`` each.
    """

    background: float = 0.05
    hurts: dict[str, dict[Head | Neuron, float]] = field(default_factory=lambda: HURTS)
    batches: list[tuple[str, list[Request]]] = field(default_factory=list)

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        ablation.check(SHAPE)
        return Request(item, tuple(item.prompt.encode()), tuple(item.answer.encode()), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        self.batches.append((stage, list(requests)))
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Outcome:
        task = request.item.task
        hurts = {UNIVERSAL: 0.4, **self.hurts.get(task, {})}
        zeroed: list[tuple[Head | Neuron, float]] = [*request.ablation.heads, *request.ablation.neurons]
        damage = sum(hurts.get(unit, self.background * share(f"{task}|{unit}")) * (1 - scale) for unit, scale in zeroed)
        correct = share(request.item.id) + damage < 0.9
        if request.mode == "score":
            score = -0.1 - 4 * (share(request.item.id) + damage) ** 2
            return Outcome(score, correct, "", len(request.prompt_ids) + len(request.answer_ids))
        return Outcome(float("nan"), correct, request.item.answer if correct else "", len(request.prompt_ids) + 3)

    def repeat(self, requests: Sequence[Request]) -> list[Outcome]:
        """A second run in which every thirteenth answer differs."""
        outcomes = [self.answer(request) for request in requests]
        return [replace(o, correct=o.correct != (i % 13 == 0)) for i, o in enumerate(outcomes)]


def neuron_set(neurons: Sequence[Neuron] = NEURONS) -> NeuronSet:
    overlap = OverlapMeasure(max=0.5, min=0.6, iou=0.4, chance=0.01)
    return NeuronSet(
        count=len(neurons),
        ratio=len(neurons) / SHAPE.n_neurons,
        rule="above the mean by 6 standard deviations",
        neurons=[str(neuron) for neuron in neurons],
        items=24,
        completeness=0.99,
        overlap=overlap,
        knowledge_neurons=overlap,
        attribution_with_heads_zeroed=0.3,
        random_attribution_with_heads_zeroed=0.95,
    )


def confirmed(measurer: WorldMeasurer | None = None, config: ConfirmConfig | None = None) -> ConfirmFile:
    measurer = measurer or WorldMeasurer()
    config = config or ConfirmConfig(random_draws=4, curve=3, bootstrap=400)
    return confirm_heads(
        measurer, HELD_OUT, NAMED, RANKING, (UNIVERSAL,), RELATIVES, SHAPE, config, seed=7, repeat=measurer.repeat
    )


def with_pairs() -> ConfirmFile:
    """The confirmation with its heads in pairs, as a study writes it."""
    pairs = head_interactions(
        WorldMeasurer(), HELD_OUT, NAMED, (UNIVERSAL,), SHAPE, ConfirmConfig(bootstrap=400, interaction_items=8), seed=7
    )
    return confirmed().model_copy(update={"interactions": pairs})


def crosschecked(measurer: WorldMeasurer | None = None, config: CrosscheckConfig | None = None) -> CrosscheckFile:
    config = config or CrosscheckConfig(random_draws=5, dose=(1, 2, 5, 10))
    sets = {"antonyms": neuron_set(), "plurals": neuron_set(NEURONS[1:4]), "capitals": neuron_set(())}
    return crosscheck(measurer or WorldMeasurer(), HELD_OUT, NAMED, sets, confirmed(), RELATIVES, SHAPE, config, seed=7)
