"""What every solver must do, whatever the method behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from sklearn.base import clone

from cs_localize.config import SolverConfig
from cs_localize.design import draw_design, inclusion_rates
from cs_localize.errors import SolverError, UsageError
from cs_localize.heads import ModelShape
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import SOLVERS, make_solver

SHAPE = ModelShape(layers=5, heads=8, kv_heads=4, head_dim=8, ffn=16)
TRUE = {3: 2.0, 17: 1.2, 30: 0.8}

NAIVE = ("ridge", "marginal")

every = pytest.mark.parametrize("name", list(SOLVERS))
sparse = pytest.mark.parametrize("name", [name for name in SOLVERS if name not in NAIVE])
# Where damage saturates, its level counts and not only how it differs between requests.
linear = pytest.mark.parametrize("name", [name for name in SOLVERS if name != "saturating"])


def additive_table(seed: int = 0, rows: int = 400, noise: float = 0.3) -> MeasurementTable:
    """Two tasks whose damage is a plain sum over heads; the second has the effects of the first, halved."""
    rng = np.random.default_rng(seed)
    rates = inclusion_rates(SHAPE, 0.15)
    designs = [draw_design("balanced", "request", rates, rows, 20, 1, rng) for _ in range(2)]
    masks = np.concatenate([design.masks for design in designs])
    task = np.repeat([0, 1], rows)
    effects = np.zeros(SHAPE.n_heads)
    effects[list(TRUE)] = list(TRUE.values())
    damage = masks @ effects / (1 + task) + noise * rng.normal(size=2 * rows)
    baseline = -rng.random(2 * rows)
    return MeasurementTable(
        SHAPE,
        ("a", "b"),
        task,
        np.concatenate([design.items for design in designs]) + 20 * task,
        masks,
        baseline - damage,
        baseline,
        damage < 1,
        np.full(2 * rows, 30),
    )


@every
def test_damage_is_predicted_in_nats_for_masks_that_were_not_fitted(name: str) -> None:
    table, other = additive_table(), additive_table(seed=1)
    predicted = make_solver(name).fit(table).predict(other)
    assert predicted == pytest.approx(other.damage(6.0), abs=2.5)
    assert np.std(predicted - other.damage(6.0)) < 0.6 * np.std(other.damage(6.0))


@sparse
def test_effects_are_found_in_nats_and_little_else(name: str) -> None:
    solver = make_solver(name).fit(additive_table())
    assert solver.effects_.shape == (2, SHAPE.n_heads)
    assert np.argsort(-solver.effects_[0])[:3].tolist() == list(TRUE)
    assert solver.effects_[0, list(TRUE)] == pytest.approx(list(TRUE.values()), abs=0.3)
    assert solver.effects_[1, list(TRUE)] == pytest.approx(np.array(list(TRUE.values())) / 2, abs=0.3)
    others = np.delete(solver.effects_, list(TRUE), axis=1)
    assert np.abs(others).max() < 0.2
    assert np.abs(solver.intercept_).max() < 0.3
    assert not solver.untested_.any()


@every
def test_the_strongest_heads_come_first(name: str) -> None:
    solver = make_solver(name).fit(additive_table())
    assert np.argsort(-solver.effects_[0])[:3].tolist() == list(TRUE)
    assert solver.effects_[1, 3] > 0.4


@every
def test_the_constructor_only_stores_and_fit_returns_the_solver(name: str) -> None:
    solver = make_solver(name, floor=5.5)
    assert solver.get_params()["floor"] == 5.5
    assert not [attribute for attribute in vars(solver) if attribute.endswith("_")]
    copy = clone(solver)
    assert copy.get_params() == solver.get_params()
    assert copy.fit(additive_table()) is copy
    assert not hasattr(solver, "effects_")


@every
def test_permuting_heads_permutes_effects(name: str) -> None:
    table = additive_table()
    order = np.random.default_rng(1).permutation(SHAPE.n_heads)
    plain = make_solver(name).fit(table).effects_
    permuted = make_solver(name).fit(replace(table, masks=table.masks[:, order])).effects_
    assert permuted == pytest.approx(plain[:, order], abs=1e-3)


@every
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    table = additive_table()
    shuffled = table.take(np.random.default_rng(1).permutation(len(table)))
    assert make_solver(name).fit(shuffled).effects_ == pytest.approx(make_solver(name).fit(table).effects_, abs=1e-3)


@linear
def test_scaling_the_damage_of_a_task_scales_its_effects_alone(name: str) -> None:
    table = additive_table()
    factor = np.where(table.task == 1, 3.0, 1.0)
    scaled = replace(table, score=table.baseline - factor * (table.baseline - table.score))
    plain, larger = (make_solver(name, floor=100.0).fit(t).effects_ for t in (table, scaled))
    assert larger == pytest.approx(plain * np.array([[1.0], [3.0]]), abs=3e-3)


@linear
def test_what_differs_between_items_is_not_charged_to_heads(name: str) -> None:
    table = additive_table(noise=0.05)
    extra = 3.0 * np.random.default_rng(2).random(40)[table.item]
    shifted = replace(table, score=table.score - extra)
    plain, moved = (make_solver(name, floor=100.0).fit(t).effects_ for t in (table, shifted))
    assert np.abs(moved - plain).max() < 0.25


@every
def test_repeated_masks_are_no_problem(name: str) -> None:
    table = additive_table()
    twice = table.take(np.repeat(np.arange(len(table)), 2))
    assert np.argsort(-make_solver(name).fit(twice).effects_[0])[:3].tolist() == list(TRUE)


@every
@pytest.mark.parametrize("value", [False, True])
def test_a_head_that_was_never_tested_has_no_effect_and_says_so(name: str, value: bool) -> None:
    table = additive_table()
    masks = table.masks.copy()
    masks[table.task == 0, 5] = value
    solver = make_solver(name).fit(replace(table, masks=masks))
    assert solver.effects_[0, 5] == 0
    assert solver.untested_[0, 5]
    assert solver.untested_.sum() == 1


@every
def test_constant_outcomes_have_no_effects(name: str) -> None:
    table = additive_table()
    solver = make_solver(name).fit(replace(table, score=table.baseline - 0.7))
    assert not solver.effects_.any()
    assert solver.intercept_ == pytest.approx([0.7, 0.7])


@every
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("field", ["score", "baseline"])
def test_an_outcome_without_a_finite_score_is_an_error(name: str, field: str, value: float) -> None:
    table = additive_table()
    values = getattr(table, field).copy()
    values[7] = value
    with pytest.raises(SolverError, match="1 of 400 outcomes of task 'a' have no finite score"):
        make_solver(name).fit(replace(table, **{field: values}))


@every
def test_a_task_without_outcomes_is_an_error(name: str) -> None:
    table = additive_table()
    with pytest.raises(SolverError, match="task 'b' has no outcomes"):
        make_solver(name).fit(table.take(table.rows_of("a")))


@every
def test_one_task_alone_can_be_fitted(name: str) -> None:
    table = additive_table()
    solver = make_solver(name).fit(replace(table.take(table.rows_of("a")), tasks=("a",)))
    assert np.argsort(-solver.effects_[0])[:3].tolist() == list(TRUE)


@every
def test_a_model_that_no_mask_touches_has_no_effects(name: str) -> None:
    table = additive_table()
    solver = make_solver(name).fit(replace(table, masks=np.zeros_like(table.masks)))
    assert solver.untested_.all()
    assert not solver.effects_.any()


@every
def test_two_heads_that_always_go_together_share_what_one_of_them_has(name: str) -> None:
    table = additive_table()
    masks = table.masks.copy()
    masks[:, 4] = masks[:, 3]
    effects = make_solver(name).fit(replace(table, masks=masks)).effects_
    assert np.isfinite(effects).all()
    assert effects[0, [3, 4]].sum() > 1.2


@every
def test_a_single_request_has_no_effects(name: str) -> None:
    table = additive_table().take(np.array([0]))
    solver = make_solver(name).fit(replace(table, tasks=("a",)))
    assert not solver.effects_.any()
    assert solver.untested_.all()


@every
def test_unknown_options_and_impossible_values_are_usage_errors(name: str) -> None:
    known = ", ".join(make_solver(name).__init__.__code__.co_varnames[1:])  # type: ignore[misc]
    with pytest.raises(UsageError, match=f"solver '{name}' has no option 'alhpa'; it has {known}"):
        make_solver(name, alhpa=1)
    for value in (0, -1.0, float("nan"), "much", True):
        with pytest.raises(UsageError, match=r"'floor' is .*; give a number above 0"):
            make_solver(name, floor=value)


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("lasso", "alpha", 0, "number above 0"),
        ("cvxpy", "alpha", "much", "number above 0"),
        ("ridge", "alpha", -1, "number above 0"),
        ("saturating", "cap", 0, "number above 0"),
        ("lasso", "positive", "yes", "true or false"),
        ("cvxpy", "group", 1, "from 0 to below 1"),
        ("cvxpy", "group", True, "from 0 to below 1"),
        ("lasso", "max_iter", 0.5, "whole number of at least 1"),
        ("saturating", "max_iter", 2.5, "whole number of at least 1"),
        ("omp", "limit", 0, "whole number of at least 1"),
        ("omp", "limit", 2.5, "whole number of at least 1"),
        ("omp", "folds", 1, "whole number of at least 2"),
    ],
)
def test_an_option_out_of_range_says_what_to_give(name: str, option: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"'{option}' is .*; give a? ?.*{message}"):
        make_solver(name, **{option: value})


def test_scaling_the_damage_and_the_cap_scales_the_effects_under_a_saturating_link() -> None:
    table = additive_table()
    scaled = replace(table, score=table.baseline - 3.0 * (table.baseline - table.score))
    plain = make_solver("saturating", floor=100.0, cap=6.0).fit(table).effects_
    assert make_solver("saturating", floor=100.0, cap=18.0).fit(scaled).effects_ == pytest.approx(3 * plain, abs=3e-3)


def test_a_cap_that_is_never_reached_makes_the_saturating_solver_a_lasso() -> None:
    table = additive_table()
    plain = make_solver("lasso").fit(table).effects_
    assert make_solver("saturating", cap=1e17).fit(table).effects_ == pytest.approx(plain, abs=1e-6)


def test_a_pursuit_of_more_heads_or_folds_than_there_are_is_one_of_all() -> None:
    table = additive_table()
    few = make_solver("omp", limit=table.shape.n_heads, folds=len(table)).fit(table).effects_
    assert np.array_equal(make_solver("omp", limit=10**12, folds=10**30).fit(table).effects_, few)


def test_effects_under_a_saturating_link_are_those_that_made_the_damage_and_predict_it() -> None:
    table = additive_table(noise=0.0)
    table = replace(table, item=np.arange(len(table)))  # no item is asked twice: nothing is removed for items
    damage = 3.0 * (1 - np.exp(-(table.baseline - table.score) * 2 / 3.0))
    solver = make_solver("saturating", alpha=1e-4, cap=3.0).fit(replace(table, score=table.baseline - damage))
    assert solver.effects_[0, list(TRUE)] == pytest.approx(2 * np.array(list(TRUE.values())), abs=0.05)
    assert solver.predict(table) == pytest.approx(damage, abs=0.05)
    assert solver.predict(replace(table, masks=np.ones_like(table.masks))).max() < 3.0


def test_a_study_can_name_every_solver() -> None:
    assert get_args(SolverConfig.model_fields["name"].annotation) == tuple(SOLVERS)
