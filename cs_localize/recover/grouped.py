"""Effects of whole KV groups, where no mask tells the heads of a group apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from cs_localize.errors import UsageError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.fitted import FittedEffects
from cs_localize.recover.solver import Solver


class GroupSolver(FittedEffects):
    """Another solver with the KV groups for its heads; every head of a group gets an equal part of the group's effect.

    Args:
        solver: the other one; a copy of it is fitted.
    """

    def __init__(self, solver: Solver) -> None:
        self.solver = solver

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's parameter and, if ``deep``, those of the other solver by their own names."""
        return {"solver": self.solver, **(self.solver.get_params() if deep else {})}

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        self.solver.check_options()

    def fit(self, table: MeasurementTable) -> Self:
        """Fits all tasks of a table whose masks knock out whole KV groups.

        Raises:
            SolverError: as the other solver.
            UsageError: if a mask knocks out a part of a group, or a parameter is out of range.
        """
        fitted = clone(self.solver, safe=False).fit(grouped(table))
        width = table.shape.heads // table.shape.kv_heads
        self._fitted = fitted
        self.effects_ = np.repeat(fitted.effects_, width, axis=1) / width
        self.untested_ = np.repeat(fitted.untested_, width, axis=1)
        self.intercept_ = fitted.intercept_
        return self

    def predict(self, table: MeasurementTable) -> NDArray[np.float64]:
        """What the other solver expects of every request; see ``Solver``."""
        predicted: NDArray[np.float64] = self._fitted.predict(grouped(table))
        return predicted


def grouped(table: MeasurementTable) -> MeasurementTable:
    """The same outcomes with the KV groups for heads.

    Raises:
        UsageError: if a mask knocks out a part of a group.
    """
    groups = table.shape.groups
    masks = table.masks.reshape(len(table), groups.n_heads, -1)
    whole = masks[:, :, 0]
    if (masks != whole[:, :, None]).any():
        raise UsageError("effects of KV groups need masks that knock out whole groups")
    return replace(table, shape=groups, masks=whole)
