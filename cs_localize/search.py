"""The search: a method ranks the heads, and the first that hold are named, on search items alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import StudyConfig
from cs_localize.confirm.answers import controls_of
from cs_localize.design import Design
from cs_localize.findings import RankedHead, TaskFinding
from cs_localize.heads import Head, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods import Localization, Method, damage_cap, measure_baseline, measure_designs
from cs_localize.naming import Naming, name_heads, start_naming
from cs_localize.outcomes import Item, MeasurementTable, Outcome
from cs_localize.recover import (
    EffectIntervals,
    SpecificityResult,
    bootstrap_intervals,
    fit_above_chance,
    held_back_fit,
    mean_interval,
    selection_frequencies,
    specificity,
    universal_heads,
)
from cs_localize.seeds import stream
from cs_localize.selection import Selection, TestedHead, check_items, select_candidates

_FLOOR = 8.0
"""Cap on the damage of one request in tests of single heads, in nats, for a method that has none of its own."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found and what it rests on.

    Attributes:
        findings: by task.
        candidates: by task, the named heads, then the others among the first of the ranking.
        universal: heads that hurt nearly every task, worst first; none where the method estimates no effects.
        localization: what the method found.
    """

    findings: dict[str, TaskFinding]
    candidates: dict[str, tuple[Head, ...]]
    universal: tuple[Head, ...]
    localization: Localization

    @property
    def named(self) -> dict[str, tuple[Head, ...]]:
        """The named heads by task."""
        return {task: tuple(map(Head.parse, finding.named)) for task, finding in self.findings.items()}

    @property
    def designs(self) -> dict[str, Design]:
        """By task, every masked request of the sparse method; empty for the others."""
        return self.localization.sparse.requests if self.localization.sparse else {}

    @property
    def fragile(self) -> tuple[int, ...]:
        """Layers that the design of the sparse method spared."""
        return self.localization.sparse.fragile if self.localization.sparse else ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know."""
        return self.localization.sparse.warnings if self.localization.sparse else ()


@dataclass(frozen=True)
class Search:
    """A search over all tasks of a study at once.

    Attributes:
        config: the study.
        shape: the model's geometry.
        items: search items by task, in the study's order.
        relatives: by task, the tasks that do not control it.
        measurer: asks the model.
        method: ranks the heads.
        note: is told the heads that are named so far.
    """

    config: StudyConfig
    shape: ModelShape
    items: Mapping[str, Sequence[Item]]
    relatives: Mapping[str, frozenset[str]]
    measurer: Measurer
    method: Method
    note: Callable[[str], None] = lambda best: None

    def run(self) -> SearchResult:
        """Measures, ranks and names.

        Raises:
            UsageError: if the study's numbers make no design, or an option does not fit the items or the model.
            MeasurementError: if an outcome cannot be measured.
            SolverError: if the solver reaches no solution.
        """
        check_items({task: len(items) for task, items in self.items.items()}, self.config.select)
        found = self.method.localize(self.measurer, self.shape, self.items, self.relatives)
        tasks, effects, select = tuple(self.items), found.effects, self.config.select
        first = max(select.candidates, self.config.confirm.curve)
        candidates = {task: heads[:first] for task, heads in found.ranking.items()}
        tests = _Tests(self, found)
        selection = select_candidates(
            self.shape,
            found.sparse,
            candidates,
            {task: len(items) for task, items in self.items.items()},
            self.relatives,
            select,
            _FLOOR if (cap := damage_cap(self.method)) is None else cap,
            self.config.seed,
            tests.measure,
        )
        namings = {
            task: start_naming(
                task, selection.offered[task], self.items, controls_of(task, self.items, self.relatives), select
            )
            for task in tasks
        }
        name_heads(list(namings.values()), select, self.measurer, self.note)
        evidence = self._evidence(found, candidates)
        contrast = specificity(effects, tasks, self.relatives) if effects is not None else None
        findings = {
            task: TaskFinding(
                named=[str(head) for head in namings[task].kept],
                reason=selection.reason(
                    task, namings[task].reason(select), select.error_rate, evidence.fit_p.get(task)
                ),
                search_curve=namings[task].curve,
                items=len(self.items[task]),
                ranking=self._ranked(found, contrast, task, evidence, selection.tested[task]),
                fit=evidence.fit.get(task),
                fit_p=evidence.fit_p.get(task),
                **_ground(found, task, tests.baseline[task]),
                **_spending(found, tests.baseline[task], selection, namings[task]),
            )
            for task in tasks
        }
        return SearchResult(
            findings,
            {task: _named_first(candidates[task], namings[task].kept) for task in tasks},
            tuple(self.shape.head(int(i)) for i in universal_heads(effects)) if effects is not None else (),
            found,
        )

    def _evidence(self, found: Localization, candidates: Mapping[str, Sequence[Head]]) -> _Evidence:
        """What resampling and permuting the outcomes of a fit tells; nothing without a fit."""
        if found.sparse is None:
            return _Evidence()
        table, solver, seed, select = found.sparse.table, found.sparse.solver, self.config.seed, self.config.select
        fit = held_back_fit(table, solver, stream(seed, "fit"))
        fit_p: dict[str, float] = {}
        if select.permutations:
            p = fit_above_chance(table, solver, stream(seed, "fit"), select.permutations)
            fit_p = dict(zip(table.tasks, p.tolist(), strict=True))
        frequency = None
        if select.resamples:
            frequency = selection_frequencies(table, solver, select.resamples, stream(seed, "stability"))
        intervals = {}
        for task, heads in candidates.items():
            positions = np.array([self.shape.index(head) for head in heads])
            rng = stream(seed, "bootstrap", task)
            intervals[task] = bootstrap_intervals(table, solver, positions, select.bootstrap, rng)
        return _Evidence(intervals, dict(zip(table.tasks, fit.tolist(), strict=True)), fit_p, frequency)

    def _ranked(
        self,
        found: Localization,
        contrast: SpecificityResult | None,
        task: str,
        evidence: _Evidence,
        tested: Mapping[Head, TestedHead],
    ) -> list[RankedHead]:
        tasks = tuple(self.items)
        number, intervals, frequency = tasks.index(task), evidence.intervals.get(task), evidence.frequency
        known = {int(head): column for column, head in enumerate(intervals.heads)} if intervals else {}
        narrowed = found.sparse.narrowed if found.sparse else None
        alone = narrowed.damage[task] if narrowed else {}
        ranked = []
        for head in found.ranking[task]:
            test = tested.get(head)
            sure = {"p": test.p if test else None, "q": test.q if test else None}
            if found.effects is None or contrast is None:
                ranked.append(RankedHead(head=str(head), **sure))
                continue
            position = self.shape.index(head)
            column = known.get(position)
            effect, bounds = float(found.effects[number, position]), None
            if intervals and column is not None and np.isfinite(intervals.low[number, column]):
                # The solver's estimates are shrunk: right for ranking, too small to quote.
                effect = float(intervals.effect[number, column])
                bounds = (float(intervals.low[number, column]), float(intervals.high[number, column]))
            if head in alone:
                effect, *ends = mean_interval(alone[head])
                bounds = (ends[0], ends[1])
            control = int(contrast.control[number, position])
            ranked.append(
                RankedHead(
                    head=str(head),
                    effect=effect,
                    interval=bounds,
                    specificity=float(contrast.strongest[number, position]),
                    specificity_mean=float(contrast.mean[number, position]),
                    strongest_control=tasks[control] if control >= 0 else None,
                    frequency=None if frequency is None else float(frequency[number, position]),
                    **sure,
                )
            )
        return ranked


@dataclass(frozen=True, eq=False)
class _Evidence:
    """How far a sparse fit can be trusted; empty without one.

    Attributes:
        intervals: by task, the effects of its candidates on every task.
        fit: by task, the correlation on masks held back.
        fit_p: by task, its p-value against shuffled masks; empty where none is wished.
        frequency: ``[n_tasks, n_heads]`` share of resamples that select a head; None where none are wished.
    """

    intervals: Mapping[str, EffectIntervals] = field(default_factory=dict)
    fit: Mapping[str, float] = field(default_factory=dict)
    fit_p: Mapping[str, float] = field(default_factory=dict)
    frequency: NDArray[np.float64] | None = None


class _Tests:
    """Measures candidates alone, with the unablated outcomes that takes.

    Attributes:
        baseline: by task, unablated outcomes: those of the method; of all search items once candidates were measured.
    """

    def __init__(self, search: Search, found: Localization) -> None:
        self.baseline: dict[str, Sequence[Outcome]] = dict(found.baseline)
        self._search = search

    def measure(self, alone: Mapping[str, Design], stage: str) -> MeasurementTable:
        """The outcomes of requests that knock out a single head each."""
        search = self._search
        if any(len(self.baseline[task]) < len(items) for task, items in search.items.items()):
            self.baseline = dict(measure_baseline(search.measurer, search.items))
        return measure_designs(search.measurer, search.shape, search.items, alone, self.baseline, stage)


def _spending(found: Localization, baseline: Sequence[Outcome], selection: Selection, naming: Naming) -> dict[str, int]:
    task = naming.task
    added = sum(outcome.tokens for outcome in baseline) - sum(outcome.tokens for outcome in found.baseline[task])
    return {
        "requests": found.requests[task] + selection.requests[task] + naming.requests,
        "baseline_requests": len(baseline) + naming.baseline_requests,
        "tokens": found.tokens[task] + added + selection.tokens[task] + naming.tokens,
    }


def _ground(found: Localization, task: str, baseline: Sequence[Outcome]) -> dict[str, float | None]:
    """What the ranking of a task stands on, as far as the method can tell."""
    covered = found.sparse.coverage[task] if found.sparse else None
    return {
        "baseline_score": float(np.mean([outcome.score for outcome in baseline])) if baseline else None,
        "baseline_accuracy": float(np.mean([outcome.correct for outcome in baseline])) if baseline else None,
        "tests_a_head": covered.tests_min if covered else None,
        "overlap": covered.overlap if covered else None,
        "coherence": covered.coherence if covered else None,
    }


def _named_first(candidates: Sequence[Head], named: Sequence[Head]) -> tuple[Head, ...]:
    return (*named, *(head for head in candidates if head not in named))
