"""The contract of the solvers, and where they are found by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.convex import ConvexSolver
from cs_localize.recover.lasso import LassoSolver
from cs_localize.recover.naive import MarginalSolver, RidgeSolver
from cs_localize.recover.omp import OmpSolver
from cs_localize.recover.saturating import SaturatingSolver


class Solver(Protocol):
    """Fits the damage of every request as a sum over the heads knocked out, for each task of a table.

    A solver with a link, such as a saturating one, has the sum in its argument; ``predict`` applies it.

    A scikit-learn estimator, but for ``fit`` taking a table: the constructor only stores parameters, and what is
    learned ends in an underscore.

    Attributes:
        effects_: ``[n_tasks, n_heads]`` damage in nats caused by knocking the head out; positive is harmful, and 0
            where the head was not selected or not tested.
        intercept_: ``[n_tasks]`` damage in nats of a request that knocks out none of the heads with an effect.
        untested_: ``[n_tasks, n_heads]`` bool, True where the outcomes say nothing about the head.
    """

    effects_: NDArray[np.float64]
    intercept_: NDArray[np.float64]
    untested_: NDArray[np.bool_]

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        ...

    def fit(self, table: MeasurementTable) -> Self:
        """Fits all tasks of a table.

        Raises:
            SolverError: if an outcome is not finite, a task has none, or no solution was reached.
            UsageError: if a parameter is out of range.
        """
        ...

    def predict(self, table: MeasurementTable) -> NDArray[np.float64]:
        """The damage that a fit to other outcomes of the same tasks expects of every request, ``[rows]`` nats."""
        ...

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's parameters."""
        ...


SOLVERS: dict[str, Callable[..., Solver]] = {
    "lasso": LassoSolver,
    "cvxpy": ConvexSolver,
    "omp": OmpSolver,
    "saturating": SaturatingSolver,
    "ridge": RidgeSolver,
    "marginal": MarginalSolver,
}
"""Every solver by the name a study gives it."""


def make_solver(name: str, **options: object) -> Solver:
    """Builds a solver by name.

    Args:
        name: one of ``SOLVERS``.
        options: parameters of its constructor.

    Raises:
        UsageError: on an unknown name or option, or a value out of range.
    """
    if name not in SOLVERS:
        raise UsageError(f"no solver '{name}'; choose {', '.join(list(SOLVERS)[:-1])} or {list(SOLVERS)[-1]}")
    known = inspect.signature(SOLVERS[name]).parameters
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(f"solver '{name}' has no option '{unknown[0]}'; it has {', '.join(known)}")
    solver = SOLVERS[name](**options)
    solver.check_options()
    return solver
