"""Stepwise: masks find the first head, and each further one is tried on top of those before, among few candidates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import DesignConfig, SolverConfig
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods.counting import CountingMeasurer
from cs_localize.methods.method import Items, Localization, Relatives, check_items, localized
from cs_localize.methods.rounds import divide
from cs_localize.methods.sparse import Sparse
from cs_localize.methods.tables import measure_baseline
from cs_localize.recover.options import check_above_zero, check_whole
from cs_localize.recover.specificity import controls_by_row
from cs_localize.seeds import stream

_START = 0.4
"""Share of the requests that finds the first head."""
_SECOND = 0.4
"""Share of the rest that finds the second; the others share equally."""
_ITEMS = 2
"""Items on which every candidate of a step is tried, and more on which the finalists are."""
_FINALISTS = 4
_CONTROL_ITEMS = 5
"""Items of the controls, together, on which a finalist is tried."""
_MOST_REQUESTS = 1_000_000
"""As many as a design may have."""

Ask = tuple[str, tuple[int, ...], int]
"""A task, heads to knock out together, and an item of the task."""


@dataclass(frozen=True)
class Stepwise:
    """Greedy on few candidates: adds, one by one, the head that is most specific on top of those a task has already.

    The first head comes from the sparse method with three rounds. A step then tries candidates on top of the heads
    chosen so far, on two items. The first four, by the damage they add less the mean damage to the controls that the
    sparse method estimates, are tried on two more items of the task and on five of the controls together, where the
    damage under all heads takes the place of the estimate. The best is added.

    Candidates of the first step are the heads that lead the sparse method's ranking and those of fragile layers, which
    masks spare and where heads often stand in for each other; those of a later one come from the step before and the
    ranking. Effects are those of the sparse method.

    Attributes:
        requests: masked requests a task, at most.
        heads: how many to choose for every task; the others follow in the order of the sparse method.
        floor: cap on the damage of one request, in nats.
        seed: of masks and items.
        reserved: first items of a task on which no step and no round tries a head.
    """

    requests: int = 600
    heads: int = 5
    floor: float = 8.0
    seed: int = 0
    reserved: int = 0

    def check_options(self) -> None:
        """Raises UsageError if an option is out of range; see ``Method``."""
        check_whole(1, requests=self.requests)
        if self.requests > _MOST_REQUESTS:
            raise UsageError(f"option 'requests' is {self.requests}; give at most {_MOST_REQUESTS:,}")
        check_whole(2, heads=self.heads)
        check_above_zero(floor=self.floor)

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Finds the first head of all tasks at once, and the others step by step; see ``Method``."""
        check_items(items)
        self.check_options()
        controls = _shared_out(controls_by_row(tuple(items), relatives))
        self._check(shape, items, controls)
        counter = CountingMeasurer(measurer)
        first = self._first(shape).localize(counter, shape, items, relatives)
        assert first.effects is not None
        assert first.sparse is not None
        fragile = {shape.index(head) for head in shape.all_heads() if head.layer in first.sparse.fragile}
        chains = []
        for (task, ranking), others in zip(first.ranking.items(), controls, strict=True):
            cost = np.maximum(first.effects[others], 0).mean(axis=0) if others else np.zeros(shape.n_heads)
            order = [shape.index(head) for head in ranking]
            chains.append(_Chain(task, order, fragile, cost, [tuple(items)[other] for other in others]))
        damage = _Damage(counter, shape, items, self.floor)
        for step, granted in enumerate(self._grants()[1:], 1):
            left = [
                granted - counter.requests[chain.task] - asked
                for chain, asked in zip(chains, _asked_as_controls(controls), strict=True)
            ]
            self._step(step, chains, left, damage, items)
        found = {chain.task: tuple(map(shape.head, chain.ranking)) for chain in chains}
        return localized(found, first.effects, counter)

    def _first(self, shape: ModelShape) -> Sparse:
        """The search for the first head.

        In a model of few heads, those of fragile layers go off in more masks than by default, so that a mask takes a
        head: fewer than half of the layers are fragile, since each stands out from the median.
        """
        design = DesignConfig(requests=self._grants()[0], rounds=3)
        rare = max(design.fragile_density, 2 / shape.n_heads - design.density)
        design = design.model_copy(update={"fragile_density": rare})
        return Sparse(design, SolverConfig(options={"floor": self.floor}), self.seed, self.heads, self.reserved)

    def _grants(self) -> list[int]:
        """Requests a task that may be spent by the end of each step, the search for the first head being the first."""
        later = self.heads - 2
        second = _START + (1 - _START) * (_SECOND if later else 1)
        shares = [_START, second, *(second + (1 - second) * step / later for step in range(1, later + 1))]
        return [round(share * self.requests) for share in shares]

    def _check(self, shape: ModelShape, items: Items, controls: Sequence[Sequence[int]]) -> None:
        if self.heads > shape.n_heads:
            raise UsageError(f"stepwise cannot choose {self.heads} heads of {shape.n_heads}; lower its option 'heads'")
        density = DesignConfig().density
        if density * shape.n_heads < 1:
            raise UsageError(
                f"stepwise finds its first head by masks of a share of {density} of the heads, and {shape.n_heads} are "
                "too few for that; name another method"
            )
        needed = self.reserved + 2 * _ITEMS
        few = [task for task, asked in items.items() if len(asked) < needed]
        if few:
            kept = f", {self.reserved} of them for the tests of single heads" if self.reserved else ""
            raise UsageError(
                f"task '{few[0]}' has {len(items[few[0]])} search items and stepwise needs {needed}{kept}; raise "
                "search_items"
            )
        pilot = DesignConfig().pilot_requests(shape.layers)
        least = _own_requests(_FINALISTS) + max(_asked_as_controls(controls))
        if not self._suffices(pilot, least):
            masks, alone, step = self._divided()
            enough = self._enough(pilot, least)
            advice = "name another method" if enough is None else f"raise its option 'requests' to {enough}"
            raise UsageError(
                f"stepwise with {self.requests} requests a task leaves the masks {masks}, of which the pilot takes "
                f"{pilot}, heads alone {sum(alone)}, which take {len(alone) * _ITEMS}, and a step {step}, which takes "
                f"{least}; {advice}"
            )

    def _divided(self) -> tuple[int, tuple[int, ...], int]:
        """Requests a task of the masks, of each round of heads alone, and of the step that gets least."""
        grants = self._grants()
        masks, *alone = divide(grants[0], 3)
        return masks, tuple(alone), min(np.diff(grants).tolist())

    def _suffices(self, pilot: int, least: int) -> bool:
        """Whether the requests are enough, where the pilot takes so many and a step at least so many."""
        masks, alone, step = self._divided()
        return masks > pilot and min(alone) >= _ITEMS and step >= least

    def _enough(self, pilot: int, least: int) -> int | None:
        """A larger number of requests that suffices, the smallest but for rounding; None if there is none."""
        more = range(self.requests + 1, _MOST_REQUESTS + 1)
        place = bisect_left(more, True, key=lambda requests: replace(self, requests=requests)._suffices(pilot, least))
        # Shares are rounded, so that more is not always enough where less was; but where this ends was tried.
        return more[place] if place < len(more) else None

    def _step(self, step: int, chains: Sequence[_Chain], left: Sequence[int], damage: _Damage, items: Items) -> None:
        """Adds a head to every chain, with so many requests left for each."""
        looks = []
        for chain, requests in zip(chains, left, strict=True):
            rng = stream(self.seed, "stepwise", chain.task, str(step))
            drawn = {
                task: iter((self.reserved + rng.permutation(len(items[task]) - self.reserved)).tolist())
                for task in dict.fromkeys([chain.task, *chain.controls])
            }
            own = list(islice(drawn[chain.task], 2 * _ITEMS))
            others = [(control, item) for control in chain.controls for item in islice(drawn[control], 1)]
            candidates = chain.candidates((requests - _own_requests(0)) // _ITEMS)
            looks.append(_Look(chain, candidates, own, others))
        damage.measure([ask for look in looks for ask in look.first()])
        for look in looks:
            look.narrow(damage)
        damage.measure([ask for look in looks for ask in look.second()])
        for look in looks:
            look.choose(damage)


class _Damage:
    """The damage of knocking out heads together, by task, heads and item."""

    def __init__(self, measurer: Measurer, shape: ModelShape, items: Items, floor: float) -> None:
        self._measurer, self._shape, self._items, self._floor = measurer, shape, items, floor
        self._before = {
            task: [outcome.score for outcome in outcomes]
            for task, outcomes in measure_baseline(measurer, items).items()
        }
        self._known: dict[Ask, float] = {}

    def measure(self, asks: Sequence[Ask]) -> None:
        """Asks the model all at once."""
        requests = [
            self._measurer.request(self._items[task][item], Ablation.of(map(self._shape.head, heads)))
            for task, heads, item in asks
        ]
        for ask, outcome in zip(asks, self._measurer.measure(requests, "steps"), strict=True):
            self._known[ask] = min(self._before[ask[0]][ask[2]] - outcome.score, self._floor)

    def mean(self, asks: Sequence[Ask]) -> float:
        """The mean damage of what was measured, in nats; 0 of nothing."""
        return float(np.mean([self._known[ask] for ask in asks])) if asks else 0.0


@dataclass(eq=False)
class _Chain:
    """The heads of one task, as they are being chosen.

    Attributes:
        task: the task.
        order: all heads as the sparse method ranks them.
        fragile: heads of fragile layers.
        cost: ``[n_heads]`` mean damage to the controls that the sparse method estimates, in nats.
        controls: tasks on which finalists are tried, one for every item.
        chosen: heads chosen so far.
        value: by candidate of the last step, damage added to the task less that to the controls, in nats.
    """

    task: str
    order: list[int]
    fragile: set[int]
    cost: NDArray[np.float64]
    controls: list[str]
    chosen: list[int] = field(init=False)
    value: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chosen = self.order[:1]

    @property
    def ranking(self) -> list[int]:
        """All heads, the chosen ones first."""
        return list(dict.fromkeys([*self.chosen, *self.order]))

    def candidates(self, count: int) -> list[int]:
        """So many heads to try next."""
        rest = [head for head in self.order if head not in self.chosen]
        if self.value:
            tried = [head for head in self.value if head not in self.chosen]
            first = sorted(tried, key=lambda head: -self.value[head])[: 2 * count // 3]
        else:
            first = [*rest[: count // 3], *(head for head in rest if head in self.fragile)]
        return list(dict.fromkeys([*first, *rest]))[:count]


@dataclass(eq=False)
class _Look:
    """One step of one task: candidates on a few items, then the finalists on more and on the controls.

    Attributes:
        chain: the heads chosen so far.
        candidates: heads to try.
        own: items of the task, the finalists' last.
        others: items of its controls.
        finalists: the candidates that came first.
    """

    chain: _Chain
    candidates: list[int]
    own: list[int]
    others: list[tuple[str, int]]
    finalists: list[int] = field(default_factory=list)

    def first(self) -> list[Ask]:
        """What the candidates take, and the chosen heads without any."""
        return [
            *self._asks(self.own),
            *(ask for head in self.candidates for ask in self._asks(self.own[:_ITEMS], head)),
        ]

    def narrow(self, damage: _Damage) -> None:
        """Takes the candidates that add most."""
        added = {head: self._added(damage, self.own[:_ITEMS], head) for head in self.candidates}
        self.chain.value = {head: gain - float(self.chain.cost[head]) for head, gain in added.items()}
        self.finalists = sorted(self.candidates, key=lambda head: -self.chain.value[head])[:_FINALISTS]

    def second(self) -> list[Ask]:
        """What the finalists take."""
        return [ask for head in self.finalists for ask in (*self._asks(self.own[_ITEMS:], head), *self._controls(head))]

    def choose(self, damage: _Damage) -> None:
        """Adds the best finalist."""
        worth = {
            head: self._added(damage, self.own, head) - damage.mean(self._controls(head)) for head in self.finalists
        }
        self.chain.chosen.append(max(self.finalists, key=lambda head: worth[head]))

    def _added(self, damage: _Damage, items: Sequence[int], head: int) -> float:
        return damage.mean(self._asks(items, head)) - damage.mean(self._asks(items))

    def _asks(self, items: Sequence[int], *heads: int) -> list[Ask]:
        return [(self.chain.task, (*self.chain.chosen, *heads), item) for item in items]

    def _controls(self, head: int) -> list[Ask]:
        return [(control, (*self.chain.chosen, head), item) for control, item in self.others]


def _own_requests(candidates: int) -> int:
    """Requests on a task's own items in one of its steps."""
    return 2 * _ITEMS + _ITEMS * (candidates + _FINALISTS)


def _shared_out(controls: Sequence[Sequence[int]]) -> list[list[int]]:
    """For every task the controls on which its finalists are tried, one for every item; all serve about as often."""
    shared = []
    for row, others in enumerate(controls):
        near = sorted(others, key=lambda other: (other - row) % len(controls))
        shared.append([near[i % len(near)] for i in range(_CONTROL_ITEMS)] if near else [])
    return shared


def _asked_as_controls(controls: Sequence[Sequence[int]]) -> list[int]:
    """By task, its requests in one step on behalf of the tasks that it controls."""
    return [_FINALISTS * sum(others.count(row) for others in controls) for row in range(len(controls))]
