"""What every method must do, on a planted model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cs_localize.baselines import CountingMeasurer, ExhaustiveSweep, Greedy, Method, RandomHeads, ThinSweep
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item, Outcome

SHAPE = ModelShape(layers=10, heads=4, kv_heads=2, head_dim=8, ffn=16)
TASKS = ("a", "b")
ITEMS = {task: [Item(task, f"{n}", f"{task} {n}:", f" {n}") for n in range(8)] for task in TASKS}

METHODS: dict[str, tuple[Method, int]] = {
    "exhaustive": (ExhaustiveSweep(), 8 * 40),
    "thin": (ThinSweep(items=3, seed=1), 3 * 40),
    # After the first sweep: the chosen head alone (asked before), 39 pairs; both, 38 triples.
    "greedy": (Greedy(heads=3), 8 * (40 + 39 + 38)),
    "random": (RandomHeads(seed=1), 0),
}

every = pytest.mark.parametrize("name", list(METHODS))


class EngineMeasurer:
    """Asks an engine in this process."""

    def __init__(self, engine: PlantedEngine) -> None:
        self.engine = engine

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        return Request(item, (1, int(item.id)), (2,), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        return self.engine.measure(requests)


def world(seed: int = 0) -> EngineMeasurer:
    return EngineMeasurer(PlantedEngine(SHAPE, PlantedOptions(TASKS, seed, n_specific=3, n_universal=2)))


@every
def test_every_head_is_ranked_once_for_every_task(name: str) -> None:
    found = METHODS[name][0].localize(world(), SHAPE, ITEMS, {})
    assert list(found.ranking) == list(TASKS)
    for heads in found.ranking.values():
        assert sorted(heads) == sorted(SHAPE.all_heads())


@every
def test_requests_are_counted_by_task_as_the_engine_saw_them(name: str) -> None:
    method, expected = METHODS[name]
    measurer = world()
    found = method.localize(measurer, SHAPE, ITEMS, {})
    asked = int(measurer.engine.evidence()["requests"])
    assert found.requests == dict.fromkeys(TASKS, expected)
    assert sum(found.requests.values()) + sum(found.baseline_requests.values()) <= asked


@every
def test_equal_options_give_equal_rankings(name: str) -> None:
    first, again = (METHODS[name][0].localize(world(), SHAPE, ITEMS, {}) for _ in range(2))
    assert first == again


@every
def test_a_task_without_items_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="task 'b' has no search items"):
        METHODS[name][0].localize(world(), SHAPE, {"a": ITEMS["a"], "b": []}, {})
    with pytest.raises(UsageError, match="no task to localize"):
        METHODS[name][0].localize(world(), SHAPE, {}, {})


@pytest.mark.parametrize("name", ["exhaustive", "greedy"])
def test_the_strongest_specific_head_comes_first(name: str) -> None:
    hits = 0
    for seed in range(3):
        measurer = world(seed)
        found = METHODS[name][0].localize(measurer, SHAPE, ITEMS, {})
        hits += sum(found.ranking[task][0] == next(iter(measurer.engine.truth(task))) for task in TASKS)
    assert hits >= 5


def test_a_thin_sweep_of_all_items_is_the_exhaustive_one() -> None:
    thin = ThinSweep(items=8).localize(world(), SHAPE, ITEMS, {})
    assert thin == ExhaustiveSweep().localize(world(), SHAPE, ITEMS, {})


def test_greedy_finds_a_backup_that_no_single_head_shows() -> None:
    engine = PlantedEngine(SHAPE, PlantedOptions(TASKS, n_specific=1, n_universal=2, background=0.0))
    found = Greedy(heads=2).localize(EngineMeasurer(engine), SHAPE, ITEMS, {})
    assert found.ranking["b"][:2] == (next(iter(engine.truth("b"))), engine.backup("b"))
    swept = ExhaustiveSweep().localize(EngineMeasurer(engine), SHAPE, ITEMS, {})
    assert swept.ranking["b"][1] != engine.backup("b")


def test_a_repeated_request_is_counted_once() -> None:
    counter = CountingMeasurer(world())
    item = ITEMS["a"][0]
    masked = counter.request(item, Ablation.of([SHAPE.head(3)]))
    counter.measure([masked, masked, counter.request(item, Ablation())], "any")
    counter.measure([masked], "any")
    assert dict(counter.requests) == {"a": 1}
    assert dict(counter.baseline_requests) == {"a": 1}


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
