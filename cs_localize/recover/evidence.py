"""How far to trust a fit: intervals of effects, and prediction of masks it has not seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student
from sklearn.base import clone

from cs_localize.errors import UsageError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.arrays import TaskArrays, mask_numbers, spread_of, task_arrays
from cs_localize.recover.solver import Solver


@dataclass(frozen=True)
class EffectIntervals:
    """Least-squares effects with 95% percentile intervals; NaN where a head was not tested on a task.

    Attributes:
        heads: ``[heads]`` int, positions of the heads.
        effect: ``[n_tasks, heads]`` damage in nats.
        low: ``[n_tasks, heads]`` nats.
        high: ``[n_tasks, heads]`` nats.
    """

    heads: NDArray[np.int64]
    effect: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def bootstrap_intervals(
    table: MeasurementTable, solver: Solver, heads: NDArray[np.int64], n: int, rng: np.random.Generator
) -> EffectIntervals:
    """Refits chosen heads by least squares, on resampled outcomes.

    All other heads keep the fitted solver's effects. A resample draws items with replacement and, within them, every
    row a Poisson number of times, so that both the choice of items and the choice of masks count. The intervals take
    the choice of heads as given: they do not cover the selection.

    Args:
        table: the outcomes the solver was fitted on.
        solver: a fitted solver with a ``floor`` parameter.
        heads: ``[heads]`` positions of different heads.
        n: resamples.
        rng: source of the resamples.

    Raises:
        UsageError: if there are no resamples, or a head is given twice.
        SolverError: if an outcome is not finite.
    """
    if n < 1 or len(set(heads.tolist())) != len(heads):
        raise UsageError("intervals need at least one resample and a list of different heads")
    tasks = task_arrays(table, solver.get_params()["floor"])
    shape = (len(tasks), len(heads))
    effect, low, high = np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, np.nan)
    for row, arrays in enumerate(tasks):
        tested = ~arrays.untested[heads]
        rest = solver.effects_[row].copy()
        rest[heads] = 0.0
        target = arrays.damage - arrays.masks @ rest
        columns = np.column_stack([arrays.masks[:, heads[tested]].toarray(), np.ones(len(target))])
        effect[row, tested] = _least_squares(columns, target, np.ones(len(target)))
        draws = np.stack([_least_squares(columns, target, _weights(arrays, rng)) for _ in range(n)])
        low[row, tested], high[row, tested] = np.quantile(draws, [0.025, 0.975], axis=0)
    return EffectIntervals(heads, effect, low, high)


def mean_interval(damage: NDArray[np.float64]) -> tuple[float, float, float]:
    """The mean of a head's damage on different items with Student's 95% interval, in nats.

    Args:
        damage: ``[items]`` nats, of two items at least.

    Raises:
        UsageError: if there are fewer.
    """
    if len(damage) < 2:
        raise UsageError(f"an interval needs two items at least, not {len(damage)}")
    mean = float(damage.mean())
    reach = float(student.ppf(0.975, len(damage) - 1) * damage.std(ddof=1) / len(damage) ** 0.5)
    return mean, mean - reach, mean + reach


def held_back_fit(
    table: MeasurementTable, solver: Solver, rng: np.random.Generator, folds: int = 5
) -> NDArray[np.float64]:
    """Correlation of predicted and measured damage over masks held back in turn, for each task.

    Rows with one mask stay together, so no mask is predicted by a fit that has seen it.

    Args:
        table: the outcomes.
        solver: an estimator, fitted or not; copies of it are fitted.
        rng: source of the folds.
        folds: parts that are held back in turn.

    Returns:
        ``[n_tasks]``, -1 to 1; 0 where the outcomes are constant, and a little below where no fit has an effect: then
        each predicts the mean of the masks it has seen, which lies beyond that of those it has not.

    Raises:
        UsageError: if there are fewer different masks than folds.
        SolverError: if a fit fails.
    """
    mask = mask_numbers(table.masks)
    if not 2 <= folds <= mask.max(initial=0) + 1:
        raise UsageError(f"{mask.max(initial=0) + 1} different masks cannot be held back in {folds} folds")
    fold = (rng.permutation(mask.max() + 1) % folds)[mask]
    predicted = np.empty(len(table))
    for held in range(folds):
        rows = np.flatnonzero(fold == held)
        fitted = clone(solver).fit(table.take(np.flatnonzero(fold != held)))
        predicted[rows] = fitted.predict(table.take(rows))
    damage = table.damage(solver.get_params()["floor"])
    return np.array([_correlation(predicted[rows], damage[rows]) for rows in map(table.rows_of, table.tasks)])


def _weights(arrays: TaskArrays, rng: np.random.Generator) -> NDArray[np.float64]:
    n_items = int(arrays.item.max()) + 1
    times = rng.multinomial(n_items, np.full(n_items, 1 / n_items))
    return rng.poisson(times[arrays.item]).astype(float)


def _least_squares(
    columns: NDArray[np.float64], target: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Weighted effects of all columns but the last, the intercept; the smallest ones where several fit equally."""
    weighted = columns * weights[:, None]
    solution = np.linalg.lstsq(columns.T @ weighted, weighted.T @ target, rcond=1e-10)[0]
    return np.asarray(solution[:-1])


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    if spread_of(a) == 0 or spread_of(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
