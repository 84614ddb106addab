"""The sparse method: random masks, a fresh one for every request, and a solver that finds the few heads behind them.

With more than one round, fewer masks, and then the heads that lead knocked out alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import DesignConfig, SolverConfig
from cs_localize.design import (
    Coverage,
    Design,
    draw_design,
    fragile_layers,
    given_design,
    inclusion_rates,
    joined,
    pilot_design,
    read_masks,
)
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
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import GroupSolver, Solver, make_solver
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
        self.check_design(shape, items)  # before anything is measured
        rounds, pilots = self._rounds(), self._pilots(shape, items)
        baseline = measure_baseline(counter, items)
        fragile: tuple[int, ...] = ()
        if pilots:
            fragile = fragile_layers(measure_designs(counter, shape, items, pilots, baseline, "pilot"))
        designs = self._designs(shape, items, fragile, pilots)
        table = measure_designs(counter, shape, items, designs, baseline, "search")
        solver = self._solver().fit(table)
        narrowed = rounds.narrow(counter, items, relatives, table, solver.effects_, baseline) if rounds else None
        effects = narrowed.effects if narrowed else solver.effects_
        ranking = narrowed.ranking if narrowed else by_specificity(effects, shape, table.tasks, relatives)
        spent = len(next(iter(pilots.values()))) if pilots else 0
        coverage = self.coverage(shape, designs)
        fit = SparseFit(designs, table, spent, fragile, self._rates(shape, fragile), solver, coverage, narrowed)
        return localized(ranking, effects, counter, fit)

    def check_design(self, shape: ModelShape, items: Items) -> None:
        """Raises UsageError if the numbers make no design for these items, or leave a round nothing."""
        rounds = self._rounds()
        if rounds:
            rounds.check(items)
        _check_masks(self.designs(shape, items))

    @property
    def floor(self) -> float:
        """The solver's cap on the damage of one request, in nats."""
        return float(make_solver(self.solver.name, **self.solver.options).get_params()["floor"])

    @property
    def _masks(self) -> int:
        """Requests of a task under random masks, the pilot's included."""
        return divide(self.design.requests, self.design.rounds)[0]

    def _rounds(self) -> Rounds | None:
        """The rounds after the masks; None if there are none."""
        _, *budgets = divide(self.design.requests, self.design.rounds)
        if not budgets:
            return None
        return Rounds(tuple(budgets), self.limit, self.design.confidence, self.floor, self.seed, self.reserved)

    def designs(self, shape: ModelShape, items: Items) -> Designs:
        """Every task's design as it is while no layer is known to be fragile.

        Raises:
            UsageError: if the numbers make no design.
        """
        return self._designs(shape, items, (), self._pilots(shape, items))

    def coverage(self, shape: ModelShape, designs: Mapping[str, Design]) -> dict[str, Coverage]:
        """By task, how well its design tests the heads, or the KV groups where whole ones are knocked out."""
        width = shape.heads // self._drawn(shape).heads
        return {task: Design(design.masks[:, ::width], design.items).coverage() for task, design in designs.items()}

    def pilot(self, measurer: Measurer, shape: ModelShape, items: Items) -> MeasurementTable | None:
        """The outcomes of the pilot alone; None where the design has none.

        Raises:
            UsageError: if the pilot takes all requests.
            MeasurementError: if an outcome cannot be measured.
        """
        pilots = self._pilots(shape, items)
        if not pilots:
            return None
        return measure_designs(measurer, shape, items, pilots, measure_baseline(measurer, items), "pilot")

    def _pilots(self, shape: ModelShape, items: Items) -> Designs:
        pilot, requests = self.design.pilot, self._masks
        spent = self.design.pilot_requests(shape.layers)
        if not spent:
            return {}
        if requests <= spent:
            kept = f", of which the masks get {requests}," if self.design.rounds > 1 else ""
            raise UsageError(
                f"design.requests is {self.design.requests}{kept} and the pilot alone takes {spent}; raise it or lower "
                "design.pilot.requests_a_layer"
            )
        drawn = self._drawn(shape)
        return {
            task: self._whole_groups(
                pilot_design(
                    drawn,
                    len(asked),
                    pilot.requests_a_layer,
                    min(-(-pilot.heads_a_mask * drawn.heads // shape.heads), drawn.heads),
                    stream(self.seed, "pilot", task),
                ),
                shape,
            )
            for task, asked in items.items()
        }

    def _rates(self, shape: ModelShape, fragile: Sequence[int]) -> NDArray[np.float64]:
        design = self.design
        outside = [layer for layer in design.densities if layer >= shape.layers]
        if outside:
            raise UsageError(
                f"design.layer_density: there is no layer {outside[0]}; this model has layers 0..{shape.layers - 1}"
            )
        return inclusion_rates(shape, design.density, fragile, design.fragile_density, design.densities)

    def _solver(self) -> Solver:
        solver = make_solver(self.solver.name, **self.solver.options)
        return GroupSolver(solver) if self.design.knock_out == "kv_group" else solver

    def _drawn(self, shape: ModelShape) -> ModelShape:
        """The geometry of what is knocked out together."""
        return shape.groups if self.design.knock_out == "kv_group" else shape

    def _whole_groups(self, design: Design, shape: ModelShape) -> Design:
        """A design over what is knocked out together as one over heads."""
        width = shape.heads // self._drawn(shape).heads
        return Design(np.repeat(design.masks, width, axis=1), design.items)

    def _drawn_design(self, shape: ModelShape, fragile: Sequence[int], task: str, requests: int, items: int) -> Design:
        """Every request of a task but the pilot's."""
        design, rng = self.design, stream(self.seed, "design", task)
        if design.masks is not None:
            masks = read_masks(Path(design.masks), shape, task)
            return given_design(masks, design.unit, requests, items, design.block, rng)
        rates = self._rates(self._drawn(shape), fragile)
        drawn = draw_design(design.kind, design.unit, rates, requests, items, design.block, rng)
        return self._whole_groups(drawn, shape)

    def _designs(
        self, shape: ModelShape, items: Items, fragile: Sequence[int], pilots: Mapping[str, Design]
    ) -> Designs:
        """Every task's masks: the pilot's requests count against the budget and serve the fit as well."""
        whole = {}
        for task, asked in items.items():
            spent = len(pilots[task]) if pilots else 0
            drawn = self._drawn_design(shape, fragile, task, self._masks - spent, len(asked))
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
