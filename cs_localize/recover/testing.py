"""Tests of single heads: does a head, knocked out alone, hurt its task, and hurt it more than the controls?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import false_discovery_control, permutation_test

from cs_localize.errors import SolverError, UsageError
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover.specificity import controls_by_row

Correction = Literal["bh", "holm"]

_FEWEST_ITEMS = 2
_BATCH = 500  # rearrangements at a time, to bound the memory
_TINY = 1e-9  # nats; keeps a ratio finite where two samples do not vary at all


@dataclass(frozen=True)
class SingleHeadTests:
    """Tests of candidates, one entry each, task by task in the order of the table and then as they were given.

    Attributes:
        task: ``[candidates]`` int, the task, as the table numbers them.
        head: ``[candidates]`` int, position of the head.
        damage: ``[candidates]`` mean damage to the task, in nats an item.
        control_damage: ``[candidates]`` mean damage to the controls, in nats an item; NaN where a task has none.
        p_effect: ``[candidates]`` p-values of the damage to the task.
        p_specific: ``[candidates]`` p-values of the excess over the controls; NaN where a task has none.
        p: ``[candidates]`` the larger of the two.
    """

    task: NDArray[np.int64]
    head: NDArray[np.int64]
    damage: NDArray[np.float64]
    control_damage: NDArray[np.float64]
    p_effect: NDArray[np.float64]
    p_specific: NDArray[np.float64]
    p: NDArray[np.float64]

    def adjusted(self, correction: Correction = "bh") -> NDArray[np.float64]:
        """P-values adjusted for all candidates of all tasks, ``[candidates]``.

        Args:
            correction: ``bh``: keeping those of at most q bounds the expected share of false ones among the kept by q
                (Benjamini and Hochberg, 1995). ``holm``: it bounds the chance of any false one.
        """
        return holm(self.p) if correction == "holm" else np.asarray(false_discovery_control(self.p, method="bh"))


def single_head_tests(
    table: MeasurementTable,
    candidates: Mapping[str, Sequence[int]],
    relatives: Mapping[str, Collection[str]],
    rng: np.random.Generator,
    least_effect: float = 0.1,
    floor: float = 6.0,
    rearrangements: int = 9_999,
) -> SingleHeadTests:
    r"""Tests every candidate on outcomes under its knockout alone.

    With :math:`D_{th}` the damage to an item of task t without head h, over the items that the capability could have
    been asked with, the null hypothesis of a candidate is

    .. math:: E[D_{th}] \le \delta \quad\text{or}\quad E[D_{th}] \le E[D_{ch}]

    where :math:`\delta` is the smallest effect of interest and c an item of the controls, each control weighing as many
    items as it was asked. Both parts must be rejected, so the p-value is the larger of the two (intersection-union
    test; Berger, 1982), which needs no correction for being two.

    - The first part by flipping signs of the damage less :math:`\delta`: exact where that is symmetric under the null,
      and conservative where damage is skewed to the right, as it is if an effect multiplies what an item brings. At
      two items it cannot fall below 1/4, at n below :math:`2^{-n}`.
    - The second by dealing the items of task and controls out anew, with Welch's ratio as the statistic: exact where
      damage is distributed alike on both, as that of a universal head is, and right for many items wherever the means
      are equal (Janssen, 1997). Welch's t itself rejects too often where the items of the controls are few.

    Assumed: the items are a random sample of the capability, and the candidates were not chosen by these outcomes.
    Where they were chosen on the same items under other masks, the noise of the measurement is new and the items are
    not: a head that happens to hurt these items more than others of their kind is chosen more readily. The correction
    of Benjamini and Hochberg is proven for p-values that are independent or positively dependent; those of one head for
    two tasks, each the control of the other, are neither. ``benchmarks/error_control.py`` shows what all this amounts
    to. A head that acts only once another is gone does nothing alone and fails.

    Args:
        table: outcomes, a single head knocked out in each; none may have had a say in the choice of the candidates.
        candidates: by task, positions of the heads to test for it; other heads that were measured are passed over.
        relatives: by task, the tasks too close to it to be its controls.
        rng: source of the rearrangements.
        least_effect: smallest mean damage of interest, in nats an item.
        floor: cap on the damage to one item, in nats.
        rearrangements: random ones behind a p-value, which is at least one in one more; all of them if they are fewer.

    Raises:
        UsageError: if there is no candidate, one is given twice, a row knocks out none or several heads, a candidate
            was measured on fewer than two items of its task or of its controls, or an option is out of range.
        SolverError: if a score is not finite.
    """
    _check(table, candidates, least_effect, rearrangements)
    damage = _damage_by_item(table, floor)
    controls = controls_by_row(table.tasks, relatives)
    pairs = [(table.tasks.index(task), head) for task in table.tasks for head in candidates.get(task, ())]
    own = [_sample(damage, [task], head, table) for task, head in pairs]
    others = [_sample(damage, controls[task], head, table) if controls[task] else np.empty(0) for task, head in pairs]
    _check_sizes(table, pairs, own, others, controls)
    p_effect = _grouped(
        [(sample - least_effect,) for sample in own],
        lambda stacked: _rearranged(stacked, _mean, "samples", rearrangements, rng),
    )
    specific = np.array([len(other) > 0 for other in others])
    p_specific = np.full(len(pairs), np.nan)
    p_specific[specific] = _grouped(
        [(sample, other) for sample, other in zip(own, others, strict=True) if len(other)],
        lambda stacked: _rearranged(stacked, _welch, "independent", rearrangements, rng),
    )
    return SingleHeadTests(
        task=np.array([task for task, _ in pairs]),
        head=np.array([head for _, head in pairs]),
        damage=np.array([sample.mean() for sample in own]),
        control_damage=np.array([other.mean() if len(other) else np.nan for other in others]),
        p_effect=p_effect,
        p_specific=p_specific,
        p=np.fmax(p_effect, p_specific),
    )


def holm(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Holm's step-down correction of a family of p-values (Holm, 1979).

    Of m values in increasing order, counted from 0, the i-th becomes the largest ``(m - j) p_j`` of all ``j <= i``, at
    most 1.

    Args:
        p: ``[m]`` p-values in any order.

    Returns:
        ``[m]`` corrected values in the same order.

    Raises:
        UsageError: if there are none, or one is not a p-value.
    """
    p = np.asarray(p, dtype=np.float64)
    if p.ndim != 1 or not len(p) or not np.all((p >= 0) & (p <= 1)):
        raise UsageError("Holm's correction needs at least one p-value, all of them from 0 to 1")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(stepped, 1.0)
    return corrected


def _check(
    table: MeasurementTable, candidates: Mapping[str, Sequence[int]], least_effect: float, rearrangements: int
) -> None:
    unknown = sorted(set(candidates) - set(table.tasks))
    if unknown:
        raise UsageError(f"task '{unknown[0]}' has candidates and is not in the table; measure them on it")
    if not any(len(heads) for heads in candidates.values()):
        raise UsageError("there is no candidate to test; give at least one head of one task")
    twice = sorted(task for task, heads in candidates.items() if len(set(heads)) < len(heads))
    if twice:
        raise UsageError(f"a candidate of task '{twice[0]}' is given twice; it would count as two tests")
    if not 0 <= least_effect < np.inf or rearrangements < 1:
        raise UsageError(
            f"least_effect is {least_effect} and there are {rearrangements} rearrangements; give a least effect of 0 "
            "nats or more and at least one rearrangement"
        )
    several = int(np.sum(table.masks.sum(axis=1) != 1))
    if several:
        raise UsageError(f"{several} of {len(table)} rows do not knock out exactly one head; test single heads only")
    bad = int(np.sum(~np.isfinite(table.score) | ~np.isfinite(table.baseline)))
    if bad:
        raise SolverError(f"{bad} of {len(table)} outcomes of single heads have no finite score; measure again")


def _damage_by_item(table: MeasurementTable, floor: float) -> dict[tuple[int, int], NDArray[np.float64]]:
    """By task and head the damage to every item asked, repeated requests averaged, in nats."""
    heads = table.masks.argmax(axis=1)
    cells, number = np.unique(np.stack([table.task, heads, table.item], axis=1), axis=0, return_inverse=True)
    number = number.reshape(-1)
    means = np.bincount(number, weights=table.damage(floor)) / np.bincount(number)
    starts = np.flatnonzero(np.any(np.diff(cells[:, :2], axis=0), axis=1)) + 1
    groups = zip(np.split(cells[:, :2], starts), np.split(means, starts), strict=True)
    return {(int(cell[0, 0]), int(cell[0, 1])): values for cell, values in groups if len(values)}


def _sample(
    damage: Mapping[tuple[int, int], NDArray[np.float64]], tasks: Sequence[int], head: int, table: MeasurementTable
) -> NDArray[np.float64]:
    if not 0 <= head < table.shape.n_heads:
        raise UsageError(f"there is no head {head}: the model has {table.shape.n_heads}, counted from 0")
    return np.concatenate([np.empty(0), *(damage.get((task, head), np.empty(0)) for task in tasks)])


def _check_sizes(
    table: MeasurementTable,
    pairs: Sequence[tuple[int, int]],
    own: Sequence[NDArray[np.float64]],
    others: Sequence[NDArray[np.float64]],
    controls: Sequence[Sequence[int]],
) -> None:
    for (task, head), sample, other in zip(pairs, own, others, strict=True):
        for items, of in ((len(sample), "its task"), (len(other) if controls[task] else _FEWEST_ITEMS, "its controls")):
            if items < _FEWEST_ITEMS:
                raise UsageError(
                    f"{table.shape.head(head)}, a candidate of '{table.tasks[task]}', was measured alone on {items} "
                    f"items of {of}; measure it on at least {_FEWEST_ITEMS}"
                )


def _grouped(
    samples: Sequence[tuple[NDArray[np.float64], ...]],
    test: Callable[[tuple[NDArray[np.float64], ...]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Applies a test to the samples of many candidates, those of equal sizes stacked and rearranged together."""
    sizes = [tuple(map(len, parts)) for parts in samples]
    p = np.empty(len(samples))
    for size in sorted(set(sizes)):
        rows = [row for row, other in enumerate(sizes) if other == size]
        p[rows] = test(tuple(np.stack(parts) for parts in zip(*(samples[row] for row in rows), strict=True)))
    return p


def _rearranged(
    stacked: tuple[NDArray[np.float64], ...],
    statistic: Callable[..., NDArray[np.float64]],
    kind: Literal["samples", "independent"],
    rearrangements: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """One-sided p-values of ``[candidates, items]`` samples."""
    result: Any = permutation_test(
        stacked,
        statistic,
        permutation_type=kind,
        n_resamples=rearrangements,
        batch=_BATCH,
        alternative="greater",
        axis=1,
        random_state=rng,
    )
    return np.asarray(result.pvalue)


def _mean(sample: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    return np.asarray(sample.mean(axis=axis))


def _welch(sample: NDArray[np.float64], other: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    squares = [part.var(axis=axis, ddof=1) / part.shape[axis] for part in (sample, other)]
    return np.asarray((sample.mean(axis=axis) - other.mean(axis=axis)) / (np.sqrt(squares[0] + squares[1]) + _TINY))
