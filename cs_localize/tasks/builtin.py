"""The built-in suite: small capabilities that a 135M model has, each behind one fixed few-shot prefix.

The word lists lie in ``data/<task>.tsv``, one question a line: text, answer, family. Templates and shots were chosen by
the greedy accuracy of SmolLM2-135M-Instruct on the whole list; no question was dropped for being answered wrongly.
"""

from __future__ import annotations

from importlib.resources import files

from cs_localize.tasks.task import Question, Task

_LARGEST_START = 118


def _words(task: str) -> tuple[Question, ...]:
    """The questions of ``data/<task>.tsv``; a question's text is its id."""
    lines = files("cs_localize.tasks").joinpath("data", f"{task}.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    return tuple(Question(id=text, text=text, answer=answer, family=family) for text, answer, family in rows)


def _shots(*pairs: tuple[str, str]) -> tuple[Question, ...]:
    return tuple(Question(id=text, text=text, answer=answer, family=text) for text, answer in pairs)


def _sum(a: int, b: int) -> Question:
    return Question(f"{a}+{b}", f"{a} + {b}", str(a + b), f"{min(a, b)}+{max(a, b)}")


def _sums(shots: tuple[Question, ...]) -> tuple[Question, ...]:
    """Every sum of two digits, in both orders, but those of the shots."""
    taken = {shot.family for shot in shots}
    sums = [_sum(a, b) for a in range(10) for b in range(10)]
    return tuple(question for question in sums if question.family not in taken)


def _count(start: int) -> Question:
    return Question(str(start), f"{start} {start + 1}", str(start + 2), str(start))


def _counts(shots: tuple[Question, ...]) -> tuple[Question, ...]:
    """Two successive numbers, to be continued, without those that repeat a step shown in the shots."""
    shown = {int(shot.id) + step for shot in shots for step in (0, 1)}
    return tuple(_count(start) for start in range(1, _LARGEST_START + 1) if not {start, start + 1} & shown)


ANTONYMS = Task(
    name="antonyms",
    description="the opposite of a common word",
    questions=_words("antonyms"),
    shots=_shots(("hot", "cold"), ("love", "hate"), ("buy", "sell"), ("up", "down")),
    template="{text} ->",
)
PAST_TENSE = Task(
    name="past_tense",
    description="the simple past of a common verb, regular or irregular",
    questions=_words("past_tense"),
    shots=_shots(("walk", "walked"), ("go", "went"), ("try", "tried"), ("see", "saw")),
    template="{text} =>",
    relatives=frozenset({"plurals"}),
)
PLURALS = Task(
    name="plurals",
    description="the plural of a common noun, regular or irregular",
    questions=_words("plurals"),
    shots=_shots(("dog", "dogs"), ("child", "children"), ("city", "cities"), ("box", "boxes")),
    template="{text} ->",
    relatives=frozenset({"past_tense"}),
)
CAPITALS = Task(
    name="capitals",
    description="the capital of a country of at least a million people",
    questions=_words("capitals"),
    shots=_shots(("France", "Paris"), ("Japan", "Tokyo"), ("Kenya", "Nairobi"), ("Peru", "Lima")),
    template="Capital of {text}:",
)
_COUNTING_SHOTS = tuple(_count(start) for start in (3, 5, 12, 27))
COUNTING = Task(
    name="counting",
    description=f"the number after two successive ones, up to {_LARGEST_START + 2}",
    questions=_counts(_COUNTING_SHOTS),
    shots=_COUNTING_SHOTS,
    template="{text}",
)
_ADDITION_SHOTS = tuple(_sum(a, b) for a, b in ((2, 5), (9, 3), (4, 4), (8, 7)))
ADDITION = Task(
    name="addition",
    description="the sum of two one-digit numbers",
    questions=_sums(_ADDITION_SHOTS),
    shots=_ADDITION_SHOTS,
    template="{text} ->",
)
COPYING = Task(
    name="copying",
    description="the same word again: a control for the format of the other word tasks",
    questions=_words("copying"),
    shots=_shots(("house", "house"), ("walk", "walk"), ("small", "small"), ("under", "under")),
    template="{text} ->",
)

BUILT_IN = (ANTONYMS, PAST_TENSE, PLURALS, CAPITALS, COUNTING, ADDITION, COPYING)
