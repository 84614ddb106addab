"""The sparse method: random masks, a fresh one for every request, and a solver that finds the few heads behind them.

With more than one round, fewer masks, and then the heads that lead knocked out alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import DesignConfig, SolverConfig
from cs_localize.design import Design, draw_design, fragile_layers, inclusion_rates, joined, pilot_design
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
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
from cs_localize.methods.rounds import Rounds, divide
from cs_localize.methods.tables import measure_baseline, measure_designs
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
        seed: of pilot, masks and rounds.
        limit: heads that the rounds look for.
        reserved: first items of a task on which the rounds try no head.
    """

    design: DesignConfig = field(default_factory=DesignConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    seed: int = 0
    limit: int = 5
    reserved: int = 0

    def check_options(self) -> None:
        """Raises UsageError if an option is out of range; see ``Method``."""
        make_solver(self.solver.name, **self.solver.options)

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Measures the designs of all tasks, fits them and ranks by specificity; see ``Method``."""
        check_items(items)
        counter = CountingMeasurer(measurer)
        solver = make_solver(self.solver.name, **self.solver.options)
        rounds = self._rounds(float(solver.get_params()["floor"]))
        if rounds:
            rounds.check(items)
        pilots = self._pilots(shape, items)
        _check_masks(self._designs(shape, items, (), pilots))  # before anything is measured
        baseline = measure_baseline(counter, items)
        fragile: tuple[int, ...] = ()
        if pilots:
            fragile = fragile_layers(measure_designs(counter, shape, items, pilots, baseline, "pilot"))
        designs = self._designs(shape, items, fragile, pilots)
        table = measure_designs(counter, shape, items, designs, baseline, "search")
        solver.fit(table)
        narrowed = rounds.narrow(counter, items, relatives, table, solver.effects_, baseline) if rounds else None
        effects = narrowed.effects if narrowed else solver.effects_
        ranking = narrowed.ranking if narrowed else by_specificity(effects, shape, table.tasks, relatives)
        spent = len(next(iter(pilots.values()))) if pilots else 0
        fit = SparseFit(
            designs, table, spent, fragile, self._rates(shape, fragile), solver, _warnings(designs), narrowed
        )
        return localized(ranking, effects, counter, fit)

    @property
    def _masks(self) -> int:
        """Requests of a task under random masks, the pilot's included."""
        return divide(self.design.requests, self.design.rounds)[0]

    def _rounds(self, floor: float) -> Rounds | None:
        """The rounds after the masks; None if there are none."""
        _, *budgets = divide(self.design.requests, self.design.rounds)
        if not budgets:
            return None
        return Rounds(tuple(budgets), self.limit, self.design.confidence, floor, self.seed, self.reserved)

    def _pilots(self, shape: ModelShape, items: Items) -> Designs:
        pilot, requests = self.design.pilot, self._masks
        if not pilot.requests_a_layer:
            return {}
        spent = shape.layers * pilot.requests_a_layer
        if requests <= spent:
            kept = f", of which the masks get {requests}," if self.design.rounds > 1 else ""
            raise UsageError(
                f"design.requests is {self.design.requests}{kept} and the pilot alone takes {spent}; raise it or lower "
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

    def _rates(self, shape: ModelShape, fragile: Sequence[int]) -> NDArray[np.float64]:
        return inclusion_rates(shape, self.design.density, fragile, self.design.fragile_density)

    def _designs(
        self, shape: ModelShape, items: Items, fragile: Sequence[int], pilots: Mapping[str, Design]
    ) -> Designs:
        """Every task's masks: the pilot's requests count against the budget and serve the fit as well."""
        design = self.design
        rates = self._rates(shape, fragile)
        whole = {}
        for task, asked in items.items():
            spent = len(pilots[task]) if pilots else 0
            drawn = draw_design(
                design.kind,
                design.unit,
                rates,
                self._masks - spent,
                len(asked),
                design.block,
                stream(self.seed, "design", task),
            )
            whole[task] = drawn
            if pilots:
                whole[task] = joined([pilots[task], drawn])
        return whole


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
