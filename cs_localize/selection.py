"""Between ranking and naming: which candidates may be named at all, with control of the errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import SelectConfig, SingleHeadConfig
from cs_localize.confirm.answers import controls_of
from cs_localize.design import Design
from cs_localize.errors import UsageError
from cs_localize.heads import Head, ModelShape
from cs_localize.methods import SparseFit
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import SingleHeadTests, knockoff_selection, single_head_tests
from cs_localize.seeds import stream

_STAGE = "testing"
_FEWEST_ITEMS = 2

Measure = Callable[[Mapping[str, Design], str], MeasurementTable]
"""Measures a design of every task; the second argument names the stage."""


@dataclass(frozen=True)
class TestedHead:
    """What the test of one candidate says.

    Attributes:
        p: its p-value.
        q: the same, adjusted for all candidates of all tasks.
    """

    p: float
    q: float


@dataclass(frozen=True)
class Selection:
    """Which candidates are offered to the naming.

    Attributes:
        offered: by task, most specific first.
        refused: by task, the others.
        why: what the refused ones lack, in words.
        tested: by task, the candidates that were tested.
        requests: by task, masked requests spent on it.
        tokens: by task, their tokens.
    """

    offered: dict[str, tuple[Head, ...]]
    refused: dict[str, tuple[Head, ...]]
    why: str
    tested: dict[str, dict[Head, TestedHead]]
    requests: dict[str, int]
    tokens: dict[str, int]

    def reason(self, task: str, naming: str, error_rate: float, fit_p: float | None) -> str:
        """Why these heads are named and no others, in one sentence.

        Args:
            task: the task.
            naming: why the naming kept the heads it did among those offered.
            error_rate: the study's.
            fit_p: p-value of the task's fit on held-back masks; None if there is none.
        """
        refused = " ".join(map(str, self.refused[task]))
        if not refused:
            return naming
        if self.offered[task]:
            return f"{naming}; {refused} not offered to the naming, {self.why}"
        reason = f"no localized heads: the first {len(self.refused[task])} of the ranking are passed over, {self.why}"
        if fit_p is not None and fit_p > error_rate:
            reason += f"; nor does the fit predict held-back masks better than one to shuffled masks (p {fit_p:.2g})"
        return reason


@dataclass(frozen=True)
class SingleHeadRequests:
    """The requests that test candidates.

    Attributes:
        designs: by task, requests that knock out a single head.
        charged: ``[requests]`` int in the order of the designs, the task that each is spent on: the one whose items it
            asks if the head is a candidate of it, else the first that it is a control of.
    """

    designs: dict[str, Design]
    charged: NDArray[np.int64]


def check_items(items: Mapping[str, int], select: SelectConfig) -> None:
    """Raises UsageError if a task has too few search items, counted by task, for what selects candidates."""
    few = [task for task, count in items.items() if count < _FEWEST_ITEMS]
    if few and select.by == "tests":
        raise UsageError(
            f"task '{few[0]}' has {items[few[0]]} search item and tests of single heads need {_FEWEST_ITEMS}; raise "
            "search_items, or set select.by to naming"
        )


def single_head_requests(
    shape: ModelShape,
    candidates: Mapping[str, Sequence[Head]],
    items: Mapping[str, int],
    relatives: Mapping[str, Collection[str]],
    tests: SingleHeadConfig,
) -> SingleHeadRequests:
    """Every candidate alone on the first items of its task and, a few of each, of its controls; none asked twice.

    Args:
        shape: the model's geometry.
        candidates: by task.
        items: search items by task, how many there are.
        relatives: by task, the tasks that do not control it.
        tests: how many items.
    """
    asked: dict[str, dict[tuple[int, int], int]] = {task: {} for task in candidates}

    def ask(spent_on: int, heads: Sequence[Head], task: str, count: int) -> None:
        for head in map(shape.index, heads):
            for item in range(min(count, items[task])):
                asked[task].setdefault((head, item), spent_on)

    for row, (task, heads) in enumerate(candidates.items()):
        ask(row, heads, task, tests.items)
    for row, (task, heads) in enumerate(candidates.items()):
        controls = controls_of(task, candidates, relatives)
        for control in controls:
            ask(row, heads, control, -(-tests.control_items // len(controls)))
    designs = {}
    for task, requests in asked.items():
        pairs = np.array(list(requests), dtype=np.int64).reshape(-1, 2)
        designs[task] = Design(np.arange(shape.n_heads) == pairs[:, :1], pairs[:, 1])
    return SingleHeadRequests(designs, np.array([row for requests in asked.values() for row in requests.values()]))


def select_candidates(
    shape: ModelShape,
    sparse: SparseFit | None,
    candidates: Mapping[str, Sequence[Head]],
    items: Mapping[str, int],
    relatives: Mapping[str, Collection[str]],
    select: SelectConfig,
    floor: float,
    seed: int,
    measure: Measure,
) -> Selection:
    """Passes over the candidates whose effect cannot be told from chance, by the study's rule.

    Args:
        shape: the model's geometry.
        sparse: the fit that ranked them, which knockoffs need; None if another method did.
        candidates: by task in the order of the study, most specific first; the first ``select.candidates`` count.
        items: search items by task, how many there are.
        relatives: by task, the tasks that do not control it.
        select: the rules.
        floor: cap on the damage of one request, in nats.
        seed: the study's seed.
        measure: measures candidates alone.

    Raises:
        UsageError: if there are no masks of the kind that knockoffs need.
        MeasurementError: if an outcome cannot be measured.
    """
    tried = {task: tuple(candidates[task][: select.candidates]) for task in candidates}
    if select.by == "tests":
        requests = single_head_requests(shape, tried, items, relatives, select.tests)
        alone = measure(requests.designs, _STAGE)
        positions = {task: [shape.index(head) for head in heads] for task, heads in tried.items()}
        least, rng = select.tests.least_effect, stream(seed, "tests")
        tests = single_head_tests(alone, positions, relatives, rng, least_effect=least, floor=floor)
        return _by_tests(tried, requests, alone, tests, select)
    none, nothing = dict[str, int].fromkeys(tried, 0), {task: dict[Head, TestedHead]() for task in tried}
    if select.by == "naming":
        return Selection(tried, dict.fromkeys(tried, ()), "", nothing, none, none)
    if sparse is None:
        raise UsageError("knockoffs need the masks of the method sparse; name it, or set select.by to tests")
    table = sparse.table
    drawn = table.take(np.concatenate([table.rows_of(task)[sparse.pilot :] for task in table.tasks]))
    selected = knockoff_selection(
        drawn, sparse.rates, select.error_rate, stream(seed, "knockoffs"), floor=floor
    ).selected
    passed = {
        task: {head for head in tried[task] if selected[row, shape.index(head)]} for row, task in enumerate(table.tasks)
    }
    why = f"for knockoffs do not select them at an error rate of {select.error_rate:g}"
    return Selection(*_split(tried, passed), why, nothing, none, none)


def _by_tests(
    tried: dict[str, tuple[Head, ...]],
    requests: SingleHeadRequests,
    alone: MeasurementTable,
    tests: SingleHeadTests,
    select: SelectConfig,
) -> Selection:
    """The candidates that pass their tests, on the outcomes of their requests."""
    tested: dict[str, dict[Head, TestedHead]] = {task: {} for task in tried}
    for task, head, p, q in zip(tests.task, tests.head, tests.p, tests.adjusted(select.tests.correction), strict=True):
        tested[alone.tasks[task]][alone.shape.head(int(head))] = TestedHead(float(p), float(q))
    passed = {
        task: {head for head, test in heads.items() if test.q <= select.error_rate} for task, heads in tested.items()
    }
    spent = [
        dict(zip(tried, np.bincount(requests.charged, weights, len(tried)).astype(int).tolist(), strict=True))
        for weights in (np.ones(len(alone)), alone.tokens)
    ]
    why = (
        f"for alone they are not shown to cost it {select.tests.least_effect:g} nats an item, and more than its "
        f"controls (q above {select.error_rate:g})"
    )
    return Selection(*_split(tried, passed), why, tested, *spent)


def _split(
    tried: Mapping[str, tuple[Head, ...]], passed: Mapping[str, Collection[Head]]
) -> tuple[dict[str, tuple[Head, ...]], dict[str, tuple[Head, ...]]]:
    """The candidates that passed, and the others, each in their order."""
    return (
        {task: tuple(head for head in heads if head in passed[task]) for task, heads in tried.items()},
        {task: tuple(head for head in heads if head not in passed[task]) for task, heads in tried.items()},
    )
