"""Work units: how a list of requests is cut up, handed out, taken back and counted. No Ray in here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cs_localize.measure.protocol import Request


@dataclass(eq=False)
class Unit:
    """Requests that one worker answers in one call.

    Attributes:
        positions: where the requests stand in the list that was cut up.
        requests: the requests themselves.
        kills: workers that died while they ran it.
        done: whether its outcomes have come back.
    """

    positions: range
    requests: Sequence[Request]
    kills: int = 0
    done: bool = False

    @property
    def items(self) -> str:
        """The items it asks about, for messages: the first three and how many more there are."""
        names = list(dict.fromkeys(f"{request.item.task}/{request.item.id}" for request in self.requests))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more


class UnitQueue:
    """Units in order, of which a unit that is taken back comes first.

    Args:
        requests: what is to be answered.
        unit_tokens: tokens that fill a unit; a single longer request is a unit of its own.
        workers: where there is less than a full unit for each of them, they share evenly.

    Attributes:
        unfinished: units whose outcomes have not come back.
        discarded: outcomes that came back a second time.
    """

    def __init__(self, requests: Sequence[Request], unit_tokens: int, workers: int) -> None:
        total = sum(map(request_tokens, requests))
        size = max(1, min(unit_tokens, math.ceil(total / workers)))
        self._waiting: deque[Unit] = deque(_cut(requests, size))
        self.unfinished = len(self._waiting)
        self.discarded = 0

    def __len__(self) -> int:
        """Units that wait to be handed out."""
        return len(self._waiting)

    def take(self) -> Unit | None:
        """Hands out the next unit, or None if none waits."""
        while self._waiting:
            unit = self._waiting.popleft()
            if not unit.done:
                return unit
        return None

    def put_back(self, units: Iterable[Unit]) -> None:
        """Takes back units whose worker died; they are handed out next, in the order given."""
        self._waiting.extendleft(reversed([unit for unit in units if not unit.done]))

    def finish(self, unit: Unit) -> bool:
        """Records that a unit's outcomes came back; False, and counted, if they had come back before."""
        if unit.done:
            self.discarded += len(unit.requests)
            return False
        unit.done = True
        self.unfinished -= 1
        return True


def request_tokens(request: Request) -> int:
    """Most tokens a request can take: prompt plus the answer, or plus all that may be generated."""
    return len(request.prompt_ids) + (len(request.answer_ids) if request.mode == "score" else request.max_tokens)


def _cut(requests: Sequence[Request], size: int) -> Iterator[Unit]:
    start, tokens = 0, 0
    for position, request in enumerate(requests):
        more = request_tokens(request)
        if position > start and tokens + more > size:
            yield Unit(range(start, position), requests[start:position])
            start, tokens = position, 0
        tokens += more
    if start < len(requests):
        yield Unit(range(start, len(requests)), requests[start:])
