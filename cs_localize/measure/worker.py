"""What runs in a worker's process: one engine on cores of its own. Imports nothing heavy, so that cores come first."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.measure.protocol import Engine, Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.outcomes import Outcome

Loader = Callable[[EngineSpec], Engine]
_HELD: dict[int, int] = {}  # the descriptor that keeps each core's file locked
_CLAIM_PATIENCE_S = 60.0


class CoresTaken(UsageError):
    """Other workers of the machine have the cores that one asks for."""


@dataclass(frozen=True)
class Placement:
    """Where a worker runs.

    Attributes:
        host: name of its machine.
        pid: its process there.
        cores: the cores it has for itself.
    """

    host: str
    pid: int
    cores: tuple[int, ...]


class EngineWorker:
    """One engine in a process of its own; the fleet makes it a Ray actor.

    Args:
        spec: the engine to load.
        threads: cores it gets.
        loader: makes the engine; travels to the worker by reference.
    """

    def __init__(self, spec: EngineSpec, threads: int, loader: Loader) -> None:
        self._spec = spec
        self._threads = threads
        self._loader = loader
        self._engine: Engine | None = None
        self._affinity = os.sched_getaffinity(0)
        self._cores: tuple[int, ...] = ()

    def arrive(self) -> str:
        """Answers as soon as the process runs, with the name of its machine."""
        return socket.gethostname()

    def load(self) -> Placement:
        """Claims cores, then loads the engine on them.

        Raises:
            MeasurementError: if the engine that was loaded is not the one that was asked for.
            UsageError: if the machine has too few cores, or the engine cannot be loaded.
        """
        self._cores = cores = claim_cores(self._threads)
        os.sched_setaffinity(0, cores)
        engine = self._loader(self._spec)
        if engine.fingerprint != self._spec.fingerprint:
            raise MeasurementError(
                f"worker on {socket.gethostname()}: the engine's fingerprint is {engine.fingerprint}, the study's is "
                f"{self._spec.fingerprint}; install the same versions on every machine"
            )
        self._engine = engine
        return Placement(socket.gethostname(), os.getpid(), cores)

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answers all requests, in their order.

        Raises:
            MeasurementError: if the engine cannot vouch for an outcome or returns another number of them.
        """
        outcomes = self._loaded().measure(requests)
        if len(outcomes) != len(requests):
            raise MeasurementError(f"the engine returned {len(outcomes)} outcomes for {len(requests)} requests")
        for request, outcome in zip(requests, outcomes, strict=True):
            if request.mode == "score" and not math.isfinite(outcome.score):
                raise MeasurementError(
                    f"the score of {request.item.task}/{request.item.id} under {request.ablation} is {outcome.score}"
                )
        return outcomes

    def evidence(self) -> dict[str, float]:
        """What the engine can show about its own work."""
        return self._loaded().evidence()

    def close(self) -> None:
        """Ends the engine and gives back its cores, for a process that lives on."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        finally:
            os.sched_setaffinity(0, self._affinity)
            release_cores(self._cores)

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise MeasurementError("the worker was asked before its engine was loaded")
        return self._engine


def claim_cores(count: int, directory: Path | None = None, patience_s: float = _CLAIM_PATIENCE_S) -> tuple[int, ...]:
    """Takes cores of this machine that no other worker has, until this process ends.

    Engines whose threads share a core spin against each other and run many times slower. Ray counts cores but does not
    say which, and two studies may share a machine, so each core is a file that its worker keeps locked; the kernel
    lets go of it however the worker ends.

    Args:
        count: cores to take.
        directory: where the lock files are. Default: a folder of this user in the temporary directory.
        patience_s: seconds to wait for a worker that is just ending.

    Raises:
        CoresTaken: if others keep too many of them.
        UsageError: if the machine has fewer cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        raise UsageError(
            f"a worker asks for {count} cores, but {socket.gethostname()} offers {len(cores)}; set engine.threads lower"
        )
    directory = directory or Path(tempfile.gettempdir()) / f"cs_localize-cores-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + patience_s
    while True:
        free = _try_claim(count, cores, directory)
        if len(free) == count:
            return free
        if time.monotonic() > deadline:
            raise CoresTaken(
                f"a worker asks for {count} cores, but of the {len(cores)} of {socket.gethostname()} other workers use "
                f"{len(cores) - len(free)}; set engine.workers or engine.threads lower, or wait for the other study"
            )
        time.sleep(0.2)


def release_cores(cores: Sequence[int]) -> None:
    """Lets go of cores that this process has claimed."""
    for core in cores:
        if (descriptor := _HELD.pop(core, None)) is not None:
            os.close(descriptor)


def _try_claim(count: int, cores: Sequence[int], directory: Path) -> tuple[int, ...]:
    """The cores that were free, at most ``count``; fewer than that are let go again."""
    held: dict[int, int] = {}
    turn = os.open(directory / "turn", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)  # one claims at a time, or two could each hold half of what they need
        for core in cores:
            if len(held) == count:
                break
            descriptor = os.open(directory / f"core-{core}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held[core] = descriptor
            except BlockingIOError:
                os.close(descriptor)
        if len(held) == count:
            _HELD.update(held)
        else:
            for descriptor in held.values():
                os.close(descriptor)
    finally:
        os.close(turn)
    return tuple(held)
