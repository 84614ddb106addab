"""How many heads orthogonal matching pursuit takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cs_localize.recover import OmpSolver
from tests.recover.test_solvers import TRUE, additive_table


def test_effects_are_the_least_squares_ones_of_the_heads_taken() -> None:
    table = additive_table(noise=0.05)
    table = replace(table, item=np.arange(len(table)))
    found = OmpSolver(limit=3, floor=100.0).fit(table)
    rows = table.rows_of("a")
    columns = np.column_stack([table.masks[rows][:, list(TRUE)], np.ones(len(rows))]).astype(float)
    expected = np.linalg.lstsq(columns, table.damage(100.0)[rows], rcond=None)[0]
    assert [*found.effects_[0, list(TRUE)], found.intercept_[0]] == pytest.approx(expected)
    assert np.count_nonzero(found.effects_[0]) == 3


def test_few_heads_are_taken_where_none_matters() -> None:
    taken = []
    for seed in range(10):
        table = additive_table(seed)
        noise = replace(table, score=table.baseline - np.random.default_rng(seed).normal(size=len(table)))
        taken += np.count_nonzero(OmpSolver().fit(noise).effects_, axis=1).tolist()
    assert np.median(taken) == 0
    assert np.mean(taken) < 1


def test_requests_under_one_mask_are_held_back_together() -> None:
    table = additive_table(rows=80)
    noise = replace(table, score=table.baseline - np.random.default_rng(0).normal(size=len(table)))
    copies = noise.take(np.repeat(np.arange(len(noise)), 5))
    found = OmpSolver().fit(copies)
    assert np.count_nonzero(found.effects_, axis=1).max() <= 2, "copies in other folds would be learned by heart"


def test_no_more_heads_are_taken_than_there_are_masks_to_tell_them_apart() -> None:
    table = additive_table(rows=12)
    assert np.count_nonzero(OmpSolver().fit(table).effects_, axis=1).max() < 12
