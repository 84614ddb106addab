"""Does it hold: the named heads on items the search never saw, beside controls and random heads."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cs_localize.config import ConfirmConfig
from cs_localize.confirm.answers import BASELINE, Answers, Cell, ask, controls_of
from cs_localize.confirm.stats import Flags, contrast, mcnemar_exact, share_left, wilson
from cs_localize.errors import UsageError
from cs_localize.findings import ConfirmFile, CountShare, Drop, RandomHeads, TaskCounts
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.protocol import Measurer, Request
from cs_localize.outcomes import Item, Outcome
from cs_localize.recover import holm
from cs_localize.seeds import stream

log = logging.getLogger(__name__)

_UNIVERSAL = ""  # names the row of the universal heads; no task has an empty name


@dataclass(frozen=True)
class _Plan:
    """What is zeroed, and which tasks control which.

    Attributes:
        tasks: every task measured.
        controls: by task, those that control it.
        own: the named heads of every task that has some.
        universal: the universal heads, if there are any.
        curves: by task, the first k heads of ``ranking``, k = 0, 1, ….
        draws: by task in ``own``, random heads.
    """

    tasks: tuple[str, ...]
    controls: dict[str, list[str]]
    own: dict[str, Ablation]
    universal: Ablation | None
    curves: dict[str, list[Ablation]]
    draws: dict[str, list[tuple[Head, ...]]]

    def rows(self) -> list[tuple[str, Ablation]]:
        """Rows of the table whose p-values are corrected together: every task's heads, then the universal ones."""
        return [*self.own.items(), *([(_UNIVERSAL, self.universal)] if self.universal else [])]

    def cells(self, curve_on_controls: bool, random_on_controls: bool) -> Iterator[Cell]:
        """Everything to measure besides the baseline; one ablation's tasks come together."""
        for _, ablation in self.rows():
            yield from ((task, ablation) for task in self.tasks)
        for target, ablations in self.curves.items():
            for ablation in ablations:
                measured = (target, *self.controls[target]) if curve_on_controls else (target,)
                yield from ((task, ablation) for task in measured)
        for target, draws in self.draws.items():
            for heads in draws:
                measured = (target, *self.controls[target]) if random_on_controls else (target,)
                yield from ((task, Ablation.of(heads)) for task in measured)


def confirm_heads(
    measurer: Measurer,
    held_out: Mapping[str, Sequence[Item]],
    named: Mapping[str, Sequence[Head]],
    ranking: Mapping[str, Sequence[Head]],
    universal: Sequence[Head],
    relatives: Mapping[str, Collection[str]],
    shape: ModelShape,
    config: ConfirmConfig,
    seed: int,
    repeat: Callable[[Sequence[Request]], list[Outcome]],
) -> ConfirmFile:
    """Zeroes heads and generates answers to held-out items, graded by each task's own metric.

    For every task with named heads: all of them zeroed, every task measured (the matrix), and the target's drop set
    against its controls and against random heads. For every ranked task: a knockout curve. A task with nothing named
    has no row in the matrix, no contrast and no random heads. A task without controls has no contrast and an empty
    control curve. P-values are corrected over the matrix, with the universal heads as one more row of it.

    Args:
        measurer: who answers.
        held_out: items of every task and control.
        named: heads the search named, by task.
        ranking: the heads of the knockout curve in order, by task.
        universal: heads that hurt every task.
        relatives: by task, tasks that do not act as its control; one side's word is enough.
        shape: the model's geometry.
        config: how much to measure.
        seed: seed of random heads and resamples.
        repeat: answers requests anew although the ledger holds them; the baseline goes through it once more to measure
            noise.

    Raises:
        UsageError: if a task has no held-out items or a head does not exist.
    """
    plan = _plan(held_out, named, ranking, universal, relatives, shape, config, seed)
    answers = ask(measurer, held_out, plan.cells(config.curve_on == "all", config.random_on == "all"), "confirm")
    again = repeat([measurer.request(item, BASELINE, "generate") for items in held_out.values() for item in items])
    first = np.concatenate([answers.correct[task, BASELINE] for task in plan.tasks])
    table = _table(answers, plan, config.bootstrap, seed)
    return ConfirmFile(
        items={task: len(items) for task, items in held_out.items()},
        baseline={task: answers.accuracy(task) for task in plan.tasks},
        baseline_ci={
            task: wilson(int(np.sum(answers.correct[task, BASELINE])), len(held_out[task])) for task in plan.tasks
        },
        matrix={target: table[target] for target in plan.own},
        universal=table.get(_UNIVERSAL, {}),
        contrast=_contrasts(answers, plan, config.bootstrap, seed),
        random={
            target: _random_heads(answers, target, plan.controls[target], draws, config.random_on == "all")
            for target, draws in plan.draws.items()
        },
        curve={task: [answers.accuracy(task, ablation) for ablation in curve] for task, curve in plan.curves.items()},
        control_curve={
            task: [answers.mean_accuracy(plan.controls[task], a) for a in curve] if plan.controls[task] else []
            for task, curve in plan.curves.items()
            if config.curve_on == "all"
        },
        counts=_counts(answers, plan, config.bootstrap, seed),
        noise=float(np.mean(first != np.array([outcome.correct for outcome in again]))),
        requests=answers.requests + len(again),
        tokens=answers.tokens + sum(outcome.tokens for outcome in again),
    )


def random_heads(named: Sequence[Head], shape: ModelShape, rng: np.random.Generator) -> tuple[Head, ...]:
    """For every named head another one of its layer, none of them named and none twice.

    Where a layer has fewer other heads than named ones, all its other heads are taken.

    Args:
        named: the heads to stay clear of, without repeats.
        shape: the model's geometry.
        rng: source of the draw.

    Raises:
        UsageError: if the model lacks one of the heads.
    """
    for head in named:
        shape.check_head(head)
    drawn: list[Head] = []
    for layer, wanted in sorted(Counter(head.layer for head in named).items()):
        others = [Head(layer, h) for h in range(shape.heads) if Head(layer, h) not in named]
        picked = rng.choice(len(others), size=min(wanted, len(others)), replace=False)
        drawn.extend(others[i] for i in sorted(picked))
    return tuple(drawn)


def _plan(
    held_out: Mapping[str, Sequence[Item]],
    named: Mapping[str, Sequence[Head]],
    ranking: Mapping[str, Sequence[Head]],
    universal: Sequence[Head],
    relatives: Mapping[str, Collection[str]],
    shape: ModelShape,
    config: ConfirmConfig,
    seed: int,
) -> _Plan:
    missing = sorted({*named, *ranking} - set(held_out))
    if missing:
        raise UsageError(f"task '{missing[0]}' has heads but no held-out items; confirm it on items of its own")
    draws: dict[str, list[tuple[Head, ...]]] = {}
    for task, heads in named.items():
        if heads and config.random_draws:
            rng = stream(seed, "random heads", task)
            draws[task] = [random_heads(heads, shape, rng) for _ in range(config.random_draws)]
            if len(draws[task][0]) < len(heads):
                drawn = len(draws[task][0])
                log.warning("%s: too few other heads: a random draw has %d for %d named ones", task, drawn, len(heads))
    return _Plan(
        tasks=tuple(held_out),
        controls={task: controls_of(task, held_out, relatives) for task in held_out},
        own={task: Ablation.of(heads) for task, heads in named.items() if heads},
        universal=Ablation.of(universal) if universal else None,
        curves={
            task: [Ablation.of(heads[:k]) for k in range(min(config.curve, len(heads)) + 1)]
            for task, heads in ranking.items()
        },
        draws=draws,
    )


def _table(answers: Answers, plan: _Plan, bootstrap: int, seed: int) -> dict[str, dict[str, Drop]]:
    """Every task under every row of the plan."""
    cells = [(row, task, ablation) for row, ablation in plan.rows() for task in plan.tasks]
    if not cells:
        return {}
    p = np.array([_mcnemar(*answers.pair(task, ablation)) for _, task, ablation in cells])
    table: dict[str, dict[str, Drop]] = {}
    for (row, task, ablation), raw, corrected in zip(cells, p, holm(p), strict=True):
        table.setdefault(row, {})[task] = Drop(
            accuracy=answers.accuracy(task, ablation),
            drop=answers.drop(task, ablation),
            ci=answers.interval(task, ablation, bootstrap, seed),
            p=float(raw),
            p_holm=float(corrected),
        )
    return table


def _mcnemar(baseline: Flags, ablated: Flags) -> float:
    return mcnemar_exact(int(np.sum(~baseline & ablated)), int(np.sum(baseline & ~ablated)))


def _contrasts(answers: Answers, plan: _Plan, bootstrap: int, seed: int) -> dict[str, tuple[float, float, float]]:
    return {
        target: contrast(
            answers.pair(target, ablation),
            [answers.pair(task, ablation) for task in plan.controls[target]],
            bootstrap,
            stream(seed, "contrast", target),
        )
        for target, ablation in plan.own.items()
        if plan.controls[target]
    }


def _counts(answers: Answers, plan: _Plan, bootstrap: int, seed: int) -> dict[str, TaskCounts]:
    """What is left of every count, of tasks whose metric counts and finds something without an ablation."""
    found = {}
    for task in plan.tasks:
        before = answers.counts.get((task, BASELINE))
        if before is None or not before.sum():
            continue
        without = {}
        for target, ablation in plan.own.items():
            after = answers.counts[task, ablation]
            share, *ci = share_left(before, after, bootstrap, stream(seed, "count", ablation.key, task))
            without[target] = CountShare(count=int(after.sum()), share=share, ci=(ci[0], ci[1]))
        drawn = [answers.counts[task, Ablation.of(heads)].sum() for heads in plan.draws.get(task, ())]
        random = [float(total / before.sum()) for total in drawn]
        found[task] = TaskCounts(baseline=int(before.sum()), without=without, random=random)
    return found


def _random_heads(
    answers: Answers, target: str, controls: list[str], draws: list[tuple[Head, ...]], on_controls: bool
) -> RandomHeads:
    ablations = [Ablation.of(heads) for heads in draws]
    drops = [answers.drop(target, ablation) for ablation in ablations]
    return RandomHeads(
        mean_drop=float(np.mean(drops)),
        draws=drops,
        heads=[[str(head) for head in heads] for heads in draws],
        controls=[answers.mean_drop(controls, ablation) for ablation in ablations] if on_controls and controls else [],
    )
