"""Rhymes by the dictionary, and the couplets that ask for them."""

from __future__ import annotations

import pytest

from cs_localize.tasks.builtin import RHYMING
from cs_localize.tasks.rhyming import rhymes


@pytest.mark.parametrize(
    ("one", "other", "right"),
    [
        ("cat", "hat", True),
        ("Cat", "HAT", True),
        ("bear", "chair", True),
        ("cow", "snow", False),
        ("cat", "cat", False),
        ("cat", "Cat", False),
        ("cat", "zzyzqx", False),
        ("qqq", "qqq's", False),
        ("wind", "find", True),
        ("wind", "pinned", True),
        ("money", "honey", True),
        ("money", "bee", False),
    ],
)
def test_words_rhyme_from_the_last_stressed_vowel_in_any_of_their_pronunciations(
    one: str, other: str, right: bool
) -> None:
    assert rhymes(one, other) is rhymes(other, one) is right


def test_every_reference_rhymes_and_no_two_families_sound_alike() -> None:
    words: dict[str, set[str]] = {}
    for question in (*RHYMING.shots, *RHYMING.questions):
        item = RHYMING.item(question)
        assert RHYMING.grade(item, item.answer), question
        first, _ = question.text.split("; ")
        words.setdefault(question.family, set()).update({first.split()[-1].lower(), question.answer})
    families = list(words)
    for number, family in enumerate(families):
        for other in families[:number]:
            assert not [(a, b) for a in words[family] for b in words[other] if rhymes(a, b)]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" hat", True),
        (" Mat, of course", True),
        (" hat\nand more", True),
        (" bat", False),
        (" big hat", False),
        ("\n hat", False),
        ("", False),
        (" ...", False),
        (" Ünde", False),
    ],
)
def test_the_first_word_of_the_first_line_is_graded_and_the_asked_word_is_no_answer(text: str, right: bool) -> None:
    (question,) = (q for q in RHYMING.questions if q.text.startswith("I threw the ball toward the bat;"))
    assert RHYMING.grade(RHYMING.item(question), text) is right
