from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cs_localize.errors import UsageError
from cs_localize.recover import (
    LassoSolver,
    expected_null_selections,
    fit_above_chance,
    make_solver,
    selection_frequencies,
    stability,
)
from tests.recover.builders import SMALL_REAL
from tests.recover.test_refinements import TASKS, planted
from tests.recover.test_solvers import TRUE, additive_table


def test_heads_that_matter_are_selected_nearly_always_and_others_rarely() -> None:
    engine, table = planted(0, 900)
    often = selection_frequencies(table, LassoSolver(), 20, np.random.default_rng(0))
    assert often.shape == (len(TASKS), SMALL_REAL.n_heads)
    assert often.sum(axis=1).max() <= 10 + 1e-9
    universal = {SMALL_REAL.index(head) for head in engine.universal()}
    for row, task in zip(often, TASKS, strict=True):
        heads = [SMALL_REAL.index(head) for head in engine.truth(task)]
        assert row[heads[0]] >= 0.9
        null = [h for h in range(SMALL_REAL.n_heads) if h not in heads and h not in universal]
        assert row[null].mean() < 0.05


def test_the_bound_on_null_selections_is_that_of_meinshausen_and_buehlmann() -> None:
    assert expected_null_selections(0.75, 270) == pytest.approx(100 / (0.5 * 270))
    assert expected_null_selections(1.0, 100, most=5) == 0.25
    for frequency in (0.5, 1.1, float("nan")):
        with pytest.raises(UsageError, match="no bound at a frequency of"):
            expected_null_selections(frequency, 270)


def test_a_dense_solver_selects_no_more_heads_than_allowed() -> None:
    often = selection_frequencies(additive_table(), make_solver("ridge"), 10, np.random.default_rng(0), most=3)
    assert often.sum(axis=1).max() <= 3 + 1e-9
    assert often[0, next(iter(TRUE))] == 1.0


def test_blocks_of_items_under_one_mask_lose_whole_items_and_whole_masks() -> None:
    table = additive_table()
    blocks = replace(table, masks=np.repeat(table.masks[::8], 8, axis=0))
    seen: list[tuple[int, int, int]] = []

    class Recorder(LassoSolver):
        def fit(self, table):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            rows = table.rows_of("a")
            seen.append((len(rows), len(np.unique(table.item[rows])), len(np.unique(table.masks[rows], axis=0))))
            return super().fit(table)

    selection_frequencies(blocks, Recorder(), 5, np.random.default_rng(0))
    assert {items for _, items, _ in seen} == {15}, "20 items / root 2, rounded up"
    assert max(masks for _, _, masks in seen) <= 36, "50 masks / root 2, rounded up"
    assert 0.35 < np.mean([rows for rows, _, _ in seen]) / 400 < 0.7


def test_equal_generators_give_equal_frequencies() -> None:
    first, again = (
        selection_frequencies(additive_table(), LassoSolver(), 3, np.random.default_rng(3)) for _ in range(2)
    )
    assert np.array_equal(first, again)


def test_a_fit_is_above_chance_where_heads_matter() -> None:
    assert fit_above_chance(additive_table(), LassoSolver(), np.random.default_rng(0)).tolist() == [0.05, 0.05]


def test_a_fit_to_noise_is_above_chance_no_more_often_than_it_may_be() -> None:
    values = []
    for seed in range(20):
        table = additive_table(seed, rows=120)
        noise = replace(table, score=table.baseline - np.random.default_rng(seed).normal(size=len(table)))
        values.append(fit_above_chance(noise, make_solver("marginal"), np.random.default_rng(seed), 9))
    assert np.mean(np.array(values) <= 0.1) <= 0.25, "40 p-values, a tenth expected"
    assert 0.35 < np.mean(values) < 0.75


def test_masks_are_dealt_out_within_a_task_and_requests_under_one_mask_stay_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = additive_table()
    blocks = replace(table, masks=np.repeat(table.masks[::8], 8, axis=0))
    seen = []
    monkeypatch.setattr(stability, "held_back_fit", lambda given, *_: seen.append(given) or np.zeros(2))
    fit_above_chance(blocks, LassoSolver(), np.random.default_rng(0), permutations=3)
    assert seen[0] is blocks
    for given in seen[1:]:
        assert np.array_equal(given.score, blocks.score)
        assert np.array_equal(given.item, blocks.item)
        assert np.array_equal(given.masks, np.repeat(given.masks[::8], 8, axis=0)), "blocks stay whole"
        assert not np.array_equal(given.masks, blocks.masks)
        for rows in (given.rows_of("a")[::8], given.rows_of("b")[::8]):
            assert np.array_equal(np.unique(given.masks[rows], axis=0), np.unique(blocks.masks[rows], axis=0))


def test_no_resamples_and_no_permutations_are_usage_errors() -> None:
    table = additive_table()
    for resamples, most in ((0, 10), (5, 0)):
        with pytest.raises(UsageError, match="at least one resample and one head"):
            selection_frequencies(table, LassoSolver(), resamples, np.random.default_rng(0), most)
    with pytest.raises(UsageError, match="0 permutations"):
        fit_above_chance(table, LassoSolver(), np.random.default_rng(0), permutations=0)
