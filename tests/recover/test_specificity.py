from __future__ import annotations

import numpy as np
import pytest

from cs_localize.errors import UsageError
from cs_localize.recover import rank_heads, specificity, universal_heads

TASKS = ("antonyms", "past_tense", "plurals")
EFFECTS = np.zeros((3, 40))
EFFECTS[:, 0] = 3.0  # universal
EFFECTS[0, 1] = 2.5  # antonyms alone
EFFECTS[1:, 2] = 2.0  # both inflections
EFFECTS[1, 3] = 1.0


def test_a_universal_head_leads_by_effect_but_not_by_specificity() -> None:
    result = specificity(EFFECTS, TASKS, {})
    assert EFFECTS[0].argmax() == 0
    assert result.strongest[0].argmax() == 1
    assert result.mean[0].argmax() == 1
    assert abs(result.strongest[0, 0]) < 1


def test_specificity_is_the_effect_in_spreads_minus_that_of_the_control_hurt_most() -> None:
    result = specificity(EFFECTS, TASKS, {})
    scaled = EFFECTS / EFFECTS.std(axis=1, keepdims=True)
    assert result.strongest[1, 2] == pytest.approx(scaled[1, 2] - scaled[2, 2])
    assert result.mean[1, 2] == pytest.approx(scaled[1, 2] - (scaled[2, 2] + scaled[0, 2]) / 2)
    assert result.control[1, 2] == 2
    assert result.control[1, 1] == 0


@pytest.mark.parametrize("relatives", [{"past_tense": ["plurals"]}, {"plurals": {"past_tense", "not-in-this-study"}}])
def test_relatives_do_not_control_each_other_whichever_of_them_declares_it(relatives: dict[str, list[str]]) -> None:
    result = specificity(EFFECTS, TASKS, relatives)
    scaled = EFFECTS / EFFECTS.std(axis=1, keepdims=True)
    assert result.strongest[1, 2] == pytest.approx(scaled[1, 2])
    assert result.strongest[2, 2] == pytest.approx(scaled[2, 2])
    assert set(result.control[1]) == {0}


def test_without_controls_specificity_is_the_effect_in_spreads() -> None:
    alone = specificity(EFFECTS[:1], TASKS[:1], {})
    assert alone.strongest[0] == pytest.approx(EFFECTS[0] / EFFECTS[0].std())
    assert alone.mean[0] == pytest.approx(alone.strongest[0])
    assert set(alone.control[0]) == {-1}
    related = specificity(EFFECTS[1:], TASKS[1:], {"plurals": ["past_tense"]})
    assert related.strongest[0] == pytest.approx(EFFECTS[1] / EFFECTS[1].std())


def test_a_task_without_any_effect_has_no_specific_heads() -> None:
    effects = EFFECTS.copy()
    effects[0] = 0
    result = specificity(effects, TASKS, {})
    assert np.isfinite(result.strongest).all()
    assert result.strongest[0].max() == 0


def test_rows_without_names_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="one row for each of 2 tasks"):
        specificity(EFFECTS, TASKS[:2], {})


def test_universal_heads_hurt_nearly_every_task_and_come_worst_first() -> None:
    effects = np.zeros((5, 40))
    effects[:, 7] = 2.0
    effects[:, 4] = 3.0
    effects[:4, 9] = 2.0
    effects[:3, 11] = 2.0
    effects[0, 12] = 3.0
    assert universal_heads(effects).tolist() == [4, 7, 9]
    assert universal_heads(effects, share=1.0).tolist() == [4, 7]


def test_one_task_has_no_universal_heads_and_two_must_both_be_hurt() -> None:
    assert universal_heads(EFFECTS[:1]).tolist() == []
    assert universal_heads(EFFECTS[:2], share=0.3).tolist() == [0]


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 0.8), (1.5, 0.0), (1.5, 1.1)])
def test_an_impossible_rule_for_universal_heads_is_a_usage_error(threshold: float, share: float) -> None:
    with pytest.raises(UsageError, match="threshold above 0"):
        universal_heads(EFFECTS, threshold, share)


def test_heads_rank_by_specificity_then_effect_then_position() -> None:
    scores = np.array([[0.0, 2.0, 1.0, 1.0, 0.0]])
    effects = np.array([[0.0, 1.0, 1.0, 3.0, 0.0]])
    assert rank_heads(scores, effects).tolist() == [[1, 3, 2, 0, 4]]
