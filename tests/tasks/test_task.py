from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cs_localize.errors import UsageError
from cs_localize.outcomes import Item
from cs_localize.tasks import Question, Split, Task, get_task, task_names

ROOT = Path(__file__).parents[2]

ABC = Task(
    name="abc",
    description="capitalize",
    questions=tuple(Question(f"{x}{n}", f"{x}{n}", f"{x}{n}".upper(), x) for x in "abcdef" for n in (1, 2)),
    shots=(Question("z", "z", "Z", "z"),),
    template="{text} ->",
)


def ids(items: tuple[Item, ...]) -> list[str]:
    return [item.id for item in items]


def families(items: tuple[Item, ...], task: Task) -> set[str]:
    by_id = {question.id: question.family for question in task.questions}
    return {by_id[item.id] for item in items}


def test_an_item_is_the_prefix_the_question_and_the_answer_after_a_space() -> None:
    assert ABC.prefix == "z -> Z\n"
    assert ABC.item(ABC.questions[0]) == Item(task="abc", id="a1", prompt="z -> Z\na1 ->", answer=" A1")


@pytest.mark.parametrize("name", task_names())
@pytest.mark.parametrize("seed", [0, 1, 2, -7, 2**40])
def test_search_and_held_out_share_no_item_and_no_family(name: str, seed: int) -> None:
    task = get_task(name)
    split = task.split(seed)
    assert not families(split.search, task) & families(split.held_out, task)
    assert max(Counter(ids(split.search + split.held_out)).values()) == 1
    assert len(split.search) == len(task.questions) // 2
    assert len(split.held_out) >= 0.45 * len(task.questions)


@pytest.mark.parametrize("name", task_names())
@pytest.mark.parametrize("seed", [0, 3])
def test_the_sides_have_the_numbers_asked_for(name: str, seed: int) -> None:
    task = get_task(name)
    split = task.split(seed, search=31, held_out=27)
    assert (len(split.search), len(split.held_out)) == (31, 27)
    assert not families(split.search, task) & families(split.held_out, task)


def test_a_side_left_open_takes_every_family_that_the_other_leaves() -> None:
    split = ABC.split(0, search=3)
    assert len(split.search) == 3
    assert len(split.held_out) == 8
    split = ABC.split(0, held_out=4)
    assert (len(split.search), len(split.held_out)) == (8, 4)


def test_neither_side_changes_when_the_other_grows_and_a_smaller_side_is_a_prefix() -> None:
    small, large = ABC.split(0, search=2, held_out=3), ABC.split(0, search=8, held_out=4)
    assert large.search[:2] == small.search
    assert large.held_out[:3] == small.held_out


def test_another_seed_gives_another_split_and_so_does_another_name() -> None:
    task = get_task("antonyms")
    assert ids(task.split(0).search) != ids(task.split(1).search)
    assert ids(replace(task, name="opposites").split(0).search) != ids(task.split(0).search)


def test_the_order_of_the_question_list_does_not_matter() -> None:
    assert replace(ABC, questions=ABC.questions[::-1]).split(5) == ABC.split(5)


def test_a_new_question_leaves_the_order_of_the_others_alone() -> None:
    more = replace(ABC, questions=(*ABC.questions, Question("g1", "g1", "G1", "g")))
    before, after = ABC.split(3, search=10).search, more.split(3, search=11).search
    kept = [i for i in ids(after) if i != "g1"]
    assert kept == ids(before)[: len(kept)]


def test_the_split_is_the_same_in_another_process() -> None:
    code = "from cs_localize.tasks import get_task; print([i.id for i in get_task('plurals').split(11).search])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{ids(get_task('plurals').split(11).search)}\n"}


@pytest.mark.parametrize(
    "sizes",
    [{"search": 11, "held_out": 3}, {"search": 12}, {"held_out": 12}, {"search": 13}, {"search": 7, "held_out": 5}],
)
def test_asking_for_more_than_there_is_names_what_there_is(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"'abc' has 12 questions in 6 families, too few for .*; ask for fewer"):
        ABC.split(0, **sizes)


@pytest.mark.parametrize("sizes", [{"search": 0}, {"held_out": 0}, {"search": -1, "held_out": 3}])
def test_a_side_cannot_be_asked_to_be_empty(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="ask for at least 1"):
        ABC.split(0, **sizes)


@pytest.mark.parametrize("questions", [(), ABC.questions[:1], ABC.questions[:2]])
def test_a_task_too_small_to_split_is_refused(questions: tuple[Question, ...]) -> None:
    with pytest.raises(UsageError, match="too few"):
        replace(ABC, questions=questions).split(0)


def test_the_smallest_task_that_can_be_split_has_two_families() -> None:
    split = replace(ABC, questions=(ABC.questions[0], ABC.questions[2])).split(0)
    assert isinstance(split, Split)
    assert (len(split.search), len(split.held_out)) == (1, 1)


@pytest.mark.parametrize("template", ["-> ", "{text} -> ", "no place for the question"])
def test_a_template_without_a_place_or_with_a_space_at_its_end_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="the template needs"):
        replace(ABC, template=template)


@pytest.mark.parametrize("answer", ["", " A", "A ", "A\nB"])
def test_an_answer_that_is_not_one_stripped_line_is_refused(answer: str) -> None:
    with pytest.raises(UsageError, match="must be one line"):
        replace(ABC, questions=(Question("q", "q", answer, "q"),))


def test_two_questions_with_one_id_are_refused() -> None:
    with pytest.raises(UsageError, match="share the id 'a1'"):
        replace(ABC, questions=(*ABC.questions, ABC.questions[0]))


def test_a_shot_of_a_question_family_is_refused() -> None:
    with pytest.raises(UsageError, match="family 'a' is both"):
        replace(ABC, shots=(Question("a9", "a9", "A9", "a"),))


def test_relatives_hold_in_both_directions() -> None:
    other = replace(ABC, name="other")
    friend = replace(ABC, name="friend", relatives=frozenset({"abc"}))
    assert ABC.related(ABC)
    assert ABC.related(friend)
    assert friend.related(ABC)
    assert not ABC.related(other)
