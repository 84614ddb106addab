from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, Head, ModelShape, Neuron
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.outcomes import Outcome
from tests.measure.conformance import check_engine, check_refused_specs
from tests.recover.builders import SMALL_REAL, request

TASKS = ("antonyms", "plurals", "capitals")


def engine_of(**changes: object) -> PlantedEngine:
    return PlantedEngine.from_options(SMALL_REAL, {"tasks": list(TASKS), **changes})


def mean_damage(engine: PlantedEngine, task: str, heads: list[Head], scale: float = 0.0) -> float:
    ablation = Ablation.of(heads, scale=scale)
    before = engine.measure([request(task, number, Ablation()) for number in range(60)])
    after = engine.measure([request(task, number, ablation) for number in range(60)])
    return float(np.mean([a.score - b.score for a, b in zip(before, after, strict=True)]))


def test_it_keeps_the_contract_of_engines() -> None:
    settings = {"tasks": list(TASKS)}
    spec = EngineSpec("planted", "", "planted", SMALL_REAL, settings=settings, mean_prompts=((1, 2), (3,)))
    engine = PlantedEngine.from_spec(spec)
    check_engine(engine, [request("antonyms", number, Ablation()) for number in range(6)])
    check_refused_specs(spec)


def test_specific_heads_matter_to_their_task_alone_in_the_planted_order() -> None:
    engine = engine_of()
    for task in TASKS:
        others = [other for other in TASKS if other != task]
        sizes = list(engine.truth(task).values())
        assert sizes == sorted(sizes, reverse=True)
        first = next(iter(engine.truth(task)))
        assert mean_damage(engine, task, [first]) > 1.5
        assert max(mean_damage(engine, other, [first]) for other in others) < 0.6


def test_universal_heads_matter_to_every_task_and_lie_in_the_first_layers() -> None:
    engine = engine_of()
    universal = list(engine.universal())
    assert len(universal) == 5
    assert {head.layer for head in universal} <= {0, 1, 2}
    assert min(mean_damage(engine, task, universal) for task in TASKS) > 3


def test_a_backup_matters_only_once_its_primary_is_gone() -> None:
    engine = engine_of(background=0.0)
    primary, backup = next(iter(engine.truth("plurals"))), engine.backup("plurals")
    assert abs(mean_damage(engine, "plurals", [backup])) < 0.05
    together = mean_damage(engine, "plurals", [primary, backup])
    assert together > mean_damage(engine, "plurals", [primary]) + 0.5


def test_a_kv_group_matters_more_together_than_its_heads_do_one_by_one() -> None:
    engine = engine_of(background=0.0)
    group = list(engine.group())
    assert set(group) == set(SMALL_REAL.kv_group(group[0]))
    alone = sum(mean_damage(engine, "antonyms", [head]) for head in group)
    assert mean_damage(engine, "antonyms", group) > 2 * alone > 0
    assert abs(mean_damage(engine, "capitals", group)) < 0.05, "the group belongs to the first task by name"


def test_a_task_without_heads_is_hurt_by_universal_heads_alone_and_leaves_the_other_tasks_as_they_are() -> None:
    with_all, engine = engine_of(background=0.0), engine_of(background=0.0, without=["antonyms"])
    assert engine.truth("antonyms") == {}
    own = [*with_all.truth("antonyms"), with_all.backup("antonyms"), *with_all.group()]
    assert mean_damage(with_all, "antonyms", own) > 3
    assert abs(mean_damage(engine, "antonyms", own)) < 0.05
    assert mean_damage(engine, "antonyms", list(engine.universal())) > 3
    assert engine.truth("plurals") == with_all.truth("plurals")
    asked = [request("plurals", n, Ablation.of(with_all.truth("plurals"))) for n in range(5)]
    assert engine.measure(asked) == with_all.measure(asked)


def test_universal_heads_without_a_spread_matter_to_all_tasks_alike() -> None:
    engine = engine_of(background=0.0, universal_spread=0.0, decay=1.0, variation=0.0)
    for head in engine.universal():
        damage = [mean_damage(engine, task, [head]) for task in TASKS]
        assert max(damage) - min(damage) < 0.2 * max(damage)


def test_damage_saturates_at_the_floor() -> None:
    outcomes = engine_of(floor=6.0).measure(
        [request("antonyms", number, Ablation.of(SMALL_REAL.all_heads())) for number in range(20)]
    )
    assert max(outcome.score for outcome in outcomes) < -5
    assert min(outcome.score for outcome in outcomes) > -6.3


def test_a_head_scaled_halfway_does_part_of_the_damage() -> None:
    engine = engine_of()
    first = [next(iter(engine.truth("antonyms")))]
    half, whole = mean_damage(engine, "antonyms", first, scale=0.5), mean_damage(engine, "antonyms", first)
    assert 0.3 * whole < half < 0.7 * whole


def test_neurons_have_no_effect() -> None:
    engine = engine_of(noise=0.0)
    plain, ablated = engine.measure(
        [request("antonyms", 0, Ablation()), request("antonyms", 0, Ablation.of(neurons=[Neuron(3, 5)]))]
    )
    assert plain == ablated


def test_most_unablated_answers_are_correct_and_few_are_with_many_heads_gone() -> None:
    engine = engine_of()
    gone = Ablation.of(engine.universal())
    before = engine.measure([request(task, number, Ablation()) for task in TASKS for number in range(60)])
    after = engine.measure([request(task, number, gone) for task in TASKS for number in range(60)])
    assert 0.8 < np.mean([outcome.correct for outcome in before]) < 1
    assert np.mean([outcome.correct for outcome in after]) < 0.2


def test_generated_text_is_the_answer_exactly_where_its_score_counts_as_correct() -> None:
    engine = engine_of()
    ablations = [Ablation(), Ablation.of(engine.universal())]
    requests = [request("antonyms", n, ablation, mode="generate") for n in range(30) for ablation in ablations]
    outcomes = engine.measure(requests)
    quiet = PlantedOptions(TASKS, noise=0.0)
    scored = PlantedEngine(engine.shape, quiet).measure([replace(asked, mode="score") for asked in requests])
    agree = [
        outcome.text == (asked.item.answer if score.correct else "?")
        for asked, outcome, score in zip(requests, outcomes, scored, strict=True)
    ]
    assert np.mean(agree) > 0.95, "but for the noise, which is another in either mode"
    assert {outcome.text for outcome in outcomes} > {"?"}
    for outcome in outcomes:
        assert not outcome.correct, "engines do not grade"
        assert np.isnan(outcome.score)
        assert outcome.tokens == 3


def test_outcomes_are_the_same_in_another_process() -> None:
    asked = [request("antonyms", 3, Ablation.of([Head(2, 1), Head(20, 4)]))]
    program = (
        "from tests.measure.test_planted import engine_of, request, Ablation, Head\n"
        "asked = [request('antonyms', 3, Ablation.of([Head(2, 1), Head(20, 4)]))]\n"
        "print(repr(engine_of().measure(asked)[0].score))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(other.stdout) == engine_of().measure(asked)[0].score


def test_noise_is_of_the_size_asked_for_and_belongs_to_the_request() -> None:
    quiet, noisy = engine_of(noise=0.0), engine_of(noise=0.03)
    asked = [request("antonyms", n, Ablation.of([Head(9, h)])) for n in range(50) for h in range(8)]

    def scores(outcomes: list[Outcome]) -> np.ndarray:
        return np.array([outcome.score for outcome in outcomes])

    difference = scores(noisy.measure(asked)) - scores(quiet.measure(asked))
    assert 0.02 < difference.std() < 0.04
    assert np.array_equal(scores(noisy.measure(asked)), scores(noisy.measure(asked)))


def test_the_fingerprint_tells_seeds_shapes_and_sizes_apart_but_not_delays_or_the_order_of_tasks() -> None:
    fingerprints = {
        engine_of().fingerprint,
        engine_of(seed=1).fingerprint,
        engine_of(strongest=2.0).fingerprint,
        PlantedEngine.from_options(replace(SMALL_REAL, layers=29), {"tasks": list(TASKS)}).fingerprint,
    }
    assert len(fingerprints) == 4
    assert engine_of(delay_s=0.001).fingerprint == engine_of().fingerprint
    assert engine_of(tasks=list(reversed(TASKS))).fingerprint == engine_of().fingerprint


def test_options_at_the_values_outcomes_were_recorded_with_leave_the_fingerprint_as_it_was() -> None:
    assert engine_of().fingerprint == "planted/1 seed=0 30x9 6fe9d04a8cbd429c"
    assert engine_of(universal_spread=0.2, without=[]).fingerprint == engine_of().fingerprint
    assert engine_of(universal_spread=0.1).fingerprint != engine_of().fingerprint
    assert engine_of(without=["plurals"]).fingerprint != engine_of().fingerprint


def test_a_spec_with_plain_json_options_loads_the_same_engine() -> None:
    settings = json.loads(json.dumps({"tasks": list(TASKS), "seed": 3}))
    spec = EngineSpec("planted", "", "planted", SMALL_REAL, settings=settings, resources={"delay_s": 0.0})
    engine = load_engine(spec)
    assert engine.fingerprint == spec.fingerprint
    asked = [request("antonyms", 1, Ablation.of([Head(9, 2)]))]
    assert engine.measure(asked) == engine_of(seed=3).measure(asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs 'tasks'"),
        ({"tasks": "antonyms"}, "needs 'tasks'"),
        ({"tasks": 7}, "needs 'tasks'"),
        ({"tasks": [7]}, "needs 'tasks'"),
        ({"tasks": ["a", "a"]}, "list of different 'tasks'"),
        ({"tasks": ["a"], "sed": 1}, "no option 'sed'"),
        ({"tasks": ["a"], "seed": "one"}, "'seed' must be a whole number"),
        ({"tasks": ["a"], "noise": "loud"}, "'noise' must be a number"),
        ({"tasks": ["a"], "n_specific": 0}, "n_specific of at least 1"),
        ({"tasks": ["a"], "floor": 0}, "above 0"),
        ({"tasks": ["a"], "noise": -1}, "must not be negative"),
        ({"tasks": ["a"], "n_specific": 300}, "270 heads are too few"),
        ({"tasks": ["a"], "universal_spread": -1}, "must not be negative"),
        ({"tasks": ["a"], "without": "a"}, "needs 'without', a list of task names"),
        ({"tasks": ["a"], "without": ["b"]}, "'without' lists tasks that are not in 'tasks'"),
    ],
)
def test_impossible_options_are_usage_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PlantedEngine.from_options(SMALL_REAL, options)


def test_an_item_of_a_task_that_is_not_planted_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="task 'rhymes' is not planted; planted are antonyms, capitals, plurals"):
        engine_of().measure([request("rhymes", 0, Ablation())])


def test_a_closed_engine_does_not_measure() -> None:
    engine = engine_of()
    engine.close()
    with pytest.raises(MeasurementError, match="closed"):
        engine.measure([])


def test_a_model_with_as_many_kv_heads_as_heads_has_no_group() -> None:
    shape = ModelShape(layers=8, heads=4, kv_heads=4, head_dim=8, ffn=16)
    engine = PlantedEngine(shape, PlantedOptions(tasks=("a",), n_universal=2))
    assert engine.group() == ()
    assert len(engine.truth("a")) == 5
