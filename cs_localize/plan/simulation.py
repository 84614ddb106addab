"""What the search of a study would find in synthetic models of its size, whose heads are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.stats import binomtest

from cs_localize.design import fragile_layers
from cs_localize.design.draw import Unit
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.protocol import Mode, Request
from cs_localize.methods import Sparse, make_method
from cs_localize.outcomes import Item, MeasurementTable, Outcome
from cs_localize.plan.values import Expected, Interval, Planned
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
    """One synthetic model, and the study's method on it.

    Args:
        planned: the study; its items, with a difficulty of their own in every world.
        generator: what is planted, but for the seed.
        number: of the world; equal numbers give equal worlds.

    Attributes:
        engine: the model; it knows the heads that matter.
        k: specific heads planted for every task.
        trials: tasks.
    """

    def __init__(self, planned: Planned, generator: PlantedOptions, number: int) -> None:
        self._planned = planned
        self.k = generator.n_specific
        self.trials = len(planned.search)
        model, self._seed = map(int, stream(planned.config.seed, "plan", str(number)).integers(2**31, size=2))
        self.engine = PlantedEngine(planned.shape, replace(generator, seed=model))
        self._measurer = _Planted(self.engine, planned.search)

    def pilot(self) -> MeasurementTable | None:
        """The outcomes of the pilot; None where the study has none.

        Raises:
            UsageError: if the numbers make no design.
        """
        config = self._planned.config
        method = Sparse(config.design, config.solver, self._seed)
        return method.pilot(self._measurer, self._planned.shape, self._planned.search)

    def marks(self, unit: Unit, requests: int) -> list[Mark]:
        """How the search does with so many masked requests a task, task by task.

        Raises:
            UsageError: if the numbers make no design.
            SolverError: if the solver reaches no solution.
        """
        planned = self._planned
        found = self._method(unit, requests).localize(self._measurer, planned.shape, planned.search, planned.relatives)
        return [self._mark(task, heads) for task, heads in found.ranking.items()]

    def has_design(self, unit: Unit, requests: int) -> bool:
        """Whether so many masked requests a task make a design."""
        try:
            self._method(unit, requests).check_design(self._planned.shape, self._planned.search)
        except UsageError:
            return False
        return True

    def _method(self, unit: Unit, requests: int) -> Sparse:
        config = self._planned.config
        block = min(config.design.block, *(len(items) for items in self._planned.search.values()))
        design = config.design.model_copy(update={"unit": unit, "requests": requests, "block": block})
        method = make_method(config.model_copy(update={"design": design, "seed": self._seed}))
        assert isinstance(method, Sparse)  # a plan is of no other
        return method

    def _mark(self, task: str, ranking: Sequence[Head]) -> Mark:
        """Where masks knock out whole KV groups, it is groups that can be found."""
        groups = self._planned.config.design.knock_out == "kv_group"

        def found(heads: Iterable[Head]) -> list[Head]:
            return list(dict.fromkeys(self._planned.shape.kv_group(head)[0] if groups else head for head in heads))

        first, truth = found(ranking), found(self.engine.truth(task))
        return first[0] == truth[0], len({*first[: len(truth)]} & {*truth}) / len(truth)


class _Planted:
    """A ``Measurer`` that asks a planted engine in this process; a number stands for an item's tokens."""

    def __init__(self, engine: PlantedEngine, items: Mapping[str, Sequence[Item]]) -> None:
        self._engine = engine
        self._numbers = {(task, item.id): i for task, asked in items.items() for i, item in enumerate(asked)}

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        return Request(item, (self._numbers[item.task, item.id],), (0,), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        return self._engine.measure(requests)


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
    caused = PlantedWorld(planned, quiet, 0).pilot()
    if caused is None:
        raise UsageError("a study without a pilot has no background to show")
    left = max(_spread(pilot) ** 2 - 2 * noise**2, 0.0)
    return replace(generator, background=0.1 * left**0.5 / _spread(caused), noise=noise)


def _spread(pilot: MeasurementTable) -> float:
    shape = pilot.shape
    layer = pilot.masks.reshape(len(pilot), shape.layers, shape.heads).any(axis=2).argmax(axis=1)
    damage = pilot.damage()[~np.isin(layer, fragile_layers(pilot))]
    return float(_MAD_TO_STD * np.median(np.abs(damage - np.median(damage))))
