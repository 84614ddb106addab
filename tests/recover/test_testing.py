from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from cs_localize.errors import SolverError, UsageError
from cs_localize.heads import ModelShape
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import holm, single_head_tests
from cs_localize.recover.testing import SingleHeadTests

SHAPE = ModelShape(layers=5, heads=4, kv_heads=2, head_dim=8, ffn=16)
TASKS = ("a", "b", "c")
Damage = Mapping[tuple[int, int], NDArray[np.float64]]


def alone(damage: Damage) -> MeasurementTable:
    """Every head of the keys (task, head) alone, on as many items as damages are given."""
    keys = [(task, head, item) for (task, head), values in damage.items() for item in range(len(values))]
    task, head, item = np.array(keys).T
    values = np.concatenate(list(damage.values()))
    zeros = np.zeros(len(keys))
    masks = np.arange(SHAPE.n_heads) == head[:, None]
    return MeasurementTable(
        SHAPE, TASKS, task, item + 100 * task, masks, zeros - 1 - values, zeros - 1, values < 1, task
    )


def outcome_of(damage: Damage, candidates: Mapping[str, list[int]], seed: int = 0, **options: float) -> SingleHeadTests:
    return single_head_tests(alone(damage), candidates, {}, np.random.default_rng(seed), **options)  # type: ignore[arg-type]


def lognormal(rng: np.random.Generator, items: int, size: float) -> NDArray[np.float64]:
    """The damage of a head whose effect multiplies what an item brings, as measured."""
    return np.asarray(size * rng.lognormal(-0.32, 0.8, items) + rng.normal(0, 0.03, items))


def null_p_values(effect: float, control_effect: float, items: int, control_items: int) -> NDArray[np.float64]:
    """P-values of 20 heads in each of 20 experiments."""
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        damage = {(0, head): lognormal(rng, items, effect) for head in range(20)}
        damage |= {(1, head): lognormal(rng, control_items, control_effect) for head in range(20)}
        found.append(outcome_of(damage, {"a": list(range(20))}, seed, rearrangements=499).p)
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("effect", "control_effect", "items", "control_items"),
    [(0.0, 0.0, 12, 12), (0.1, 0.0, 12, 12), (0.1, 0.0, 6, 4), (2.0, 2.0, 12, 12), (2.0, 2.0, 12, 4), (0.1, 0.1, 8, 8)],
    ids=["no effect", "the least effect", "few items", "universal", "universal, few control items", "both at once"],
)
def test_a_head_of_the_null_is_rejected_no_more_often_than_the_level_says(
    effect: float, control_effect: float, items: int, control_items: int
) -> None:
    p = null_p_values(effect, control_effect, items, control_items)
    for level in (0.02, 0.1, 0.3):
        rejected = int(np.sum(p <= level))
        assert stats.binomtest(rejected, len(p), level, alternative="greater").pvalue > 0.001


def test_p_values_of_a_head_that_hurts_all_tasks_alike_are_uniform() -> None:
    p = null_p_values(2.0, 2.0, 12, 12)
    assert stats.kstest(p, "uniform").pvalue > 0.001


def test_power_grows_with_the_effect_and_with_the_items() -> None:
    def power(effect: float, items: int) -> float:
        return float(np.mean(null_p_values(effect, 0.0, items, 8) <= 0.05))

    by_effect = [power(effect, 8) for effect in (0.1, 0.2, 0.4, 1.0)]
    assert by_effect == sorted(by_effect)
    assert by_effect[0] <= 0.05
    assert by_effect[-1] > 0.9
    assert power(0.2, 6) < power(0.2, 20)


def test_the_p_value_is_the_larger_of_the_two_and_each_is_what_scipy_says_of_one_candidate_alone() -> None:
    rng = np.random.default_rng(1)
    own, other = lognormal(rng, 7, 0.6), lognormal(rng, 4, 0.3)
    found = outcome_of({(0, 3): own, (2, 3): other}, {"a": [3]}, least_effect=0.2)

    flipped = stats.permutation_test(
        (own - 0.2,), np.mean, permutation_type="samples", alternative="greater", vectorized=False
    )
    dealt = stats.permutation_test(
        (own, other),
        lambda x, y: stats.ttest_ind(x, y, equal_var=False).statistic,
        alternative="greater",
        vectorized=False,
    )
    assert found.p_effect[0] == flipped.pvalue
    assert found.p_specific[0] == pytest.approx(dealt.pvalue)
    assert found.p[0] == max(found.p_effect[0], found.p_specific[0])
    assert (found.damage[0], found.control_damage[0]) == (pytest.approx(own.mean()), pytest.approx(other.mean()))


def test_relabelled_heads_and_shuffled_rows_get_the_same_results() -> None:
    rng = np.random.default_rng(2)
    damage = {(task, head): lognormal(rng, 12, 1.0 - 0.2 * head) for task in range(2) for head in range(4)}
    found = outcome_of(damage, {"a": [0, 1, 2, 3]})

    order = [2, 0, 3, 1]
    renamed = {(task, order[head]): values for (task, head), values in damage.items()}
    again = outcome_of(renamed, {"a": order})
    np.testing.assert_array_equal(again.head, order)
    np.testing.assert_array_equal(again.p, found.p)

    table = alone(damage)
    shuffled = single_head_tests(
        table.take(rng.permutation(len(table))), {"a": [0, 1, 2, 3]}, {}, np.random.default_rng(0)
    )
    np.testing.assert_allclose(shuffled.damage, found.damage)
    np.testing.assert_allclose(shuffled.p, found.p, atol=0.02)


def test_a_repeated_request_counts_as_one_item() -> None:
    rng = np.random.default_rng(3)
    table = alone({(0, 0): lognormal(rng, 6, 1.0), (1, 0): lognormal(rng, 6, 0.0)})
    twice = table.take(np.concatenate([np.arange(len(table)), np.arange(len(table))]))
    once, again = (single_head_tests(t, {"a": [0]}, {}, np.random.default_rng(0)) for t in (table, twice))
    np.testing.assert_array_equal(once.p, again.p)


def test_relatives_are_no_controls_and_a_task_without_controls_is_tested_for_its_effect_alone() -> None:
    rng = np.random.default_rng(4)
    table = alone({(0, 0): lognormal(rng, 10, 2.0), (1, 0): lognormal(rng, 10, 2.0), (2, 0): lognormal(rng, 10, 0.0)})
    universal = single_head_tests(table, {"a": [0]}, {"a": ["c"]}, np.random.default_rng(0))
    specific = single_head_tests(table, {"a": [0]}, {"b": ["a"]}, np.random.default_rng(0))
    lonely = single_head_tests(table, {"a": [0]}, {"a": ["b", "c"]}, np.random.default_rng(0))
    assert universal.p[0] > 0.05 > specific.p[0]
    assert np.isnan(lonely.p_specific[0])
    assert np.isnan(lonely.control_damage[0])
    assert lonely.p[0] == lonely.p_effect[0] < 0.01


def test_samples_that_do_not_vary_have_p_values_that_their_size_allows() -> None:
    destroyed = outcome_of({(0, 0): np.full(8, 50.0), (1, 0): np.zeros(8)}, {"a": [0]})
    assert destroyed.damage[0] == 6.0, "capped"
    assert destroyed.p_effect[0] == 2**-8
    assert 0 < destroyed.p[0] < 0.01
    nothing = outcome_of({(0, 0): np.zeros(8), (1, 0): np.zeros(8)}, {"a": [0]})
    assert nothing.p[0] == 1.0


def test_both_corrections_count_the_candidates_of_all_tasks() -> None:
    rng = np.random.default_rng(5)
    damage = {(task, head): lognormal(rng, 12, 2.0 * (task == head)) for task in range(3) for head in range(6)}
    found = outcome_of(damage, {"a": [0, 3], "b": [1, 4], "c": [2, 5]})
    assert found.task.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(found.adjusted("bh"), stats.false_discovery_control(found.p))
    np.testing.assert_allclose(found.adjusted("holm"), holm(found.p))
    assert (found.adjusted("bh") <= 0.1).tolist() == [True, False] * 3
    assert np.all(found.p <= found.adjusted("bh"))
    assert np.all(found.adjusted("bh") <= found.adjusted("holm"))


@pytest.mark.parametrize(
    ("damage", "candidates", "options", "message"),
    [
        ({(0, 0): [1.0, 1.0]}, {}, {}, "no candidate to test"),
        ({(0, 0): [1.0, 1.0]}, {"a": []}, {}, "no candidate to test"),
        ({(0, 0): [1.0, 1.0]}, {"z": [0]}, {}, "task 'z' has candidates and is not in the table"),
        ({(0, 0): [1.0, 1.0]}, {"a": [0, 0]}, {}, "given twice"),
        ({(0, 0): [1.0, 1.0]}, {"a": [99]}, {}, "there is no head 99"),
        ({(0, 0): [1.0], (1, 0): [1.0, 1.0]}, {"a": [0]}, {}, "L0H0, a candidate of 'a', .* 1 items of its task"),
        ({(0, 0): [1.0, 1.0], (1, 0): [1.0]}, {"a": [0]}, {}, "1 items of its controls"),
        ({(0, 0): [1.0, 1.0], (1, 1): [1.0, 1.0]}, {"a": [0]}, {}, "0 items of its controls"),
        ({(0, 0): [1.0, 1.0]}, {"a": [0]}, {"least_effect": -1.0}, "least_effect is -1"),
        ({(0, 0): [1.0, 1.0]}, {"a": [0]}, {"rearrangements": 0}, "at least one rearrangement"),
    ],
)
def test_what_cannot_be_tested_is_refused_in_one_line(
    damage: dict[tuple[int, int], list[float]],
    candidates: dict[str, list[int]],
    options: dict[str, float],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        outcome_of({key: np.array(values) for key, values in damage.items()}, candidates, **options)
    assert "\n" not in str(error.value)


def test_rows_of_several_heads_and_scores_that_are_no_numbers_are_refused() -> None:
    table = alone({(0, 0): np.ones(4), (1, 0): np.zeros(4)})
    masks = table.masks.copy()
    masks[0, 1] = True
    with pytest.raises(UsageError, match="1 of 8 rows do not knock out exactly one head"):
        single_head_tests(replace(table, masks=masks), {"a": [0]}, {}, np.random.default_rng(0))
    score = table.score.copy()
    score[2] = np.nan
    with pytest.raises(SolverError, match="1 of 8 outcomes"):
        single_head_tests(replace(table, score=score), {"a": [0]}, {}, np.random.default_rng(0))


def test_holm_corrects_a_worked_example() -> None:
    corrected = holm(np.array([0.01, 0.04, 0.03, 0.005]))
    np.testing.assert_allclose(corrected, [0.03, 0.06, 0.06, 0.02])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.999))
def test_holm_rejects_what_stepping_down_by_hand_rejects(p: list[float], level: float) -> None:
    rejected = set()
    for step, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[index] * (len(p) - step) > level:
            break
        rejected.add(index)
    corrected = holm(np.array(p))
    assert {i for i, value in enumerate(corrected) if value <= level} == rejected
    assert np.all(corrected >= p)
    assert np.all(corrected <= 1)


@pytest.mark.parametrize("p", [[], [0.5, float("nan")], [1.5]])
def test_holm_refuses_what_are_no_p_values(p: list[float]) -> None:
    with pytest.raises(UsageError, match="at least one p-value"):
        holm(np.array(p))
