"""Work units: how a list of requests is cut up, handed out, taken back, blamed and counted. No Ray in here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cs_localize.measure.protocol import Request

UNIT_KILLS = 3
_PATIENCE = 10


@dataclass(eq=False)
class Unit:
    """Requests that one worker answers in one call.

    Attributes:
        positions: where the requests stand in the list that was cut up.
        requests: the requests themselves.
        kills: workers that died while they ran it.
        done: whether its outcomes have come back, or are not waited for any more.
        suspect: whether it is a part of a unit that killed workers.
    """

    positions: range
    requests: Sequence[Request]
    kills: int = 0
    done: bool = False
    suspect: bool = False

    @cached_property
    def tokens(self) -> int:
        """Most tokens its requests can take."""
        return sum(map(request_tokens, self.requests))

    @property
    def to_blame(self) -> bool:
        """Whether the unit itself, rather than chance, is what kills its workers."""
        return self.kills >= (1 if self.suspect and len(self.requests) > 1 else UNIT_KILLS)

    def halves(self) -> list[Unit]:
        """Two units of half of its requests each."""
        middle = len(self.requests) // 2
        return [
            Unit(self.positions[part], self.requests[part], suspect=True)
            for part in (slice(None, middle), slice(middle, None))
        ]


class UnitQueue:
    """Units in order, of which a unit that is taken back comes first and one under suspicion last.

    A unit that killed three workers is halved, and so is every half that kills one more, until a single request is
    alone; a request that kills three workers by itself is not asked again.

    Args:
        requests: what is to be answered.
        unit_tokens: most tokens of a unit; a single longer request is a unit of its own.
        workers: who share the units. There are as many for each, of the same size, so that all end at the same time.

    Attributes:
        unfinished: units whose outcomes have not come back.
        discarded: outcomes that came back a second time.
        quarantined: requests that killed every worker they were given to, so that they have no outcome.
    """

    def __init__(self, requests: Sequence[Request], unit_tokens: int, workers: int) -> None:
        rounds = math.ceil(full_units(requests, unit_tokens) / workers)
        self._waiting: deque[Unit] = deque(_cut(requests, unit_tokens, rounds * workers))
        self.unfinished = len(self._waiting)
        self.discarded = 0
        self.quarantined: list[Request] = []

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

    def blame(self, unit: Unit) -> Request | None:
        """Records that a worker died while it ran a unit, and takes the unit back.

        Returns:
            The request that was quarantined for it, if one was.
        """
        if unit.done:
            return None
        unit.kills += 1
        if not unit.to_blame:
            if unit.suspect:
                self._waiting.append(unit)
            else:
                self.put_back([unit])
            return None
        unit.done = True
        self.unfinished -= 1
        if len(unit.requests) == 1:
            self.quarantined.append(unit.requests[0])
            return unit.requests[0]
        parts = unit.halves()
        self._waiting.extend(parts)  # last, so that everything else is measured before more workers are lost
        self.unfinished += len(parts)
        return None

    def finish(self, unit: Unit) -> bool:
        """Records that a unit's outcomes came back; False, and counted, if they had come back before."""
        if unit.done:
            self.discarded += len(unit.requests)
            return False
        unit.done = True
        self.unfinished -= 1
        return True


class Patience:
    """How long a worker may take for a unit before it counts as hung, by the pace of all units so far.

    Args:
        floor_s: seconds that every unit may take.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._tokens = 0
        self._seconds = 0.0

    def saw(self, unit: Unit, seconds: float) -> None:
        """Takes account of a unit that came back."""
        self._tokens += unit.tokens
        self._seconds += seconds

    def seconds(self, unit: Unit) -> float:
        """Seconds a unit may take: ten times what it would at the pace so far, and no less than the floor."""
        pace = self._seconds / self._tokens if self._tokens else 0.0
        return max(self._floor_s, _PATIENCE * pace * unit.tokens)


def full_units(requests: Sequence[Request], unit_tokens: int) -> int:
    """How many workers there is a full unit for, the last of them perhaps not quite full."""
    return math.ceil(sum(map(request_tokens, requests)) / unit_tokens)


def request_name(request: Request) -> str:
    """A request for messages: task, item and ablation."""
    return f"{request.item.task}/{request.item.id} under {request.ablation}"


def request_tokens(request: Request) -> int:
    """Most tokens a request can take: prompt plus the answer, or plus all that may be generated."""
    return len(request.prompt_ids) + (len(request.answer_ids) if request.mode == "score" else request.max_tokens)


def _cut(requests: Sequence[Request], most: int, number: int) -> Iterator[Unit]:
    """Cuts as near before every ``number``-th part of all tokens as requests allow."""
    total = sum(map(request_tokens, requests))
    start = tokens = done = passed = 0
    for position, request in enumerate(requests):
        more = request_tokens(request)
        full = tokens + more > most or (done + more) * number > total * (passed + 1)
        if position > start and full:
            yield Unit(range(start, position), requests[start:position])
            start, tokens = position, 0
            passed = max(passed + 1, done * number // total)
        tokens += more
        done += more
    if start < len(requests):
        yield Unit(range(start, len(requests)), requests[start:])
