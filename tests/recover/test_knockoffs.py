from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cs_localize.design import draw_design, inclusion_rates, pilot_design
from cs_localize.errors import UsageError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import knockoff_selection
from cs_localize.recover.knockoffs import check_bernoulli, knockoff_threshold
from tests.recover.builders import SMALL_REAL

RATES = inclusion_rates(SMALL_REAL, 0.06, range(3), 0.015)
TRUE = np.arange(40, 52)


def bernoulli(seed: int, effect: float = 1.5, rows: int = 400) -> MeasurementTable:
    """Twelve heads with an effect on the first of two tasks; outcomes of an item share what it brings."""
    rng = np.random.default_rng(seed)
    design = draw_design("bernoulli", "request", RATES, 2 * rows, 40, 1, rng)
    task = np.repeat([0, 1], rows)
    damage = effect * design.masks[:, TRUE].sum(axis=1) * (task == 0) + rng.normal(0, 0.5, 80)[design.items + 40 * task]
    damage += rng.normal(0, 0.3, 2 * rows)
    zeros = np.zeros(2 * rows)
    items = design.items + 40 * task
    return MeasurementTable(SMALL_REAL, ("a", "b"), task, items, design.masks, -damage, zeros, damage < 1, task)


def test_heads_with_an_effect_are_selected_and_few_others() -> None:
    found = knockoff_selection(bernoulli(0), RATES, 0.2, np.random.default_rng(0))
    assert found.selected[0, TRUE].all()
    assert found.selected.sum() <= 1.5 * len(TRUE)
    assert found.statistic.shape == found.selected.shape == (2, SMALL_REAL.n_heads)


def test_the_share_of_false_heads_stays_below_the_rate_and_nothing_is_selected_from_nothing() -> None:
    shares, alarms = [], 0
    for seed in range(25):
        found = knockoff_selection(bernoulli(seed, 0.6, 250), RATES, 0.2, np.random.default_rng(seed)).selected
        shares.append((found.sum() - found[0, TRUE].sum()) / max(found.sum(), 1))
        alarms += knockoff_selection(bernoulli(seed, 0.0, 250), RATES, 0.2, np.random.default_rng(seed)).selected.any()
    assert np.mean(shares) <= 0.2 + 2 * np.std(shares) / 5
    assert alarms <= 10, "one in five at most is expected of 25"


def test_the_sign_of_w_is_a_coin_for_heads_without_an_effect() -> None:
    signs: list[NDArray[np.float64]] = []
    for seed in range(8):
        statistic = knockoff_selection(bernoulli(seed), RATES, 0.2, np.random.default_rng(seed)).statistic
        null = np.delete(statistic[0], TRUE)
        signs.append(null[null != 0] > 0)
    flips = np.concatenate(signs)
    assert abs(flips.mean() - 0.5) < 3 * 0.5 / np.sqrt(len(flips))


def test_the_threshold_is_that_of_a_worked_example_and_fewer_than_one_in_the_rate_are_never_selected() -> None:
    w = np.array([[5.0, 4.0, 3.0, 2.0], [1.5, -1.0, 0.5, 0.0]])
    assert knockoff_threshold(w, 0.2) == 1.5, "five at least, none below -1.5"
    assert knockoff_threshold(w, 0.34) == 0.5, "1 + 1 of six"
    assert knockoff_threshold(w[:, :3], 0.1) == float("inf")
    assert knockoff_threshold(np.full(4, 3.0), 0.2) == float("inf"), "four heads cannot be one in five false"
    assert knockoff_threshold(np.zeros(9), 0.2) == float("inf")


@pytest.mark.parametrize("kind", ["balanced", "pilot", "block", "rates", "empty"])
def test_masks_that_were_not_drawn_independently_at_the_rates_are_refused(kind: str) -> None:
    rng = np.random.default_rng(0)
    masks, rates = draw_design("bernoulli", "request", RATES, 400, 40, 1, rng).masks, RATES
    check_bernoulli(masks, rates)
    if kind == "balanced":
        masks = draw_design("balanced", "request", RATES, 400, 40, 1, rng).masks
    elif kind == "pilot":
        masks = pilot_design(SMALL_REAL, 40, 3, 3, rng).masks
    elif kind == "block":
        masks = draw_design("bernoulli", "block", RATES, 400, 40, 8, rng).masks
    elif kind == "rates":
        rates = RATES * 1.5
    else:
        masks = masks[:0]
    with pytest.raises(UsageError, match="knockoffs"):
        check_bernoulli(masks, rates)


def test_a_rate_for_every_head_and_an_error_rate_between_0_and_1_are_needed() -> None:
    table = bernoulli(0, rows=50)
    with pytest.raises(UsageError, match="3 rates for 270 heads"):
        knockoff_selection(table, RATES[:3], 0.2, np.random.default_rng(0))
    for rate in (0.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match="the error rate is"):
            knockoff_selection(table, RATES, rate, np.random.default_rng(0))
