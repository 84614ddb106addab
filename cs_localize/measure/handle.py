"""The driver's view of one worker: the place it asked Ray for, the engine it loads there, the units it was given."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cs_localize.measure.cluster import ask_place, worker_environment
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.units import Unit
from cs_localize.measure.worker import EngineWorker, Loader, Placement
from cs_localize.outcomes import Outcome

if TYPE_CHECKING:
    from ray import ObjectRef


class WorkerHandle:
    """One worker, asked for when this is made. It needs a connected Ray.

    Args:
        number: its name in messages; the next worker in its place takes it over.
        spec: the engine it loads.
        threads: cores it gets.
        gpus: GPUs it gets.
        loader: makes the engine.

    Attributes:
        place_id: Ray's name for the place it asked for.
        loading: the call that loads the engine; None once it has come back.
        placement: where it runs; None until it has loaded.
        units: the units it was given, the first of which it works on.
        asked_at: when it was asked for, in seconds of the monotonic clock.
        began_at: when it began its first unit, likewise.
        unwatched_s: seconds since then in which the driver did something else than to wait for answers.
        late: whether anybody was told that it takes long to start.
        ended: whether it died or was ended.
    """

    def __init__(self, number: int, spec: EngineSpec, threads: int, gpus: float, loader: Loader) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.number = number
        self._place = ask_place(threads, gpus)
        self.place_id: str = self._place.id.hex()
        actor: Any = (
            ray.remote(EngineWorker)
            .options(
                num_cpus=threads,
                num_gpus=gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._place, 0),
                runtime_env={"env_vars": worker_environment(spec, threads)},
            )
            .remote(spec, threads, loader)
        )
        self._actor = actor
        self._arrival: ObjectRef[str] = actor.arrive.remote()
        self.loading: ObjectRef[Placement] | None = actor.load.remote()
        self.placement: Placement | None = None
        self.units: deque[Unit] = deque()
        self.asked_at = self.began_at = time.monotonic()
        self.unwatched_s = 0.0
        self.late = False
        self.ended = False

    @property
    def arrived(self) -> bool:
        """Whether its process runs, if only to load its engine."""
        import ray

        return self.placement is not None or bool(ray.wait([self._arrival], timeout=0)[0])

    def measure(self, unit: Unit) -> ObjectRef[list[Outcome]]:
        """Gives it a unit, to begin when it is through with those it has."""
        if not self.units:
            self._begin(time.monotonic())
        self.units.append(unit)
        reference: ObjectRef[list[Outcome]] = self._actor.measure.remote(unit.requests)
        return reference

    def evidence(self) -> ObjectRef[dict[str, float]]:
        """Asks for what its engine can show about its own work."""
        reference: ObjectRef[dict[str, float]] = self._actor.evidence.remote()
        return reference

    def took(self, unit: Unit) -> float:
        """Notes that a unit came back, and returns the seconds it took at most."""
        now = time.monotonic()
        seconds = now - self.began_at
        if unit in self.units:
            self.units.remove(unit)
        self._begin(now)
        return seconds

    def excuse(self, seconds: float) -> None:
        """Does not hold against it that the driver was away: what came meanwhile may not have been fetched."""
        self.unwatched_s += seconds
        self.asked_at += seconds

    def waited(self) -> float:
        """Seconds that the driver has waited for its first unit."""
        return time.monotonic() - self.began_at - self.unwatched_s

    def _begin(self, now: float) -> None:
        self.began_at, self.unwatched_s = now, 0.0

    def end(self) -> None:
        """Ends its process, if it still runs, and gives back its place."""
        import ray
        from ray.util import remove_placement_group

        self.ended = True
        if ray.is_initialized():
            # Of a cluster that is gone there is nothing left to end.
            with suppress(ray.exceptions.RayError):
                ray.kill(self._actor, no_restart=True)
            with suppress(ray.exceptions.RayError):
                remove_placement_group(self._place)
