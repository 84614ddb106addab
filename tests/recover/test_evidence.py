from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cs_localize.errors import UsageError
from cs_localize.recover import LassoSolver, bootstrap_intervals, held_back_fit
from tests.recover.test_solvers import TRUE, additive_table

HEADS = np.array([*TRUE, 9])


def test_intervals_lie_around_the_effects_and_most_cover_the_truth() -> None:
    covered = []
    for seed in range(10):
        table = additive_table(seed)
        solver = LassoSolver().fit(table)
        found = bootstrap_intervals(table, solver, HEADS, 100, np.random.default_rng(seed))
        assert found.effect.shape == found.low.shape == found.high.shape == (2, 4)
        assert np.all((found.low < found.effect) & (found.effect < found.high))
        truth = np.array([*TRUE.values(), 0.0])
        covered.append((found.low[0] <= truth) & (truth <= found.high[0]))
    assert np.mean(covered) >= 0.85


def test_intervals_widen_with_noise_and_with_fewer_requests() -> None:
    def width(rows: int, noise: float) -> float:
        table = additive_table(rows=rows, noise=noise)
        found = bootstrap_intervals(table, LassoSolver().fit(table), HEADS, 100, np.random.default_rng(0))
        return float((found.high - found.low).mean())

    assert width(400, 0.3) < width(400, 1.0)
    assert width(400, 0.3) < width(100, 0.3)


def test_equal_generators_give_equal_intervals() -> None:
    table = additive_table()
    solver = LassoSolver().fit(table)
    first, again = (bootstrap_intervals(table, solver, HEADS, 20, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first.low, again.low)


def test_a_head_that_was_not_tested_has_no_interval() -> None:
    table = additive_table()
    masks = table.masks.copy()
    masks[table.task == 0, 9] = False
    table = replace(table, masks=masks)
    found = bootstrap_intervals(table, LassoSolver().fit(table), HEADS, 20, np.random.default_rng(0))
    assert np.isnan(found.low[0]).tolist() == [False, False, False, True]
    assert np.isfinite(found.low[1]).all()


@pytest.mark.parametrize(("heads", "n"), [([1, 1], 10), ([1, 2], 0)])
def test_repeated_heads_or_no_resamples_are_a_usage_error(heads: list[int], n: int) -> None:
    table = additive_table()
    with pytest.raises(UsageError, match="at least one resample and a list of different heads"):
        bootstrap_intervals(table, LassoSolver().fit(table), np.array(heads), n, np.random.default_rng(0))


def test_unseen_masks_are_predicted_where_heads_matter_and_not_where_masks_are_permuted() -> None:
    table = additive_table()
    assert held_back_fit(table, LassoSolver(), np.random.default_rng(0)).min() > 0.7
    permuted = replace(table, masks=table.masks[np.random.default_rng(1).permutation(len(table))])
    assert np.abs(held_back_fit(permuted, LassoSolver(), np.random.default_rng(0))).max() < 0.3


def test_requests_under_one_mask_are_held_back_together() -> None:
    table = additive_table(rows=200)
    noise = replace(table, score=table.baseline - np.random.default_rng(0).normal(size=len(table)))
    copies = noise.take(np.repeat(np.arange(len(noise)), 4))
    assert held_back_fit(copies, LassoSolver(), np.random.default_rng(0)).max() < 0.3, "copies would leak otherwise"


def test_more_folds_than_masks_are_a_usage_error() -> None:
    table = additive_table(rows=10)
    with pytest.raises(UsageError, match="cannot be held back in 50 folds"):
        held_back_fit(table, LassoSolver(), np.random.default_rng(0), folds=50)


def test_outcomes_that_are_constant_up_to_rounding_have_no_fit() -> None:
    table = additive_table(rows=200)
    constant = replace(table, score=table.baseline - 0.7)
    assert np.array_equal(held_back_fit(constant, LassoSolver(), np.random.default_rng(0)), [0.0, 0.0])
