"""What a method spends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Measurer, Mode, Request
from cs_localize.outcomes import Item, Outcome


class CountingMeasurer:
    """A ``Measurer`` that counts the different requests that pass through it to another.

    Attributes:
        requests: masked requests by task.
        baseline: by task, the outcomes of the unablated requests.
        tokens: tokens of both by task.
    """

    def __init__(self, measurer: Measurer) -> None:
        self.requests: Counter[str] = Counter()
        self.baseline: defaultdict[str, list[Outcome]] = defaultdict(list)
        self.tokens: Counter[str] = Counter()
        self._measurer = measurer
        self._seen: set[tuple[str, str, str]] = set()

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        """The other measurer's request; costs nothing until it is measured."""
        return self._measurer.request(item, ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        """The other measurer's outcomes."""
        outcomes = self._measurer.measure(requests, stage)
        for request, outcome in zip(requests, outcomes, strict=True):
            task = request.item.task
            seen = (task, request.item.id, request.key)
            if seen in self._seen:
                continue
            self._seen.add(seen)
            self.tokens[task] += outcome.tokens
            if request.ablation.empty:
                self.baseline[task].append(outcome)
            else:
                self.requests[task] += 1
        return outcomes
