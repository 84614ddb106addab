"""Rounds after the masks, on planted models."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_localize.config import DesignConfig, PilotConfig, parse_study
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.methods import Localization, Sparse, divide, make_method
from cs_localize.outcomes import Item
from tests.methods.test_methods import EngineMeasurer

TASKS = ("a", "b")
SMALL = ModelShape(layers=10, heads=4, kv_heads=2, head_dim=8, ffn=16)
ITEMS = {task: [Item(task, f"{n}", f"{task} {n}:", f" {n}") for n in range(24)] for task in TASKS}

later = pytest.mark.parametrize("rounds", [2, 3])


def world(seed: int = 0) -> EngineMeasurer:
    return EngineMeasurer(PlantedEngine(SMALL, PlantedOptions(TASKS, seed, n_specific=3, n_universal=2)))


def sparse(rounds: int, requests: int = 200, seed: int = 1, reserved: int = 0, confidence: float = 0.95) -> Sparse:
    design = DesignConfig(requests=requests, density=0.15, rounds=rounds, confidence=confidence)
    return Sparse(design, seed=seed, limit=3, reserved=reserved)


def tried(found: Localization, task: str) -> dict[str, int]:
    """On how many items each head was knocked out alone."""
    assert found.sparse is not None
    assert found.sparse.narrowed is not None
    return {str(head): len(damage) for head, damage in found.sparse.narrowed.damage[task].items()}


@given(requests=st.integers(1, 5000), rounds=st.integers(1, 3))
def test_the_rounds_together_spend_what_was_granted(requests: int, rounds: int) -> None:
    parts = divide(requests, rounds)
    assert len(parts) == rounds
    assert sum(parts) == requests
    assert min(parts) >= 0


@later
@given(requests=st.integers(60, 400), seed=st.integers(0, 9), reserved=st.integers(0, 16))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_no_task_is_asked_more_than_was_granted_and_no_reserved_item(
    rounds: int, requests: int, seed: int, reserved: int
) -> None:
    measurer = world(seed)
    found = sparse(rounds, requests, seed, reserved).localize(measurer, SMALL, ITEMS, {})
    masked = {(r.item.task, r.key) for r in measurer.asked if not r.ablation.empty}
    assert found.requests == Counter(task for task, _ in masked)
    assert max(found.requests.values()) <= requests
    assert found.sparse is not None
    assert found.sparse.narrowed is not None
    for task, design in found.sparse.narrowed.designs.items():
        assert set(design.masks.sum(axis=1)) <= {1}
        assert design.items.min() >= reserved
        assert len(np.unique(np.column_stack([design.masks.argmax(axis=1), design.items]), axis=0)) == len(design)
        assert sum(tried(found, task).values()) == len(design)


@later
def test_equal_seeds_give_equal_rounds_and_others_do_not(rounds: int) -> None:
    first, again, other = (sparse(rounds, seed=seed).localize(world(), SMALL, ITEMS, {}) for seed in (1, 1, 2))
    assert first.ranking == again.ranking
    np.testing.assert_array_equal(np.array(first.effects), np.array(again.effects))
    assert tried(first, "a") == tried(again, "a")
    assert tried(first, "a") != tried(other, "a")


@later
def test_heads_that_were_tried_alone_come_first(rounds: int) -> None:
    found = sparse(rounds).localize(world(), SMALL, ITEMS, {})
    for task in TASKS:
        alone = tried(found, task)
        assert {str(head) for head in found.ranking[task][: len(alone)]} == set(alone)


def test_the_third_round_asks_more_of_some_heads_only() -> None:
    found = sparse(3).localize(world(), SMALL, ITEMS, {})
    for task in TASKS:
        assert len(set(tried(found, task).values())) == 2


def test_the_rounds_end_early_once_all_is_decided() -> None:
    options = PlantedOptions(TASKS, n_specific=3, n_universal=2, background=0.0, variation=0.0, noise=0.0)
    measurer = EngineMeasurer(PlantedEngine(SMALL, options))
    found = sparse(3, requests=1000, confidence=0.6).localize(measurer, SMALL, ITEMS, {})
    for task in TASKS:
        assert len(set(tried(found, task).values())) == 1
        assert set(found.ranking[task][:3]) == set(measurer.engine.truth(task))


def test_one_round_asks_what_it_asked_before_there_were_more() -> None:
    found = sparse(1).localize(world(), SMALL, ITEMS, {})
    assert found.sparse is not None
    assert found.sparse.narrowed is None
    assert found.sparse.requests is found.sparse.designs
    assert {len(design) for design in found.sparse.designs.values()} == {200}


def test_rounds_find_planted_heads_with_fewer_requests_than_masks_alone() -> None:
    shape = ModelShape(layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192)
    tasks = ("a", "b", "c", "d")
    items = {task: [Item(task, f"{n}", f"{task} {n}:", f" {n}") for n in range(40)] for task in tasks}
    recall = dict.fromkeys((1, 3), 0.0)
    for seed in range(3):
        engine = PlantedEngine(shape, PlantedOptions(tasks, seed, decay=0.8, background=0.01))
        for rounds, requests in ((1, 512), (3, 400)):
            design = DesignConfig(requests=requests, rounds=rounds, pilot=PilotConfig(requests_a_layer=2))
            found = Sparse(design, seed=seed).localize(EngineMeasurer(engine), shape, items, {})
            recall[rounds] += sum(len({*found.ranking[task][:5]} & {*engine.truth(task)}) / 60 for task in tasks)
    assert recall[3] > recall[1]
    assert recall[3] > 0.9


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            sparse(3, requests=5),
            "design.requests leaves the rounds after the masks nothing; raise it, or set",
        ),
        (sparse(2, reserved=23), "task 'a' has 24 search items and design.rounds above 1 needs 25, 23 of them for the"),
        (sparse(2, requests=24), "design.requests is 24, of which the masks get 19, and the pilot alone takes 20"),
    ],
)
def test_what_leaves_no_room_for_rounds_is_a_usage_error_before_anything_is_asked(method: Sparse, message: str) -> None:
    measurer = world()
    with pytest.raises(UsageError, match=message):
        method.localize(measurer, SMALL, ITEMS, {})
    assert not measurer.asked


@pytest.mark.parametrize(("by", "reserved"), [("tests", 14), ("naming", 0)])
def test_the_items_of_the_tests_are_kept_from_the_rounds(by: str, reserved: int) -> None:
    select = {"by": by, "limit": 4, "tests": {"items": 9, "control_items": 14}}
    made = make_method(parse_study({"model": "m", "tasks": ["a"], "select": select}))
    assert isinstance(made, Sparse)
    assert (made.limit, made.reserved) == (4, reserved)
