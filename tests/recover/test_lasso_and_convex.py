"""What one solver does and the other does not."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest

from cs_localize.errors import SolverError, UsageError
from cs_localize.heads import ModelShape
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import ConvexSolver, LassoSolver, make_solver
from cs_localize.recover.arrays import task_arrays
from tests.recover.test_solvers import additive_table


def test_an_unknown_solver_is_a_usage_error_that_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"no solver 'magic'; choose lasso, cvxpy, .* or marginal"):
        make_solver("magic")


@pytest.mark.parametrize("group", [0.0, 0.4])
def test_the_convex_solver_reaches_the_optimum_of_the_program_it_states(group: float) -> None:
    table = additive_table(rows=150, noise=1.0)
    solver = ConvexSolver(alpha=0.02, shared=0.8, group=group).fit(table)
    tasks = task_arrays(table, solver.floor)
    own = np.stack([arrays.penalties(0.02) for arrays in tasks])
    common = cp.Variable(table.shape.n_heads, nonneg=True)

    def price(part: cp.Variable, weights: np.ndarray) -> cp.Expression:
        pairs = [slice(h, h + 2) for h in range(0, table.shape.n_heads, 2)]
        norms = [weights[pair].mean() * 2**0.5 * cp.norm(part[pair]) for pair in pairs]
        return (1 - group) * weights @ part + group * cp.sum(cp.hstack(norms))

    cost = price(common, 0.8 * 2**0.5 * own.mean(axis=0))
    totals = []
    for arrays, weights in zip(tasks, own, strict=True):
        part = cp.Variable(table.shape.n_heads, nonneg=True)
        target = (arrays.damage - arrays.damage.mean()) / arrays.spread
        residual = (arrays.masks.toarray() - arrays.rates) @ (common + part) - target
        cost += cp.sum_squares(residual) / (2 * len(target)) + price(part, weights)
        totals.append((common + part) * arrays.spread)
    cp.Problem(cp.Minimize(cost)).solve(solver=cp.CLARABEL)
    expected = np.stack([total.value for total in totals])
    assert solver.effects_ == pytest.approx(expected, abs=1e-3)


def test_a_kv_group_of_more_heads_than_enter_at_once_is_found_like_any_other() -> None:
    shape = ModelShape(layers=2, heads=60, kv_heads=1, head_dim=8, ffn=16)
    rng = np.random.default_rng(0)
    masks = rng.random((500, shape.n_heads)) < 0.15
    zeros = np.zeros(500)
    item = np.arange(500)
    table = MeasurementTable(shape, ("a",), 0 * item, item, masks, -2.0 * masks[:, 7], zeros, zeros == 0, item)
    assert ConvexSolver(group=0.1).fit(table).effects_[0].argmax() == 7
    assert ConvexSolver(group=0.1).fit(table).effects_[0, 7] > 1


def test_a_program_that_is_not_solved_to_optimality_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp.Problem, "status", property(lambda _: "optimal_inaccurate"))
    with pytest.raises(SolverError, match="ended as 'optimal_inaccurate'"):
        ConvexSolver().fit(additive_table())


def test_the_convex_solver_finds_no_negative_effects() -> None:
    assert ConvexSolver().fit(additive_table(noise=2.0)).effects_.min() >= 0


def test_a_lasso_that_does_not_converge_is_an_error() -> None:
    with pytest.raises(SolverError, match="task 'a' did not converge; raise alpha or max_iter"):
        LassoSolver(alpha=1e-6, max_iter=1).fit(additive_table(noise=2.0))


def test_the_lasso_finds_negative_effects_unless_told_not_to() -> None:
    table = additive_table(noise=2.0)
    assert LassoSolver().fit(table).effects_.min() < 0
    assert LassoSolver(positive=True).fit(table).effects_.min() >= 0
    with pytest.raises(UsageError, match="'positive' is 'yes'; give true or false"):
        make_solver("lasso", positive="yes")
