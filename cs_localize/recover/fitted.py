"""What every solver has once it is fitted, and the damage that follows from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.arrays import sparse_masks


class FittedEffects(BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """A ``Solver`` without its ``fit``."""

    effects_: NDArray[np.float64]
    intercept_: NDArray[np.float64]
    untested_: NDArray[np.bool_]

    def predict(self, table: MeasurementTable) -> NDArray[np.float64]:
        """The damage that a fit to other outcomes of the same tasks expects of every request, ``[rows]`` nats."""
        predicted = self.intercept_[table.task]
        for row, task in enumerate(table.tasks):
            rows = table.rows_of(task)
            predicted[rows] += sparse_masks(table.masks[rows]) @ self.effects_[row]
        return predicted
