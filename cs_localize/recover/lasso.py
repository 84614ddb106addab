"""The Lasso of Bair et al., one fit a task."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso

from cs_localize.errors import SolverError
from cs_localize.recover.arrays import TaskArrays
from cs_localize.recover.options import check_above_zero, check_flag, check_whole
from cs_localize.recover.per_task import PerTaskSolver


class LassoSolver(PerTaskSolver):
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

    def __init__(self, alpha: float = 0.01, floor: float = 6.0, positive: bool = False, max_iter: int = 5000) -> None:
        self.alpha = alpha
        self.floor = floor
        self.positive = positive
        self.max_iter = max_iter

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        check_above_zero(alpha=self.alpha, floor=self.floor)
        check_flag(positive=self.positive)
        check_whole(1, max_iter=self.max_iter)

    def fit_task(self, arrays: TaskArrays, task: str) -> tuple[NDArray[np.float64], float]:
        """One Lasso; see ``PerTaskSolver``."""
        return self.weighted(arrays, arrays.damage, None, task)

    def weighted(
        self, arrays: TaskArrays, target: NDArray[np.float64], weights: NDArray[np.float64] | None, task: str
    ) -> tuple[NDArray[np.float64], float]:
        """The Lasso of one task, with a target of one's own and rows that count differently.

        Args:
            arrays: the masks, and with them the penalties.
            target: ``[rows]`` nats, not constant.
            weights: ``[rows]`` above 0, what a row counts; None if all count alike.
            task: its name, for errors.

        Returns:
            The effects ``[n_heads]`` and the intercept, in nats.

        Raises:
            SolverError: if coordinate descent did not converge.
        """
        mean = float(np.average(target, weights=weights))
        spread = float(np.average((target - mean) ** 2, weights=weights)) ** 0.5
        penalties = arrays.penalties(self.alpha)
        reference = float(np.median(penalties))
        scale = penalties / reference
        columns = arrays.masks.copy()
        columns.data /= np.repeat(scale, np.diff(columns.indptr))
        lasso = Lasso(alpha=reference, positive=self.positive, max_iter=self.max_iter, tol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            try:
                lasso.fit(columns, (target - mean) / spread, sample_weight=weights)
            except ConvergenceWarning:
                raise SolverError(f"the Lasso of task '{task}' did not converge; raise alpha or max_iter") from None
        effects = np.where(arrays.untested, 0.0, lasso.coef_ / scale * spread)
        return effects, mean + spread * float(lasso.intercept_)
