"""The table a command ends with, and the rules for writing numbers."""

from __future__ import annotations

import pytest

from cs_localize.report import summary_lines
from cs_localize.report.headline import headline
from cs_localize.report.numbers import (
    MINUS,
    count,
    fixed,
    interval,
    listing,
    nats,
    p_value,
    percent,
    plural,
    points,
    span,
)
from tests.report.builders import NAMED, confirm_file, crosscheck_file, heads_file, renamed


def test_every_task_has_a_line_with_heads_accuracy_controls_and_random_heads() -> None:
    lines = summary_lines(heads_file(), confirm_file(), crosscheck_file())
    antonyms = next(line for line in lines if line.startswith("antonyms"))
    assert antonyms.split() == ["antonyms", "L4H2", "77.0%", "->", "3.0%", "1.7", "0.7"]
    for task, named in NAMED.items():
        line = next(line for line in lines if line.startswith(task))
        assert " ".join(named) in line
    assert any("the heads are the more specific" in line for line in lines)


def test_without_a_confirmation_the_heads_are_listed_and_said_to_be_unconfirmed() -> None:
    text = " ".join(summary_lines(heads_file()))
    assert "L4H2" in text
    assert "held-out items have not confirmed them" in text


@pytest.mark.parametrize("name", ["antonyms", "a_task_with_a_name_far_too_long_for_any_column_of_the_table"])
def test_the_summary_fits_100_columns_of_plain_ascii(name: str) -> None:
    heads = renamed(heads_file(), "antonyms", name)
    many = [f"L{layer}H8" for layer in range(10, 30)]
    tasks = heads.tasks | {"plurals": heads.tasks["plurals"].model_copy(update={"named": many})}
    lines = summary_lines(heads.model_copy(update={"tasks": tasks}), confirm_file(), crosscheck_file())
    assert max(map(len, lines)) <= 100
    assert "\n".join(lines).isascii()
    assert all(any(head in line for line in lines) for head in many)


def test_heads_that_hurt_their_controls_as_much_are_said_not_to_be_shown() -> None:
    confirm = confirm_file()
    confirm = confirm.model_copy(update={"contrast": confirm.contrast | {"plurals": (0.02, -0.05, 0.09)}})
    found, *rest = headline(heads_file(), confirm)
    assert found.startswith("4 of 6 capabilities")
    assert "The heads named for plurals were not shown to hurt it more than its controls." in rest


def test_a_study_in_which_nothing_held_says_so() -> None:
    confirm = confirm_file()
    nothing = dict.fromkeys(confirm.contrast, (0.0, -0.05, 0.05))
    found, *_ = headline(heads_file(), confirm.model_copy(update={"contrast": nothing}))
    assert found == "No capability of smollm2-135m-instruct could be tied to attention heads of its own."


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(0.77), "77.0%"),
        (points(-0.0042), f"{MINUS}0.4"),
        (points(-0.00001), "0.0"),
        (nats(1.98765), "1.988"),
        (fixed(1234.5678, 2), "1,234.57"),
        (count(2_101_555), "2,101,555"),
        (p_value(0.0004), "<0.001"),
        (p_value(0.04), "0.040"),
        (interval((0.701, 0.802), points), "[70.1, 80.2]"),
        (span([3, 1, 2], lambda n: count(int(n))), "1 to 3"),
        (span([0.5, 0.5], percent), "50.0%"),
        (plural(1, "head"), "1 head"),
        (plural(2, "head"), "2 heads"),
        (listing(["a", "b", "c"]), "a, b and c"),
        (listing(["a"]), "a"),
    ],
)
def test_each_kind_of_number_is_written_by_one_rule(written: str, expected: str) -> None:
    assert written == expected


def test_the_summary_says_how_sure_the_named_heads_are_and_why_a_task_has_none() -> None:
    heads = heads_file()
    none = heads.tasks["counting"].model_copy(update={"reason": "no localized heads: none passed"})
    text = " ".join(summary_lines(heads.model_copy(update={"tasks": heads.tasks | {"counting": none}})))
    assert "Named heads: q 0.034 by tests of each head alone, selected in 96.7% of resamples." in text
    assert "counting: no localized heads: none passed." in text


def test_findings_without_tests_and_resamples_say_nothing_of_how_sure_they_are() -> None:
    heads = heads_file()
    bare = {"p": None, "q": None, "frequency": None}
    tasks = {
        task: found.model_copy(update={"ranking": [entry.model_copy(update=bare) for entry in found.ranking]})
        for task, found in heads.tasks.items()
    }
    text = " ".join(summary_lines(heads.model_copy(update={"tasks": tasks})))
    assert "Named heads:" not in text
