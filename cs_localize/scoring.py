"""Does the score that a search reads go with the metric that confirms? Both, on the same items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import spearmanr

from cs_localize.findings import Scoring
from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Measurer, Mode
from cs_localize.outcomes import Item
from cs_localize.tasks import Capability

_MODES: tuple[Mode, Mode] = ("score", "generate")


def scoring_of(
    tasks: Mapping[str, Capability],
    items: Mapping[str, Sequence[Item]],
    named: Mapping[str, Sequence[Head]],
    measurer: Measurer,
) -> dict[str, Scoring]:
    """Score and metric of every task, on some items unablated and with the task's named heads zeroed.

    Args:
        tasks: tasks by name.
        items: the sample, by task.
        named: the named heads, by task.
        measurer: who answers; what the naming has measured already comes from the ledger.

    Raises:
        MeasurementError: if an outcome cannot be measured.
    """
    cells = {
        task: [(item, ablation) for ablation in dict.fromkeys((Ablation(), Ablation.of(named[task]))) for item in asked]
        for task, asked in items.items()
    }
    requests = {
        task: [[measurer.request(*cell, mode) for cell in pairs] for mode in _MODES] for task, pairs in cells.items()
    }
    asked = [request for modes in requests.values() for mode in modes for request in mode]
    outcomes = iter(measurer.measure(asked, "scoring"))
    found = {}
    for task, modes in requests.items():
        scores, right = [next(outcomes).score for _ in modes[0]], [next(outcomes).correct for _ in modes[1]]
        found[task] = Scoring(
            score=tasks[task].score,
            metric=tasks[task].metric,
            sequences=float(np.mean([len(item.choices) or 1 for item in items[task]])),
            correlation=_rank_correlation(scores, right),
            sample=len(scores),
        )
    return found


def _rank_correlation(scores: Sequence[float], right: Sequence[bool]) -> float | None:
    """Spearman's; None where all scores or all answers are the same."""
    if len(set(scores)) < 2 or len(set(right)) < 2:
        return None
    return float(spearmanr(scores, right).statistic)
