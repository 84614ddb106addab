from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cs_localize.confirm.answers import BASELINE, ask, controls_of
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Outcome
from tests.confirm.builders import WorldMeasurer, items_of

HELD_OUT = {"antonyms": items_of("antonyms", 8), "copying": items_of("copying", 5)}
ZEROED = Ablation.of([Head(3, 2), Head(4, 0)])


def test_everything_is_asked_in_one_batch_and_each_request_once() -> None:
    measurer = WorldMeasurer()
    answers = ask(measurer, HELD_OUT, [("antonyms", ZEROED), ("antonyms", ZEROED), ("copying", BASELINE)], "confirm")
    ((stage, requests),) = measurer.batches
    assert stage == "confirm"
    assert len({request.key for request in requests}) == len(requests) == 8 + 5 + 8
    assert answers.requests == 21
    assert answers.tokens == sum(len(request.prompt_ids) + 3 for request in requests)


def test_answers_are_generated_so_that_the_tasks_own_metric_grades_them() -> None:
    measurer = WorldMeasurer()
    ask(measurer, HELD_OUT, [("antonyms", ZEROED)], "confirm")
    assert {request.mode for request in measurer.batches[0][1]} == {"generate"}


def test_flags_stand_in_the_order_of_the_items() -> None:
    measurer = WorldMeasurer()
    answers = ask(measurer, HELD_OUT, [("antonyms", ZEROED)], "confirm")
    for task, ablation in (("antonyms", BASELINE), ("antonyms", ZEROED), ("copying", BASELINE)):
        expected = [measurer.answer(measurer.request(item, ablation, "generate")).correct for item in HELD_OUT[task]]
        np.testing.assert_array_equal(answers.correct[task, ablation], expected)


def test_means_weigh_tasks_and_not_items() -> None:
    answers = ask(WorldMeasurer(), HELD_OUT, [(task, ZEROED) for task in HELD_OUT], "confirm")
    drops = [answers.accuracy(task) - answers.accuracy(task, ZEROED) for task in HELD_OUT]
    assert drops[0] != drops[1]
    assert answers.mean_drop(list(HELD_OUT), ZEROED) == pytest.approx(sum(drops) / 2)
    assert answers.mean_accuracy(list(HELD_OUT), ZEROED) == pytest.approx(
        sum(answers.accuracy(task, ZEROED) for task in HELD_OUT) / 2
    )


def test_a_task_without_items_is_refused() -> None:
    with pytest.raises(UsageError, match="task 'empty' has no held-out items"):
        ask(WorldMeasurer(), {**HELD_OUT, "empty": ()}, [], "confirm")


def test_relatives_control_each_other_in_neither_direction() -> None:
    tasks = ("plurals", "past_tense", "antonyms")
    relatives = {"plurals": {"past_tense"}}
    assert controls_of("plurals", tasks, relatives) == ["antonyms"]
    assert controls_of("past_tense", tasks, relatives) == ["antonyms"]
    assert controls_of("antonyms", tasks, relatives) == ["plurals", "past_tense"]


def test_counts_are_kept_for_tasks_whose_metric_counts_and_for_no_other() -> None:
    class Counting(WorldMeasurer):
        def answer(self, request: Request) -> Outcome:
            outcome = super().answer(request)
            return replace(outcome, count=2 * outcome.correct) if request.item.task == "copying" else outcome

    answers = ask(Counting(), HELD_OUT, [("copying", ZEROED), ("antonyms", ZEROED)], "confirm")
    assert set(answers.counts) == {("copying", BASELINE), ("copying", ZEROED)}
    for cell, counts in answers.counts.items():
        assert counts.tolist() == [2 * right for right in answers.correct[cell].tolist()]
