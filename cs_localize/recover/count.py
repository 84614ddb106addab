"""Which candidates are named: taken in order of specificity, each on the damage it adds to those kept before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError


def adds_specific_damage(target: NDArray[np.float64], controls: NDArray[np.float64], ratio: float = 3.0) -> bool:
    """Whether a head, zeroed on top of others, adds damage to its task and far less to the controls.

    It does where the mean damage it adds to the target exceeds its standard error, after ``ratio`` times the mean
    damage it adds to the controls is taken off. Without controls the damage to the target alone counts.

    Args:
        target: ``[target items]`` nats added to each item of the task.
        controls: ``[control items]`` nats added to each item of the controls; may be empty.
        ratio: how many times the controls' damage the target's must be.

    Raises:
        UsageError: if there is no target item, a value is not finite, or the ratio is negative.
    """
    if not len(target) or not (np.all(np.isfinite(target)) and np.all(np.isfinite(controls))):
        raise UsageError("added damage must be finite, on at least one item of the target")
    if not 0 <= ratio < np.inf:
        raise UsageError(f"ratio is {ratio}; give a number of at least 0")
    spread = float(target.std(ddof=1)) if len(target) > 1 else float(np.abs(target[0]))
    taken_off = ratio * max(float(controls.mean()), 0.0) if len(controls) else 0.0
    return bool(target.mean() - taken_off > spread / len(target) ** 0.5)
