"""The ledger: every outcome ever measured, in append-only Parquet files that one driver writes."""

from __future__ import annotations

import hashlib
import logging
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from cs_localize.errors import LedgerError, UsageError
from cs_localize.measure.ledger_index import KEY_BYTES, OutcomeIndex
from cs_localize.measure.ledger_lock import FolderLock
from cs_localize.measure.ledger_parts import DamagedPart, Part, merge_parts, part_table, read_part, write_part
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Outcome

_LOG = logging.getLogger("cs_localize")
_NUMBER = re.compile(r"part-([0-9]+)\.parquet")
_SMALL_ROWS = 1 << 15  # a file of fewer outcomes is worth merging
_MOST_SMALL = 128  # so many small files of one engine are merged
_MOST_MERGED = 1 << 17  # outcomes that one merge holds in memory
_TRIES = 10


@dataclass(frozen=True)
class _Repeats:
    """Rows under a key that has one already: how many, how many with another outcome, and the files of both."""

    rows: int = 0
    differing: int = 0
    parts: frozenset[str] = frozenset()


def outcome_key(fingerprint: str, request: Request) -> bytes:
    """What an outcome is found by: a hash (16 bytes) of the engine's fingerprint and everything the model is sent.

    The file holds it as 32 hex digits.
    """
    return hashlib.sha256(f"{fingerprint}|{request.key}".encode()).digest()[:KEY_BYTES]


class Ledger:
    """Outcomes on disk, found by key.

    Reading needs nothing and changes nothing; writing needs ``lock()``, which one process can hold. Every append is
    one new file that is either whole or not there, so a driver that is killed loses only what it had not appended. In
    memory an outcome takes about 45 bytes plus the text it holds.

    Args:
        directory: the folder of ``part-*.parquet`` files; made when missing.
        fingerprint: of the one engine whose outcomes are wanted; the others' stay on disk. None wants all.

    Attributes:
        directory: that folder.
        discarded: outcomes offered to ``append`` under a key that already had one.
        damaged: files found damaged and left out, with the outcomes each had where that is known. ``lock()`` sets them
            aside.

    Raises:
        LedgerError: if the folder cannot be read, or a file in it is whole and not of this schema.
        UsageError: if there is a file in the folder's place.
    """

    def __init__(self, directory: Path, fingerprint: str | None = None) -> None:
        self.directory = Path(directory)
        self.discarded = 0
        self.damaged: dict[str, int | None] = {}
        self._fingerprint = fingerprint
        self._index = OutcomeIndex()
        self._parts: dict[str, Part] = {}
        self._repeats = _Repeats()
        self._last_number = 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(
                f"the ledger {self.directory} is a file or lies inside one; choose a folder that is or can be there"
            ) from None
        except OSError as error:
            raise LedgerError(
                f"the ledger folder {self.directory} cannot be made: {error.strerror}; choose another ledger"
            ) from None
        self._lock = FolderLock(self.directory)
        self._read()

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def get(self, key: bytes) -> Outcome | None:
        """The outcome under a key of ``outcome_key``, or None if there is none."""
        return self._index.get(key)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for writing; the same ledger object may be locked more than once.

        Taking the lock puts the folder right: it reads what others appended meanwhile, removes what a killed driver
        left half written, renames damaged files to ``*.damaged``, leaves one row a key, and merges small files where
        there are many. A damaged file, and rows too many, are logged in one line each.

        Raises:
            LedgerError: if another process holds the folder, or it cannot be written.
        """
        first = self._lock.acquire()
        try:
            if first:
                self._put_right()
            yield
        finally:
            self._lock.release()

    def append(self, fingerprint: str, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> int:
        """Writes outcomes as one new file, safe on disk when this returns; needs the lock.

        Args:
            fingerprint: of the engine that measured them.
            requests: what was asked.
            outcomes: what came back, in the same order. Where the key has an outcome already the first one stays.

        Returns:
            The number of outcomes written; the others are counted in ``discarded``.

        Raises:
            LedgerError: if the disk is full, the folder cannot be written, or the lock was taken away. What was there
                before is untouched.
        """
        if not self._lock.held:
            raise LedgerError(f"the ledger {self.directory} must be locked before anything is appended")
        if len(requests) != len(outcomes):
            raise UsageError(f"{len(requests)} requests cannot be recorded with {len(outcomes)} outcomes")
        if self._fingerprint not in (None, fingerprint):
            raise UsageError(f"this ledger was opened for {self._fingerprint} and cannot record {fingerprint}")
        fresh: dict[bytes, tuple[Request, Outcome]] = {}
        for request, outcome in zip(requests, outcomes, strict=True):
            key = outcome_key(fingerprint, request)
            if key in self._index or key in fresh:
                self.discarded += 1
            else:
                fresh[key] = (request, outcome)
        if fresh:
            self._lock.check()
            part = Part(self._next_name(), len(fresh), fingerprint)
            write_part(self.directory / part.name, part_table(fingerprint, fresh))
            self._parts[part.name] = part
            for key, (_, outcome) in fresh.items():
                self._index.add(key, outcome)
            self._merge_small(fingerprint)
        return len(fresh)

    def _read(self) -> None:
        """Reads the whole folder anew; a file that another driver merges away meanwhile makes it start again."""
        for _ in range(_TRIES):
            try:
                return self._read_parts(self._names())
            except FileNotFoundError:
                continue
        raise LedgerError(f"the ledger folder {self.directory} cannot be read: its files keep vanishing")

    def _read_parts(self, names: Sequence[str]) -> None:
        index = OutcomeIndex()
        parts: dict[str, Part] = {}
        damaged: dict[str, int | None] = {}
        starts: list[int] = []
        held: list[str] = []
        rows = 0
        for name in names:
            try:
                part, columns = read_part(self.directory / name, self._fingerprint)
            except DamagedPart as damage:
                damaged[name] = damage.rows
                continue
            parts[name] = part
            if columns is not None and part.rows:
                index.extend(columns)
                starts.append(rows)
                held.append(name)
                rows += part.rows
        repeats = index.sort().tolist()
        self._index, self._parts, self.damaged = index, parts, damaged
        self._repeats = _Repeats(
            rows=len(repeats),
            differing=sum(repr(index.outcome(kept)) != repr(index.outcome(row)) for kept, row in repeats),  # NaN too
            parts=frozenset(held[bisect_right(starts, row) - 1] for pair in repeats for row in pair),
        )

    def _names(self) -> list[str]:
        try:
            names = sorted(path.name for path in self.directory.iterdir())
        except OSError as error:
            raise LedgerError(f"the ledger folder {self.directory} cannot be read: {error.strerror}") from None
        for name in names:
            numbered = _NUMBER.match(name)  # what was set aside keeps its number, too
            if numbered is not None:
                self._last_number = max(self._last_number, int(numbered[1]))
        return [name for name in names if name.endswith(".parquet") and not name.startswith(".")]

    def _next_name(self) -> str:
        self._last_number += 1
        return f"part-{self._last_number:08d}.parquet"

    def _put_right(self) -> None:
        try:
            for leftover in self.directory.glob(".part-*.tmp"):
                leftover.unlink(missing_ok=True)
            if self._names() != sorted(self._parts):  # others wrote, or a file seemed damaged: look again
                self._read()
            for name, rows in self.damaged.items():
                self._set_aside(name, rows)
        except OSError as error:
            raise LedgerError(f"the ledger folder {self.directory} cannot be put right: {error.strerror}") from None
        self.damaged = {}
        self._end_repeats()
        engines = {part.fingerprint for part in self._parts.values()}
        for fingerprint in sorted(engines if self._fingerprint is None else engines & {self._fingerprint}):
            self._merge_small(fingerprint)

    def _set_aside(self, name: str, rows: int | None) -> None:
        path = self.directory / name
        path.rename(path.with_name(f"{name}.damaged"))
        cost = "its outcomes, nobody knows how many," if rows is None else f"its {rows:,} outcomes"
        _LOG.warning(
            "%s was damaged or cut short and is now called %s.damaged; %s are measured again when they are needed",
            path,
            name,
            cost,
        )

    def _end_repeats(self) -> None:
        """Leaves one row a key: a merge of files that was cut short, or a file copied by hand, made more."""
        repeats, self._repeats = self._repeats, _Repeats()
        if not repeats.rows:
            return
        _LOG.warning(
            "%s held %s outcomes more than once, %s of them with other values; the first of each is kept",
            self.directory,
            f"{repeats.rows:,}",
            f"{repeats.differing:,}" if repeats.differing else "none",
        )
        by_engine: dict[str, list[str]] = {}
        for name in sorted(repeats.parts):
            by_engine.setdefault(self._parts[name].fingerprint, []).append(name)
        for names in by_engine.values():
            self._merge(names)

    def _merge_small(self, fingerprint: str) -> None:
        """Merges small files of one engine, the smallest first, until there are few."""
        while True:
            small = [p for p in self._parts.values() if p.fingerprint == fingerprint and p.rows < _SMALL_ROWS]
            if len(small) < _MOST_SMALL:
                return
            small.sort(key=lambda part: part.rows)
            sums = accumulate(part.rows for part in small)
            chosen = [part.name for part, rows in zip(small, sums, strict=True) if rows <= _MOST_MERGED]
            self._merge(sorted(chosen))

    def _merge(self, names: Sequence[str]) -> None:
        merged = self._next_name()
        rows = merge_parts([self.directory / name for name in names], self.directory / merged)
        fingerprint = self._parts[names[0]].fingerprint
        for name in names:
            del self._parts[name]
        self._parts[merged] = Part(merged, rows, fingerprint)
