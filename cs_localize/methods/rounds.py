"""Rounds: the heads that lead after the masks are knocked out alone, and those still undecided on more items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.design import Design, joined
from cs_localize.errors import UsageError
from cs_localize.measure.protocol import Measurer
from cs_localize.methods.method import Items, Narrowed, Relatives
from cs_localize.methods.tables import measure_designs
from cs_localize.outcomes import MeasurementTable, Outcome
from cs_localize.recover import (
    TaskArrays,
    heads_in_order,
    rank_heads,
    refit_heads,
    specificity,
    task_arrays,
    undecided_heads,
)
from cs_localize.seeds import stream

_MASKS = 0.8
"""Share of the requests that goes to masks."""
_CANDIDATES = 4
"""Heads of the second round, in multiples of those that are looked for."""
_CONTENDERS = 2
"""Most heads of the third round, in the same."""
_FEWEST_ITEMS = 2

Effects = NDArray[np.float64]


def mask_share(rounds: int) -> float:
    """Share of the masked requests of a task that goes to masks, by the number of rounds."""
    return _MASKS if rounds > 1 else 1.0


def items_a_head(requests: int, heads: int) -> int:
    """Items that each of some heads is tried on when they share so many requests, as far as the task has them."""
    return max(requests // heads, _FEWEST_ITEMS)


def first_tried(limit: int, n_heads: int) -> int:
    """Heads that the second round tries, when ``limit`` are looked for."""
    return min(_CANDIDATES * limit, n_heads)


def divide(requests: int, rounds: int) -> tuple[int, ...]:
    """How many masked requests of a task each round may spend: the masks first, then heads alone.

    Args:
        requests: in all.
        rounds: 1, 2 or 3.
    """
    masks = round(mask_share(rounds) * requests)
    left = requests - masks
    return {1: (masks,), 2: (masks, left), 3: (masks, left // 2, left - left // 2)}[rounds]


@dataclass(frozen=True)
class Rounds:
    """Knocks out the leading heads alone.

    The second round takes the most specific heads of every task, all on the same few of its items; the third takes more
    items for those of which it is undecided whether they are among the first.

    Attributes:
        budgets: requests a task that each round may spend, the second round's first.
        limit: heads that are looked for.
        confidence: chance from which a head is decided; see ``undecided_heads``.
        floor: cap on the damage of one request, in nats.
        seed: of the order of items, and of resamples.
        reserved: first items of every task, on which no head is tried.
    """

    budgets: tuple[int, ...]
    limit: int
    confidence: float
    floor: float
    seed: int = 0
    reserved: int = 0

    def check(self, items: Items) -> None:
        """Raises UsageError if a task has too few items, or a round too few requests."""
        needed = self.reserved + _FEWEST_ITEMS
        few = [task for task, asked in items.items() if len(asked) < needed]
        if few:
            kept = f", {self.reserved} of them for the tests of single heads" if self.reserved else ""
            raise UsageError(
                f"task '{few[0]}' has {len(items[few[0]])} search items and design.rounds above 1 needs "
                f"{needed}{kept}; raise search_items, or set design.rounds to 1"
            )
        if min(self.budgets) < _FEWEST_ITEMS:
            raise UsageError(
                "design.requests leaves the rounds after the masks nothing; raise it, or set design.rounds to 1"
            )

    def narrow(
        self,
        measurer: Measurer,
        items: Items,
        relatives: Relatives,
        table: MeasurementTable,
        effects: Effects,
        baseline: Mapping[str, Sequence[Outcome]],
    ) -> Narrowed:
        """Tries the leading heads and ranks anew.

        Args:
            measurer: asks the model.
            items: search items by task.
            relatives: by task, the tasks that do not control it.
            table: the outcomes under masks, tasks in the order of the items.
            effects: ``[n_tasks, n_heads]`` what a solver made of them, in nats.
            baseline: by task, the outcomes of all its items unablated.

        Raises:
            MeasurementError: if an outcome cannot be measured.
            SolverError: if an outcome is not finite.
        """
        shape, tasks = table.shape, table.tasks
        trials = {}
        for task in tasks:
            order = stream(self.seed, "rounds", task).permutation(len(items[task]) - self.reserved)
            trials[task] = _Trials(shape.n_heads, order + self.reserved)
        refit = _Refit(task_arrays(table, self.floor), effects)
        scores = specificity(effects, tasks, relatives).strongest
        refitted = refit(np.unique(rank_heads(scores, effects)[:, : _CANDIDATES * self.limit]), trials)
        for number, granted in enumerate(np.cumsum(self.budgets).tolist(), 2):
            scores = specificity(refitted, tasks, relatives).strongest
            order = rank_heads(scores, refitted)
            designs = {}
            for row, (task, trial) in enumerate(trials.items()):
                heads, sharing = order[row], first_tried(self.limit, shape.n_heads)
                if trial.damage:
                    heads = self._undecided(trial, order[row], scores[row], float(refitted[row].std()), task)
                    sharing = len(heads)
                designs[task] = trial.design(heads, sharing, granted)
            if not any(map(len, designs.values())):
                break
            outcomes = measure_designs(measurer, shape, items, designs, baseline, f"round {number}")
            damage = outcomes.damage(self.floor)
            for task, design in designs.items():
                trials[task].take(design, damage[outcomes.rows_of(task)])
            refitted = refit(np.unique(np.concatenate([list(trial.damage) for trial in trials.values()])), trials)
        order = rank_heads(specificity(refitted, tasks, relatives).strongest, refitted)
        tried = [np.isin(row, list(trial.damage)) for row, trial in zip(order, trials.values(), strict=True)]
        order = np.stack([np.concatenate([row[first], row[~first]]) for row, first in zip(order, tried, strict=True)])
        return Narrowed(
            heads_in_order(order, shape, tasks),
            refitted,
            {task: joined(trial.designs) for task, trial in trials.items()},
            {task: {shape.head(h): np.array(d) for h, d in trial.damage.items()} for task, trial in trials.items()},
        )

    def _undecided(
        self, trial: _Trials, order: NDArray[np.int64], scores: Effects, spread: float, task: str
    ) -> NDArray[np.int64]:
        """The heads to try on more items, most specific first."""
        tried = order[np.isin(order, list(trial.damage))]
        damage = np.array([trial.damage[head] for head in tried.tolist()])
        rng = stream(self.seed, "undecided", task)
        undecided = undecided_heads(damage, scores[tried], spread, self.limit, self.confidence, rng)
        return tried[undecided][: _CONTENDERS * self.limit]


@dataclass(frozen=True, eq=False)
class _Refit:
    """Fits chosen heads of all tasks anew, from the solver's effects and all outcomes so far."""

    arrays: Sequence[TaskArrays]
    effects: Effects

    def __call__(self, heads: NDArray[np.int64], trials: Mapping[str, _Trials]) -> Effects:
        return np.stack(
            [
                refit_heads(arrays, effects, heads, {head: np.array(damage) for head, damage in trial.damage.items()})
                for arrays, effects, trial in zip(self.arrays, self.effects, trials.values(), strict=True)
            ]
        )


class _Trials:
    """The heads of one task that were knocked out alone.

    Attributes:
        damage: by head, its damage on the first items of the order, in nats.
        designs: the requests of every round.
    """

    def __init__(self, n_heads: int, order: NDArray[np.int64]) -> None:
        self.damage: dict[int, list[float]] = {}
        self._order = order
        self._n_heads = n_heads
        self.designs = [Design(np.zeros((0, n_heads), dtype=bool), np.empty(0, dtype=np.int64))]

    def design(self, heads: NDArray[np.int64], sharing: int, granted: int) -> Design:
        """Heads alone, on the next items of the order.

        Args:
            heads: most specific first, either none of them tried before or all on as many items.
            sharing: among how many the requests are shared; more are tried where the items run out.
            granted: requests that all rounds so far may spend.
        """
        left = granted - sum(map(len, self.designs))
        asked = len(self.damage.get(int(heads[0]), ())) if len(heads) else 0
        each = min(items_a_head(left, sharing), len(self._order) - asked) if sharing else 0
        heads = heads[: left // each] if each else heads[:0]
        masks = np.arange(self._n_heads) == np.repeat(heads, each)[:, None]
        return Design(masks, np.tile(self._order[asked : asked + each], len(heads)))

    def take(self, design: Design, damage: NDArray[np.float64]) -> None:
        """Adds the damage of every request of a design."""
        self.designs.append(design)
        for head, loss in zip(design.masks.argmax(axis=1).tolist(), damage.tolist(), strict=True):
            self.damage.setdefault(head, []).append(loss)
