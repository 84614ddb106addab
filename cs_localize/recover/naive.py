"""References without selection: every tested head has an effect."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cs_localize.recover.arrays import TaskArrays
from cs_localize.recover.options import check_above_zero
from cs_localize.recover.per_task import PerTaskSolver


class MarginalSolver(PerTaskSolver):
    """Mean damage of the requests that knock a head out, minus that of those that do not.

    Args:
        floor: cap on the damage of one request, in nats.
    """

    def __init__(self, floor: float = 6.0) -> None:
        self.floor = floor

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        check_above_zero(floor=self.floor)

    def fit_task(self, arrays: TaskArrays, task: str) -> tuple[NDArray[np.float64], float]:
        """Differences of means; see ``PerTaskSolver``."""
        variance = np.where(arrays.untested, 1.0, arrays.rates * (1 - arrays.rates))
        effects = arrays.masks.T @ (arrays.damage - arrays.damage.mean()) / len(arrays.damage) / variance
        return effects, arrays.intercept(effects)


class RidgeSolver(PerTaskSolver):
    """Least squares with a squared penalty, one fit a task.

    Args:
        alpha: penalty in variances of the median tested head's column, for 1,000 requests; it scales with the inverse
            of the requests.
        floor: cap on the damage of one request, in nats.
    """

    def __init__(self, alpha: float = 0.3, floor: float = 6.0) -> None:
        self.alpha = alpha
        self.floor = floor

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        check_above_zero(alpha=self.alpha, floor=self.floor)

    def fit_task(self, arrays: TaskArrays, task: str) -> tuple[NDArray[np.float64], float]:
        """The normal equations; see ``PerTaskSolver``."""
        gram, cross = arrays.moments()
        variance = float(np.median(np.diag(gram)[~arrays.untested]))
        gram[np.diag_indices_from(gram)] += self.alpha * variance * 1000 / len(arrays.damage)
        effects = np.asarray(np.linalg.solve(gram, cross), dtype=np.float64)
        return effects, arrays.intercept(effects)
