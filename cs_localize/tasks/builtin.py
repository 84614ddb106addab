"""The built-in suite: small capabilities that a 135M model has, each behind one fixed few-shot prefix.

The word lists lie in ``data/<task>.tsv``, one question a line: text, answer, family. Templates and shots were chosen by
the greedy accuracy of SmolLM2-135M-Instruct on the whole list; no question was dropped for being answered wrongly.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

from cs_localize.tasks.rhyming import RhymingTask
from cs_localize.tasks.swearing import SwearingTask
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


def _product(a: int, b: int) -> Question:
    return Question(f"{a}*{b}", f"{a} * {b}", str(a * b), f"{min(a, b)}*{max(a, b)}")


def _products(shots: tuple[Question, ...]) -> tuple[Question, ...]:
    """Every product of two digits, in both orders, but those of the shots."""
    taken = {shot.family for shot in shots}
    products = [_product(a, b) for a in range(10) for b in range(10)]
    return tuple(question for question in products if question.family not in taken)


def _larger(a: int, b: int) -> Question:
    return Question(f"{a}|{b}", f"{a} or {b}", str(max(a, b)), f"{min(a, b)}|{max(a, b)}")


def _comparisons(shots: tuple[Question, ...]) -> tuple[Question, ...]:
    """Every two different numbers from 1 to 10, in both orders, but those of the shots."""
    taken = {shot.family for shot in shots}
    pairs = [_larger(a, b) for a in range(1, 11) for b in range(1, 11) if a != b]
    return tuple(question for question in pairs if question.family not in taken)


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
    relatives=frozenset({"gender"}),
)
PAST_TENSE = Task(
    name="past_tense",
    description="the simple past of a common verb, regular or irregular",
    questions=_words("past_tense"),
    shots=_shots(("walk", "walked"), ("go", "went"), ("try", "tried"), ("see", "saw")),
    template="{text} =>",
    relatives=frozenset({"plurals", "superlatives"}),
)
PLURALS = Task(
    name="plurals",
    description="the plural of a common noun, regular or irregular",
    questions=_words("plurals"),
    shots=_shots(("dog", "dogs"), ("child", "children"), ("city", "cities"), ("box", "boxes")),
    template="{text} ->",
    relatives=frozenset({"past_tense", "superlatives"}),
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
    relatives=frozenset({"successors"}),
)
_ADDITION_SHOTS = tuple(_sum(a, b) for a, b in ((2, 5), (9, 3), (4, 4), (8, 7)))
ADDITION = Task(
    name="addition",
    description="the sum of two one-digit numbers",
    questions=_sums(_ADDITION_SHOTS),
    shots=_ADDITION_SHOTS,
    template="{text} ->",
    relatives=frozenset({"multiplication"}),
)
COPYING = Task(
    name="copying",
    description="the same word again: a control for the format of the other word tasks",
    questions=_words("copying"),
    shots=_shots(("house", "house"), ("walk", "walk"), ("small", "small"), ("under", "under")),
    template="{text} ->",
)

SUPERLATIVES = Task(
    name="superlatives",
    description="the superlative of a common adjective, regular or irregular",
    questions=_words("superlatives"),
    shots=_shots(("big", "biggest"), ("good", "best"), ("wild", "wildest"), ("shiny", "shiniest")),
    template="{text} ->",
    relatives=frozenset({"past_tense", "plurals"}),
)
GENDER = Task(
    name="gender",
    description="the word for the other gender of a person or an animal",
    questions=_words("gender"),
    shots=_shots(("king", "queen"), ("sister", "brother"), ("boy", "girl"), ("actress", "actor")),
    template="{text} ->",
    relatives=frozenset({"antonyms"}),
)
CATEGORIES = Task(
    name="categories",
    description="the kind of thing that a word names, of sixteen",
    questions=_words("categories"),
    shots=_shots(("dog", "animal"), ("apple", "fruit"), ("blue", "color"), ("chair", "furniture")),
    template="{text} ->",
)
COLOURS = Task(
    name="colours",
    description="the usual colour of a thing, of eleven",
    questions=_words("colours"),
    shots=_shots(("fern", "green"), ("rose", "red"), ("banana", "yellow"), ("paint", "white")),
    template="The color of {text} is",
)
SENTIMENT = Task(
    name="sentiment",
    description="whether a sentence praises or complains",
    questions=_words("sentiment"),
    shots=_shots(
        ("I enjoyed the trip a lot", "positive"),
        ("The car was old and broken", "negative"),
        ("The waiter was mean to us", "negative"),
        ("Everyone was pleased with the gift", "positive"),
    ),
    template="{text} ->",
)
TRANSLATION = Task(
    name="translation",
    description="the English word for a common French one",
    questions=_words("translation"),
    shots=_shots(("eau", "water"), ("maison", "house"), ("chien", "dog"), ("livre", "book")),
    template="{text} ->",
)
SUCCESSORS = Task(
    name="successors",
    description="the next weekday, month, letter, number word or ordinal",
    questions=_words("successors"),
    shots=_shots(("Tuesday", "Wednesday"), ("June", "July"), ("B", "C"), ("million", "billion")),
    template="{text} ->",
    relatives=frozenset({"counting"}),
)
UPPERCASE = Task(
    name="uppercase",
    description="the same word in capital letters",
    questions=tuple(replace(question, answer=question.text.upper()) for question in COPYING.questions),
    shots=tuple(replace(shot, answer=shot.text.upper()) for shot in COPYING.shots),
    template="{text} ->",
)
FIRST_LETTER = Task(
    name="first_letter",
    description="the letter that a word begins with",
    questions=tuple(replace(question, answer=question.text[0]) for question in COPYING.questions),
    shots=tuple(replace(shot, answer=shot.text[0]) for shot in COPYING.shots),
    template="{text} ->",
)
_MULTIPLICATION_SHOTS = tuple(_product(a, b) for a, b in ((2, 5), (9, 3), (4, 4), (8, 7)))
MULTIPLICATION = Task(
    name="multiplication",
    description="the product of two one-digit numbers",
    questions=_products(_MULTIPLICATION_SHOTS),
    shots=_MULTIPLICATION_SHOTS,
    template="{text} =",
    relatives=frozenset({"addition"}),
)
_COMPARISON_SHOTS = tuple(_larger(a, b) for a, b in ((2, 5), (9, 3), (4, 1), (6, 8)))
COMPARISON = Task(
    name="comparison",
    description="the larger of two numbers up to 10",
    questions=_comparisons(_COMPARISON_SHOTS),
    shots=_COMPARISON_SHOTS,
    template="{text} ->",
)
CODE = Task(
    name="code",
    description="the rest of a one-line Python function, from its name and parameters",
    questions=_words("code"),
    shots=_shots(
        ("add(a, b)", "a + b"),
        ("is_empty(items)", "len(items) == 0"),
        ("capitalize(text)", "text.capitalize()"),
        ("type_of(x)", "type(x)"),
    ),
    template="def {text}: return",
)
RHYMING = RhymingTask(
    name="rhyming",
    description="the last word of a couplet, any that rhymes",
    questions=_words("rhyming"),
    shots=(
        Question("sun", "I spent the morning in the sun; and all the children had such", "fun", "un"),
        Question("tree", "The bird was sitting in the tree; and on the flower sat a", "bee", "ee"),
        Question("night", "A ghost appeared last Friday night; it gave us all an awful", "fright", "ite"),
        Question("plow", "The farmer walked behind the plow; and in the barn he milked the", "cow", "plow"),
    ),
    template="{text}",
    needs="pronouncing",
)
SWEARING = SwearingTask(
    name="swearing",
    description="a profanity in an exclamation",
    questions=_words("swearing"),
    shots=(),
    template="{text}",
    needs="better_profanity",
)

BUILT_IN = (
    ANTONYMS,
    PAST_TENSE,
    PLURALS,
    CAPITALS,
    COUNTING,
    ADDITION,
    COPYING,
    SUPERLATIVES,
    GENDER,
    CATEGORIES,
    COLOURS,
    SENTIMENT,
    TRANSLATION,
    SUCCESSORS,
    UPPERCASE,
    FIRST_LETTER,
    MULTIPLICATION,
    COMPARISON,
    CODE,
    RHYMING,
    SWEARING,
)
