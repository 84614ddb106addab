"""What every method must do, on a planted model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from cs_localize.config import DesignConfig, MethodConfig, PilotConfig, SolverConfig, StudyConfig, parse_study
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.protocol import Mode, Request
from cs_localize.methods import (
    METHODS,
    Attribution,
    CountingMeasurer,
    ExhaustiveSweep,
    Greedy,
    Localization,
    Method,
    RandomHeads,
    Sparse,
    Stepwise,
    ThinSweep,
    Thompson,
    make_method,
)
from cs_localize.outcomes import Item
from tests.methods.builders import EngineMeasurer

SHAPE = ModelShape(layers=10, heads=4, kv_heads=2, head_dim=8, ffn=16)
TASKS = ("a", "b")
ITEMS = {task: [Item(task, f"{n}", f"{task} {n}:", f" {n}") for n in range(8)] for task in TASKS}

CASES: dict[str, tuple[Method, int]] = {
    # All requests of this design differ, or fewer would be counted.
    "sparse": (Sparse(DesignConfig(requests=120, density=0.15, pilot=PilotConfig(requests_a_layer=2)), seed=4), 120),
    "sweep": (ExhaustiveSweep(), 8 * 40),
    "thin_sweep": (ThinSweep(items=3, seed=1), 3 * 40),
    # After the first sweep: the chosen head alone (asked before), 39 pairs; both, 38 triples.
    "greedy": (Greedy(heads=3), 8 * (40 + 39 + 38)),
    # Two requests less than it may spend, since every candidate takes two.
    "stepwise": (Stepwise(requests=220, heads=3, seed=1), 218),
    "thompson": (Thompson(requests=130, batch=20, seed=2), 130),
    "random": (RandomHeads(seed=1), 0),
    # Three passes an item, which ask the measurer nothing.
    "attribution": (Attribution(lambda requests: np.ones((len(requests), 40)) * np.arange(40)), 3 * 8),
}

every = pytest.mark.parametrize("name", list(CASES))


def world(seed: int = 0) -> EngineMeasurer:
    return EngineMeasurer(PlantedEngine(SHAPE, PlantedOptions(TASKS, seed, n_specific=3, n_universal=2)))


def assert_equal(first: Localization, again: Localization) -> None:
    """Everything but what only the sparse method has."""
    assert first.ranking == again.ranking
    assert (first.requests, first.tokens, first.baseline) == (again.requests, again.tokens, again.baseline)
    np.testing.assert_array_equal(np.array(first.effects), np.array(again.effects))


def test_the_cases_are_all_methods_that_a_study_can_name() -> None:
    assert set(CASES) == set(METHODS) == set(get_args(MethodConfig.model_fields["name"].annotation))
    for name, (method, _) in CASES.items():
        assert type(method) is METHODS[name]


@every
def test_every_head_is_ranked_once_for_every_task(name: str) -> None:
    found = CASES[name][0].localize(world(), SHAPE, ITEMS, {})
    assert list(found.ranking) == list(TASKS)
    for heads in found.ranking.values():
        assert sorted(heads) == sorted(SHAPE.all_heads())


@pytest.mark.parametrize("name", [name for name in CASES if name != "attribution"])
def test_requests_are_counted_by_task_as_the_engine_saw_them(name: str) -> None:
    method, expected = CASES[name]
    measurer = world()
    found = method.localize(measurer, SHAPE, ITEMS, {})
    asked = {(request.item.task, request.key): request for request in measurer.asked}
    masked = Counter(task for (task, _), request in asked.items() if not request.ablation.empty)
    bare = Counter(task for (task, _), request in asked.items() if request.ablation.empty)
    assert found.requests == dict.fromkeys(TASKS, expected) == {task: masked[task] for task in TASKS}
    assert found.baseline_requests == {task: bare[task] for task in TASKS}
    assert found.tokens == {task: 3 * (masked[task] + bare[task]) for task in TASKS}


@every
def test_equal_options_give_equal_rankings(name: str) -> None:
    first, again = (CASES[name][0].localize(world(), SHAPE, ITEMS, {}) for _ in range(2))
    assert_equal(first, again)


@every
def test_a_task_without_items_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="task 'b' has no search items"):
        CASES[name][0].localize(world(), SHAPE, {"a": ITEMS["a"], "b": []}, {})
    with pytest.raises(UsageError, match="no task to localize"):
        CASES[name][0].localize(world(), SHAPE, {}, {})


@pytest.mark.parametrize("name", ["sweep", "greedy"])
def test_the_strongest_specific_head_comes_first(name: str) -> None:
    hits = 0
    for seed in range(3):
        measurer = world(seed)
        found = CASES[name][0].localize(measurer, SHAPE, ITEMS, {})
        hits += sum(found.ranking[task][0] == next(iter(measurer.engine.truth(task))) for task in TASKS)
    assert hits >= 5


def test_a_thin_sweep_of_all_items_is_the_exhaustive_one() -> None:
    thin = ThinSweep(items=8).localize(world(), SHAPE, ITEMS, {})
    swept = ExhaustiveSweep().localize(world(), SHAPE, ITEMS, {})
    assert (thin.ranking, thin.requests, thin.tokens) == (swept.ranking, swept.requests, swept.tokens)
    np.testing.assert_allclose(thin.effects, swept.effects, rtol=1e-12)


def test_greedy_finds_a_backup_that_no_single_head_shows() -> None:
    engine = PlantedEngine(SHAPE, PlantedOptions(TASKS, n_specific=1, n_universal=2, background=0.0))
    found = Greedy(heads=2).localize(EngineMeasurer(engine), SHAPE, ITEMS, {})
    assert found.ranking["b"][:2] == (next(iter(engine.truth("b"))), engine.backup("b"))
    swept = ExhaustiveSweep().localize(EngineMeasurer(engine), SHAPE, ITEMS, {})
    assert swept.ranking["b"][1] != engine.backup("b")


def test_thompson_asks_the_heads_that_matter_more_often_than_others() -> None:
    measurer = world()
    CASES["thompson"][0].localize(measurer, SHAPE, ITEMS, {})
    strongest = next(iter(measurer.engine.truth("b")))
    asked = Counter(head for r in measurer.asked if r.item.task == "b" for head, _ in r.ablation.heads)
    assert asked[strongest] == len(ITEMS["b"]), "as often as there are items"
    assert 130 / 40 < asked[strongest] > np.median(list(asked.values()))


def test_thompson_with_requests_for_everything_is_a_sweep_that_stops() -> None:
    found = Thompson(requests=1000, batch=50).localize(world(), SHAPE, ITEMS, {})
    swept = ExhaustiveSweep().localize(world(), SHAPE, ITEMS, {})
    assert found.requests == dict.fromkeys(TASKS, 8 * 40)
    np.testing.assert_allclose(np.array(found.effects) * 9 / 8, swept.effects)


def test_thompson_rewards_damage_to_the_task_and_not_to_its_controls() -> None:
    for seed in range(3):
        measurer = world(seed)
        found = Thompson(requests=200, seed=seed).localize(measurer, SHAPE, ITEMS, {})
        for task in TASKS:
            assert found.ranking[task][0] in measurer.engine.truth(task)
            assert found.ranking[task][0] not in measurer.engine.universal()


def test_attribution_is_the_mean_slope_of_the_items_and_counts_three_requests_for_each() -> None:
    items = {"a": ITEMS["a"][:2], "b": ITEMS["b"]}
    slopes = np.random.default_rng(0).normal(size=(10, 40))
    measurer = world()
    found = Attribution(lambda requests: slopes).localize(measurer, SHAPE, items, {})
    assert found.effects == pytest.approx(np.stack([slopes[:2].mean(axis=0), slopes[2:].mean(axis=0)]))
    assert (found.requests, found.tokens) == ({"a": 6, "b": 24}, {"a": 18, "b": 72})
    assert not measurer.asked


def test_attribution_without_a_model_or_with_several_answers_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="needs a model's gradients"):
        Attribution().localize(world(), SHAPE, ITEMS, {})

    class Choosing(EngineMeasurer):
        def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
            return replace(super().request(item, ablation, mode), choices=(((1,), (2,)), ((1,), (3,))))

    with pytest.raises(UsageError, match="needs one reference answer, and task 'a' is multiple choice"):
        CASES["attribution"][0].localize(Choosing(world().engine), SHAPE, ITEMS, {})


def test_a_repeated_request_is_counted_once() -> None:
    counter = CountingMeasurer(world())
    item = ITEMS["a"][0]
    masked = counter.request(item, Ablation.of([SHAPE.head(3)]))
    counter.measure([masked, masked, counter.request(item, Ablation())], "any")
    counter.measure([masked], "any")
    assert dict(counter.requests) == {"a": 1}
    assert {task: len(outcomes) for task, outcomes in counter.baseline.items()} == {"a": 1}
    assert counter.tokens == {"a": 6}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ThinSweep(items=9), "thin sweep of 9 items a task cannot be drawn: task 'a' has 8"),
        (ThinSweep(items=0), "thin sweep of 0 items"),
        (Greedy(heads=0), "greedy cannot add 0 heads; choose 1 to 40"),
        (Greedy(heads=41), "greedy cannot add 41 heads; choose 1 to 40"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(method: Method, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        method.localize(world(), SHAPE, ITEMS, {})


def study(method: object, **changes: object) -> StudyConfig:
    return parse_study({"model": "m", "tasks": ["a"], "seed": 7, "method": method, **changes})


def test_a_study_gives_a_method_its_options_and_what_else_it_has_a_field_for() -> None:
    assert make_method(study("thin_sweep")) == ThinSweep(seed=7)
    assert make_method(study({"name": "greedy", "options": {"heads": 2}})) == Greedy(heads=2)
    made = make_method(study("sparse", design={"requests": 5}, solver={"name": "omp"}))
    assert made == Sparse(DesignConfig(requests=5), SolverConfig(name="omp"), seed=7)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "greedy", "options": {"haeds": 2}}, "method 'greedy' has no option 'haeds'; it has heads, floor"),
        ({"name": "random", "options": {"seed": 2}}, "method 'random' has no option 'seed'; it has none"),
        ({"name": "thin_sweep", "options": {"items": 0}}, "option 'items' is 0; give a whole number of at least 1"),
        ({"name": "thin_sweep", "options": {"items": True}}, "option 'items' is True; give a whole number"),
        ({"name": "thompson", "options": {"requests": 0}}, "option 'requests' is 0; give a whole number of at least 1"),
        ({"name": "thompson", "options": {"spread": 0}}, "option 'spread' is 0; give a number above 0"),
        ({"name": "sweep", "options": {"floor": -1}}, "option 'floor' is -1; give a number above 0"),
    ],
)
def test_options_that_no_study_could_want_are_usage_errors(method: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_method(study(method))


def test_a_solver_of_the_sparse_method_is_checked_with_it() -> None:
    with pytest.raises(UsageError, match="solver 'lasso' has no option 'alhpa'"):
        make_method(study("sparse", solver={"options": {"alhpa": 1}}))


def test_knockoffs_are_refused_for_a_method_without_masks() -> None:
    with pytest.raises(UsageError, match="knockoffs need the masks of the method sparse; name it, or set select"):
        study("sweep", select={"by": "knockoffs"}, design={"kind": "bernoulli"})
