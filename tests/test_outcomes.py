from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.outcomes import MeasurementTable

SHAPE = ModelShape(layers=2, heads=2, kv_heads=1, head_dim=4, ffn=8)


def table() -> MeasurementTable:
    """Four rows: antonyms, plurals, antonyms, plurals."""
    return MeasurementTable(
        shape=SHAPE,
        tasks=("antonyms", "plurals"),
        task=np.array([0, 1, 0, 1]),
        item=np.array([0, 5, 1, 6]),
        masks=np.eye(4, dtype=np.bool_),
        score=np.array([-1.0, -2.0, -50.0, -0.5]),
        baseline=np.array([-0.5, -2.0, -1.0, -1.5]),
        correct=np.array([True, True, False, True]),
        tokens=np.array([10, 11, 12, 13]),
    )


def test_damage_is_the_score_lost_capped_and_gains_are_kept() -> None:
    np.testing.assert_allclose(table().damage(), [0.5, 0.0, 8.0, -1.0])
    np.testing.assert_allclose(table().damage(floor=3.0), [0.5, 0.0, 3.0, -1.0])
    np.testing.assert_allclose(table().damage(floor=100.0), [0.5, 0.0, 49.0, -1.0])


def test_rows_of_a_task_are_its_row_numbers() -> None:
    assert table().rows_of("antonyms").tolist() == [0, 2]
    assert table().rows_of("plurals").tolist() == [1, 3]


def test_rows_of_an_unknown_task_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no task 'cooking' in this table; it has antonyms, plurals"):
        table().rows_of("cooking")


def test_taking_rows_keeps_their_columns_together_and_in_that_order() -> None:
    taken = table().take(np.array([3, 0]))
    assert len(taken) == 2
    assert taken.tasks == ("antonyms", "plurals")
    assert taken.task.tolist() == [1, 0]
    assert taken.item.tolist() == [6, 0]
    np.testing.assert_array_equal(taken.masks, np.eye(4, dtype=np.bool_)[[3, 0]])
    assert taken.score.tolist() == [-0.5, -1.0]
    assert taken.baseline.tolist() == [-1.5, -0.5]
    assert taken.correct.tolist() == [True, True]
    assert taken.tokens.tolist() == [13, 10]


def test_an_empty_selection_is_a_table() -> None:
    assert len(table().take(np.array([], dtype=np.int64))) == 0


def test_masks_must_have_a_column_for_every_head() -> None:
    with pytest.raises(UsageError, match=r"masks have shape \(4, 3\), expected \(4, 4\)"):
        replace(table(), masks=np.zeros((4, 3), dtype=np.bool_))


@pytest.mark.parametrize("column", ["item", "score", "baseline", "correct", "tokens"])
def test_columns_must_have_a_value_for_every_row(column: str) -> None:
    short = getattr(table(), column)[:3]
    with pytest.raises(UsageError, match=f"'{column}' has 3 rows, 'task' has 4"):
        replace(table(), **{column: short})


@pytest.mark.parametrize("task", [-1, 2])
def test_rows_must_be_of_a_listed_task(task: int) -> None:
    with pytest.raises(UsageError, match="a row names a task that the table does not list"):
        replace(table(), task=np.array([0, 1, 0, task]))
