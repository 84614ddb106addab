from __future__ import annotations

from dataclasses import replace

import pytest

from cs_localize.errors import UsageError
from cs_localize.tasks import get_task, register, registry, task_names

BUILT_IN = (
    *("antonyms", "past_tense", "plurals", "capitals", "counting", "addition", "copying", "superlatives", "gender"),
    *("categories", "colours", "sentiment", "translation", "successors", "uppercase", "first_letter"),
    *("multiplication", "comparison", "code", "rhyming", "swearing"),
)


def test_the_suite_and_the_tiny_tasks_are_registered_in_order() -> None:
    assert task_names() == (*BUILT_IN, "tiny_copy", "tiny_sort", "tiny_modsum")
    assert [get_task(name).name for name in task_names()] == list(task_names())


def test_an_unknown_name_is_answered_with_the_closest_and_all_known_names() -> None:
    with pytest.raises(UsageError) as error:
        get_task("antonym")
    assert "did you mean 'antonyms'?" in str(error.value)
    assert all(name in str(error.value) for name in task_names())
    assert "\n" not in str(error.value)


def test_a_name_unlike_any_is_answered_without_a_guess() -> None:
    with pytest.raises(UsageError, match=r"^no task 'qqq'; known tasks: antonyms, ") as error:
        get_task("qqq")
    assert "did you mean" not in str(error.value)


def test_a_second_task_of_the_same_name_is_refused() -> None:
    before = get_task("plurals")
    with pytest.raises(UsageError, match="'plurals' is registered already"):
        register(replace(before, description="another"))
    assert get_task("plurals") is before


def test_a_new_task_can_be_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    mine = replace(get_task("plurals"), name="my_plurals")
    register(mine)
    assert get_task("my_plurals") is mine
    assert task_names()[-1] == "my_plurals"


def test_relatives_are_declared_by_both_and_exist() -> None:
    for name in task_names():
        for relative in get_task(name).relatives:
            assert name in get_task(relative).relatives
    assert get_task("past_tense").related(get_task("plurals"))
    assert not get_task("antonyms").related(get_task("copying"))
