"""The workers of a fleet: how many there are, who is hired, and who is let go so that another fleet finds a place."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator

from cs_localize.errors import UsageError
from cs_localize.measure.cluster import count_room, describe_shortage, waiting_places
from cs_localize.measure.handle import WorkerHandle
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.worker import Loader

_LOG = logging.getLogger("cs_localize")
_LOOK_EVERY_S = 1.0


class Crew:
    """Between no and ``size`` workers of one kind. Needs a connected Ray.

    Args:
        size: how many at most.
        spec: the engine each loads.
        threads: cores of each.
        gpus: GPUs of each.
        loader: makes the engine, called in the worker.
        start_timeout_s: seconds a worker may take to find a place and load.
        notify: is told of workers that are ready, late, lost and ended; ``alive`` are those that are up from then on.
    """

    def __init__(
        self,
        size: int,
        spec: EngineSpec,
        threads: int,
        gpus: float,
        loader: Loader,
        start_timeout_s: float,
        notify: Callable[..., None],
    ) -> None:
        self._size = size
        self._spec = spec
        self._threads = threads
        self._gpus = gpus
        self._loader = loader
        self._start_timeout_s = start_timeout_s
        self._notify = notify
        self._workers: dict[int, WorkerHandle] = {}
        self._next_look = 0.0
        self._crowded = False

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerHandle]:
        """The workers by their numbers; safe while some are lost or ended."""
        return iter([worker for _, worker in sorted(self._workers.items())])

    def hire(self, unfinished: int) -> None:
        """Asks for workers up to the number of units that are left, as far as the cluster has room for them."""
        wanted = min(self._size, unfinished)
        if len(self._workers) >= wanted or (self._workers and not self._may_look()):
            return
        room = count_room(self._threads, self._gpus)
        if room < wanted and not self._crowded:
            self._crowded = True
            _LOG.warning("%d workers were asked for and the cluster has room for %d", self._size, room)
        free = (number for number in range(self._size) if number not in self._workers)
        # The room may have shrunk below the workers that are held: a lost node is seen before the loss of its workers.
        for number in itertools.islice(free, max(0, min(wanted, max(room, 1)) - len(self._workers))):
            self._workers[number] = WorkerHandle(number, self._spec, self._threads, self._gpus, self._loader)

    def give_back(self, unfinished: int) -> None:
        """Ends workers beyond the number of units that are left, all but one.

        Those that still wait for a place at once, the others when another fleet waits for one.
        """
        free = sorted((worker for worker in self if not worker.units), key=lambda worker: worker.placement is not None)
        spare = free[: max(0, len(self) - max(1, unfinished))]
        if not spare or (unfinished and not self._may_look()):
            return
        waiting = waiting_places()
        wanted = waiting - {worker.place_id for worker in self}
        for worker in spare:
            if wanted or worker.place_id in waiting:
                self.end(worker)

    def check_starts(self) -> None:
        """Complains of workers that take too long to start.

        Raises:
            UsageError: if there are and not a single one is up.
        """
        deadline = time.monotonic() - self._start_timeout_s
        late = [worker for worker in self if worker.placement is None and worker.asked_at < deadline]
        if not late:
            return
        place = f"waiting for a place ({describe_shortage(self._threads, self._gpus)})"
        waits = "loading its engine" if late[0].arrived else place
        message = f"worker {late[0].number} of {self._size} is still {waits} after {self._start_timeout_s:g} s"
        if all(worker.placement is None for worker in self):
            raise UsageError(f"{message}, and no other is up")
        for worker in late:
            if not worker.late:
                worker.late = True
                self.tell("worker_late", worker, reason=message)
                _LOG.warning("%s; the others go on without it", message)

    def drop(self, worker: WorkerHandle) -> None:
        """Ends a worker without a word."""
        worker.end()
        del self._workers[worker.number]

    def end(self, worker: WorkerHandle) -> None:
        """Ends a worker that is not needed any more."""
        self.drop(worker)
        self.tell("worker_ended", worker)

    def tell(self, kind: str, worker: WorkerHandle, **fields: object) -> None:
        """Passes on what became of a worker."""
        alive = sum(other.placement is not None for other in self)
        self._notify(kind, worker=worker.number, **fields, alive=alive)

    def _may_look(self) -> bool:
        """Whether a second has passed since this was last true; asking the cluster for its state takes time."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_EVERY_S
        return True
