"""Heads chosen one on top of the other, among few candidates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from cs_localize.errors import UsageError
from cs_localize.heads import Head, ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.protocol import Request
from cs_localize.methods import ExhaustiveSweep, Greedy, Localization, Stepwise
from cs_localize.outcomes import Item, Outcome
from tests.methods.builders import EngineMeasurer

SHAPE = ModelShape(layers=10, heads=8, kv_heads=4, head_dim=8, ffn=16)
TASKS = ("a", "b", "c")
ITEMS = {task: [Item(task, f"{n}", f"{task} {n}:", f" {n}") for n in range(12)] for task in TASKS}
FIRST, PARTNER, UNIVERSAL = Head(5, 1), Head(1, 2), Head(1, 5)
GONE = 5.0


class Pairs(EngineMeasurer):
    """Task `a` loses a little to one head and nearly all to it and a partner, and every task to a universal one."""

    def __init__(self) -> None:
        super().__init__(PlantedEngine(SHAPE, PlantedOptions(TASKS)))

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        self.asked += requests
        return [Outcome(self._score(request), False, "", 3) for request in requests]

    def _score(self, request: Request) -> float:
        out = {head for head, _ in request.ablation.heads}
        lost = GONE * (UNIVERSAL in out) + sum(0.02 for _ in out)
        if request.item.task == "a" and FIRST in out:
            lost += GONE if PARTNER in out else 1.0
        return -1.0 - lost


def found_by(stepwise: Stepwise, tasks: Sequence[str] = TASKS) -> tuple[Pairs, Localization]:
    measurer = Pairs()
    return measurer, stepwise.localize(measurer, SHAPE, {task: ITEMS[task] for task in tasks}, {})


def test_it_finds_a_partner_that_no_single_head_shows() -> None:
    measurer, found = found_by(Stepwise(requests=400, heads=2))
    assert found.ranking["a"][:2] == (FIRST, PARTNER)
    swept = ExhaustiveSweep().localize(measurer, SHAPE, ITEMS, {})
    assert swept.ranking["a"].index(PARTNER) > 1


def test_it_finds_what_greedy_finds_for_fewer_requests() -> None:
    agreed, spent = 0, Counter[str]()
    for seed in range(4):
        measurer = EngineMeasurer(PlantedEngine(SHAPE, PlantedOptions(TASKS, seed, n_specific=2, n_universal=2)))
        greedy = Greedy(heads=2).localize(measurer, SHAPE, ITEMS, {})
        found = Stepwise(requests=400, heads=2, seed=seed).localize(measurer, SHAPE, ITEMS, {})
        agreed += sum(len({*found.ranking[task][:2]} & {*greedy.ranking[task][:2]}) for task in TASKS)
        spent += Counter(greedy=greedy.requests["a"], stepwise=found.requests["a"])
    assert agreed >= 18, "of 24"
    assert 4 * spent["stepwise"] < spent["greedy"]


def test_a_head_that_the_controls_lose_as_much_to_is_not_added() -> None:
    _, found = found_by(Stepwise(requests=500, heads=5))
    assert UNIVERSAL not in found.ranking["a"][:5]


def test_without_controls_the_head_that_does_most_damage_is_added() -> None:
    _, found = found_by(Stepwise(requests=400, heads=2), ["a"])
    assert UNIVERSAL in found.ranking["a"][:2]


@pytest.mark.parametrize(("requests", "heads"), [(250, 2), (400, 3), (601, 5), (900, 5)])
def test_the_requests_of_a_task_are_the_budget_but_for_what_makes_no_whole_candidate(requests: int, heads: int) -> None:
    measurer, found = found_by(Stepwise(requests=requests, heads=heads))
    asked = {(r.item.task, r.key) for r in measurer.asked if not r.ablation.empty}
    assert found.requests == Counter(task for task, _ in asked)
    assert max(found.requests.values()) <= requests
    assert min(found.requests.values()) > requests - 10


def test_no_step_tries_a_head_on_a_reserved_item() -> None:
    measurer, _ = found_by(Stepwise(requests=400, heads=3, reserved=6))
    pairs = [r for r in measurer.asked if {FIRST, PARTNER} == {head for head, _ in r.ablation.heads}]
    assert {r.item.task for r in pairs} == set(TASKS), "the controls were asked too"
    assert {int(r.item.id) for r in pairs} <= set(range(6, 12))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Stepwise(requests=60), "stepwise with 60 requests a task leaves the masks 19, of which the pilot takes 20"),
        (Stepwise(requests=250), "and a step 30, which takes 4[0-9]; raise its option 'requests'"),
        (Stepwise(heads=81), "stepwise cannot choose 81 heads of 80; lower its option 'heads'"),
        (Stepwise(requests=3_000_000), "option 'requests' is 3000000; give at most 1,000,000"),
        (Stepwise(heads=1), "option 'heads' is 1; give a whole number of at least 2"),
        (
            Stepwise(reserved=10),
            "task 'a' has 12 search items and stepwise needs 14, 10 of them for the tests of single",
        ),
    ],
)
def test_what_cannot_be_done_is_a_usage_error_before_anything_is_asked(method: Stepwise, message: str) -> None:
    measurer = Pairs()
    with pytest.raises(UsageError, match=message):
        method.localize(measurer, SHAPE, ITEMS, {})
    assert not measurer.asked


def test_a_budget_that_leaves_no_head_alone_is_refused_by_the_name_that_stepwise_has_for_it() -> None:
    shape, measurer = ModelShape(layers=2, heads=16, kv_heads=8, head_dim=8, ffn=16), Pairs()
    with pytest.raises(UsageError, match=r"heads alone 2, which take 4, .*; raise its option 'requests'"):
        Stepwise(requests=20, heads=2).localize(measurer, shape, {"a": ITEMS["a"]}, {})
    assert not measurer.asked


def test_a_model_of_too_few_heads_for_masks_is_refused_before_anything_is_asked() -> None:
    shape, measurer = ModelShape(layers=2, heads=8, kv_heads=8, head_dim=8, ffn=16), Pairs()
    with pytest.raises(UsageError, match="and 16 are too few for that; name another method"):
        Stepwise(heads=2).localize(measurer, shape, {"a": ITEMS["a"]}, {})
    assert not measurer.asked


def test_the_smallest_budget_that_is_accepted_is_enough() -> None:
    for requests in range(100, 700):
        try:
            _, found = found_by(Stepwise(requests=requests))
        except UsageError:
            continue
        assert max(found.requests.values()) <= requests
        return
    pytest.fail("no budget is accepted")


@pytest.mark.parametrize(("layers", "heads"), [(3, 6), (5, 4), (13, 2), (17, 1)])
def test_it_runs_on_few_heads_though_nearly_half_of_the_layers_are_fragile(layers: int, heads: int) -> None:
    class Fragile(Pairs):
        def _score(self, request: Request) -> float:
            return -1.0 - GONE * any(head.layer < (layers - 1) // 2 for head, _ in request.ablation.heads)

    shape = ModelShape(layers=layers, heads=heads, kv_heads=heads, head_dim=8, ffn=16)
    found = Stepwise(requests=400, heads=3).localize(Fragile(), shape, ITEMS, {})
    assert sorted(found.ranking["a"]) == sorted(shape.all_heads())


@pytest.mark.parametrize(("layers", "heads", "chosen"), [(10, 8, 5), (2, 9, 2), (17, 1, 5), (30, 9, 12)])
def test_the_requests_that_a_refusal_names_are_enough(layers: int, heads: int, chosen: int) -> None:
    shape, measurer = ModelShape(layers=layers, heads=heads, kv_heads=heads, head_dim=8, ffn=16), Pairs()
    with pytest.raises(UsageError, match=r"raise its option 'requests' to \d+$") as refused:
        Stepwise(requests=40, heads=chosen).localize(measurer, shape, ITEMS, {})
    enough = int(str(refused.value).rpartition(" ")[2])
    found = Stepwise(requests=enough, heads=chosen).localize(measurer, shape, ITEMS, {})
    assert max(found.requests.values()) <= enough
    with pytest.raises(UsageError, match=f"to {enough}$"):
        Stepwise(requests=enough - 1, heads=chosen).localize(measurer, shape, ITEMS, {})


def test_another_method_is_advised_where_no_requests_are_enough() -> None:
    shape, measurer = ModelShape(layers=500, heads=100, kv_heads=100, head_dim=8, ffn=16), Pairs()
    with pytest.raises(UsageError, match="which takes 20; name another method"):
        Stepwise(heads=40_000).localize(measurer, shape, {"a": ITEMS["a"]}, {})
    assert not measurer.asked


def test_effects_are_finite_where_nothing_is_lost() -> None:
    class Unmoved(Pairs):
        def _score(self, request: Request) -> float:
            return -1.0

    found = Stepwise(requests=500).localize(Unmoved(), SHAPE, ITEMS, {})
    assert found.effects is not None
    assert all(map(math.isfinite, found.effects.ravel()))
    assert sorted(found.ranking["a"]) == sorted(SHAPE.all_heads())
