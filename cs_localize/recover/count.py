"""Which candidates are named: taken in order of specificity, each on the damage it adds to those kept before."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError


def adds_specific_damage(target: NDArray[np.float64], controls: NDArray[np.float64], ratio: float = 3.0) -> bool:
    """Whether a head, zeroed on top of others, adds damage to its task and far less to the controls.

    The mean damage it adds to the target must exceed its standard error, and must not fall short of ``ratio`` times
    the mean damage it adds to the controls by more than the standard error of that difference. Without controls the
    first condition is the only one.

    Args:
        target: ``[target items]`` damage added to each item of the task, in any unit.
        controls: ``[control items]`` damage added to each item of the controls, in the same unit; may be empty.
        ratio: how many times the controls' damage the target's must be.

    Raises:
        UsageError: if there is no target item, a value is not finite, or the ratio is negative.
    """
    if not len(target) or not (np.all(np.isfinite(target)) and np.all(np.isfinite(controls))):
        raise UsageError("added damage must be finite, on at least one item of the target")
    if not 0 <= ratio < np.inf:
        raise UsageError(f"ratio is {ratio}; give a number of at least 0")
    gain, error = float(target.mean()), _standard_error(target)
    if gain <= error:
        return False
    if not len(controls):
        return True
    excess = gain - ratio * max(float(controls.mean()), 0.0)
    return excess > -float(np.hypot(error, ratio * _standard_error(controls)))


def _standard_error(values: NDArray[np.float64]) -> float:
    """Of the mean; a single value tells nothing of its error, so the value itself stands in."""
    if len(values) == 1:
        return abs(float(values[0]))
    return float(values.std(ddof=1)) / math.sqrt(len(values))
