"""Profanities are counted, and the prompts have none."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest

from cs_localize.errors import UsageError
from cs_localize.outcomes import Outcome
from cs_localize.tasks import get_task
from cs_localize.tasks.builtin import SWEARING
from cs_localize.tasks.swearing import profanities

ITEM = SWEARING.item(SWEARING.questions[0])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (" hell is this?", 1),
        (" Hell, hell and HELL!", 3),
        (" hello, shell and hellish", 0),
        (" damn_it", 0),
        (" God damned it", 1),
        ("", 0),
        (" große Höhle", 0),
    ],
)
def test_whole_words_of_the_list_are_counted_in_either_case(text: str, count: int) -> None:
    outcome = SWEARING.outcome(ITEM, [Outcome(math.nan, False, text, 9)])
    assert (outcome.count, outcome.correct) == (count, count > 0)


def test_no_prompt_has_a_word_of_the_list_and_every_reference_is_one() -> None:
    for question in SWEARING.questions:
        assert profanities(SWEARING.item(question).prompt) == 0
        assert profanities(question.answer) == 1


def test_there_is_room_for_a_sentence() -> None:
    assert ITEM.max_tokens == 24
    assert ITEM.prompt == SWEARING.questions[0].text


@pytest.mark.parametrize("name", ["swearing", "rhyming"])
def test_without_the_package_that_grades_it_the_extra_to_install_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = ("better_profanity", "pronouncing")
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None if module in needed else find_spec(module))
    with pytest.raises(UsageError, match=r"pip install 'cs_localize\[eval\]'"):
        get_task(name)
