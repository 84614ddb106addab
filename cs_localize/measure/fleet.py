"""The fleet: long-lived engines, one Ray actor each, that answer units of work and may die without losing any."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cs_localize.errors import MeasurementError, UsageError, one_line
from cs_localize.measure.cluster import RaySession, check_room, death_reason, engine_error
from cs_localize.measure.crew import Crew
from cs_localize.measure.handle import WorkerHandle
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.measure.units import UNIT_KILLS, Patience, Unit, UnitQueue, full_units, request_name
from cs_localize.measure.worker import CoresTaken, Loader, Placement
from cs_localize.outcomes import Outcome

if TYPE_CHECKING:
    from ray import ObjectRef

_LOG = logging.getLogger("cs_localize")
_POLL_S = 1.0
_EVIDENCE_PATIENCE_S = 60.0
_QUARANTINED_IN_A_ROW = 10
_NAMED_IN_MESSAGES = 5


def _no_event(kind: str, **fields: object) -> None:
    """Where nobody listens."""


class Fleet:
    """Engines in processes of their own, fed by a driver that does no model work itself.

    Workers are started as there is work for them and load while others already answer. One that dies, or does not come
    back from a unit, gives its units back and is replaced; a request that kills every worker it is given to is left
    out, and everything else is answered first. Several fleets may share a cluster: workers without work are ended as
    soon as another fleet waits for a place, all but one.

    Args:
        spec: the engine each worker loads.
        workers: how many at most.
        threads: cores of each, which it shares with no other worker on its machine.
        address: the Ray cluster; see ``RaySession``.
        num_gpus_per_worker: GPUs of each.
        unit_tokens: tokens of one unit, what the death of a worker can lose.
        unit_timeout_s: seconds any unit may take; more where the pace of earlier ones says so. See ``Patience``.
        max_restarts: deaths in a row for each worker, with no unit finished in between, that are taken. The search
            for a request that kills workers does not count.
        start_timeout_s: seconds a worker may take to find a place and load.
        loader: makes the engine, called in the worker.
        notify: is told what becomes of workers and of requests that kill them: ``notify(kind, **fields)``. ``alive``
            among the fields is the number of workers that are up from then on.

    Attributes:
        discarded: outcomes that came back a second time and were dropped.
    """

    def __init__(
        self,
        spec: EngineSpec,
        workers: int,
        threads: int,
        address: str | None = None,
        num_gpus_per_worker: float = 0,
        unit_tokens: int = 6000,
        unit_timeout_s: float = 600.0,
        max_restarts: int = 3,
        start_timeout_s: float = 600.0,
        loader: Loader = load_engine,
        notify: Callable[..., None] = _no_event,
    ) -> None:
        if workers < 1 or threads < 1:
            raise UsageError(f"a fleet needs at least one worker with one core, not {workers} with {threads}")
        self._spec = spec
        self._size = workers
        self._place = (threads, num_gpus_per_worker)
        self._unit_tokens = unit_tokens
        self._max_restarts = max_restarts
        self._notify = notify
        self._session = RaySession(address)
        self._crew = Crew(workers, spec, *self._place, loader, start_timeout_s, notify)
        self._patience = Patience(unit_timeout_s)
        self._calls: dict[ObjectRef[list[Outcome]], tuple[WorkerHandle, Unit]] = {}
        self._deaths_in_a_row = 0
        self._workers_before = 0
        self._quarantined_in_a_row = 0
        self._shortages_told: set[str] = set()
        self.discarded = 0

    def __enter__(self) -> Fleet:
        """Connects to Ray.

        Raises:
            UsageError: if the cluster has no room for a single worker.
        """
        self._session.__enter__()
        try:
            check_room(*self._place)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def placements(self) -> list[Placement | None]:
        """Where each worker runs, in the order of their numbers; None while it loads."""
        return [worker.placement for worker in self._crew]

    def map(self, requests: Sequence[Request]) -> Iterator[tuple[range, list[Outcome]]]:
        """Answers all requests, unit by unit as they finish: positions in ``requests``, and their outcomes.

        Time that the caller spends on a unit does not count against workers.

        Raises:
            MeasurementError: if an engine fails or workers keep dying; and, when all other requests are answered, if
                there are some that kill every worker they are given to.
            UsageError: what an engine raised because of what it was asked, or if no worker could start in time.
        """
        sharing = max(len(self._crew), min(self._size, full_units(requests, self._unit_tokens)), 1)
        queue = UnitQueue(requests, self._unit_tokens, sharing)
        try:
            while queue.unfinished:
                self._crew.hire(queue.unfinished)
                self._feed(queue)
                ready = self._wait()
                self._end_hung(ready, queue)
                for reference in ready:
                    finished = self._receive(reference, queue)
                    if finished is not None:
                        left = time.monotonic()
                        yield finished
                        for worker in self._crew:
                            worker.excuse(time.monotonic() - left)
                self._crew.check_starts()
                self._crew.give_back(queue.unfinished)
        finally:
            self.discarded += queue.discarded
            self._calls.clear()
            for worker in self._crew:
                worker.units.clear()
        self._crew.give_back(0)
        if queue.quarantined:
            raise MeasurementError(_quarantine(queue.quarantined))

    def evidence(self) -> dict[int, dict[str, float]]:
        """What each engine that is loaded and alive can show about its own work, by the number of its worker."""
        import ray

        calls = {worker.number: worker.evidence() for worker in self._crew if worker.placement is not None}
        found = {}
        for number, call in calls.items():
            try:
                found[number] = ray.get(call, timeout=_EVIDENCE_PATIENCE_S)
            except ray.exceptions.RayTaskError as error:
                raise engine_error(error, self._spec.name) from error
            except ray.exceptions.RayError as error:
                _LOG.warning("worker %d shows no evidence (%s)", number, death_reason(error))
        return found

    def close(self) -> None:
        """Ends all workers, and Ray if this fleet started it. May be called twice."""
        self._calls.clear()
        with ExitStack() as stack:  # whatever goes wrong with one worker, the others are ended
            stack.callback(self._session.__exit__, None, None, None)
            for worker in self._crew:
                stack.callback(self._crew.end, worker)

    def _feed(self, queue: UnitQueue) -> None:
        """Hands out units: one to each worker, and a second to wait beside it while there are plenty."""
        for depth in (1, 2):
            for worker in self._crew:
                plenty = depth == 1 or len(queue) >= len(self._crew)
                if worker.placement is None or len(worker.units) >= depth or not plenty:
                    continue
                unit = queue.take()
                if unit is None:
                    return
                self._calls[worker.measure(unit)] = (worker, unit)

    def _wait(self) -> list[ObjectRef[Any]]:
        """The calls that have ended, those of one worker in the order they were made; perhaps none for a second."""
        import ray

        loading = [worker.loading for worker in self._crew if worker.loading is not None]
        pending: list[ObjectRef[Any]] = [*loading, *self._calls]
        ready, _ = ray.wait(pending, num_returns=1, timeout=_POLL_S)
        if ready:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        return ready

    def _end_hung(self, ready: Sequence[ObjectRef[Any]], queue: UnitQueue) -> None:
        """Ends workers that have run out of patience's time, unless an answer of theirs has just come."""
        answered = {self._calls[reference][0].number for reference in ready if reference in self._calls}
        for worker in self._crew:
            if not worker.units or worker.number in answered:
                continue
            limit = self._patience.seconds(worker.units[0])
            if worker.waited() > limit:
                waited = f"{worker.units[0].tokens:,} tokens in {limit:g} s"
                self._lose(worker, f"hung: no answer to {waited}, see engine.unit_timeout_s", queue)

    def _receive(self, reference: ObjectRef[Any], queue: UnitQueue) -> tuple[range, list[Outcome]] | None:
        import ray

        call = self._calls.pop(reference, None)
        worker = call[0] if call else next((w for w in self._crew if w.loading == reference), None)
        if worker is None:
            return None
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, CoresTaken) and any(other.placement is not None for other in self._crew):
                self._crew.end(worker)  # another is asked for, so that the fleet grows once there are cores
                self._tell_shortage(worker, one_line(error.cause))
                return None
            raise engine_error(error, self._spec.name) from error
        except ray.exceptions.RayError as error:
            self._lose(worker, death_reason(error), queue)
            return None
        if call is None:
            worker.loading, worker.placement = None, answer
            self._crew.tell("worker_ready", worker, host=answer.host, pid=answer.pid, cores=answer.cores)
            return None
        unit = call[1]
        self._patience.saw(unit, worker.took(unit))
        self._deaths_in_a_row = self._quarantined_in_a_row = 0
        return (unit.positions, answer) if queue.finish(unit) else None

    def _tell_shortage(self, worker: WorkerHandle, reason: str) -> None:
        """Warns once of cores that are missing: workers are asked for, and refused, for as long as they are."""
        if reason not in self._shortages_told:
            self._shortages_told.add(reason)
            _LOG.warning("worker %d was not started (%s); the others go on", worker.number, reason)

    def _lose(self, worker: WorkerHandle, reason: str, queue: UnitQueue) -> None:
        """Takes a lost worker's units back; another will be hired in its place."""
        if worker.ended:
            return
        units = list(worker.units)
        # The workers of a node that goes away are lost one after the other, and the crew is smaller each time.
        self._workers_before = max(len(self._crew), self._workers_before if self._deaths_in_a_row else 0)
        self._crew.drop(worker)
        self._crew.tell("worker_lost", worker, units=len(units), reason=reason)
        _LOG.warning("worker %d was lost (%s); starting another", worker.number, reason)
        queue.put_back(units[1:])
        searching = bool(units) and units[0].suspect
        if units:
            self._blame(units[0], reason, queue)
        self._deaths_in_a_row += not searching
        if self._deaths_in_a_row > self._max_restarts * self._workers_before:
            raise MeasurementError(
                f"{self._deaths_in_a_row} workers died and nothing was measured in between; "
                f"the last{_at(units)}: {reason}"
            )

    def _blame(self, unit: Unit, reason: str, queue: UnitQueue) -> None:
        request = queue.blame(unit)
        if request is None:
            return
        name = request_name(request)
        _LOG.warning("quarantined: %s; it killed all of the %d workers it was given to", name, UNIT_KILLS)
        self._notify(
            "quarantined",
            task=request.item.task,
            item=request.item.id,
            ablation=request.ablation.encode(),
            mode=request.mode,
            reason=reason,
        )
        self._quarantined_in_a_row += 1
        if self._quarantined_in_a_row == _QUARANTINED_IN_A_ROW:
            raise MeasurementError(
                f"{_QUARANTINED_IN_A_ROW} requests killed every worker they were given to and nothing was measured in "
                f"between, the last of them {name}; the last worker: {reason}"
            )


def _at(units: Sequence[Unit]) -> str:
    """What a worker was at, for messages."""
    if not units:
        return ""
    first, *rest = units[0].requests
    return f", while it measured {request_name(first)}" + (f" and {len(rest)} more" if rest else "")


def _quarantine(requests: Sequence[Request]) -> str:
    names = ", ".join(map(request_name, requests[:_NAMED_IN_MESSAGES]))
    more = f" and {len(requests) - _NAMED_IN_MESSAGES} more" if len(requests) > _NAMED_IN_MESSAGES else ""
    return (
        f"{len(requests)} request{'s' if len(requests) > 1 else ''} killed {UNIT_KILLS} workers each and could not be "
        f"measured: {names}{more}; everything else that was asked is in the ledger, and the same command tries again"
    )
