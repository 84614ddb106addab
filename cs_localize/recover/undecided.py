"""Which heads more outcomes could still bring among the first, or out of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 200
_FEWEST_ITEMS = 6
"""On fewer items a bootstrap tells too little of their spread to call anything decided."""


def undecided_heads(
    damage: NDArray[np.float64],
    scores: NDArray[np.float64],
    spread: float,
    limit: int,
    confidence: float,
    rng: np.random.Generator,
) -> NDArray[np.bool_]:
    """Heads of which it is open whether they belong among the first ``limit``, or come first.

    Items are drawn again with replacement, the same ones for all heads. Open is what has a chance between
    ``1 - confidence`` and ``confidence`` over the resamples; on fewer than six items all is open, and so it is
    where no head differs from another. The deviations are
    enlarged by the root of n / (n - 1), for the bootstrap's own are too small by that. What the heads do to controls
    is taken as given.

    Args:
        damage: ``[heads, items]`` damage of each head alone, in nats.
        scores: ``[heads]`` specificity, from the mean of that damage.
        spread: nats in one unit of the scores.
        limit: how many heads are looked for.
        confidence: above 0.5 and below 1.
        rng: source of the resamples.

    Returns:
        ``[heads]`` bool.
    """
    n_heads, n_items = damage.shape
    if n_items < _FEWEST_ITEMS or not spread:
        return np.ones(n_heads, dtype=bool)
    drawn = damage[:, rng.integers(n_items, size=(_RESAMPLES, n_items))].mean(axis=2)
    enlarged = (n_items / (n_items - 1)) ** 0.5 / spread
    order = np.argsort(-(scores[:, None] + (drawn - damage.mean(axis=1, keepdims=True)) * enlarged), axis=0)
    places = np.argsort(order, axis=0)
    chances = np.stack([(places < limit).mean(axis=1), (places == 0).mean(axis=1)])
    return np.asarray(((chances > 1 - confidence) & (chances < confidence)).any(axis=0))
