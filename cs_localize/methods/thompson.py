"""Thompson sampling: the heads that may well be the most specific ones, as far as is known, are asked next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.design import Design
from cs_localize.heads import ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.methods.counting import CountingMeasurer
from cs_localize.methods.method import Items, Localization, Relatives, by_specificity, check_items, localized
from cs_localize.methods.tables import measure_baseline, measure_designs
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import specificity
from cs_localize.recover.options import check_above_zero, check_whole
from cs_localize.seeds import stream


@dataclass(frozen=True)
class Thompson:
    r"""One head a request; the next is the one that leads a draw from what is known of all heads on all tasks.

    The reward of a request is the damage, the score of its item unablated minus that with the head zeroed, in nats.
    With a mean damage :math:`\bar d` over n requests, what is known of a head on a task is

    .. math:: \mathcal{N}\!\left(\frac{n \bar d}{n + 1}, \frac{\sigma^2}{n + 1}\right)

    the posterior of a normal mean whose prior weighs as much as one request without damage, :math:`\sigma` being both
    the prior's standard deviation and that of the damage from item to item. A request draws an effect for every head
    and task and takes, for each task, the head that is most specific in the draw; its item is the next of a random
    order in which that head has not been asked. All requests of a batch come from the same posteriors, so that the
    model can be asked all of them at once. Effects are the posterior means.

    The search by Thompson sampling of Bair et al. (arXiv 2603.03335) has a Beta distribution for every head and rewards
    the accuracy that is left, which prefers heads that are safe to remove.

    Attributes:
        requests: masked requests a task; fewer where every head was asked on every item.
        batch: requests a task between two updates of what is known.
        spread: sigma, in nats.
        floor: cap on the damage of one request, in nats.
        seed: of draws and items.
    """

    requests: int = 900
    batch: int = 30
    spread: float = 2.0
    floor: float = 8.0
    seed: int = 0

    def check_options(self) -> None:
        """Raises UsageError if an option is out of range; see ``Method``."""
        check_whole(1, requests=self.requests, batch=self.batch)
        check_above_zero(spread=self.spread, floor=self.floor)

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Asks batch after batch, all tasks side by side; see ``Method``."""
        check_items(items)
        self.check_options()
        counter = CountingMeasurer(measurer)
        baseline = measure_baseline(counter, items)
        known = _Known(shape, items, self.spread, stream(self.seed, "thompson"))
        for asked in range(0, self.requests, self.batch):
            designs = known.draw(min(self.batch, self.requests - asked), relatives)
            if not designs:
                break
            known.learn(measure_designs(counter, shape, items, designs, baseline, "thompson"), self.floor)
        return localized(by_specificity(known.means, shape, tuple(items), relatives), known.means, counter)


class _Known:
    """What is known of every head on every task, and what was asked.

    Attributes:
        means: ``[n_tasks, n_heads]`` posterior means, in nats.
    """

    def __init__(self, shape: ModelShape, items: Items, spread: float, rng: np.random.Generator) -> None:
        self._tasks = tuple(items)
        self._spread = spread
        self._rng = rng
        self._orders = [
            rng.permuted(np.tile(np.arange(len(asked)), (shape.n_heads, 1)), axis=1) for asked in items.values()
        ]
        self._sums = np.zeros((len(items), shape.n_heads))
        self._counts = np.zeros((len(items), shape.n_heads), dtype=np.int64)

    @property
    def means(self) -> NDArray[np.float64]:
        return np.asarray(self._sums / (self._counts + 1))

    def draw(self, count: int, relatives: Relatives) -> dict[str, Design]:
        """So many requests of every task that has some left."""
        turns, means = self._counts.copy(), self.means
        deviations = self._spread / np.sqrt(self._counts + 1)
        limits = np.array([[order.shape[1]] for order in self._orders])
        chosen: list[list[tuple[int, int]]] = [[] for _ in self._tasks]
        for _ in range(count):
            drawn = specificity(self._rng.normal(means, deviations), self._tasks, relatives).strongest
            heads = np.where(turns < limits, drawn, -np.inf).argmax(axis=1)
            for row, head in enumerate(heads.tolist()):
                if turns[row, head] < limits[row, 0]:
                    chosen[row].append((head, int(self._orders[row][head, turns[row, head]])))
                    turns[row, head] += 1
        return {task: self._design(requests) for task, requests in zip(self._tasks, chosen, strict=True) if requests}

    def _design(self, requests: Sequence[tuple[int, int]]) -> Design:
        heads, items = np.array(requests).T
        return Design(np.arange(self._sums.shape[1]) == heads[:, None], items)

    def learn(self, table: MeasurementTable, floor: float) -> None:
        """Counts the outcomes of single heads."""
        rows = np.array([self._tasks.index(task) for task in table.tasks])[table.task]
        heads = table.masks.argmax(axis=1)
        np.add.at(self._sums, (rows, heads), table.damage(floor))
        np.add.at(self._counts, (rows, heads), 1)
