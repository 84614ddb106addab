from __future__ import annotations

import numpy as np
import pytest

from cs_localize.tasks import get_task
from cs_localize.tasks.tiny import MODULUS, TINY_VOCABULARY, tiny_training_text

NAMES = ("tiny_copy", "tiny_sort", "tiny_modsum")


def solve(line: str) -> str:
    """The answer to ``task : words =``, worked out anew."""
    task, _, *words, _ = line.split(" ")
    if task == "copy":
        return " ".join(words)
    if task == "sort":
        return " ".join(sorted(words))
    a, b = words
    return str((int(a) + int(b)) % MODULUS)


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_the_solution_of_its_question(name: str) -> None:
    task = get_task(name)
    assert len(task.questions) >= 100
    assert task.prefix == ""
    for item in map(task.item, task.questions):
        assert item.prompt.startswith(name.replace("tiny_", "").replace("mod", "") + " : ")
        assert item.prompt.endswith(" =")
        assert item.answer == " " + solve(item.prompt)


@pytest.mark.parametrize("name", NAMES)
def test_questions_and_answers_use_the_vocabulary_alone(name: str) -> None:
    for item in map(get_task(name).item, get_task(name).questions):
        assert set(f"{item.prompt}{item.answer}".split(" ")) <= set(TINY_VOCABULARY)


def test_the_vocabulary_has_no_word_twice_and_none_that_no_line_uses() -> None:
    words = tiny_training_text(np.random.default_rng(0), lines=2000).replace("\n", " ").split()
    assert len(set(TINY_VOCABULARY)) == len(TINY_VOCABULARY)
    assert set(words) == set(TINY_VOCABULARY)


def test_sorting_is_never_copying_and_orders_of_the_same_letters_share_a_family() -> None:
    family: dict[tuple[str, ...], str] = {}
    for question in get_task("tiny_sort").questions:
        assert question.text != question.answer
        letters = tuple(sorted(question.text.split()))
        assert len(set(letters)) == len(letters)
        assert family.setdefault(letters, question.family) == question.family
    assert len(set(family.values())) == len(family)


def test_commuted_sums_share_a_family_and_every_sum_is_asked() -> None:
    family = {tuple(map(int, q.text.split())): q.family for q in get_task("tiny_modsum").questions}
    assert set(family) == {(a, b) for a in range(MODULUS) for b in range(MODULUS)}
    assert all(family[a, b] == family[b, a] for a, b in family)
    assert len(set(family.values())) == 91


def test_training_lines_are_solved_lines_of_all_tasks() -> None:
    text = tiny_training_text(np.random.default_rng(1), lines=600)
    assert text.endswith("\n")
    lines = text.splitlines()
    assert len(lines) == 600
    for line in lines:
        question, answer = line.split(" = ")
        assert answer == solve(f"{question} =")
    for task in ("copy", "sort", "sum"):
        assert 150 < sum(line.startswith(f"{task} ") for line in lines) < 250


def test_no_training_line_gives_away_a_question_of_copying_or_sorting() -> None:
    copies = {question.text for question in get_task("tiny_copy").questions}
    sorts = {tuple(sorted(question.text.split())) for question in get_task("tiny_sort").questions}
    for line in tiny_training_text(np.random.default_rng(2), lines=20_000).splitlines():
        task, _, rest = line.partition(" : ")
        words = rest.partition(" = ")[0]
        assert not (task == "copy" and words in copies)
        assert not (task == "sort" and tuple(sorted(words.split())) in sorts)


def test_training_text_depends_on_the_generator_alone() -> None:
    first, again, other = (tiny_training_text(np.random.default_rng(seed), lines=50) for seed in (3, 3, 4))
    assert first == again != other
