"""Iterative greedy: a sweep for every head that is added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods.counting import CountingMeasurer
from cs_localize.methods.method import Items, Localization, Relatives, check_items, localized
from cs_localize.outcomes import Item
from cs_localize.recover import rank_heads, specificity
from cs_localize.recover.options import check_above_zero, check_whole
from cs_localize.sweep import sweep


@dataclass(frozen=True)
class Greedy:
    """Adds, one by one, the head that is most specific on top of those a task has already.

    The first head comes from one sweep of all tasks. Every further head takes a sweep of the target under the heads
    chosen so far; its controls keep the single-head damage of the first sweep, which spares a sweep of each. The
    effects are those of the first sweep.

    Attributes:
        heads: how many to add for every task; the others follow in the order of the last sweep.
        floor: cap on the damage of one request, in nats.
    """

    heads: int = 5
    floor: float = 8.0

    def check_options(self) -> None:
        """Raises UsageError if an option is out of range; see ``Method``."""
        check_whole(1, heads=self.heads)
        check_above_zero(floor=self.floor)

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Sweeps once for all tasks and again for every further head of each; see ``Method``."""
        check_items(items)
        if not 1 <= self.heads <= shape.n_heads:
            raise UsageError(f"greedy cannot add {self.heads} heads; choose 1 to {shape.n_heads}")
        counter = CountingMeasurer(measurer)
        single = np.stack([part.mean(axis=0) for part in sweep(counter, shape, items, self.floor).values()])
        ranking = {}
        for row, (task, asked) in enumerate(items.items()):
            effects = single.copy()
            chosen: list[int] = []
            while True:
                order = rank_heads(specificity(effects, tuple(items), relatives).strongest, effects)[row]
                rest = [int(head) for head in order if head not in chosen]
                chosen.append(rest[0])
                if len(chosen) == self.heads:
                    break
                effects[row] = self._damage_on_top(counter, shape, asked, chosen)
            ranking[task] = tuple(shape.head(i) for i in [*chosen, *rest[1:]])
        return localized(ranking, single, counter)

    def _damage_on_top(
        self, measurer: Measurer, shape: ModelShape, items: Sequence[Item], chosen: list[int]
    ) -> NDArray[np.float64]:
        """Mean damage with each head out besides the chosen ones, ``[n_heads]``, that of the chosen ones alone less.

        It is 0 for the chosen ones themselves.
        """
        taken = [shape.head(i) for i in chosen]
        bare = measurer.measure([measurer.request(item, Ablation()) for item in items], "baseline")
        before = np.array([outcome.score for outcome in bare])
        others = [i for i in range(shape.n_heads) if i not in chosen]
        ablations = [Ablation.of(taken), *(Ablation.of([*taken, shape.head(i)]) for i in others)]
        requests = [measurer.request(item, ablation) for ablation in ablations for item in items]
        after = np.array([outcome.score for outcome in measurer.measure(requests, "greedy")])
        damage = np.minimum(before - after.reshape(len(ablations), -1), self.floor).mean(axis=1)
        result = np.zeros(shape.n_heads)
        result[others] = damage[1:] - damage[0]
        return result
