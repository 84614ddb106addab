"""Orthogonal matching pursuit: heads one by one, as many as predict masks that were held back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from cs_localize.recover.arrays import TaskArrays
from cs_localize.recover.options import check_above_zero, check_whole
from cs_localize.recover.per_task import PerTaskSolver, intercept_of

_DEPENDENT = 1e-9


class OmpSolver(PerTaskSolver):
    """Takes the head that correlates most with what is not yet explained, refits all taken ones, and goes on.

    Effects are least-squares ones, not shrunk. The number of heads is the one whose fits predict held-back masks best.
    To need no random numbers, the masks are dealt out to the folds in the order of their mean damage, which also gives
    every fold its share of broken requests.

    Args:
        limit: most heads to take for a task.
        folds: parts of the masks that are held back in turn.
        floor: cap on the damage of one request, in nats.
    """

    def __init__(self, limit: int = 40, folds: int = 5, floor: float = 6.0) -> None:
        self.limit = limit
        self.folds = folds
        self.floor = floor

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        check_above_zero(floor=self.floor)
        check_whole(1, limit=self.limit)
        check_whole(2, folds=self.folds)

    def fit_task(self, arrays: TaskArrays, task: str) -> tuple[NDArray[np.float64], float]:
        """The path of least squares up to the chosen number of heads; see ``PerTaskSolver``."""
        fold = self._folds(arrays)
        errors = np.zeros(self.limit + 1)
        for held in range(self.folds):
            errors += _held_back_errors(arrays, fold == held, self.limit)
        count = int(np.argmin(errors))
        path = _pursue(arrays.masks, arrays.damage, np.ones(len(fold), dtype=bool), count)
        effects = np.zeros(arrays.masks.shape[1])
        effects[path.heads] = path.coefficients(len(path.heads))[1:]
        return effects, intercept_of(arrays, effects)

    def _folds(self, arrays: TaskArrays) -> NDArray[np.int64]:
        packed = np.packbits(arrays.masks.astype(bool), axis=1)
        mask = np.unique(packed, axis=0, return_inverse=True)[1].reshape(-1)
        means = np.bincount(mask, weights=arrays.damage) / np.bincount(mask)
        place = np.argsort(np.argsort(means, kind="stable"), kind="stable")
        return np.asarray(place[mask] % self.folds)


@dataclass(frozen=True)
class _Path:
    """The heads in the order taken, and the QR factors of the intercept's column and theirs."""

    heads: list[int]
    upper: NDArray[np.float64]
    projections: NDArray[np.float64]

    def coefficients(self, count: int) -> NDArray[np.float64]:
        """Intercept and effects of the first ``count`` heads, refitted together."""
        kept = count + 1
        return np.asarray(solve_triangular(self.upper[:kept, :kept], self.projections[:kept]))


def _pursue(masks: NDArray[np.float64], damage: NDArray[np.float64], rows: NDArray[np.bool_], limit: int) -> _Path:
    """Takes up to ``limit`` heads on the given rows; the others are zeroed rather than copied away."""
    n = int(rows.sum())
    sums = masks.T @ rows
    norms = np.sqrt(np.maximum(sums - sums**2 / n, 0.0))
    free = norms > _DEPENDENT * n
    basis = [rows / n**0.5]
    upper = np.zeros((limit + 1, limit + 1))
    upper[0, 0] = n**0.5
    projections = [float(basis[0] @ damage)]
    residual = damage * rows - projections[0] * basis[0]
    heads: list[int] = []
    while len(heads) < limit and free.any():
        score = np.abs(masks.T @ residual)[free] / norms[free]
        head = int(np.flatnonzero(free)[np.argmax(score)])
        free[head] = False
        column = masks[:, head] * rows
        shares = np.stack(basis) @ column
        column = column - shares @ np.stack(basis)
        length = float(np.linalg.norm(column))
        if length <= 1e-6 * norms[head]:  # two heads that always go together: the first stands for both
            continue
        heads.append(head)
        upper[: len(heads), len(heads)] = shares
        upper[len(heads), len(heads)] = length
        basis.append(column / length)
        projections.append(float(basis[-1] @ residual))
        residual = residual - projections[-1] * basis[-1]
    return _Path(heads, upper, np.array(projections))


def _held_back_errors(arrays: TaskArrays, held: NDArray[np.bool_], limit: int) -> NDArray[np.float64]:
    """Squared error on the held-back rows by number of heads, ``[limit + 1]``; past the path's end, that of its end."""
    if held.all() or not held.any():
        return np.zeros(limit + 1)
    path = _pursue(arrays.masks, arrays.damage, ~held, limit)
    columns = np.column_stack([np.ones(int(held.sum())), arrays.masks[held][:, path.heads]])
    target = arrays.damage[held]
    errors = [
        float(np.sum((target - columns[:, : count + 1] @ path.coefficients(count)) ** 2))
        for count in range(len(path.heads) + 1)
    ]
    return np.array(errors + errors[-1:] * (limit + 1 - len(errors)))
