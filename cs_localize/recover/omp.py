"""Orthogonal matching pursuit: heads one by one, as many as predict masks that were held back."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import orthogonal_mp

from cs_localize.recover.arrays import TaskArrays, mask_numbers
from cs_localize.recover.options import check_above_zero, check_whole
from cs_localize.recover.per_task import PerTaskSolver


class OmpSolver(PerTaskSolver):
    """Takes the head that correlates most with what is not yet explained, refits all taken ones, and goes on.

    Effects are least-squares ones, not shrunk. The number of heads is the one whose fits predict held-back masks best.
    To need no random numbers, the masks are dealt out to the folds in the order of their mean damage, which also gives
    every fold its share of broken requests.

    Args:
        limit: most heads to take for a task.
        folds: parts of the masks that are held back in turn.
        floor: cap on the damage of one request, in nats.
    """

    def __init__(self, limit: int = 40, folds: int = 5, floor: float = 6.0) -> None:
        self.limit = limit
        self.folds = folds
        self.floor = floor

    def check_options(self) -> None:
        """Raises UsageError if a parameter is out of range."""
        check_above_zero(floor=self.floor)
        check_whole(1, limit=self.limit)
        check_whole(2, folds=self.folds)

    def fit_task(self, arrays: TaskArrays, task: str) -> tuple[NDArray[np.float64], float]:
        """The path of least squares up to the chosen number of heads; see ``PerTaskSolver``."""
        masks, damage = arrays.masks.toarray(), arrays.damage
        fold, limit = self._folds(masks, damage), min(self.limit, masks.shape[1])
        errors = np.sum([_held_back_errors(masks, damage, fold == held, limit) for held in np.unique(fold)], axis=0)
        path = _effects(masks, damage, limit)
        effects = path[:, min(int(np.argmin(errors)), path.shape[1] - 1)]
        return effects, arrays.intercept(effects)

    def _folds(self, masks: NDArray[np.float64], damage: NDArray[np.float64]) -> NDArray[np.int64]:
        mask = mask_numbers(masks)
        means = np.bincount(mask, weights=damage) / np.bincount(mask)
        place = np.argsort(np.argsort(means, kind="stable"), kind="stable")
        return np.asarray(place[mask] % min(self.folds, len(place)))


def _effects(masks: NDArray[np.float64], damage: NDArray[np.float64], limit: int) -> NDArray[np.float64]:
    """Effects with 0, 1, … heads taken, ``[n_heads, 1 + heads taken]``."""
    varied = np.ptp(masks, axis=0) > 0
    effects = np.zeros((len(varied), 1))
    if not varied.any():
        return effects
    columns = masks[:, varied] - masks[:, varied].mean(axis=0)
    norms = np.linalg.norm(columns, axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it stops where heads that are left explain nothing more
        path = orthogonal_mp(
            columns / norms, damage - damage.mean(), n_nonzero_coefs=min(limit, len(norms)), return_path=True
        ).reshape(len(norms), -1)
    effects = np.zeros((len(varied), 1 + path.shape[1]))
    effects[varied, 1:] = path / norms[:, None]
    return effects


def _held_back_errors(
    masks: NDArray[np.float64], damage: NDArray[np.float64], held: NDArray[np.bool_], limit: int
) -> NDArray[np.float64]:
    """Squared error on the held-back rows by number of heads, ``[limit + 1]``; past the path's end, that of its end."""
    seen, target = masks[~held], damage[~held]
    effects = _effects(seen, target, limit)
    predicted = target.mean() + (masks[held] - seen.mean(axis=0)) @ effects
    errors = np.sum((damage[held, None] - predicted) ** 2, axis=0)
    return np.pad(errors, (0, limit + 1 - len(errors)), mode="edge")
