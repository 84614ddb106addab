"""A convex program over all tasks at once: damage only, a part that tasks share and a part of each task's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import cvxpy as cp
import numpy as np
from cvxpy.atoms.affine.reshape import reshape
from cvxpy.atoms.affine.wraps import psd_wrap
from cvxpy.atoms.norm import norm
from cvxpy.atoms.quad_form import quad_form
from numpy.typing import NDArray

from cs_localize.errors import SolverError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.arrays import TaskArrays, task_arrays
from cs_localize.recover.fitted import FittedEffects
from cs_localize.recover.options import check_above_zero, check_share

_GROWTH = 48
_TOLERANCE = 1e-3
_ZERO = 1e-6
# With more heads than requests the Gram matrix is singular, and steps of the usual 0.99 of the way to the boundary now
# and then leave the interior-point method stuck a digit before its tolerance.
_SOLVER_OPTIONS = {"max_step_fraction": 0.95}


class ConvexSolver(FittedEffects):
    r"""Fits all tasks jointly with effects that are never negative.

    With :math:`X_t` the centred masks of task t, :math:`y_t` its standardised damage and :math:`n_t` its requests, it
    minimises over :math:`s, p_t \ge 0`

    .. math:: \sum_t \frac{1}{2 n_t} \|X_t (s + p_t) - y_t\|^2 + \sum_h \lambda_h s_h + \sum_{t,h} \lambda_{t,h} p_{t,h}

    so a head that hurts most tasks costs less in the shared part s than once in every :math:`p_t`, and estimates of
    universal heads borrow strength across tasks; that of a head which hurts few tasks must not leak to the others, so
    the shared part should not be too cheap. It is a quadratic program, solved by an interior-point method on the
    heads that can be non-zero: heads are added until the optimality conditions hold for all others.

    Heads that read the same KV head tend to matter together. With ``group`` g above 0 the penalty of a part's effects
    :math:`a_h` in a KV group of w heads becomes
    :math:`(1 - g) \sum_h \lambda_h a_h + g \sqrt{w}\, \bar\lambda\, \|a\|_2`, with the mean penalty of the group, so
    that a second head of a group costs less than the first of another.

    Args:
        alpha: l1 penalty of a task's own part, for 1,000 requests and the head of median inclusion; it scales with the
            inverse root of the requests and the standard deviation of a head's column.
        shared: penalty of the shared part, as a multiple of the tasks' mean penalty times the root of their number.
        floor: cap on the damage of one request, in nats.
        group: share of the penalty that is laid on KV groups rather than heads, from 0 to below 1.
    """

    def __init__(self, alpha: float = 0.01, shared: float = 1.5, floor: float = 6.0, group: float = 0.0) -> None:
        self.alpha = alpha
        self.shared = shared
        self.floor = floor
        self.group = group

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        check_above_zero(alpha=self.alpha, shared=self.shared, floor=self.floor)
        check_share(group=self.group)

    def fit(self, table: MeasurementTable) -> Self:
        """Fits all tasks of a table together.

        Raises:
            SolverError: if an outcome is not finite, a task has none, or the program was not solved to optimality.
            UsageError: if a parameter is out of range.
        """
        self.check_options()
        tasks = task_arrays(table, self.floor)
        own = np.stack([arrays.penalties(self.alpha) for arrays in tasks])
        shared = self.shared * own.mean(axis=0) * len(tasks) ** 0.5
        width = table.shape.heads // table.shape.kv_heads if self.group else 1
        penalty = _Penalty(own, shared, self.group, width)
        total = _solve([_moments(arrays) for arrays in tasks], penalty)
        spreads = np.array([arrays.spread for arrays in tasks])
        self.untested_ = np.stack([arrays.untested for arrays in tasks])
        self.effects_ = np.where(self.untested_, 0.0, total * spreads[:, None])
        self.intercept_ = np.array([a.intercept(e) for a, e in zip(tasks, self.effects_, strict=True)])
        return self


@dataclass(frozen=True)
class _Moments:
    """All that the program needs of a task: ``gram`` is X'X/n, ``cross`` is X'y/n, both centred, y standardised."""

    gram: NDArray[np.float64]
    cross: NDArray[np.float64]


def _moments(arrays: TaskArrays) -> _Moments:
    gram, cross = arrays.moments()
    return _Moments(gram, cross / arrays.spread if arrays.spread else np.zeros_like(cross))


@dataclass(frozen=True)
class _Penalty:
    """The weights of l1 penalties, and the share of them that groups of ``width`` adjacent heads bear instead.

    Attributes:
        own: ``[n_tasks, n_heads]``.
        shared: ``[n_heads]``.
        group: from 0 to below 1.
        width: heads of a group.
    """

    own: NDArray[np.float64]
    shared: NDArray[np.float64]
    group: float
    width: int

    def of(self, heads: NDArray[np.int64]) -> _Penalty:
        """The penalty of some of the heads, whole groups in order."""
        return _Penalty(self.own[:, heads], self.shared[heads], self.group, self.width)

    def excess(self, slopes: NDArray[np.float64]) -> NDArray[np.float64]:
        """By group, how far the cost falls where a group without effects gets some, in units of its penalty."""
        own = np.stack([self._excess(row, weights) for row, weights in zip(slopes, self.own, strict=True)])
        return np.asarray(np.maximum(own.max(axis=0), self._excess(slopes.sum(axis=0), self.shared)))

    def _excess(self, slope: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        over = np.maximum(slope - (1 - self.group) * weights, 0.0).reshape(-1, self.width)
        mean = weights.reshape(-1, self.width).mean(axis=1)
        return np.asarray(np.linalg.norm(over, axis=1) / mean - self.group * self.width**0.5)

    def norms(self, part: cp.Expression, weights: NDArray[np.float64]) -> cp.Expression:
        """What the groups of one part bear."""
        blocks = reshape(part, (self.width, len(weights) // self.width), order="F")
        mean = weights.reshape(-1, self.width).mean(axis=1)
        share: cp.Expression = self.group * self.width**0.5 * (norm(blocks, 2, axis=0) @ mean)
        return share


def _solve(tasks: list[_Moments], penalty: _Penalty) -> NDArray[np.float64]:
    """The optimal s + p_t, ``[n_tasks, n_heads]``, in spreads of each task."""
    n_heads = len(tasks[0].cross)
    heads = np.arange(n_heads).reshape(-1, penalty.width)
    total = np.zeros((len(tasks), n_heads))
    active = np.empty(0, dtype=np.int64)
    while True:
        slopes = np.stack([task.cross - task.gram @ row for task, row in zip(tasks, total, strict=True)])
        excess = penalty.excess(slopes)
        excess[active] = -1
        entering = np.argsort(-excess)[: max(1, _GROWTH // penalty.width, len(active) // 2)]
        entering = entering[excess[entering] > _TOLERANCE]
        if len(entering) == 0:
            return total
        active = np.sort(np.concatenate([active, entering]))
        members = heads[active].reshape(-1)
        total[:, members] = _solve_active(tasks, members, penalty.of(members))


def _solve_active(tasks: list[_Moments], active: NDArray[np.int64], penalty: _Penalty) -> NDArray[np.float64]:
    """The program on the active heads, in the totals u_t = s + p_t, so that p_t >= 0 reads u_t >= s."""
    common = cp.Variable(len(active), nonneg=True)
    totals = [cp.Variable(len(active)) for _ in tasks]
    heads = 1 - penalty.group
    cost = heads * (penalty.shared - penalty.own.sum(axis=0)) @ common
    for task, total, weights in zip(tasks, totals, penalty.own, strict=True):
        gram = psd_wrap(task.gram[np.ix_(active, active)])
        cost += 0.5 * quad_form(total, gram) + (heads * weights - task.cross[active]) @ total
        if penalty.group:
            cost += penalty.norms(total - common, weights)
    if penalty.group:
        cost += penalty.norms(common, penalty.shared)
    problem = cp.Problem(cp.Minimize(cost), [total >= common for total in totals])
    try:
        problem.solve(solver=cp.CLARABEL, **_SOLVER_OPTIONS)  # type: ignore[no-untyped-call]  # cvxpy leaves it untyped
    except cp.error.SolverError as error:
        raise SolverError(f"the convex program failed: {error}") from None
    if problem.status != cp.OPTIMAL:
        raise SolverError(f"the convex program ended as '{problem.status}', not as optimal; raise alpha")
    values = np.stack([np.asarray(total.value) for total in totals])
    return np.where(values > _ZERO, values, 0.0)
