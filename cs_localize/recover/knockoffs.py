"""Knockoffs: the share of false heads among those selected, bounded without a p-value, for Bernoulli masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import hstack

from cs_localize.errors import UsageError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.arrays import TaskArrays, sparse_masks, task_arrays
from cs_localize.recover.lasso import LassoSolver

_FAR = 5.0  # standard deviations that independent masks keep within


@dataclass(frozen=True)
class KnockoffSelection:
    """What the knockoff filter selects.

    Attributes:
        statistic: ``[n_tasks, n_heads]`` W, in spreads of the task's damage: harm of the head in excess of the harm of
            its copy, which has none.
        threshold: smallest W that is selected; infinite where nothing is.
        selected: ``[n_tasks, n_heads]`` bool.
    """

    statistic: NDArray[np.float64]
    threshold: float
    selected: NDArray[np.bool_]


def knockoff_selection(
    table: MeasurementTable,
    rates: NDArray[np.float64],
    error_rate: float,
    rng: np.random.Generator,
    alpha: float = 0.01,
    floor: float = 6.0,
) -> KnockoffSelection:
    r"""Selects heads by model-X knockoffs (Candès, Fan, Janson and Lv, 2018), over all tasks together.

    Every head's column gets a copy, masks drawn anew at the same rates without a request being made. As we drew the
    masks, every head of every mask by itself, that copy is exact: where outcomes do not depend on a head given the
    others, nothing would change if column and copy were exchanged. A Lasso is fitted to both, and

    .. math:: W = \max(\hat\beta, 0) - \max(\hat\beta_{copy}, 0)

    is as likely to be negative as positive for such a head. The knockoff+ threshold is the smallest w at which
    ``(1 + #{W <= -w}) / #{W >= w}`` is at most the error rate, over all heads and tasks. Then the expected share of
    heads without an effect on their task among those selected is at most the error rate, whatever the damage looks
    like, whatever the requests of an item share, and however well the Lasso fits.

    The null is "no effect on the task", so universal heads are rightly selected. The contrast with the controls has no
    exact null of this kind: a task and its controls are asked in different requests, and a head that hurts all of them
    alike has an effect on each. Exchanging it with its copy in all tasks at once would change the outcomes, although
    the contrast of its effects is 0. Specificity is therefore left to the ranking and the naming.

    At an error rate of q fewer than 1 / q heads cannot be selected: five at 0.2, over all tasks. So this is for
    studies that expect ten and more; ``single_head_tests`` can name one.

    Args:
        table: outcomes of independently drawn masks alone, one for every request: no pilot, no balanced, adaptive or
            shared masks.
        rates: ``[n_heads]`` probability of every head to be knocked out, that the masks were drawn with.
        error_rate: q, above 0 and below 1.
        rng: source of the copies.
        alpha: l1 penalty, as for the Lasso.
        floor: cap on the damage of one request, in nats.

    Raises:
        UsageError: if the masks were not drawn independently at these rates, or the error rate is out of range.
        SolverError: if an outcome is not finite, a task has none, or a fit fails.
    """
    if not 0 < error_rate < 1:
        raise UsageError(f"the error rate is {error_rate}; give a share above 0 and below 1")
    check_bernoulli(table.masks, rates)
    solver = LassoSolver(alpha, floor)
    statistic = np.zeros((len(table.tasks), table.shape.n_heads))
    for row, (task, arrays) in enumerate(zip(table.tasks, task_arrays(table, floor), strict=True)):
        copies = sparse_masks(rng.random(arrays.masks.shape) < rates)
        both = TaskArrays(hstack([arrays.masks, copies], format="csc"), arrays.damage, arrays.item)
        if arrays.spread > 0 and not both.untested.all():
            effects = np.maximum(solver.fit_task(both, task)[0], 0.0) / arrays.spread
            statistic[row] = effects[: len(rates)] - effects[len(rates) :]
    threshold = knockoff_threshold(statistic, error_rate)
    return KnockoffSelection(statistic, threshold, statistic >= threshold)


def knockoff_threshold(statistic: NDArray[np.float64], error_rate: float) -> float:
    """The knockoff+ threshold of any number of W (Barber and Candès, 2015); infinite where none meets the rate."""
    values = statistic.reshape(-1)
    for threshold in np.unique(np.abs(values[values != 0])):
        if 1 + np.sum(values <= -threshold) <= error_rate * np.sum(values >= threshold):
            return float(threshold)
    return float("inf")


def check_bernoulli(masks: NDArray[np.bool_], rates: NDArray[np.float64]) -> None:
    """Refuses masks that show not to be drawn head by head and request by request at the given rates.

    Looks at what independence says of the heads in a mask and of the masks with a head: their variances, and the
    number of all knockouts. Balanced masks, those that a block of items shares, and most others fail; no look at the
    masks can prove that they were drawn independently.

    Args:
        masks: ``[rows, n_heads]`` bool.
        rates: ``[n_heads]`` probability of every head to be knocked out.

    Raises:
        UsageError: if there are no masks, the rates are not one for every head, or a figure lies more than five
            standard deviations from what independence says.
    """
    if rates.shape != masks.shape[1:] or not np.all((rates >= 0) & (rates <= 1)):
        raise UsageError(f"{len(rates)} rates for {masks.shape[1]} heads; give every head one from 0 to 1")
    if not len(masks):
        raise UsageError("there are no masks to make knockoffs of; measure some")
    variances = rates * (1 - rates)
    deviations = (
        (masks.sum() - len(masks) * rates.sum()) / max(np.sqrt(len(masks) * variances.sum()), 1e-12),
        _chi_square((masks.sum(axis=1) - rates.sum()) ** 2, np.full(len(masks), variances.sum())),
        _chi_square((masks.sum(axis=0) - len(masks) * rates) ** 2, len(masks) * variances),
    )
    if max(map(abs, deviations)) > _FAR:
        raise UsageError(
            "knockoffs need masks that knock out every head independently, at the given rates and anew for every "
            "request, and these do not: they are balanced, shared, adaptive or of a pilot"
        )


def _chi_square(squares: NDArray[np.float64], variances: NDArray[np.float64]) -> float:
    """Standard deviations between a sum of squares in units of their variances and its expectation."""
    free = variances > 0
    if np.any(squares[~free] > 0):
        return float("inf")
    return float((np.sum(squares[free] / variances[free]) - free.sum()) / np.sqrt(2 * max(int(free.sum()), 1)))
