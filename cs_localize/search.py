"""The search: a method ranks the heads of every task, and the first that hold are named, on search items alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cs_localize.config import StudyConfig
from cs_localize.confirm.answers import controls_of
from cs_localize.design import Design
from cs_localize.findings import RankedHead, TaskFinding
from cs_localize.heads import Head, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods import Localization, Method
from cs_localize.naming import Naming, name_heads, start_naming
from cs_localize.outcomes import Item
from cs_localize.recover import (
    EffectIntervals,
    SpecificityResult,
    bootstrap_intervals,
    held_back_fit,
    specificity,
    universal_heads,
)
from cs_localize.seeds import stream


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
        return self.localization.sparse.designs if self.localization.sparse else {}

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
        found = self.method.localize(self.measurer, self.shape, self.items, self.relatives)
        tasks, effects = tuple(self.items), found.effects
        first = max(self.config.select.candidates, self.config.confirm.curve)
        candidates = {task: heads[:first] for task, heads in found.ranking.items()}
        namings = {
            task: start_naming(
                task, candidates[task], self.items, controls_of(task, self.items, self.relatives), self.config.select
            )
            for task in tasks
        }
        name_heads(list(namings.values()), self.config.select, self.measurer, self.note)
        fits = self._fits(found)
        contrast = specificity(effects, tasks, self.relatives) if effects is not None else None
        findings = {
            task: TaskFinding(
                named=[str(head) for head in namings[task].kept],
                reason=namings[task].reason(self.config.select),
                search_curve=namings[task].curve,
                items=len(self.items[task]),
                ranking=self._ranked(found, contrast, task, self._intervals(found, task, candidates[task])),
                fit=fits.get(task),
                **_ground(found, task),
                **_spending(found, namings[task]),
            )
            for task in tasks
        }
        return SearchResult(
            findings,
            {task: _named_first(candidates[task], namings[task].kept) for task in tasks},
            tuple(self.shape.head(int(i)) for i in universal_heads(effects)) if effects is not None else (),
            found,
        )

    def _intervals(self, found: Localization, task: str, candidates: Sequence[Head]) -> EffectIntervals | None:
        """Those of a task's candidates on every task; None without a fit to resample."""
        if found.sparse is None:
            return None
        heads = np.array([self.shape.index(head) for head in candidates])
        rng = stream(self.config.seed, "bootstrap", task)
        return bootstrap_intervals(found.sparse.table, found.sparse.solver, heads, self.config.select.bootstrap, rng)

    def _fits(self, found: Localization) -> dict[str, float]:
        """By task, the correlation on masks held back; empty without a fit."""
        if found.sparse is None:
            return {}
        table = found.sparse.table
        fits = held_back_fit(table, found.sparse.solver, stream(self.config.seed, "fit"))
        return dict(zip(table.tasks, map(float, fits), strict=True))

    def _ranked(
        self, found: Localization, contrast: SpecificityResult | None, task: str, intervals: EffectIntervals | None
    ) -> list[RankedHead]:
        heads = found.ranking[task]
        if found.effects is None or contrast is None:
            return [RankedHead(head=str(head)) for head in heads]
        tasks = tuple(self.items)
        number = tasks.index(task)
        known = {int(head): column for column, head in enumerate(intervals.heads)} if intervals else {}
        ranked = []
        for head in heads:
            position = self.shape.index(head)
            column = known.get(position)
            effect, bounds = float(found.effects[number, position]), None
            if intervals and column is not None and np.isfinite(intervals.low[number, column]):
                # The solver's estimates are shrunk: right for ranking, too small to quote.
                effect = float(intervals.effect[number, column])
                bounds = (float(intervals.low[number, column]), float(intervals.high[number, column]))
            control = int(contrast.control[number, position])
            ranked.append(
                RankedHead(
                    head=str(head),
                    effect=effect,
                    interval=bounds,
                    specificity=float(contrast.strongest[number, position]),
                    specificity_mean=float(contrast.mean[number, position]),
                    strongest_control=tasks[control] if control >= 0 else None,
                )
            )
        return ranked


def _spending(found: Localization, naming: Naming) -> dict[str, int]:
    task = naming.task
    return {
        "requests": found.requests[task] + naming.requests,
        "baseline_requests": found.baseline_requests[task] + naming.baseline_requests,
        "tokens": found.tokens[task] + naming.tokens,
    }


def _ground(found: Localization, task: str) -> dict[str, float | None]:
    """What the ranking of a task stands on, as far as the method can tell."""
    baseline, sparse = found.baseline[task], found.sparse
    return {
        "baseline_score": float(np.mean([outcome.score for outcome in baseline])) if baseline else None,
        "baseline_accuracy": float(np.mean([outcome.correct for outcome in baseline])) if baseline else None,
        "tests_a_head": sparse.designs[task].coverage().tests_min if sparse else None,
    }


def _named_first(candidates: Sequence[Head], named: Sequence[Head]) -> tuple[Head, ...]:
    return (*named, *(head for head in candidates if head not in named))
