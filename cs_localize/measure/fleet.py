"""The fleet: long-lived engines, one Ray actor each, that answer units of work and may die without losing any."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.measure.cluster import (
    RaySession,
    check_room,
    death_reason,
    describe_shortage,
    engine_error,
    worker_environment,
)
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.measure.units import Unit, UnitQueue
from cs_localize.measure.worker import EngineWorker, Loader, Placement
from cs_localize.outcomes import Outcome

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.exceptions import RayError

_LOG = logging.getLogger("cs_localize")
_UNIT_KILLS = 3
_POLL_S = 1.0
_EVIDENCE_PATIENCE_S = 60.0


def _no_event(kind: str, **fields: object) -> None:
    """Where nobody listens."""


@dataclass(eq=False)
class _Worker:
    """The driver's view of one worker; a new one takes the number of one that died."""

    number: int
    actor: Any
    arrival: ObjectRef[str]
    loading: ObjectRef[Placement] | None
    deadline: float
    placement: Placement | None = None
    units: deque[Unit] = field(default_factory=deque)
    late: bool = False
    dead: bool = False


class Fleet:
    """Engines in processes of their own, fed by a driver that does no model work itself.

    Workers load while others already answer; one that dies gives its units back, first in line, and is replaced.

    Args:
        spec: the engine each worker loads.
        workers: how many.
        threads: cores of each, which it shares with no other worker on its machine.
        address: the Ray cluster; see ``RaySession``.
        num_gpus_per_worker: GPUs of each.
        unit_tokens: tokens of one unit, what the death of a worker can lose.
        max_restarts: deaths in a row, with no unit finished in between, that are taken.
        start_timeout_s: seconds a worker may take to find a place and load.
        loader: makes the engine, called in the worker.
        notify: is told of workers that are ready and workers that are lost: ``notify(kind, **fields)``.

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
        max_restarts: int = 3,
        start_timeout_s: float = 600.0,
        loader: Loader = load_engine,
        notify: Callable[..., None] = _no_event,
    ) -> None:
        if workers < 1 or threads < 1:
            raise UsageError(f"a fleet needs at least one worker with one core, not {workers} with {threads}")
        self._spec = spec
        self._size = workers
        self._threads = threads
        self._gpus = num_gpus_per_worker
        self._unit_tokens = unit_tokens
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._loader = loader
        self._notify = notify
        self._session = RaySession(address)
        self._workers: list[_Worker] = []
        self._calls: dict[ObjectRef[list[Outcome]], tuple[_Worker, Unit]] = {}
        self._deaths_in_a_row = 0
        self.discarded = 0

    def __enter__(self) -> Fleet:
        """Connects to Ray and sets all workers loading; does not wait for them.

        Raises:
            UsageError: if the cluster has no room for them.
        """
        self._session.__enter__()
        try:
            check_room(self._size, self._threads, self._gpus)
            self._workers = [self._start_worker(number) for number in range(self._size)]
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
        """Where each worker runs; None while it loads."""
        return [worker.placement for worker in self._workers]

    def map(self, requests: Sequence[Request]) -> Iterator[tuple[range, list[Outcome]]]:
        """Answers all requests, unit by unit as they finish: positions in ``requests``, and their outcomes.

        Raises:
            MeasurementError: if an engine fails, workers keep dying, or a unit kills every worker it is given to.
            UsageError: what an engine raised because of what it was asked, or if no worker could start in time.
        """
        queue = UnitQueue(requests, self._unit_tokens, self._size)
        try:
            while queue.unfinished:
                self._feed(queue)
                for reference in self._wait():
                    finished = self._receive(reference, queue)
                    if finished is not None:
                        yield finished
                self._check_starts()
        finally:
            self.discarded += queue.discarded
            self._calls.clear()
            for worker in self._workers:
                worker.units.clear()

    def evidence(self) -> list[dict[str, float]]:
        """What each engine that is loaded and alive can show about its own work."""
        import ray

        calls = [worker.actor.evidence.remote() for worker in self._workers if worker.placement is not None]
        found = []
        for call in calls:
            try:
                found.append(ray.get(call, timeout=_EVIDENCE_PATIENCE_S))
            except ray.exceptions.RayTaskError as error:
                raise engine_error(error, self._spec.name) from error
            except ray.exceptions.RayError as error:
                _LOG.warning("a worker shows no evidence (%s)", death_reason(error))
        return found

    def close(self) -> None:
        """Ends all workers, and Ray if this fleet started it. May be called twice."""
        workers, self._workers = self._workers, []
        self._calls.clear()
        for worker in workers:
            _end(worker)
        self._session.__exit__(None, None, None)

    def _start_worker(self, number: int) -> _Worker:
        import ray

        actor: Any = (
            ray.remote(EngineWorker)
            .options(
                num_cpus=self._threads,
                num_gpus=self._gpus,
                max_restarts=0,
                runtime_env={"env_vars": worker_environment(self._spec, self._threads)},
            )
            .remote(self._spec, self._threads, self._loader)
        )
        deadline = time.monotonic() + self._start_timeout_s
        return _Worker(number, actor, actor.arrive.remote(), actor.load.remote(), deadline)

    def _feed(self, queue: UnitQueue) -> None:
        """Hands out units: one to each worker, and a second to wait beside it while there are plenty."""
        for depth in (1, 2):
            for worker in self._workers:
                plenty = depth == 1 or len(queue) >= self._size
                if worker.placement is None or len(worker.units) >= depth or not plenty:
                    continue
                unit = queue.take()
                if unit is None:
                    return
                worker.units.append(unit)
                self._calls[worker.actor.measure.remote(unit.requests)] = (worker, unit)

    def _wait(self) -> list[ObjectRef[Any]]:
        """The calls that have ended, those of one worker in the order they were made; perhaps none for a second."""
        import ray

        loading = [worker.loading for worker in self._workers if worker.loading is not None]
        pending: list[ObjectRef[Any]] = [*loading, *self._calls]
        ready, _ = ray.wait(pending, num_returns=1, timeout=_POLL_S)
        if ready:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        return ready

    def _receive(self, reference: ObjectRef[Any], queue: UnitQueue) -> tuple[range, list[Outcome]] | None:
        import ray

        call = self._calls.pop(reference, None)
        worker = call[0] if call else next((w for w in self._workers if w.loading == reference), None)
        if worker is None:
            return None
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise engine_error(error, self._spec.name) from error
        except ray.exceptions.RayError as error:
            self._replace(worker, error, queue)
            return None
        if call is None:
            worker.loading, worker.placement = None, answer
            self._notify("worker_ready", worker=worker.number, host=answer.host, pid=answer.pid, cores=answer.cores)
            return None
        unit = call[1]
        if unit in worker.units:
            worker.units.remove(unit)
        self._deaths_in_a_row = 0
        return (unit.positions, answer) if queue.finish(unit) else None

    def _replace(self, worker: _Worker, cause: RayError, queue: UnitQueue) -> None:
        """Takes a dead worker's units back and starts another in its place."""
        if worker.dead:
            return
        worker.dead = True
        units = list(worker.units)
        reason = death_reason(cause)
        self._notify("worker_lost", worker=worker.number, units=len(units), reason=reason)
        _LOG.warning("worker %d died (%s); starting another", worker.number, reason)
        if units:
            units[0].kills += 1
            if units[0].kills >= _UNIT_KILLS:
                raise MeasurementError(
                    f"{_UNIT_KILLS} workers in a row died while they measured {units[0].items}; the last: {reason}"
                )
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > self._max_restarts:
            raise MeasurementError(
                f"{self._deaths_in_a_row} workers died and nothing was measured in between; the last: {reason}"
            )
        queue.put_back(units)
        _end(worker)
        self._workers[worker.number] = self._start_worker(worker.number)

    def _check_starts(self) -> None:
        """Complains of workers that take too long to start; without a single one that is up, gives up."""
        import ray

        now = time.monotonic()
        late = [worker for worker in self._workers if worker.placement is None and now > worker.deadline]
        if not late:
            return
        arrived = bool(ray.wait([late[0].arrival], timeout=0)[0])
        waits = (
            "loading its engine" if arrived else f"waiting for a place ({describe_shortage(self._threads, self._gpus)})"
        )
        message = f"worker {late[0].number} of {self._size} is still {waits} after {self._start_timeout_s:g} s"
        if all(worker.placement is None for worker in self._workers):
            raise UsageError(f"{message}, and no other is up")
        for worker in late:
            if not worker.late:
                worker.late = True
                self._notify("worker_late", worker=worker.number, reason=message)
                _LOG.warning("%s; the others go on without it", message)


def _end(worker: _Worker) -> None:
    import ray

    if ray.is_initialized():
        ray.kill(worker.actor, no_restart=True)
