from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cs_localize.confirm.stats import (
    contrast,
    mcnemar_exact,
    mean_drop,
    paired_bootstrap,
    share_left,
    spread,
    wilson,
)
from cs_localize.errors import UsageError

repeatable = settings(derandomize=True, deadline=None, max_examples=60)
pairs_of_flags = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5)


def columns(pairs: list[tuple[bool, bool]]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    flags = np.array(pairs, dtype=np.bool_).reshape(-1, 2)
    return flags[:, 0], flags[:, 1]


def exact_bootstrap(pairs: list[tuple[bool, bool]]) -> Counter[float]:
    """Probability of every drop over all n^n resamples of the items."""
    drops = [int(before) - int(after) for before, after in pairs]
    n = len(drops)
    chances: Counter[float] = Counter()
    for chosen in product(drops, repeat=n):
        chances[sum(chosen) / n] += 1 / n**n
    return chances


@repeatable
@given(pairs_of_flags)
def test_the_paired_bootstrap_cuts_off_the_tails_of_all_possible_resamples(pairs: list[tuple[bool, bool]]) -> None:
    chances = exact_bootstrap(pairs)
    low, high = paired_bootstrap(*columns(pairs), 4000, np.random.default_rng(0))
    slack = 0.01
    assert sum(p for drop, p in chances.items() if drop < low - 1e-9) <= 0.025 + slack
    assert sum(p for drop, p in chances.items() if drop <= low + 1e-9) >= 0.025 - slack
    assert sum(p for drop, p in chances.items() if drop > high + 1e-9) <= 0.025 + slack
    assert sum(p for drop, p in chances.items() if drop >= high - 1e-9) >= 0.025 - slack


def test_the_paired_bootstrap_keeps_the_two_answers_to_an_item_together() -> None:
    flags = np.array([True, False] * 10)
    assert paired_bootstrap(flags, flags, 500, np.random.default_rng(0)) == (0.0, 0.0)


def test_the_paired_bootstrap_is_as_wide_as_the_normal_approximation_on_many_items() -> None:
    before, after = columns([(True, True)] * 200 + [(True, False)] * 150 + [(False, True)] * 50)
    low, high = paired_bootstrap(before, after, 20000, np.random.default_rng(1))
    deviation = np.std(before.astype(float) - after.astype(float)) / np.sqrt(400)
    assert (low + high) / 2 == pytest.approx(0.25, abs=0.004)
    assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.04)


def test_the_contrast_is_the_targets_drop_minus_the_mean_of_the_controls() -> None:
    target = columns([(True, False)] * 6 + [(True, True)] * 4)
    small = columns([(True, False)] * 1 + [(True, True)] * 1)
    large = columns([(False, True)] * 3 + [(True, True)] * 27)
    value, low, high = contrast(target, [small, large], 500, np.random.default_rng(0))
    assert value == pytest.approx(0.6 - (0.5 - 0.1) / 2)
    assert low < value < high


def test_the_contrast_adds_the_variances_of_tasks_resampled_on_their_own() -> None:
    target = columns([(True, False)] * 100 + [(True, True)] * 100)
    controls = [
        columns([(True, False)] * 40 + [(True, True)] * 120),
        columns([(True, False)] * 20 + [(True, True)] * 20),
    ]
    _, low, high = contrast(target, controls, 20000, np.random.default_rng(2))
    variance = 0.25 / 200 + (0.25 * 0.75 / 160 + 0.25 / 40) / 4
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(variance), rel=0.04)


def test_a_control_that_loses_nothing_leaves_the_targets_interval() -> None:
    target = columns([(True, False)] * 7 + [(True, True)] * 13)
    still = columns([(True, True), (False, False)])
    assert contrast(target, [still], 800, np.random.default_rng(3))[1:] == paired_bootstrap(
        *target, 800, np.random.default_rng(3)
    )


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(8, 10, 0.490162, 0.943318), (0, 10, 0.0, 0.277533), (10, 10, 0.722467, 1.0), (50, 100, 0.403832, 0.596168)],
)
def test_wilson_gives_the_published_intervals(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-6)


@repeatable
@given(st.integers(1, 500), st.data())
def test_wilson_ends_are_the_shares_that_the_score_test_only_just_accepts(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    for end in wilson(successes, n):
        distance = abs(successes / n - end)
        assert distance == pytest.approx(1.959963985 * np.sqrt(end * (1 - end) / n), abs=1e-7)


def test_wilson_on_all_or_nothing_touches_the_border_exactly() -> None:
    for n in range(1, 200):
        assert wilson(0, n)[0] == 0.0
        assert wilson(n, n)[1] == 1.0


def test_mcnemar_on_nine_against_one_is_the_sum_of_eleven_coin_sequences_a_side() -> None:
    assert mcnemar_exact(1, 9) == 22 / 1024


@repeatable
@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_the_two_sided_binomial_test_of_the_discordant_items(b01: int, b10: int) -> None:
    n = b01 + b10
    chances = [math.comb(n, k) for k in range(n + 1)]
    as_unlikely = sum(chance for chance in chances if chance <= chances[b01])
    assert mcnemar_exact(b01, b10) == pytest.approx(as_unlikely / (1 << n), rel=1e-12)
    assert mcnemar_exact(b01, b10) == mcnemar_exact(b10, b01)


def test_spread_leaves_out_a_fortieth_at_each_end() -> None:
    assert spread([float(i) for i in range(41)]) == pytest.approx((1.0, 39.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda none, rng: paired_bootstrap(none, none, 100, rng),
        lambda none, rng: mean_drop(none, none),
        lambda none, rng: contrast((none, none), [(none, none)], 100, rng),
        lambda none, rng: contrast((np.array([True]), np.array([False])), [], 100, rng),
        lambda none, rng: paired_bootstrap(np.array([True]), np.array([True, False]), 100, rng),
        lambda none, rng: paired_bootstrap(np.array([True]), np.array([True]), 0, rng),
        lambda none, rng: spread([]),
        lambda none, rng: wilson(0, 0),
        lambda none, rng: wilson(3, 2),
        lambda none, rng: mcnemar_exact(-1, 3),
    ],
)
def test_data_that_allow_no_statistic_are_refused_in_one_line(call: object) -> None:
    assert callable(call)
    with pytest.raises(UsageError) as error:
        call(np.array([], dtype=np.bool_), np.random.default_rng(0))
    assert "\n" not in str(error.value)


def test_the_share_left_of_a_count_is_of_the_totals_and_its_interval_covers_it() -> None:
    before, after = np.array([3, 0, 1, 2, 4] * 12), np.array([0, 0, 1, 1, 0] * 12)
    share, low, high = share_left(before, after, 500, np.random.default_rng(0))
    assert share == pytest.approx(2 / 10)
    assert 0 < low < share < high < 0.5
    assert share_left(before, before, 100, np.random.default_rng(0)) == (1.0, 1.0, 1.0)
    with pytest.raises(UsageError, match="nothing was counted"):
        share_left(after * 0, after, 100, np.random.default_rng(0))


def test_resamples_of_which_nothing_is_counted_are_passed_over() -> None:
    before, after = np.array([1, 0, 0]), np.array([0, 0, 0])
    assert share_left(before, after, 200, np.random.default_rng(0)) == (0.0, 0.0, 0.0)
