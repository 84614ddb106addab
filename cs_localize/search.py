"""The search: pilot, design, measurement, recovery and tests of every task's heads, on search items alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import StudyConfig
from cs_localize.confirm.answers import controls_of
from cs_localize.design import Design, draw_design, fragile_layers, inclusion_rates, pilot_design
from cs_localize.errors import UsageError
from cs_localize.findings import RankedHead, TaskFinding
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.naming import Naming, name_heads, start_naming
from cs_localize.outcomes import Item, MeasurementTable, Outcome
from cs_localize.recover import (
    EffectIntervals,
    Solver,
    SpecificityResult,
    bootstrap_intervals,
    fit_above_chance,
    heads_in_order,
    held_back_fit,
    make_solver,
    rank_heads,
    selection_frequencies,
    specificity,
    universal_heads,
)
from cs_localize.seeds import stream
from cs_localize.selection import Selection, TestedHead, check_items, select_candidates

_FEWEST_MASKS = 5  # as many as there are folds in held_back_fit


@dataclass(frozen=True)
class SearchResult:
    """What a search found and what it rests on.

    Attributes:
        findings: by task.
        ranking: by task, all heads, most specific first.
        candidates: by task, the named heads, then the others among the first of the ranking.
        universal: heads that hurt nearly every task, worst first.
        fragile: layers the design spared.
        designs: by task, every masked request but those of tests and naming, the pilot's first.
        table: the outcomes of the designs.
        warnings: what a reader should know.
    """

    findings: dict[str, TaskFinding]
    ranking: dict[str, tuple[Head, ...]]
    candidates: dict[str, tuple[Head, ...]]
    universal: tuple[Head, ...]
    fragile: tuple[int, ...]
    designs: dict[str, Design]
    table: MeasurementTable
    warnings: tuple[str, ...]

    @property
    def named(self) -> dict[str, tuple[Head, ...]]:
        """The named heads by task."""
        return {task: tuple(map(Head.parse, finding.named)) for task, finding in self.findings.items()}


@dataclass(frozen=True)
class Search:
    """A search over all tasks of a study at once.

    Attributes:
        config: the study.
        shape: the model's geometry.
        items: search items by task, in the study's order.
        relatives: by task, the tasks that do not control it.
        measurer: asks the model.
        note: is told the heads that are named so far.
    """

    config: StudyConfig
    shape: ModelShape
    items: Mapping[str, Sequence[Item]]
    relatives: Mapping[str, frozenset[str]]
    measurer: Measurer
    note: Callable[[str], None] = lambda best: None

    def run(self) -> SearchResult:
        """Measures and recovers.

        Raises:
            UsageError: if the study's numbers make no design.
            MeasurementError: if an outcome cannot be measured.
            SolverError: if the solver reaches no solution.
        """
        check_items(self._counts, self.config.select)
        pilots = self._pilots()
        _check_masks(self._designs((), pilots))  # before anything is measured
        baseline = self._baseline()
        pilot = self._table(pilots, baseline, "pilot") if pilots else None
        fragile = fragile_layers(pilot) if pilot is not None else ()
        designs = self._designs(fragile, pilots)
        table = self._table(designs, baseline, "search")

        solver = make_solver(self.config.solver.name, **self.config.solver.options)
        effects = solver.fit(table).effects_
        contrast = specificity(effects, table.tasks, self.relatives)
        order = rank_heads(contrast.strongest, effects)
        ranking = heads_in_order(order, self.shape, table.tasks)
        first = max(self.config.select.candidates, self.config.confirm.curve)
        candidates = {task: heads[:first] for task, heads in ranking.items()}
        selection = select_candidates(
            table,
            {task: len(design) for task, design in pilots.items()},
            self._rates(fragile),
            candidates,
            self._counts,
            self.relatives,
            self.config.select,
            solver.get_params()["floor"],
            self.config.seed,
            lambda alone, stage: self._table(alone, baseline, stage),
        )
        namings = {
            task: start_naming(
                task,
                selection.offered[task],
                self.items,
                controls_of(task, self.items, self.relatives),
                self.config.select,
            )
            for task in table.tasks
        }
        name_heads(list(namings.values()), self.config.select, self.measurer, self.note)
        fit = held_back_fit(table, solver, stream(self.config.seed, "fit"))
        fit_p, frequency = self._sureness(table, solver)
        findings = {}
        for number, task in enumerate(table.tasks):
            heads = np.array([self.shape.index(head) for head in candidates[task]])
            rng = stream(self.config.seed, "bootstrap", task)
            intervals = bootstrap_intervals(table, solver, heads, self.config.select.bootstrap, rng)
            findings[task] = TaskFinding(
                named=[str(head) for head in namings[task].kept],
                reason=selection.reason(
                    task, namings[task].reason(self.config.select), self.config.select.error_rate, fit_p[task]
                ),
                search_curve=namings[task].curve,
                **self._spending(table, baseline[task], designs[task], namings[task], selection),
                ranking=_ranked(
                    self.shape,
                    number,
                    table.tasks,
                    order[number],
                    effects,
                    contrast,
                    intervals,
                    frequency,
                    selection.tested[task],
                ),
                fit=float(fit[number]),
                fit_p=fit_p[task],
            )
        coverage = {task: design.coverage() for task, design in designs.items()}
        return SearchResult(
            findings,
            ranking,
            {task: _named_first(candidates[task], namings[task].kept) for task in table.tasks},
            tuple(self.shape.head(int(i)) for i in universal_heads(effects)),
            fragile,
            designs,
            table,
            tuple(f"{task}: {covered.warning}" for task, covered in coverage.items() if covered.warning),
        )

    @property
    def _counts(self) -> dict[str, int]:
        return {task: len(items) for task, items in self.items.items()}

    def _rates(self, fragile: Sequence[int]) -> NDArray[np.float64]:
        design = self.config.design
        return inclusion_rates(self.shape, design.density, fragile, design.fragile_density)

    def _sureness(
        self, table: MeasurementTable, solver: Solver
    ) -> tuple[dict[str, float | None], NDArray[np.float64] | None]:
        """By task the p-value of the fit, and ``[n_tasks, n_heads]`` selection frequencies, where they are wished."""
        select, seed = self.config.select, self.config.seed
        fit_p: dict[str, float | None] = dict.fromkeys(table.tasks)
        if select.permutations:
            p = fit_above_chance(table, solver, stream(seed, "fit"), select.permutations)
            fit_p = dict(zip(table.tasks, p.tolist(), strict=True))
        resampled = stream(seed, "stability")
        return fit_p, selection_frequencies(table, solver, select.resamples, resampled) if select.resamples else None

    def _baseline(self) -> dict[str, list[Outcome]]:
        requests = [self.measurer.request(item, Ablation()) for items in self.items.values() for item in items]
        outcomes = iter(self.measurer.measure(requests, "baseline"))
        return {task: [next(outcomes) for _ in items] for task, items in self.items.items()}

    def _pilots(self) -> dict[str, Design]:
        pilot, requests = self.config.design.pilot, self.config.design.requests
        if not pilot.requests_a_layer:
            return {}
        spent = self.shape.layers * pilot.requests_a_layer
        if requests <= spent:
            raise UsageError(
                f"design.requests is {requests} and the pilot alone takes {spent}; raise it or lower "
                "design.pilot.requests_a_layer"
            )
        return {
            task: pilot_design(
                self.shape,
                len(items),
                pilot.requests_a_layer,
                min(pilot.heads_a_mask, self.shape.heads),
                stream(self.config.seed, "pilot", task),
            )
            for task, items in self.items.items()
        }

    def _designs(self, fragile: Sequence[int], pilots: Mapping[str, Design]) -> dict[str, Design]:
        """Every task's whole design: the pilot's requests count against the budget and serve the fit as well."""
        design = self.config.design
        rates = self._rates(fragile)
        whole = {}
        for task, items in self.items.items():
            spent = len(pilots[task]) if pilots else 0
            drawn = draw_design(
                design.kind,
                design.unit,
                rates,
                design.requests - spent,
                len(items),
                design.block,
                stream(self.config.seed, "design", task),
            )
            whole[task] = drawn
            if pilots:
                whole[task] = Design(
                    np.concatenate([pilots[task].masks, drawn.masks]), np.concatenate([pilots[task].items, drawn.items])
                )
        return whole

    def _table(
        self, designs: Mapping[str, Design], baseline: Mapping[str, Sequence[Outcome]], stage: str
    ) -> MeasurementTable:
        heads = list(self.shape.all_heads())
        requests = [
            self.measurer.request(self.items[task][item], Ablation.of(heads[i] for i in np.flatnonzero(mask)))
            for task, design in designs.items()
            for mask, item in zip(design.masks, design.items, strict=True)
        ]
        outcomes = self.measurer.measure(requests, stage)
        tasks = tuple(designs)
        first = dict(zip(tasks, np.cumsum([0, *(len(self.items[task]) for task in tasks)]), strict=False))
        return MeasurementTable(
            shape=self.shape,
            tasks=tasks,
            task=np.repeat(np.arange(len(tasks)), [len(design) for design in designs.values()]),
            item=np.concatenate([first[task] + design.items for task, design in designs.items()]),
            masks=np.concatenate([design.masks for design in designs.values()]),
            score=np.array([outcome.score for outcome in outcomes]),
            baseline=np.array([baseline[task][i].score for task, design in designs.items() for i in design.items]),
            correct=np.array([outcome.correct for outcome in outcomes]),
            tokens=np.array([outcome.tokens for outcome in outcomes]),
        )

    def _spending(
        self,
        table: MeasurementTable,
        unablated: Sequence[Outcome],
        design: Design,
        naming: Naming,
        selection: Selection,
    ) -> dict[str, Any]:
        rows = table.rows_of(naming.task)
        return {
            "baseline_score": float(np.mean([outcome.score for outcome in unablated])),
            "baseline_accuracy": float(np.mean([outcome.correct for outcome in unablated])),
            "items": len(unablated),
            "tests_a_head": design.coverage().tests_min,
            "requests": len(rows) + selection.requests[naming.task] + naming.requests,
            "baseline_requests": len(unablated) + naming.baseline_requests,
            "tokens": int(table.tokens[rows].sum())
            + selection.tokens[naming.task]
            + naming.tokens
            + sum(outcome.tokens for outcome in unablated),
        }


def _check_masks(designs: Mapping[str, Design]) -> None:
    different = len(
        np.unique(np.concatenate([np.packbits(design.masks, axis=1) for design in designs.values()]), axis=0)
    )
    if different < _FEWEST_MASKS:
        raise UsageError(
            f"the design has {different} different masks and needs {_FEWEST_MASKS} to judge its fit; raise "
            "design.requests, or lower design.block"
        )


def _named_first(candidates: Sequence[Head], named: Sequence[Head]) -> tuple[Head, ...]:
    return (*named, *(head for head in candidates if head not in named))


def _ranked(
    shape: ModelShape,
    number: int,
    tasks: Sequence[str],
    order: NDArray[np.int64],
    effects: NDArray[np.float64],
    contrast: SpecificityResult,
    intervals: EffectIntervals,
    frequency: NDArray[np.float64] | None,
    tested: Mapping[Head, TestedHead],
) -> list[RankedHead]:
    known = {int(head): column for column, head in enumerate(intervals.heads)}
    ranked = []
    for position in map(int, order):
        column = known.get(position)
        effect, bounds = float(effects[number, position]), None
        if column is not None and np.isfinite(intervals.low[number, column]):
            # The solver's estimates are shrunk: right for ranking, too small to quote.
            effect = float(intervals.effect[number, column])
            bounds = (float(intervals.low[number, column]), float(intervals.high[number, column]))
        control, test = int(contrast.control[number, position]), tested.get(shape.head(position))
        ranked.append(
            RankedHead(
                head=str(shape.head(position)),
                effect=effect,
                interval=bounds,
                specificity=float(contrast.strongest[number, position]),
                specificity_mean=float(contrast.mean[number, position]),
                strongest_control=tasks[control] if control >= 0 else None,
                frequency=None if frequency is None else float(frequency[number, position]),
                p=test.p if test else None,
                q=test.q if test else None,
            )
        )
    return ranked
