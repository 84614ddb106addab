"""Three tasks for the tiny Qwen models that this repository trains: copying, sorting and sums modulo 13.

A line of their language is words separated by single spaces and ended by a newline::

    copy : c a f b = c a f b
    sort : c a f = a c f
    sum : 7 9 = 3

Copying and sorting are trained and evaluated on different letters: no training line belongs to the family of a
question. Sums have 91 families in all, too few to learn the rule from a part of them in a short training, so the model
is trained on every sum, and ``tiny_modsum`` asks for what it has memorised.
"""

from __future__ import annotations

import numpy as np

from cs_localize.tasks.task import Question, Task

MODULUS = 13

_LETTERS = tuple("abcdefghijklmnop")
_NUMBERS = tuple(str(number) for number in range(MODULUS))
_MARKERS = ("copy", "sort", "sum", ":", "=")
_SHORTEST, _LONGEST = 3, 5
_QUESTIONS = 200
_QUESTION_SEED = 135

TINY_VOCABULARY: tuple[str, ...] = (*_LETTERS, *_NUMBERS, *_MARKERS)
"""Every word of the language. The newline that ends a line is a token besides these."""


def tiny_training_text(rng: np.random.Generator, lines: int = 1) -> str:
    """Random training lines, each of a task drawn at random, question and answer, ended by a newline.

    Args:
        rng: source of the draw.
        lines: how many lines.

    Returns:
        The lines, joined. No line of copying or sorting is of the family of a question of those tasks.
    """
    return "".join(_training_line(rng) for _ in range(lines))


def _training_line(rng: np.random.Generator) -> str:
    task = _TASKS[int(rng.integers(len(_TASKS)))]
    while True:
        question = _DRAW[task.name](rng)
        if task is TINY_MODSUM or question.family not in _ASKED[task.name]:
            item = task.item(question)
            return f"{item.prompt}{item.answer}\n"


def _draw_letters(rng: np.random.Generator) -> list[str]:
    length = int(rng.integers(_SHORTEST, _LONGEST + 1))
    return [_LETTERS[i] for i in rng.permutation(len(_LETTERS))[:length]]


def _draw_copy(rng: np.random.Generator) -> Question:
    text = " ".join(_draw_letters(rng))
    return Question(id=text.replace(" ", ""), text=text, answer=text, family=text)


def _draw_sort(rng: np.random.Generator) -> Question:
    """Letters to sort, not sorted already, so that copying is never the right answer."""
    letters = _draw_letters(rng)
    while letters == sorted(letters):
        letters = _draw_letters(rng)
    answer = " ".join(sorted(letters))
    return Question(id="".join(letters), text=" ".join(letters), answer=answer, family=answer)


def _draw_sum(rng: np.random.Generator) -> Question:
    return _sum(int(rng.integers(MODULUS)), int(rng.integers(MODULUS)))


def _sum(a: int, b: int) -> Question:
    return Question(f"{a}+{b}", f"{a} {b}", str((a + b) % MODULUS), f"{min(a, b)}+{max(a, b)}")


def _copy_questions() -> tuple[Question, ...]:
    rng = np.random.default_rng(_QUESTION_SEED)
    drawn: dict[str, Question] = {}
    while len(drawn) < _QUESTIONS:
        question = _draw_copy(rng)
        drawn[question.id] = question
    return tuple(drawn.values())


def _sort_questions() -> tuple[Question, ...]:
    """Two orders of every set of letters drawn."""
    rng = np.random.default_rng(_QUESTION_SEED)
    drawn: dict[str, Question] = {}
    while len(drawn) < _QUESTIONS:
        question = _draw_sort(rng)
        letters = question.answer.split()
        other = "".join(letters[::-1])
        if question.id != other and question.family not in {q.family for q in drawn.values()}:
            drawn[question.id] = question
            drawn[other] = Question(other, " ".join(other), question.answer, question.family)
    return tuple(drawn.values())


TINY_COPY = Task(
    name="tiny_copy",
    description="repeat three to five letters (tiny models)",
    questions=_copy_questions(),
    shots=(),
    template="copy : {text} =",
)
TINY_SORT = Task(
    name="tiny_sort",
    description="put three to five letters into alphabetical order (tiny models)",
    questions=_sort_questions(),
    shots=(),
    template="sort : {text} =",
)
TINY_MODSUM = Task(
    name="tiny_modsum",
    description=f"add two numbers modulo {MODULUS} (tiny models)",
    questions=tuple(_sum(a, b) for a in range(MODULUS) for b in range(MODULUS)),
    shots=(),
    template="sum : {text} =",
)

_TASKS = (TINY_COPY, TINY_SORT, TINY_MODSUM)
_DRAW = {"tiny_copy": _draw_copy, "tiny_sort": _draw_sort, "tiny_modsum": _draw_sum}
_ASKED = {task.name: frozenset(question.family for question in task.questions) for task in _TASKS}
