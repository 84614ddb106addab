"""Runs a ``cs-localize`` command under a fault: ``python -m tests.measure.faulty FAULT run STUDY --out DIR``."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cs_localize import cli, session
from cs_localize.errors import UsageError
from cs_localize.measure.fleet import Fleet
from cs_localize.measure.ledger import Ledger
from cs_localize.measure.planted import PlantedEngine
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.outcomes import Outcome

POISONED = ("plurals", "thief")
"""Task and item of which the unablated request is poisoned."""


class Poisoned(PlantedEngine):
    """Its process dies of one request."""

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        if any((r.item.task, r.item.id) == POISONED and r.ablation.empty for r in requests):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().measure(requests)


class Hanging(PlantedEngine):
    """The first that comes to its third call hangs there."""

    marker: Path
    calls = 0

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        self.calls += 1
        if self.calls == 3:
            with contextlib.suppress(FileExistsError):
                self.marker.touch(exist_ok=False)
                time.sleep(3600)
        return super().measure(requests)


class FillingLedger(Ledger):
    """The disk has no room for what is appended from the fifth time on."""

    _appends = 0

    def append(self, fingerprint: str, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> int:
        self._appends += 1
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self._appends >= 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            return super().append(fingerprint, requests, outcomes)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)  # or events.jsonl might be the first to complain


def load_poisoned(spec: EngineSpec) -> PlantedEngine:
    """An engine that dies of one request."""
    return Poisoned.from_spec(spec)


def load_hanging(marker: Path, spec: EngineSpec) -> PlantedEngine:
    """An engine that hangs, unless another has left its mark."""
    engine = Hanging.from_spec(spec)
    engine.marker = marker
    return engine


def load_wrong(spec: EngineSpec) -> PlantedEngine:
    """A model that is none."""
    raise UsageError("/models/llama has no config.json; give the folder of a model")


def load_too_large(spec: EngineSpec) -> PlantedEngine:
    """A model for which there is no memory."""
    raise MemoryError("cannot allocate 64 GiB")


def main(fault: str, *arguments: str) -> int:
    """Runs the command."""
    loaders = {
        "poison": load_poisoned,
        "hang": functools.partial(load_hanging, Path(arguments[-1], "hung")),
        "wrong": load_wrong,
        "memory": load_too_large,
    }
    if fault == "full":
        session.Ledger = FillingLedger
    else:
        session.Fleet = functools.partial(Fleet, loader=loaders[fault])
    return cli.main(arguments)


if __name__ == "__main__":
    from tests.measure import faulty  # so that workers find the engines by the module's name

    sys.exit(faulty.main(*sys.argv[1:]))
