"""Chosen heads fitted anew to all their outcomes, those under random masks and those of single heads together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cs_localize.recover.arrays import TaskArrays

_PRIOR = 1.0
"""Variance of an effect before anything is seen of it, in square nats: shrinks what few outcomes speak of."""
_RELATIVE = 0.64
"""Square of the standard deviation of a head's damage over items, relative to its mean, where no data tell."""
_NOISE = 0.02
"""Variance of the damage of a request that knocks out nothing that matters, in square nats."""
_PASSES = 3


def refit_heads(
    arrays: TaskArrays, effects: NDArray[np.float64], heads: NDArray[np.int64], alone: Mapping[int, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Weighted ridge regression of one task's damage on some heads; the others keep their effects.

    A request that knocks out a single head has far less noise than one that knocks out many, so it is weighted by what
    it can tell: what a head costs varies over items in proportion to its effect, so the variance of a request is
    ``a + b * sum(effect**2)`` over the heads it knocks out. ``b`` comes from the outcomes of single heads, ``a`` from
    what is left under masks, in a few passes.

    Args:
        arrays: the outcomes under random masks.
        effects: ``[n_heads]`` what a solver made of them, in nats.
        heads: positions of the heads to refit, all those knocked out alone among them.
        alone: by head, its damage alone on some items, in nats.

    Returns:
        ``[n_heads]`` nats.
    """
    single = np.repeat(list(alone), [len(damage) for damage in alone.values()]).astype(np.int64)
    rest = effects.copy()
    rest[heads] = 0.0
    columns = np.concatenate([arrays.masks[:, heads].toarray(), single[:, None] == heads])
    columns = np.column_stack([columns, np.repeat([1.0, 0.0], [len(arrays.damage), len(single)])])
    target = np.concatenate([arrays.damage - arrays.masks @ rest, *alone.values()])
    relative = _relative_variance(alone)
    precision = np.append(np.full(len(heads), 1 / _PRIOR), 1e-9)  # the intercept is free
    fitted = effects.copy()
    for _ in range(_PASSES):
        weighted = columns / _variances(arrays, fitted, single, relative)[:, None]
        solution = np.linalg.solve(columns.T @ weighted + np.diag(precision), weighted.T @ target)
        fitted[heads] = solution[:-1]
    return fitted


def _relative_variance(alone: Mapping[int, NDArray[np.float64]]) -> float:
    """Variance of a head's damage over items, relative to the square of its mean; pooled over heads."""
    repeated = [damage for damage in alone.values() if len(damage) > 1]
    square = sum(float(damage.mean()) ** 2 for damage in repeated)
    if square < 1e-3:
        return _RELATIVE
    return float(np.clip(sum(float(damage.var(ddof=1)) for damage in repeated) / square, 0.05, 2.0))


def _variances(
    arrays: TaskArrays, effects: NDArray[np.float64], single: NDArray[np.int64], relative: float
) -> NDArray[np.float64]:
    left = np.var(arrays.damage - arrays.masks @ effects)
    varied = relative * (arrays.masks @ effects**2)
    masked = max(float(left - varied.mean()), 0.25 * float(left), 1e-3) + varied
    return np.concatenate([masked, _NOISE + relative * effects[single] ** 2])
