"""What a method spends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Measurer, Mode, Request
from cs_localize.outcomes import Item, Outcome


class CountingMeasurer:
    """A ``Measurer`` that counts the different requests that pass through it to another.

    Attributes:
        requests: masked requests by task.
        baseline_requests: unablated requests by task.
    """

    def __init__(self, measurer: Measurer) -> None:
        self.requests: Counter[str] = Counter()
        self.baseline_requests: Counter[str] = Counter()
        self._measurer = measurer
        self._seen: set[tuple[str, str, str]] = set()

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        """The other measurer's request; costs nothing until it is measured."""
        return self._measurer.request(item, ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        """The other measurer's outcomes."""
        for request in requests:
            seen = (request.item.task, request.item.id, request.key)
            if seen not in self._seen:
                self._seen.add(seen)
                count = self.baseline_requests if request.ablation.empty else self.requests
                count[request.item.task] += 1
        return self._measurer.measure(requests, stage)
