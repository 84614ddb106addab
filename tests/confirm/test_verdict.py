from __future__ import annotations

import numpy as np
import pytest

from cs_localize.confirm.stats import Flags, Pair
from cs_localize.confirm.verdict import Conclusion, Handle, conclude, verdict

ITEMS = 100


def flags(correct: int) -> Flags:
    """The first items right, the others wrong."""
    return np.arange(ITEMS) < correct


def handle(kind: str, count: int, target: int, *controls: int) -> Handle:
    """A handle that leaves so many items right, of 77 on the target and 90 on every control."""
    pairs: list[Pair] = [(flags(90), flags(control)) for control in controls]
    return Handle("head" if kind == "head" else "neuron", count, (flags(77), flags(target)), pairs)


def test_the_sentence_gives_both_handles_figures_and_the_conclusion() -> None:
    heads, neurons = handle("head", 1, 3, 90, 89), handle("neuron", 60, 7, 73, 73)
    assert verdict("antonyms", heads, neurons, 500, np.random.default_rng(0)) == (
        "Zeroing 1 head takes antonyms from 77% to 3% and the controls lose 0.5 points; zeroing 60 neurons takes it "
        "to 7% and the controls lose 17 points: the heads are the more specific handle."
    )


@pytest.mark.parametrize(
    ("heads", "neurons", "expected"),
    [
        pytest.param((3, 90), (7, 60), "heads", id="equal damage, heads spare the controls"),
        pytest.param((3, 90), (70, 90), "heads", id="heads damage more, both spare the controls"),
        pytest.param((7, 60), (3, 90), "neurons", id="neurons spare the controls"),
        pytest.param((10, 80), (10, 80), "neither", id="the same"),
        pytest.param((10, 80), (13, 82), "neither", id="differences within the items' noise"),
        pytest.param((10, 80), (77, 90), "heads", id="neurons do nothing"),
        pytest.param((77, 90), (77, 20), "neither", id="heads do nothing, neurons hurt only the controls"),
        pytest.param((77, 20), (77, 90), "neither", id="neurons do nothing, heads hurt only the controls"),
    ],
)
def test_a_handle_wins_by_a_larger_drop_of_the_target_over_its_controls_and_only_if_the_target_drops(
    heads: tuple[int, int], neurons: tuple[int, int], expected: Conclusion
) -> None:
    by_heads, by_neurons = handle("head", 2, *heads), handle("neuron", 9, *neurons)
    assert conclude(by_heads, by_neurons, 1000, np.random.default_rng(0)) == expected
    text = verdict("antonyms", by_heads, by_neurons, 1000, np.random.default_rng(0))
    assert text.endswith(
        "neither is shown to be the more specific handle."
        if expected == "neither"
        else f"the {expected} are the more specific handle."
    )


def test_few_items_conclude_less_than_many() -> None:
    def narrowed(full: Handle, step: int) -> Handle:
        def cut(pair: Pair) -> Pair:
            return pair[0][::step], pair[1][::step]

        return Handle(full.kind, full.count, cut(full.target), [cut(control) for control in full.controls])

    heads, neurons = handle("head", 1, 30, 90), handle("neuron", 1, 40, 86)
    assert conclude(heads, neurons, 1000, np.random.default_rng(0)) == "heads"
    assert conclude(narrowed(heads, 20), narrowed(neurons, 20), 1000, np.random.default_rng(0)) == "neither"


@pytest.mark.parametrize(
    ("controls", "words"),
    [
        ((90, 90), "lose nothing"),
        ((92, 92), "gain 2 points"),
        ((89, 89), "lose 1 point"),
        ((88, 89), "lose 1.5 points"),
    ],
)
def test_the_change_of_the_controls_is_put_into_words(controls: tuple[int, int], words: str) -> None:
    text = verdict(
        "antonyms", handle("head", 1, 3, *controls), handle("neuron", 2, 3, 90, 90), 200, np.random.default_rng(0)
    )
    assert f"the controls {words};" in text


def test_nothing_named_or_located_is_said_and_nothing_concluded() -> None:
    rng = np.random.default_rng(0)
    none, some = handle("head", 0, 77, 90), handle("neuron", 5, 7, 80)
    assert verdict("antonyms", none, some, 200, rng) == (
        "No head is named; zeroing 5 neurons takes antonyms from 77% to 7% and the controls lose 10 points: there is "
        "nothing to compare for antonyms."
    )
    assert verdict("antonyms", handle("head", 2, 7, 80), handle("neuron", 0, 77, 90), 200, rng) == (
        "Zeroing 2 heads takes antonyms from 77% to 7% and the controls lose 10 points; no neuron is located: there is "
        "nothing to compare for antonyms."
    )


def test_without_controls_nothing_is_said_about_specificity() -> None:
    text = verdict("antonyms", handle("head", 1, 3), handle("neuron", 5, 7), 200, np.random.default_rng(0))
    assert text == (
        "Zeroing 1 head takes antonyms from 77% to 3%; zeroing 5 neurons takes it to 7%: without controls nothing "
        "follows about specificity."
    )
