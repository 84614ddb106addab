"""How far a study is: a bar on a terminal, lines elsewhere, and always one JSON object an event in a file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from cs_localize.errors import LedgerError

_LINE_EVERY_S = 5.0


@dataclass
class _Stage:
    name: str
    total: int
    started: float
    printed: float
    done: int = 0
    served: int = 0

    def rate(self, now: float) -> float:
        """Requests measured a second; what the ledger served took no time and would mislead."""
        return (self.done - self.served) / max(now - self.started, 1e-9)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['rate']:.1f}/s")


class Progress:
    """Shows the stages of a study one after another, and records events.

    Args:
        events: the file that gets one JSON object a line, appended to; None records nothing.
        stream: where the bar or the lines go.
        clock: seconds, for rates.

    Raises:
        LedgerError: if the file cannot be written.
    """

    def __init__(
        self, events: Path | None, stream: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = events
        self._stream = stream
        self._clock = clock
        self._stage: _Stage | None = None
        self._bars: Bars | None = None
        self._alive: int | None = None
        self._best = ""
        self._best_printed = ""
        self._file: IO[bytes] | None = None
        if events is not None:
            try:
                events.parent.mkdir(parents=True, exist_ok=True)
                self._file = events.open("ab", buffering=0)
                _end_last_line(events, self._file)
            except OSError as error:
                raise LedgerError(f"cannot write {events}: {error.strerror}") from None

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[None]:
        """Shows a stage of so many requests while the ``with`` block lasts."""
        now = self._clock()
        self._stage = _Stage(name, total, now, now)
        self.event("stage_started", stage=name, total=total)
        if self._stream.isatty():
            self._bars = _bars(self._stream)
            self._bars.add_task(name, total=total, rate=0.0, workers=_workers(self._alive), best=self._best)
            self._bars.start()
        try:
            yield
        except BaseException:
            self._end_stage("stage_stopped")
            raise
        self._end_stage("stage_finished")

    def advance(self, n: int, served: int = 0) -> None:
        """Counts ``n`` more requests as done, of which the ledger served ``served``."""
        stage = self._stage
        if stage is None:
            raise RuntimeError("advance outside a stage")
        stage.done += n
        stage.served += served
        now = self._clock()
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=stage.done, rate=stage.rate(now))
        elif now - stage.printed >= _LINE_EVERY_S and stage.done < stage.total:
            stage.printed = now
            self._print(_line(stage, now, self._alive) + self._news())

    def note(self, best: str) -> None:
        """Shows what is best so far, such as heads, beside the stages from now on.

        Raises:
            LedgerError: if the event cannot be recorded.
        """
        if best != self._best:
            self._best = best
            self.event("best", text=best)
            self._show()

    def event(self, kind: str, **fields: object) -> None:
        """Appends one event, with the time in UTC, to the file.

        A field ``alive`` is the number of workers that are up from then on, and shown.

        Raises:
            LedgerError: if the file cannot be written.
        """
        alive = fields.get("alive")
        if isinstance(alive, int):
            self._alive = alive
            self._show()
        if self._file is None:
            return
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": stamp, "event": kind, **fields}, ensure_ascii=False) + "\n"
        try:
            self._file.write(line.encode())
        except OSError as error:
            raise LedgerError(f"cannot write {self._path}: {error.strerror}") from None

    def close(self) -> None:
        """Closes the file of events."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_stage(self, kind: str) -> None:
        stage, self._stage = self._stage, None
        bars, self._bars = self._bars, None
        if bars is not None:
            bars.stop()
        if stage is None:
            return
        seconds = self._clock() - stage.started
        if bars is None and kind == "stage_finished":
            served = f", {stage.served:,} of them from the ledger" if stage.served else ""
            self._print(f"{stage.name}: {stage.done:,} requests in {_duration(seconds)}{served}{self._news()}")
        self.event(kind, stage=stage.name, done=stage.done, served=stage.served, seconds=round(seconds, 3))

    def _show(self) -> None:
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], workers=_workers(self._alive), best=self._best)

    def _news(self) -> str:
        """What is best so far, for the end of a line, unless an earlier line has said so."""
        if self._best == self._best_printed:
            return ""
        self._best_printed = self._best
        return f"; best so far: {self._best}"

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def _bars(stream: TextIO) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[workers]}"),
        TextColumn("{task.fields[best]}", markup=False),
        console=Console(file=stream),
    )


def _line(stage: _Stage, now: float, alive: int | None) -> str:
    parts = [f"{stage.name}: {stage.done:,}/{stage.total:,}"]
    rate = stage.rate(now)
    if rate > 0:
        parts += [f"{rate:.1f}/s", f"{_duration((stage.total - stage.done) / rate)} left"]
    return ", ".join([*parts, _workers(alive)] if alive is not None else parts)


def _workers(alive: int | None) -> str:
    return "" if alive is None else f"{alive} worker{'' if alive == 1 else 's'}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _end_last_line(path: Path, file: IO[bytes]) -> None:
    """A driver that was killed, or a full disk, can leave half a line; the next event must not join it."""
    with path.open("rb") as existing:
        if existing.seek(0, 2) == 0:
            return
        existing.seek(-1, 2)
        if existing.read(1) != b"\n":
            file.write(b"\n")
