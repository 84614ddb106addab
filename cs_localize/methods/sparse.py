"""The sparse method: random masks, a fresh one for every request, and a solver that finds the few heads behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cs_localize.config import DesignConfig, SolverConfig
from cs_localize.design import Design, draw_design, fragile_layers, inclusion_rates, pilot_design
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods.counting import CountingMeasurer
from cs_localize.methods.method import (
    Items,
    Localization,
    Relatives,
    SparseFit,
    by_specificity,
    check_items,
    localized,
)
from cs_localize.outcomes import MeasurementTable, Outcome
from cs_localize.recover import make_solver
from cs_localize.seeds import stream

_FEWEST_MASKS = 5  # as many as there are folds in held_back_fit

Designs = dict[str, Design]


@dataclass(frozen=True)
class Sparse:
    """A pilot that shows the fragile layers, a design that spares them, and a sparse fit to its outcomes.

    Attributes:
        design: which heads go off together in which request.
        solver: from outcomes to effects.
        seed: of pilot and masks.
    """

    design: DesignConfig = field(default_factory=DesignConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    seed: int = 0

    def check_options(self) -> None:
        """Raises UsageError if an option is out of range; see ``Method``."""
        make_solver(self.solver.name, **self.solver.options)

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Measures the designs of all tasks, fits them and ranks by specificity; see ``Method``."""
        check_items(items)
        counter = CountingMeasurer(measurer)
        pilots = self._pilots(shape, items)
        _check_masks(self._designs(shape, items, (), pilots))  # before anything is measured
        baseline = _baseline(counter, items)
        fragile = fragile_layers(_table(counter, shape, items, pilots, baseline, "pilot")) if pilots else ()
        designs = self._designs(shape, items, fragile, pilots)
        table = _table(counter, shape, items, designs, baseline, "search")
        solver = make_solver(self.solver.name, **self.solver.options).fit(table)
        ranking = by_specificity(solver.effects_, shape, table.tasks, relatives)
        fit = SparseFit(designs, table, fragile, solver, _warnings(designs))
        return localized(ranking, solver.effects_, counter, fit)

    def _pilots(self, shape: ModelShape, items: Items) -> Designs:
        pilot, requests = self.design.pilot, self.design.requests
        if not pilot.requests_a_layer:
            return {}
        spent = shape.layers * pilot.requests_a_layer
        if requests <= spent:
            raise UsageError(
                f"design.requests is {requests} and the pilot alone takes {spent}; raise it or lower "
                "design.pilot.requests_a_layer"
            )
        return {
            task: pilot_design(
                shape,
                len(asked),
                pilot.requests_a_layer,
                min(pilot.heads_a_mask, shape.heads),
                stream(self.seed, "pilot", task),
            )
            for task, asked in items.items()
        }

    def _designs(
        self, shape: ModelShape, items: Items, fragile: Sequence[int], pilots: Mapping[str, Design]
    ) -> Designs:
        """Every task's whole design: the pilot's requests count against the budget and serve the fit as well."""
        design = self.design
        rates = inclusion_rates(shape, design.density, fragile, design.fragile_density)
        whole = {}
        for task, asked in items.items():
            spent = len(pilots[task]) if pilots else 0
            drawn = draw_design(
                design.kind,
                design.unit,
                rates,
                design.requests - spent,
                len(asked),
                design.block,
                stream(self.seed, "design", task),
            )
            whole[task] = drawn
            if pilots:
                whole[task] = Design(
                    np.concatenate([pilots[task].masks, drawn.masks]), np.concatenate([pilots[task].items, drawn.items])
                )
        return whole


def _baseline(measurer: Measurer, items: Items) -> dict[str, list[Outcome]]:
    requests = [measurer.request(item, Ablation()) for asked in items.values() for item in asked]
    outcomes = iter(measurer.measure(requests, "baseline"))
    return {task: [next(outcomes) for _ in asked] for task, asked in items.items()}


def _table(
    measurer: Measurer,
    shape: ModelShape,
    items: Items,
    designs: Mapping[str, Design],
    baseline: Mapping[str, Sequence[Outcome]],
    stage: str,
) -> MeasurementTable:
    """The outcomes of some designs, measured."""
    heads = list(shape.all_heads())
    requests = [
        measurer.request(items[task][item], Ablation.of(heads[i] for i in np.flatnonzero(mask)))
        for task, design in designs.items()
        for mask, item in zip(design.masks, design.items, strict=True)
    ]
    outcomes = measurer.measure(requests, stage)
    tasks = tuple(designs)
    first = dict(zip(tasks, np.cumsum([0, *(len(items[task]) for task in tasks)]), strict=False))
    return MeasurementTable(
        shape=shape,
        tasks=tasks,
        task=np.repeat(np.arange(len(tasks)), [len(design) for design in designs.values()]),
        item=np.concatenate([first[task] + design.items for task, design in designs.items()]),
        masks=np.concatenate([design.masks for design in designs.values()]),
        score=np.array([outcome.score for outcome in outcomes]),
        baseline=np.array([baseline[task][i].score for task, design in designs.items() for i in design.items]),
        correct=np.array([outcome.correct for outcome in outcomes]),
        tokens=np.array([outcome.tokens for outcome in outcomes]),
    )


def _check_masks(designs: Mapping[str, Design]) -> None:
    different = len(
        np.unique(np.concatenate([np.packbits(design.masks, axis=1) for design in designs.values()]), axis=0)
    )
    if different < _FEWEST_MASKS:
        raise UsageError(
            f"the design has {different} different masks and needs {_FEWEST_MASKS} to judge its fit; raise "
            "design.requests, or lower design.block"
        )


def _warnings(designs: Mapping[str, Design]) -> tuple[str, ...]:
    coverage = {task: design.coverage() for task, design in designs.items()}
    return tuple(f"{task}: {covered.warning}" for task, covered in coverage.items() if covered.warning)
