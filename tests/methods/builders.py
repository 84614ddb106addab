"""A measurer that needs no fleet."""

from __future__ import annotations

from collections.abc import Sequence

from cs_localize.heads import Ablation
from cs_localize.measure.planted import PlantedEngine
from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item, Outcome


class EngineMeasurer:
    """Asks an engine in this process."""

    def __init__(self, engine: PlantedEngine) -> None:
        self.engine = engine
        self.asked: list[Request] = []

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        return Request(item, (1, int.from_bytes(item.id.encode())), (2,), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        self.asked += requests
        return self.engine.measure(requests)
