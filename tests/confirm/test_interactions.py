from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cs_localize.config import ConfirmConfig
from cs_localize.confirm import head_interactions
from cs_localize.findings import HeadPair, Interactions
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item, Outcome
from cs_localize.recover import holm

SHAPE = ModelShape(layers=12, heads=8, kv_heads=4, head_dim=16, ffn=64)
TASKS = ("a", "b")
ITEMS = {task: [Item(task, f"{task}-{n}", f"{task} {n}:", f" {n}") for n in range(40)] for task in TASKS}
CONFIG = ConfirmConfig(bootstrap=400)


class Direct:
    """A ``Measurer`` that asks a planted model in this process."""

    def __init__(self, seed: int = 0, **options: float) -> None:
        self.engine = PlantedEngine(SHAPE, replace(PlantedOptions(TASKS, seed), **options))  # type: ignore[arg-type]
        self.asked: list[Request] = []

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        ablation.check(SHAPE)
        return Request(item, (TASKS.index(item.task), ITEMS[item.task].index(item)), (0,), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        self.asked += requests
        return self.engine.measure(requests)


def pairs_of(measurer: Direct, named: dict[str, Sequence[Head]], config: ConfirmConfig = CONFIG) -> Interactions:
    return head_interactions(measurer, ITEMS, named, measurer.engine.universal(), SHAPE, config, seed=3)


def kinds(found: Sequence[HeadPair]) -> dict[frozenset[str], str]:
    return {frozenset(pair.heads): pair.kind for pair in found}


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_backup_is_told_from_heads_that_add_up(seed: int) -> None:
    measurer = Direct(seed)
    first, second, third, *_ = measurer.engine.truth("b")
    backup = measurer.engine.backup("b")

    found = kinds(pairs_of(measurer, {"b": [first, second, third, backup]}).tasks["b"])

    assert found.pop(frozenset({str(first), str(backup)})) == "backup"
    assert set(found.values()) <= {"additive"}


@pytest.mark.parametrize("seed", range(5))
def test_a_kv_group_that_matters_as_a_whole_shows_between_a_named_head_and_its_neighbour(seed: int) -> None:
    measurer = Direct(seed)
    group = measurer.engine.group()

    (pair,) = pairs_of(measurer, {"a": group[:1]}).tasks["a"]

    assert set(pair.heads) == set(map(str, group))
    assert pair.kind == "backup"
    assert 0.5 < pair.nats < 3


def test_damage_that_meets_the_floor_is_called_saturated_and_never_redundant() -> None:
    measurer = Direct(strongest=9.0, decay=0.9)
    heads = list(measurer.engine.truth("b"))[:3]

    found = pairs_of(measurer, {"b": heads}).tasks["b"]

    own = [pair for pair in found if set(pair.heads) <= set(map(str, heads))]
    assert {pair.kind for pair in own} == {"saturated"}
    assert all(pair.nats < -1 for pair in own), "the numbers alone would look redundant"


class OnePath(Direct):
    """Two heads in a row: the path is broken once either is gone."""

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        first, second, *_ = self.engine.truth("b")
        merged = []
        for request in requests:
            heads = {head for head, _ in request.ablation.heads}
            if second in heads:
                heads = heads - {second} | {first}
            merged.append(replace(request, ablation=Ablation.of(heads)))
        return super().measure(merged, stage)


def test_two_heads_on_one_path_are_redundant_where_the_items_could_lose_more() -> None:
    measurer = OnePath(strongest=2.0)
    heads = list(measurer.engine.truth("b"))[:2]

    found = kinds(pairs_of(measurer, {"b": heads}).tasks["b"])

    assert found.pop(frozenset(map(str, heads))) == "redundant"


def test_pairs_are_named_heads_with_each_other_and_with_their_kv_neighbours_once_each() -> None:
    named = [Head(5, 0), Head(5, 1), Head(7, 3)]
    found = pairs_of(Direct(), {"a": named, "b": []})
    assert list(found.tasks) == ["a"]
    assert [pair.heads for pair in found.tasks["a"]] == [
        ("L5H0", "L5H1"), ("L5H0", "L7H3"), ("L5H1", "L7H3"), ("L7H3", "L7H2")
    ]  # fmt: skip


def test_a_pair_is_both_together_less_each_alone_item_by_item() -> None:
    measurer = Direct()
    pair = list(measurer.engine.truth("b"))[2:4]
    found = pairs_of(measurer, {"b": pair}, ConfirmConfig(bootstrap=400, interaction_items=12))
    described = found.tasks["b"][0]

    def scores(heads: Sequence[Head]) -> np.ndarray:
        requests = [measurer.request(item, Ablation.of(heads)) for item in ITEMS["b"][:12]]
        return np.array([outcome.score for outcome in measurer.engine.measure(requests)])

    bare, both, first, second = scores([]), scores(pair), scores(pair[:1]), scores(pair[1:])
    assert described.items == found.items["b"] == 12
    assert described.nats == pytest.approx(((bare - both) - (bare - first) - (bare - second)).mean())
    assert described.nats_ci[0] <= described.nats <= described.nats_ci[1]


def test_requests_under_one_ablation_lie_together_and_nothing_is_asked_twice() -> None:
    measurer = Direct()
    found = pairs_of(measurer, {"a": [Head(5, 0), Head(7, 3)], "b": [Head(5, 0)]})
    order = [(request.item.task, request.ablation) for request in measurer.asked]
    changes = sum(before != after for before, after in pairwise(order))
    assert changes + 1 == len(set(order))
    assert len({request.key for request in measurer.asked}) == len(order) == found.requests
    assert all(request.mode == "score" for request in measurer.asked)


def test_p_values_are_corrected_over_the_pairs_of_all_tasks() -> None:
    measurer = Direct()
    found = pairs_of(measurer, {task: list(measurer.engine.truth(task))[:3] for task in TASKS})
    pairs = [pair for pairs in found.tasks.values() for pair in pairs]
    np.testing.assert_allclose([pair.p_holm for pair in pairs], holm(np.array([pair.p for pair in pairs])))


def test_without_named_heads_nothing_is_asked() -> None:
    measurer = Direct()
    found = pairs_of(measurer, {"a": [], "b": []})
    assert (found.tasks, found.requests, measurer.asked) == ({}, 0, [])
