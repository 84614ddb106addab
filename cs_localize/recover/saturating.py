"""A Lasso under a saturating link: a broken model cannot break further."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.arrays import TaskArrays
from cs_localize.recover.lasso import LassoSolver
from cs_localize.recover.options import check_above_zero

_STEPS = 4


class SaturatingSolver(LassoSolver):
    r"""A Lasso on what the damage of a request would be if it never saturated.

    The expected damage of a request whose knocked-out heads have effects that add up to z is

    .. math:: g(z) = c\,(1 - e^{-z / c})

    near z for small damage and never more than the cap c. Starting from the plain Lasso, a few Gauss-Newton steps fit
    weighted Lassos to the damage, linearised around the last fit. It helps where many requests break the model: dense
    masks, or layers of universal heads that the design does not spare. Elsewhere it is no better than the Lasso.

    Args:
        alpha: as for the Lasso.
        floor: cap on the damage of one request as measured, in nats.
        positive: whether effects are kept from falling below 0.
        max_iter: most passes of coordinate descent in a step.
        cap: the damage that no request exceeds in expectation, in nats.
    """

    def __init__(
        self,
        alpha: float = 0.01,
        floor: float = 6.0,
        positive: bool = False,
        max_iter: int = 5000,
        cap: float = 6.0,
    ) -> None:
        super().__init__(alpha, floor, positive, max_iter)
        self.cap = cap

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        super().check_options()
        check_above_zero(cap=self.cap)

    def predict(self, table: MeasurementTable) -> NDArray[np.float64]:
        """The damage of every request after saturation, ``[rows]`` nats; see ``Solver``."""
        return np.asarray(self.cap * -np.expm1(-super().predict(table) / self.cap))

    def fit_task(self, arrays: TaskArrays, task: str) -> tuple[NDArray[np.float64], float]:
        """A plain Lasso and Gauss-Newton steps from there; see ``PerTaskSolver``."""
        effects, intercept = super().fit_task(arrays, task)
        for _ in range(_STEPS):
            # Beyond these bounds the linearisation would ask for steps that no outcome supports.
            total = np.clip(arrays.masks @ effects + intercept, -self.cap, 2 * self.cap)
            slope = np.exp(-total / self.cap)
            residual = arrays.damage + self.cap * np.expm1(-total / self.cap)
            bounded = np.minimum(slope, 1.0)
            target = total + residual / bounded
            effects, intercept = self.weighted(arrays, target, bounded**2, task)
        return effects, intercept
