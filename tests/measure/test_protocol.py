from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Item

ITEM = Item("antonyms", "hot", "hot ->", " cold")
REQUEST = Request(ITEM, (5, 6), (7,), Ablation.of([Head(1, 2)]))
CHOICES = (((5, 6), (7,)), ((5, 6), (8, 9)))


def test_keys_are_those_of_outcomes_measured_before_items_had_choices_and_stop_strings() -> None:
    written = replace(REQUEST, mode="generate", max_tokens=4)
    for request, text in (
        (REQUEST, f"score|0|(5, 6)|(7,)|{REQUEST.ablation.key}|0"),
        (written, f"generate|4|(5, 6)| cold|{REQUEST.ablation.key}|0"),
    ):
        assert request.key == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_a_generated_answer_of_lm_eval_does_not_depend_on_the_reference_but_on_where_it_ends() -> None:
    item = replace(ITEM, boundary="lm-eval", max_tokens=4)
    written = replace(REQUEST, item=item, mode="generate", max_tokens=4)
    assert written.key == replace(written, item=replace(item, answer=" icy"), answer_ids=(8,)).key
    assert written.key != replace(written, stop=("Q:",)).key
    assert written.key != replace(written, max_tokens=5).key
    assert written.key != replace(REQUEST, mode="generate", max_tokens=4).key


def test_engines_are_sent_one_request_for_every_choice() -> None:
    request = replace(REQUEST, choices=CHOICES)
    assert [(part.prompt_ids, part.answer_ids, part.choices) for part in request.parts] == [
        ((5, 6), (7,), ()),
        ((5, 6), (8, 9), ()),
    ]
    assert {part.ablation for part in request.parts} == {request.ablation}
    assert request.parts[0].key == REQUEST.key, "what was scored before is served again"
    assert request.key not in {part.key for part in request.parts}


@pytest.mark.parametrize("mode", ["score", "generate"])
def test_a_request_without_choices_is_its_only_part(mode: str) -> None:
    request = replace(REQUEST, mode=mode)  # type: ignore[arg-type]  # one of the two
    assert request.parts == (request,)
