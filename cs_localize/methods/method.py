"""The interface of the methods."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cs_localize.design import Coverage, Design, joined
from cs_localize.errors import UsageError
from cs_localize.heads import Head, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods.counting import CountingMeasurer
from cs_localize.outcomes import Item, MeasurementTable, Outcome
from cs_localize.recover import Solver, heads_in_order, rank_heads, specificity

Items = Mapping[str, Sequence[Item]]
Relatives = Mapping[str, Collection[str]]


@dataclass(frozen=True, eq=False)
class Narrowed:
    """What rounds after the masks found, in which heads were knocked out alone.

    Attributes:
        ranking: by task, all heads; those knocked out alone come first.
        effects: ``[n_tasks, n_heads]`` damage in nats; see ``refit_heads`` for those of heads knocked out alone.
        designs: by task, the requests of these rounds, each of which knocks out a single head.
        damage: by task and head, its damage alone on every item it was tried on, in nats.
    """

    ranking: dict[str, tuple[Head, ...]]
    effects: NDArray[np.float64]
    designs: dict[str, Design]
    damage: dict[str, dict[Head, NDArray[np.float64]]]


@dataclass(frozen=True, eq=False)
class SparseFit:
    """What only the sparse method has: its designs, their outcomes and the fit to them.

    Attributes:
        designs: by task, every request under a random mask, the pilot's first.
        table: the outcomes of the designs.
        pilot: how many of the first requests of each task are the pilot's.
        fragile: layers the design spared.
        rates: ``[n_heads]`` share of the other requests that was to knock out each head.
        solver: fitted to the table.
        coverage: by task, how well its design tests the heads.
        narrowed: what the rounds after the masks found; None where there were none.
    """

    designs: dict[str, Design]
    table: MeasurementTable
    pilot: int
    fragile: tuple[int, ...]
    rates: NDArray[np.float64]
    solver: Solver
    coverage: dict[str, Coverage]
    narrowed: Narrowed | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know of the designs."""
        return tuple(f"{task}: {covered.warning}" for task, covered in self.coverage.items() if covered.warning)

    @property
    def requests(self) -> dict[str, Design]:
        """By task, every masked request, those of single heads last."""
        if self.narrowed is None:
            return self.designs
        return {task: joined([design, self.narrowed.designs[task]]) for task, design in self.designs.items()}


@dataclass(frozen=True, eq=False)
class Localization:
    """What a method found and spent.

    Attributes:
        ranking: by task, all heads, the one the method would name first in front.
        effects: ``[n_tasks, n_heads]`` damage in nats caused by knocking the head out, tasks in the order of the items;
            None for a method that estimates none.
        requests: by task, different masked requests.
        baseline: by task, the outcomes of different unablated requests; empty where a method asks none.
        tokens: by task, tokens of both.
        sparse: what the sparse method has besides; None for the others.
    """

    ranking: dict[str, tuple[Head, ...]]
    effects: NDArray[np.float64] | None
    requests: dict[str, int]
    baseline: dict[str, tuple[Outcome, ...]]
    tokens: dict[str, int]
    sparse: SparseFit | None = None

    @property
    def baseline_requests(self) -> dict[str, int]:
        """By task, different unablated requests."""
        return {task: len(outcomes) for task, outcomes in self.baseline.items()}


class Method(Protocol):
    """Ranks the heads of all tasks of a study, which control each other.

    A frozen dataclass: its fields are its options, and what a study gives every method that has a field for it; see
    ``make_method``.
    """

    def check_options(self) -> None:
        """Raises UsageError if an option is out of range whatever the model and the items."""
        ...

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Measures and ranks.

        Args:
            measurer: asks the model.
            shape: the model's geometry.
            items: search items by task.
            relatives: by task, the tasks that do not control it.

        Raises:
            UsageError: if there are no items, or an option does not fit them or the model.
            MeasurementError: if an outcome cannot be measured.
            SolverError: if a solver reaches no solution.
        """
        ...


def damage_cap(method: Method) -> float | None:
    """Nats at which the damage of one request is capped; None where a method looks at no damage."""
    return getattr(method, "floor", None)


def check_items(items: Items) -> None:
    """Raises UsageError unless there are tasks and each has items."""
    empty = [task for task, asked in items.items() if not asked]
    if empty or not items:
        raise UsageError(f"task '{empty[0]}' has no search items" if empty else "there is no task to localize")


def by_specificity(
    effects: NDArray[np.float64], shape: ModelShape, tasks: Sequence[str], relatives: Relatives
) -> dict[str, tuple[Head, ...]]:
    """By task, all heads, most specific first, from effects ``[n_tasks, n_heads]`` in nats."""
    order = rank_heads(specificity(effects, tasks, relatives).strongest, effects)
    return heads_in_order(order, shape, tasks)


def localized(
    ranking: dict[str, tuple[Head, ...]],
    effects: NDArray[np.float64] | None,
    counter: CountingMeasurer,
    sparse: SparseFit | None = None,
) -> Localization:
    """A ranking with what the counter saw, nothing for a task of which it saw nothing."""
    return Localization(
        ranking,
        effects,
        {task: counter.requests[task] for task in ranking},
        {task: tuple(counter.baseline[task]) for task in ranking},
        {task: counter.tokens[task] for task in ranking},
        sparse,
    )
