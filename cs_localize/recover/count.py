"""How many heads to name."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError

_ERRORS = 2.0


def choose_count(damage_by_k: NDArray[np.float64], standard_error: float, share: float = 0.8, limit: int = 10) -> int:
    """The smallest number of heads that does most of the damage of all candidates together.

    Args:
        damage_by_k: ``[k_max + 1]`` mean damage in nats on search items with the first k candidates zeroed together,
            k = 0 up to all of them.
        standard_error: of the last entry, in nats.
        share: share of the last entry that must be reached.
        limit: most heads to name.

    Returns:
        k from 1 to ``limit``; 0 where the candidates' damage does not exceed twice its standard error, so that none of
        them can be shown to matter.

    Raises:
        UsageError: if there is no candidate, a value is not finite, or an argument is out of range.
    """
    if len(damage_by_k) < 2 or not np.all(np.isfinite(damage_by_k)):
        raise UsageError("the number of heads is chosen from finite damages at k = 0, 1, ...; measure at least k = 1")
    if not (0 < share <= 1 and limit >= 1 and 0 <= standard_error < np.inf):
        raise UsageError(f"share ({share}), limit ({limit}) or standard error ({standard_error}) is out of range")
    reached = damage_by_k[-1]
    if reached <= _ERRORS * standard_error:
        return 0
    smallest = int(np.argmax(damage_by_k[1:] >= share * reached)) + 1
    return min(smallest, limit)
