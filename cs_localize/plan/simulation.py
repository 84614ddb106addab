"""What the search of a study would find in synthetic models of its size, whose heads are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from cs_localize.design import Design, draw_design, fragile_layers, inclusion_rates, pilot_design
from cs_localize.design.draw import Unit
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import MeasurementTable
from cs_localize.plan.values import Expected, Interval, Planned
from cs_localize.recover import make_solver, rank_heads, specificity
from cs_localize.seeds import stream

Mark = tuple[bool, float]
"""Of one task: whether the most specific head came first, and the share of the planted heads among the first."""

_MAD_TO_STD = 1.4826
_WORK = 12_000_000  # requests x heads that a simulation may take by itself: some ten seconds
_REPEATS = (4, 20)


def fitting(options: PlantedOptions, shape: ModelShape) -> PlantedOptions | None:
    """The same generator with no more heads planted than the model has room for; None if it has too few for any."""
    for specific in range(options.n_specific, 0, -1):
        early = max(1, shape.layers // 10) * shape.heads
        fewer = replace(options, n_specific=specific, n_universal=min(options.n_universal, early))
        try:
            PlantedEngine(shape, fewer)
        except UsageError:
            continue
        return fewer
    return None


def usual_repeats(planned: Planned) -> int:
    """How many models are simulated by default: fewer of large ones."""
    requests = planned.config.design.requests * len(planned.search)
    return int(np.clip(_WORK // (requests * planned.shape.n_heads), *_REPEATS))


class PlantedWorld:
    """One synthetic model, and the search of the study on it.

    Args:
        planned: the study; its items, with a difficulty of their own in every world.
        generator: what is planted, but for the seed.
        number: of the world; equal numbers give equal worlds.

    Attributes:
        engine: the model; it knows the heads that matter.
        k: specific heads planted for every task.
        trials: tasks.
        pilot: the outcomes of the pilot; None where the study has none.
    """

    def __init__(self, planned: Planned, generator: PlantedOptions, number: int) -> None:
        self._planned = planned
        self.k = generator.n_specific
        self.trials = len(planned.search)
        self._purpose = ("plan", str(number))
        seed = int(stream(planned.config.seed, *self._purpose).integers(2**31))
        self.engine = PlantedEngine(planned.shape, replace(generator, seed=seed))
        self._heads = list(planned.shape.all_heads())
        bare = {task: [self._request(task, i) for i in range(len(items))] for task, items in planned.search.items()}
        self._baseline = {
            task: np.array([outcome.score for outcome in self.engine.measure(requests)])
            for task, requests in bare.items()
        }
        pilots = pilot_designs(planned, self._purpose)
        self.pilot = self._measured(pilots) if pilots else None

    def marks(self, unit: Unit, requests: int) -> list[Mark]:
        """How the search does with so many masked requests a task, task by task.

        Raises:
            UsageError: if the numbers make no design.
            SolverError: if the solver reaches no solution.
        """
        planned, config = self._planned, self._planned.config
        tasks = tuple(planned.search)
        table = self._measured(self._designs(unit, requests))
        if self.pilot is not None:
            table = _joined(self.pilot, table)
        effects = make_solver(config.solver.name, **config.solver.options).fit(table).effects_
        order = rank_heads(specificity(effects, tasks, planned.relatives).strongest, effects)
        marks = []
        for row, task in enumerate(tasks):
            truth = [planned.shape.index(head) for head in self.engine.truth(task)]
            first = order[row, : self.k].tolist()
            marks.append((first[0] == truth[0], len({*first} & {*truth}) / self.k))
        return marks

    def _designs(self, unit: Unit, requests: int) -> dict[str, Design]:
        planned, design = self._planned, self._planned.config.design
        fragile = fragile_layers(self.pilot) if self.pilot is not None else ()
        rates = inclusion_rates(planned.shape, design.density, fragile, design.fragile_density)
        left = requests - planned.shape.layers * design.pilot.requests_a_layer
        return {
            task: draw_design(
                design.kind,
                unit,
                rates,
                left,
                len(items),
                min(design.block, len(items)),
                stream(planned.config.seed, *self._purpose, "design", task),
            )
            for task, items in planned.search.items()
        }

    def _request(self, task: str, item: int, mask: Iterable[int] = ()) -> Request:
        """The planted engine answers by item; a number stands for the prompt's tokens."""
        ablation = Ablation.of(self._heads[i] for i in mask)
        return Request(self._planned.search[task][item], (item,), (0,), ablation)

    def _measured(self, designs: dict[str, Design]) -> MeasurementTable:
        requests = [
            self._request(task, int(item), np.flatnonzero(mask))
            for task, design in designs.items()
            for mask, item in zip(design.masks, design.items, strict=True)
        ]
        outcomes = self.engine.measure(requests)
        return measured_table(self._planned, designs, self._baseline, np.array([outcome.score for outcome in outcomes]))


def pilot_designs(planned: Planned, purpose: Sequence[str] = ()) -> dict[str, Design]:
    """The pilot of every task; with no further purpose, those that the study itself draws."""
    pilot, shape = planned.config.design.pilot, planned.shape
    if not pilot.requests_a_layer:
        return {}
    return {
        task: pilot_design(
            shape,
            len(items),
            pilot.requests_a_layer,
            min(pilot.heads_a_mask, shape.heads),
            stream(planned.config.seed, *purpose, "pilot", task),
        )
        for task, items in planned.search.items()
    }


def measured_table(
    planned: Planned, designs: dict[str, Design], baseline: dict[str, NDArray[np.float64]], score: NDArray[np.float64]
) -> MeasurementTable:
    """The table of some designs, as the solvers see it.

    Args:
        planned: the study.
        designs: by task.
        baseline: by task, ``[items]`` score without an ablation.
        score: ``[requests]``, design after design.
    """
    rows = len(score)
    lengths = [len(design) for design in designs.values()]
    first = np.cumsum([0, *(len(items) for items in planned.search.values())])
    return MeasurementTable(
        shape=planned.shape,
        tasks=tuple(designs),
        task=np.repeat(np.arange(len(designs)), lengths),
        item=np.concatenate([start + design.items for start, design in zip(first, designs.values(), strict=False)]),
        masks=np.concatenate([design.masks for design in designs.values()]),
        score=score,
        baseline=np.concatenate([baseline[task][design.items] for task, design in designs.items()]),
        correct=np.zeros(rows, dtype=np.bool_),
        tokens=np.zeros(rows, dtype=np.int64),
    )


def expected(worlds: Sequence[PlantedWorld], unit: Unit, requests: int, least: float | None = None) -> Expected | None:
    """What the search finds over all worlds.

    Args:
        worlds: one a repeat.
        unit: what shares a mask.
        requests: masked requests a task.
        least: ends the simulation, with None, as soon as the hit rate's lower bound can no longer reach this.
    """
    marks: list[Mark] = []
    for world in worlds:
        marks += world.marks(unit, requests)
        trials = len(worlds) * world.trials
        best = trials - sum(not hit for hit, _ in marks)
        if least is not None and wilson(best, trials)[0] < least:
            return None
    hits, recalled = sum(hit for hit, _ in marks), sum(recall for _, recall in marks)
    return Expected(
        requests=requests,
        unit=unit,
        trials=len(marks),
        hit=hits / len(marks),
        hit_interval=wilson(hits, len(marks)),
        k=worlds[0].k,
        recall=recalled / len(marks),
        # A mean of shares varies no more than as many tosses of a coin.
        recall_interval=wilson(round(recalled), len(marks)),
    )


def wilson(successes: int, trials: int) -> Interval:
    """95% Wilson interval of a share."""
    interval = binomtest(successes, trials).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def background_of(pilot: MeasurementTable, planned: Planned, generator: PlantedOptions) -> PlantedOptions:
    """The generator with the background and, at most, the noise that a pilot shows.

    A pilot's masks are all of one size, so it cannot tell a background from noise. Noise stays what it was, as far as
    the pilot's spread allows that much; what the spread exceeds it by is background. The spread is 1.4826 times the
    median absolute deviation of the damage outside the fragile layers, and a background is proportional to the spread
    it causes in a noiseless planted model under the same pilot.
    """
    noise = min(generator.noise, _spread(pilot) / 2**0.5)  # twice in every difference of two scores
    quiet = replace(generator, n_universal=0, n_specific=1, strongest=1e-9, background=0.1, noise=0.0)
    caused = PlantedWorld(planned, quiet, 0).pilot
    if caused is None:
        raise UsageError("a study without a pilot has no background to show")
    left = max(_spread(pilot) ** 2 - 2 * noise**2, 0.0)
    return replace(generator, background=0.1 * left**0.5 / _spread(caused), noise=noise)


def _spread(pilot: MeasurementTable) -> float:
    shape = pilot.shape
    layer = pilot.masks.reshape(len(pilot), shape.layers, shape.heads).any(axis=2).argmax(axis=1)
    damage = pilot.damage()[~np.isin(layer, fragile_layers(pilot))]
    return float(_MAD_TO_STD * np.median(np.abs(damage - np.median(damage))))


def _joined(first: MeasurementTable, second: MeasurementTable) -> MeasurementTable:
    columns = ("task", "item", "masks", "score", "baseline", "correct", "tokens")
    parts = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in columns}
    return MeasurementTable(first.shape, first.tasks, **parts)
