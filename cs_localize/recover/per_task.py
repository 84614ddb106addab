"""What solvers share that fit one task after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.arrays import TaskArrays, task_arrays
from cs_localize.recover.fitted import FittedEffects


class PerTaskSolver(FittedEffects, ABC):
    """A ``Solver`` whose fit of a task sees nothing of the other tasks.

    A subclass stores its parameters, ``floor`` among them, and fits one task.
    """

    floor: float

    @abstractmethod
    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""

    @abstractmethod
    def fit_task(self, arrays: TaskArrays, task: str) -> tuple[NDArray[np.float64], float]:
        """The effects ``[n_heads]`` and the intercept of one task whose damage is not constant, in nats.

        What it says of heads that were not tested is discarded.

        Raises:
            SolverError: if no solution was reached.
        """

    def fit(self, table: MeasurementTable) -> Self:
        """Fits all tasks of a table, each on its own.

        Raises:
            SolverError: if an outcome is not finite, a task has none, or no solution was reached.
            UsageError: if a parameter is out of range.
        """
        self.check_options()
        tasks = task_arrays(table, self.floor)
        self.untested_ = np.stack([arrays.untested for arrays in tasks])
        self.effects_ = np.zeros(self.untested_.shape)
        self.intercept_ = np.array([arrays.damage.mean() for arrays in tasks])
        for row, (arrays, task) in enumerate(zip(tasks, table.tasks, strict=True)):
            if arrays.spread > 0 and not arrays.untested.all():
                effects, self.intercept_[row] = self.fit_task(arrays, task)
                self.effects_[row] = np.where(arrays.untested, 0.0, effects)
        return self
