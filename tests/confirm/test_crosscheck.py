from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cs_localize.config import ConfirmConfig, CrosscheckConfig
from cs_localize.confirm.crosscheck import crosscheck
from cs_localize.errors import UsageError
from cs_localize.findings import dump_file
from cs_localize.heads import Ablation, Neuron
from tests.confirm.builders import (
    HELD_OUT,
    NAMED,
    NEURONS,
    RELATIVES,
    SHAPE,
    WorldMeasurer,
    confirmed,
    crosschecked,
    neuron_set,
)

GOLDEN = Path(__file__).parent / "golden" / "crosscheck.json"
SMALL = CrosscheckConfig(random_draws=5, dose=(1, 2, 5, 10))


def accuracy(task: str, ablation: Ablation) -> float:
    measurer = WorldMeasurer()
    return float(np.mean([measurer.answer(measurer.request(i, ablation, "generate")).correct for i in HELD_OUT[task]]))


def random_ablations(measurer: WorldMeasurer, located: tuple[Neuron, ...]) -> list[Ablation]:
    """The ablations that zero as many neurons as were located, but none of them."""
    ((_, requests),) = measurer.batches
    seen = dict.fromkeys(request.ablation for request in requests)
    return [a for a in seen if len(a.neurons) == len(located) and not {n for n, _ in a.neurons} & set(located)]


def test_crosscheck_json_is_the_golden_file_byte_for_byte() -> None:
    assert dump_file(crosschecked()) == GOLDEN.read_text(encoding="utf-8")


def test_heads_neurons_and_both_are_zeroed_and_every_task_measured_relatives_included() -> None:
    found = crosschecked().tasks["plurals"]
    heads, neurons = NAMED["plurals"], NEURONS[1:4]
    for condition, ablation in (
        ("heads", Ablation.of(heads)),
        ("neurons", Ablation.of(neurons=neurons)),
        ("both", Ablation.of(heads, neurons)),
    ):
        row = found.conditions[condition]
        assert {task: cell.accuracy for task, cell in row.items()} == {
            task: accuracy(task, ablation) for task in HELD_OUT
        }
        for task, cell in row.items():
            assert cell.drop == pytest.approx(accuracy(task, Ablation()) - cell.accuracy)
            assert cell.ci[0] <= cell.drop <= cell.ci[1]


def test_the_heads_have_the_same_interval_here_and_in_the_confirmation() -> None:
    confirm = confirmed(config=ConfirmConfig(random_draws=4, curve=3, bootstrap=2000))
    here = crosschecked().tasks["antonyms"].conditions["heads"]
    assert {task: cell.ci for task, cell in here.items()} == {
        task: cell.ci for task, cell in confirm.matrix["antonyms"].items()
    }


def test_random_neurons_are_as_many_in_every_layer_and_averaged_over_draws() -> None:
    measurer = WorldMeasurer()
    sets = {"antonyms": neuron_set()}
    found = crosscheck(measurer, HELD_OUT, NAMED, sets, confirmed(), RELATIVES, SHAPE, SMALL, 7).tasks["antonyms"]
    draws = random_ablations(measurer, NEURONS)
    assert len(draws) == 5
    layers = sorted(neuron.layer for neuron in NEURONS)
    assert all(sorted(neuron.layer for neuron, _ in draw.neurons) == layers for draw in draws)
    for task, cell in found.conditions["random_neurons"].items():
        values = [accuracy(task, draw) for draw in draws]
        assert cell.accuracy == pytest.approx(np.mean(values))
        assert cell.drop == pytest.approx(accuracy(task, Ablation()) - np.mean(values))
        assert cell.ci == pytest.approx(tuple(accuracy(task, Ablation()) - np.quantile(values, (0.975, 0.025))))


def test_random_neurons_on_the_target_alone_leave_the_other_tasks_out() -> None:
    config = CrosscheckConfig(random_draws=5, dose=(1, 2, 5, 10), random_on="target")
    narrow, full = crosschecked(config=config), crosschecked()
    for task, found in narrow.tasks.items():
        assert list(found.conditions["random_neurons"]) == [task]
        assert found.conditions["random_neurons"][task] == full.tasks[task].conditions["random_neurons"][task]
        assert found.ipp == full.tasks[task].ipp
    assert narrow.requests < full.requests


def test_impact_on_performance_is_the_distance_to_the_best_random_draw() -> None:
    confirm = confirmed()
    measurer = WorldMeasurer()
    sets = {"antonyms": neuron_set()}
    found = crosscheck(measurer, HELD_OUT, NAMED, sets, confirm, RELATIVES, SHAPE, SMALL, 7).tasks["antonyms"]
    best_heads = max(confirm.baseline["antonyms"] - drop for drop in confirm.random["antonyms"].draws)
    best_neurons = max(accuracy("antonyms", draw) for draw in random_ablations(measurer, NEURONS))
    assert best_neurons < confirm.baseline["antonyms"]
    assert found.ipp.heads == pytest.approx(accuracy("antonyms", Ablation.of(NAMED["antonyms"])) - best_heads)
    assert found.ipp.neurons == pytest.approx(accuracy("antonyms", Ablation.of(neurons=NEURONS)) - best_neurons)


def test_the_dose_curve_ends_at_the_located_neurons_and_leaves_relatives_out_of_the_controls() -> None:
    found = crosschecked().tasks["plurals"]
    located = NEURONS[1:4]
    assert [point.neurons for point in found.dose] == [1, 2, 3]
    for point in found.dose:
        ablation = Ablation.of(neurons=located[: point.neurons])
        assert point.target == accuracy("plurals", ablation)
        controls = [accuracy(task, ablation) for task in ("antonyms", "capitals", "copying")]
        assert point.controls == pytest.approx(np.mean(controls))


def test_a_dose_that_is_the_number_of_neurons_is_one_point() -> None:
    sets = {"antonyms": neuron_set(NEURONS[:5])}
    found = crosscheck(WorldMeasurer(), HELD_OUT, NAMED, sets, confirmed(), RELATIVES, SHAPE, SMALL, 7)
    assert [point.neurons for point in found.tasks["antonyms"].dose] == [1, 2, 5]


def test_a_task_with_nothing_named_or_located_stays_at_its_baseline() -> None:
    found = crosschecked().tasks["capitals"]
    assert {cell.drop for row in found.conditions.values() for cell in row.values()} == {0.0}
    assert (found.ipp.heads, found.ipp.neurons, found.dose) == (0.0, 0.0, [])
    assert found.verdict == "No head is named; no neuron is located: there is nothing to compare for capitals."


def test_the_verdict_speaks_of_the_figures_in_the_file() -> None:
    found = crosschecked().tasks["antonyms"]
    heads, neurons = found.conditions["heads"], found.conditions["neurons"]
    controls = [task for task in HELD_OUT if task != "antonyms"]
    lost = [100 * sum(row[task].drop for task in controls) / 4 for row in (heads, neurons)]
    assert found.verdict == (
        f"Zeroing 2 heads takes antonyms from 88% to {heads['antonyms'].accuracy:.0%} and the controls lose "
        f"{lost[0]:.1f} points; zeroing 7 neurons takes it to {neurons['antonyms'].accuracy:.0%} and the controls "
        f"lose {lost[1]:.1f} points: the heads are the more specific handle."
    )


def test_all_tasks_are_asked_in_one_batch_and_counted_once() -> None:
    measurer = WorldMeasurer()
    found = crosschecked(measurer)
    ((stage, requests),) = measurer.batches
    assert stage == "crosscheck"
    assert found.requests == len({request.key for request in requests})
    assert found.tokens == sum({request.key: len(request.prompt_ids) + 3 for request in requests}.values())


def test_a_lone_task_has_no_dose_curve() -> None:
    alone = {"antonyms": HELD_OUT["antonyms"]}
    sets = {"antonyms": neuron_set()}
    found = crosscheck(WorldMeasurer(), alone, NAMED, sets, confirmed(), RELATIVES, SHAPE, SMALL, 7).tasks["antonyms"]
    assert found.dose == []
    assert found.verdict.endswith("without controls nothing follows about specificity.")


def test_a_confirmation_of_other_items_is_refused() -> None:
    other = {**HELD_OUT, "antonyms": HELD_OUT["antonyms"][:-1]}
    sets = {"antonyms": neuron_set()}
    with pytest.raises(UsageError, match="the confirmation is not of these items of 'antonyms'"):
        crosscheck(WorldMeasurer(), other, NAMED, sets, confirmed(), RELATIVES, SHAPE, SMALL, 7)


def test_a_confirmation_without_random_heads_is_refused() -> None:
    confirm = confirmed(config=ConfirmConfig(random_draws=0, curve=1, bootstrap=100))
    with pytest.raises(UsageError, match=r"set confirm\.random_draws to at least 1"):
        crosscheck(WorldMeasurer(), HELD_OUT, NAMED, {"antonyms": neuron_set()}, confirm, RELATIVES, SHAPE, SMALL, 7)


def test_neurons_of_a_task_without_held_out_items_are_refused() -> None:
    with pytest.raises(UsageError, match="task 'cooking' has neurons but no held-out items"):
        crosscheck(WorldMeasurer(), HELD_OUT, NAMED, {"cooking": neuron_set()}, confirmed(), {}, SHAPE, SMALL, 7)


def test_a_neuron_that_the_model_lacks_is_refused() -> None:
    sets = {"antonyms": neuron_set((Neuron(3, 99),))}
    with pytest.raises(UsageError, match="L3N99 is out of range"):
        crosscheck(WorldMeasurer(), HELD_OUT, NAMED, sets, confirmed(), RELATIVES, SHAPE, SMALL, 7)
