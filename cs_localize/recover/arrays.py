"""What every solver fits: one task's masks and the damage of its requests, with the items' own part removed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from cs_localize.errors import SolverError
from cs_localize.outcomes import MeasurementTable


@dataclass(frozen=True)
class TaskArrays:
    """One task.

    Attributes:
        masks: ``[rows, n_heads]`` float, 1 where the head was knocked out; sparse, as designs are.
        damage: ``[rows]`` nats, item effects removed.
        item: ``[rows]`` int, the items numbered from 0.
    """

    masks: csc_array
    damage: NDArray[np.float64]
    item: NDArray[np.int64]

    @cached_property
    def rates(self) -> NDArray[np.float64]:
        """``[n_heads]``, the share of the requests that knocked out each head."""
        return np.asarray(self.masks.sum(axis=0) / len(self.damage))

    @cached_property
    def untested(self) -> NDArray[np.bool_]:
        """``[n_heads]``, True where a head was never knocked out, or in every request: nothing is known of it."""
        return np.asarray((self.rates == 0) | (self.rates == 1))

    def penalties(self, alpha: float) -> NDArray[np.float64]:
        """The l1 penalty of every head's effect on the standardised damage, ``[n_heads]``.

        A head must stand out from chance correlation, which falls with the root of the requests and grows with the
        standard deviation of its column: ``alpha`` is the penalty at 1,000 requests of the median tested head. Without
        the second part, heads that a design knocks out rarely would be shrunk most.
        """
        deviation = np.sqrt(self.rates * (1 - self.rates))
        tested = ~self.untested
        relative = np.ones(len(deviation))
        if tested.any():
            relative[tested] = deviation[tested] / np.median(deviation[tested])
        return np.asarray(alpha * (1000 / len(self.damage)) ** 0.5 * relative)

    def moments(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The covariances of the heads' columns, ``[n_heads, n_heads]``, and those with the damage, ``[n_heads]``."""
        # Centred before they are multiplied: a difference of two Gram matrices has eigenvalues a little below zero.
        masks = self.masks.toarray() - self.rates
        return masks.T @ masks / len(masks), masks.T @ (self.damage - self.damage.mean()) / len(masks)

    def intercept(self, effects: NDArray[np.float64]) -> float:
        """Where a sum of effects ``[n_heads]`` meets the mean damage, in nats; untested heads count for nothing."""
        return float(self.damage.mean() - self.rates @ np.where(self.untested, 0.0, effects))

    @property
    def spread(self) -> float:
        """Standard deviation of the damage in nats; 0 where the outcomes are constant up to rounding."""
        return spread_of(self.damage)


def spread_of(values: NDArray[np.float64]) -> float:
    """The standard deviation of ``[rows]`` values; 0 where they are constant up to rounding."""
    spread = float(values.std())
    return spread if spread > 1e-9 * max(1.0, float(np.abs(values).max())) else 0.0


def sparse_masks(masks: NDArray[np.bool_]) -> csc_array:
    """Masks ``[rows, n_heads]`` as a sparse matrix of ones."""
    # scipy converts an array of two dimensions several times as slowly.
    positions = np.flatnonzero(masks) % masks.shape[1]
    starts = np.append(0, np.cumsum(masks.sum(axis=1)))
    # scikit-learn takes no wider index.
    indices = positions.astype(np.int32), starts.astype(np.int32)
    return csr_array((np.ones(len(positions)), *indices), shape=masks.shape).tocsc()


def mask_numbers(masks: NDArray[np.generic]) -> NDArray[np.int64]:
    """Numbers the different rows of ``[rows, n_heads]`` 0/1 masks from 0; ``[rows]``, equal for equal masks."""
    return np.unique(np.packbits(masks.astype(bool), axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def task_arrays(table: MeasurementTable, floor: float) -> list[TaskArrays]:
    """Splits a table by task, in the order of ``table.tasks``.

    Args:
        table: scored outcomes.
        floor: cap on the damage of one request, in nats.

    Raises:
        SolverError: if a task has no rows or a score is not finite.
    """
    damage = table.damage(floor)
    result = []
    for task in table.tasks:
        rows = table.rows_of(task)
        if len(rows) == 0:
            raise SolverError(f"task '{task}' has no outcomes to fit; measure some or leave the task out")
        bad = int((~np.isfinite(table.score[rows]) | ~np.isfinite(table.baseline[rows])).sum())
        if bad:
            raise SolverError(f"{bad} of {len(rows)} outcomes of task '{task}' have no finite score; measure again")
        item = np.unique(table.item[rows], return_inverse=True)[1]
        result.append(TaskArrays(sparse_masks(table.masks[rows]), _without_items(damage[rows], item), item))
    return result


def _without_items(damage: NDArray[np.float64], item: NDArray[np.int64]) -> NDArray[np.float64]:
    """Takes away each item's mean deviation, shrunk by what its requests can tell (one-way random effects, by moments).

    Some items lose more than others under any mask. Items asked less than twice on average are left as they are: their
    own part cannot be told from that of the mask.
    """
    counts = np.bincount(item)
    if len(damage) < 2 * len(counts):
        return damage
    means = np.bincount(item, weights=damage) / counts - damage.mean()
    within = float(np.sum((damage - damage.mean() - means[item]) ** 2)) / (len(damage) - len(counts))
    between = float(means.var()) - within * float(np.mean(1 / counts))
    if between <= 0:
        return damage
    reliability = between / (between + within / counts)
    return np.asarray(damage - (reliability * means)[item])
