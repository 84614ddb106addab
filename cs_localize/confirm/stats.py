"""Intervals and tests for paired right-or-wrong answers. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError

Flags = NDArray[np.bool_]
Pair = tuple[Flags, Flags]

_TAILS = (0.025, 0.975)


def paired_bootstrap(baseline: Flags, ablated: Flags, draws: int, rng: np.random.Generator) -> tuple[float, float]:
    """95% interval of the drop in accuracy: mean of ``baseline - ablated`` over items.

    The percentile bootstrap over items, which keeps the two answers to an item together (Efron and Tibshirani, "An
    Introduction to the Bootstrap", 1993, chapters 13 and 16). If no two items differ in what happened to them, the
    interval has no width.

    Args:
        baseline: ``[n]`` bool, answered correctly without the ablation.
        ablated: ``[n]`` bool, the same items under the ablation.
        draws: resamples.
        rng: source of the resamples.

    Raises:
        UsageError: if there are no items, no draws, or the two differ in length.
    """
    return _interval(_resampled_drops(baseline, ablated, draws, rng))


def contrast(
    target: Pair, controls: Sequence[Pair], draws: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Drop of the target minus the mean drop of its controls, with its 95% interval.

    Items are resampled within each task, independently of the other tasks; the two answers to an item stay together.
    Percentile intervals as in ``paired_bootstrap``.

    Args:
        target: baseline and ablated flags of the target, each ``[n]`` bool.
        controls: the same of every control; controls weigh equally, however many items they have.
        draws: resamples.
        rng: source of the resamples.

    Returns:
        The contrast and both ends of its interval, in shares of 1.

    Raises:
        UsageError: if there are no controls, or as ``paired_bootstrap`` does.
    """
    if not controls:
        raise UsageError("a contrast needs at least one control task; add one to the study's tasks or controls")
    resampled = _resampled_drops(*target, draws, rng)
    resampled = resampled - np.mean([_resampled_drops(*control, draws, rng) for control in controls], axis=0)
    value = mean_drop(*target) - float(np.mean([mean_drop(*control) for control in controls]))
    return (value, *_interval(resampled))


def mean_drop(baseline: Flags, ablated: Flags) -> float:
    """Accuracy lost: mean of ``baseline - ablated`` over items.

    Raises:
        UsageError: if there are no items or the two differ in length.
    """
    _check_pair(baseline, ablated)
    return float(np.mean(baseline) - np.mean(ablated))


def share_left(
    baseline: NDArray[np.int64], ablated: NDArray[np.int64], draws: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Total count under an ablation as a share of the total without it, with its 95% interval.

    Items are resampled as in ``paired_bootstrap``; resamples in which nothing is counted without the ablation have no
    share and are passed over.

    Args:
        baseline: ``[n]`` int, what was counted in each answer without the ablation, something in all.
        ablated: ``[n]`` int, the same items under the ablation.
        draws: resamples.
        rng: source of the resamples.

    Raises:
        UsageError: if nothing was counted without the ablation.
    """
    if not baseline.sum():
        raise UsageError("nothing was counted without an ablation, so there is no share of it; ask for more items")
    picked = rng.integers(len(baseline), size=(draws, len(baseline)))
    before, after = baseline[picked].sum(axis=1), ablated[picked].sum(axis=1)
    some = before > 0
    return (float(ablated.sum() / baseline.sum()), *_interval(after[some] / before[some]))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95% of some values, by linear interpolation between them.

    Raises:
        UsageError: if there are none.
    """
    if not values:
        raise UsageError("no values to take an interval of")
    return _interval(np.asarray(values, dtype=np.float64))


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95% score interval of a share (Wilson, 1927, "Probable inference, the law of succession").

    With ``p = successes / n`` and ``z = 1.96``, its centre is ``(p + z^2 / 2n) / (1 + z^2 / n)`` and its half-width
    ``z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)``.

    Raises:
        UsageError: if ``n`` is 0 or there are more successes than ``n``.
    """
    if n < 1 or not 0 <= successes <= n:
        raise UsageError(f"{successes} of {n} items is not a share; at least one item is needed")
    z = NormalDist().inv_cdf(_TAILS[1])
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The ends touch 0 and 1 exactly where nothing or everything succeeded; rounding must not move them.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def mcnemar_exact(b01: int, b10: int) -> float:
    """Two-sided exact p-value of McNemar's test (McNemar, 1947): the discordant items are tosses of a fair coin.

    ``p = min(1, 2 P(X <= min(b01, b10)))`` with ``X ~ Binomial(b01 + b10, 1/2)``; 1 if no item is discordant.

    Args:
        b01: items wrong in the baseline and right under the ablation.
        b10: items right in the baseline and wrong under the ablation.

    Raises:
        UsageError: if a count is negative.
    """
    if min(b01, b10) < 0:
        raise UsageError(f"counts of items cannot be negative: {b01}, {b10}")
    n = b01 + b10
    tail = sum(math.comb(n, k) for k in range(min(b01, b10) + 1))
    return min(1.0, 2 * tail / (1 << n))


def _resampled_drops(baseline: Flags, ablated: Flags, draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Mean drop of every resample of the items, ``[draws]``."""
    _check_pair(baseline, ablated)
    if draws < 1:
        raise UsageError(f"{draws} resamples asked for; ask for at least 1")
    n = len(baseline)
    lost = int(np.sum(baseline & ~ablated))
    gained = int(np.sum(~baseline & ablated))
    # Items count only as lost, gained or unchanged, so a resample is a multinomial draw of these three.
    counts = rng.multinomial(n, [lost / n, gained / n, (n - lost - gained) / n], size=draws)
    return np.asarray((counts[:, 0] - counts[:, 1]) / n, dtype=np.float64)


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(values, _TAILS)
    return float(low), float(high)


def _check_pair(baseline: Flags, ablated: Flags) -> None:
    if len(baseline) != len(ablated):
        raise UsageError(f"{len(baseline)} baseline answers cannot be paired with {len(ablated)} ablated ones")
    if not len(baseline):
        raise UsageError("no items to compare; ask for at least one held-out item")
