"""The methods that look at every head once, or at none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods.counting import CountingMeasurer
from cs_localize.methods.method import Items, Localization, Relatives, by_specificity, check_items, localized
from cs_localize.recover.options import check_above_zero, check_whole
from cs_localize.sweep import sweep


@dataclass(frozen=True)
class ExhaustiveSweep:
    """Every head alone, on every item.

    Attributes:
        floor: cap on the damage of one request, in nats.
    """

    floor: float = 8.0

    def check_options(self) -> None:
        """Raises UsageError if an option is out of range; see ``Method``."""
        check_above_zero(floor=self.floor)

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Sweeps and ranks by specificity; see ``Method``."""
        check_items(items)
        counter = CountingMeasurer(measurer)
        damage = sweep(counter, shape, items, self.floor)
        effects = np.stack([part.mean(axis=0) for part in damage.values()])
        return localized(by_specificity(effects, shape, tuple(items), relatives), effects, counter)


@dataclass(frozen=True)
class ThinSweep:
    """Every head alone, on a few random items a task.

    Attributes:
        items: how many, for every task.
        seed: decides which.
        floor: cap on the damage of one request, in nats.
    """

    items: int = 2
    seed: int = 0
    floor: float = 8.0

    def check_options(self) -> None:
        """Raises UsageError if an option is out of range; see ``Method``."""
        check_whole(1, items=self.items)
        check_above_zero(floor=self.floor)

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Sweeps a part of the items; see ``Method``."""
        check_items(items)
        fewest = min(items, key=lambda task: len(items[task]))
        if not 1 <= self.items <= len(items[fewest]):
            raise UsageError(
                f"a thin sweep of {self.items} items a task cannot be drawn: task '{fewest}' has {len(items[fewest])}"
            )
        part = {}
        for number, (task, asked) in enumerate(items.items()):
            rng = np.random.default_rng([self.seed, number])
            part[task] = [asked[i] for i in rng.choice(len(asked), self.items, replace=False)]
        return ExhaustiveSweep(self.floor).localize(measurer, shape, part, relatives)


@dataclass(frozen=True)
class RandomHeads:
    """Heads in random order, of no request.

    Attributes:
        seed: decides the order.
    """

    seed: int = 0

    def check_options(self) -> None:
        """Nothing to check: a study gives the seed."""

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Shuffles; see ``Method``."""
        check_items(items)
        orders = {
            task: np.random.default_rng([self.seed, number]).permutation(shape.n_heads)
            for number, task in enumerate(items)
        }
        ranking = {task: tuple(shape.head(int(i)) for i in order) for task, order in orders.items()}
        return localized(ranking, None, CountingMeasurer(measurer))
