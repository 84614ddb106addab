"""The Lasso of Bair et al., one fit a task."""

from __future__ import annotations

import warnings
from typing import Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso

from cs_localize.errors import SolverError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.arrays import TaskArrays, task_arrays
from cs_localize.recover.options import check_above_zero, check_flag


class LassoSolver(BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """One Lasso a task on the standardised damage of its requests, with 0/1 masks and an intercept.

    The method of Bair et al. (arXiv 2603.03335), on continuous damage in place of accuracy, with what differs between
    items removed and a smaller penalty on heads that the design knocks out more rarely. Effects are the Lasso's own,
    shrunk ones: ranking refitted effects finds fewer of the right heads.

    Args:
        alpha: l1 penalty on the standardised damage, for 1,000 requests and the head of median inclusion; it scales
            with the inverse root of the requests and the standard deviation of a head's column.
        floor: cap on the damage of one request, in nats.
        positive: whether effects are kept from falling below 0.
        max_iter: most passes of coordinate descent.
    """

    effects_: NDArray[np.float64]
    intercept_: NDArray[np.float64]
    untested_: NDArray[np.bool_]

    def __init__(self, alpha: float = 0.01, floor: float = 6.0, positive: bool = False, max_iter: int = 5000) -> None:
        self.alpha = alpha
        self.floor = floor
        self.positive = positive
        self.max_iter = max_iter

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        check_above_zero(alpha=self.alpha, floor=self.floor, max_iter=self.max_iter)
        check_flag(positive=self.positive)

    def fit(self, table: MeasurementTable) -> Self:
        """Fits all tasks of a table, each on its own.

        Raises:
            SolverError: if an outcome is not finite, a task has none, or coordinate descent did not converge.
            UsageError: if a parameter is out of range.
        """
        self.check_options()
        tasks = task_arrays(table, self.floor)
        self.effects_ = np.stack([self._effects(arrays, name) for arrays, name in zip(tasks, table.tasks, strict=True)])
        self.intercept_ = np.array(
            [a.damage.mean() - a.masks.mean(axis=0) @ e for a, e in zip(tasks, self.effects_, strict=True)]
        )
        self.untested_ = np.stack([arrays.untested for arrays in tasks])
        return self

    def _effects(self, arrays: TaskArrays, task: str) -> NDArray[np.float64]:
        spread = arrays.spread
        if spread == 0:
            return np.zeros(arrays.masks.shape[1])
        target = (arrays.damage - arrays.damage.mean()) / spread
        penalties = arrays.penalties(self.alpha)
        reference = float(np.median(penalties))
        scale = penalties / reference
        lasso = Lasso(alpha=reference, positive=self.positive, max_iter=int(self.max_iter), tol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            try:
                lasso.fit(arrays.masks / scale, target)
            except ConvergenceWarning:
                raise SolverError(f"the Lasso of task '{task}' did not converge; raise alpha or max_iter") from None
        return np.where(arrays.untested, 0.0, lasso.coef_ / scale * spread)
