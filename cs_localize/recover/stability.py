"""Does a finding hold on other items and masks, and does the fit say anything at all?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from cs_localize.errors import UsageError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.arrays import mask_numbers
from cs_localize.recover.evidence import held_back_fit
from cs_localize.recover.grouped import GroupSolver, grouped
from cs_localize.recover.solver import Solver

_KEPT = 0.5**0.5


def selection_frequencies(
    table: MeasurementTable, solver: Solver, resamples: int, rng: np.random.Generator, most: int = 10
) -> NDArray[np.float64]:
    """How often every head is selected when items and masks are drawn again (stability selection).

    A resample keeps a random share of a task's items and the same share of its masks, root one half, so half of the
    rows on average; a head is selected where its effect is above 0 and among the largest ``most`` of the task.
    ``expected_null_selections`` says what that bounds. A ``GroupSolver`` selects whole KV groups, so for it a group
    counts as one head.

    Args:
        table: the outcomes.
        solver: an estimator, fitted or not; copies of it are fitted.
        resamples: how many fits.
        rng: source of the resamples.
        most: heads of a task that one resample can select.

    Returns:
        ``[n_tasks, n_heads]``, shares of the resamples, 0 to 1.

    Raises:
        UsageError: if there are no resamples, no head may be selected, or a mask takes a KV group apart that the solver
            keeps whole.
        SolverError: if a fit fails.
    """
    if resamples < 1 or most < 1:
        raise UsageError(f"stability needs at least one resample and one head, not {resamples} and {most}")
    if isinstance(solver, GroupSolver):
        of_groups = selection_frequencies(grouped(table), solver.solver, resamples, rng, most)
        return np.repeat(of_groups, table.shape.heads // table.shape.kv_heads, axis=1)
    mask = mask_numbers(table.masks)
    counts = np.zeros((len(table.tasks), table.shape.n_heads))
    for _ in range(resamples):
        kept = [
            rows[_subset(table.item[rows], rng) & _subset(mask[rows], rng)] for rows in map(table.rows_of, table.tasks)
        ]
        effects = clone(solver).fit(table.take(np.concatenate(kept))).effects_
        leading = np.zeros(effects.shape, dtype=bool)
        np.put_along_axis(leading, np.argsort(-effects, axis=1, kind="stable")[:, :most], True, axis=1)
        counts += leading & (effects > 0)
    return counts / resamples


def expected_null_selections(frequency: float, n_heads: int, most: int = 10) -> float:
    """Most heads without an effect to be expected among those selected at least so often.

    ``most**2 / ((2 * f - 1) * n_heads)`` for resamples of half the data, if heads without an effect are exchangeable
    and the solver selects them no more readily than the others (Meinshausen and Bühlmann, 2010).

    Args:
        frequency: f, above 0.5 and at most 1.
        n_heads: heads of the model, or KV groups where whole ones are knocked out.
        most: as for ``selection_frequencies``.

    Raises:
        UsageError: if the frequency is out of range.
    """
    if not 0.5 < frequency <= 1:
        raise UsageError(f"there is no bound at a frequency of {frequency}; choose one above 0.5 and at most 1")
    return most**2 / ((2 * frequency - 1) * n_heads)


def fit_above_chance(
    table: MeasurementTable, solver: Solver, rng: np.random.Generator, permutations: int = 19
) -> NDArray[np.float64]:
    """Whether a fit predicts held-back masks better than one whose masks are dealt out at random.

    If no head matters, outcomes do not depend on the masks, and any assignment of a task's masks to its requests is as
    good as the true one. Requests under one mask stay together.

    Args:
        table: the outcomes.
        solver: an estimator, fitted or not; copies of it are fitted.
        rng: source of the permutations and of the folds.
        permutations: assignments to compare with; the smallest p-value is one in one more than that.

    Returns:
        ``[n_tasks]`` one-sided p-values of the correlation of ``held_back_fit``.

    Raises:
        UsageError: if there are no permutations, or fewer different masks than folds.
        SolverError: if a fit fails.
    """
    if permutations < 1:
        raise UsageError(f"{permutations} permutations were asked for; at least one is needed")
    observed = held_back_fit(table, solver, rng)
    mask = mask_numbers(table.masks)
    reached = np.ones(len(table.tasks))
    for _ in range(permutations):
        masks = table.masks.copy()
        for rows in map(table.rows_of, table.tasks):
            _, first, number = np.unique(mask[rows], return_index=True, return_inverse=True)
            masks[rows] = table.masks[rng.permutation(rows[first])[number]]
        reached += held_back_fit(replace(table, masks=masks), solver, rng) >= observed
    return reached / (permutations + 1)


def _subset(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Rows whose label is among a random share of the different labels, rounded up."""
    different = np.unique(labels)
    return np.isin(labels, rng.choice(different, int(np.ceil(_KEPT * len(different))), replace=False))
