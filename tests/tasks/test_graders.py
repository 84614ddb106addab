from __future__ import annotations

import pytest

from cs_localize.tasks import first_line_equals, get_task
from cs_localize.tasks.graders import margin


@pytest.mark.parametrize("text", [" bad", "bad", " bad\n", " bad\nhot -> cold\n", "  bad  \n", " bad\r\n", "\tbad"])
def test_the_answer_on_the_first_line_is_right_whatever_surrounds_it(text: str) -> None:
    assert first_line_equals(text, " bad")


@pytest.mark.parametrize("text", [" badly", " Bad", "", "\n bad", " bad.", " not bad", " bad -> good", "   \n", " ba"])
def test_anything_else_on_the_first_line_is_wrong(text: str) -> None:
    assert not first_line_equals(text, " bad")


def test_an_answer_of_several_words_must_be_whole() -> None:
    assert first_line_equals(" New Delhi\n", " New Delhi")
    assert not first_line_equals(" New", " New Delhi")


def test_a_task_grades_by_the_first_line() -> None:
    task = get_task("antonyms")
    item = next(task.item(question) for question in task.questions if question.text == "good")
    assert task.grade(item, " bad\ngood ->")
    assert not task.grade(item, " badly\n")


@pytest.mark.parametrize(
    ("scores", "gold", "expected"),
    [([-1.0, -3.0, -2.5], {0}, 1.5), ([-1.0, -3.0, -2.5], {1}, -2.0), ([-4.0, -1.0, -2.0], {0, 2}, -1.0)],
)
def test_a_margin_is_the_best_right_choice_over_the_best_wrong_one(
    scores: list[float], gold: set[int], expected: float
) -> None:
    assert margin(scores, gold) == expected
