"""The ledger: every outcome ever measured, in append-only Parquet files that one driver writes."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from cs_localize.errors import LedgerError, UsageError
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Outcome

SCHEMA_VERSION = 1
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("item", pa.string(), nullable=False),
        pa.field("mode", pa.string(), nullable=False),
        pa.field("ablation", pa.string(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
        pa.field("correct", pa.bool_(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
    ],
    metadata={"cs_localize.schema": str(SCHEMA_VERSION)},
)
_REPETITIVE = ["task", "item", "mode", "ablation", "text", "fingerprint"]
_KEPT = ["key", "score", "correct", "text", "tokens"]
_KEY_BYTES = 16
_PART = re.compile(r"part-([0-9]+)\.parquet")


def outcome_key(fingerprint: str, request: Request) -> bytes:
    """What an outcome is found by: a hash (16 bytes) of the engine's fingerprint and everything the model is sent.

    The file holds it as 32 hex digits.
    """
    return hashlib.sha256(f"{fingerprint}|{request.key}".encode()).digest()[:_KEY_BYTES]


class Ledger:
    """Outcomes on disk, found by key.

    Reading needs nothing; writing needs ``lock()``, which one process can hold. Every append is one new file that is
    either whole or not there, so a driver that is killed loses only what it had not appended. In memory an outcome
    takes about 150 bytes plus the text it holds.

    Args:
        directory: the folder of ``part-*.parquet`` files; made when missing.

    Attributes:
        directory: that folder.
        discarded: outcomes offered to ``append`` under a key that already had one.

    Raises:
        LedgerError: if the folder cannot be read, or a file in it is damaged, of another schema, or repeats a key.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.discarded = 0
        self._rows: dict[bytes, int] = {}
        self._score = array("d")
        self._correct = bytearray()
        self._tokens = array("q")
        self._text: list[str] = []
        self._parts: set[str] = set()
        self._last_number = 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"the ledger folder {self.directory} cannot be made: {error.strerror}; choose another ledger"
            ) from None
        self._lock = FileLock(self.directory / ".lock")
        self._read_new_parts()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def get(self, key: bytes) -> Outcome | None:
        """The outcome under a key of ``outcome_key``, or None if there is none."""
        row = self._rows.get(key)
        if row is None:
            return None
        return Outcome(self._score[row], bool(self._correct[row]), self._text[row], self._tokens[row])

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for writing; the same ledger object may be locked more than once.

        Taking the lock removes what a killed driver left half written and reads what others appended meanwhile.

        Raises:
            LedgerError: if another process holds the folder, or it cannot be written.
        """
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise LedgerError(
                f"another study is writing to {self.directory}; wait for it to end, or give this one another ledger"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise LedgerError(f"the ledger folder {self.directory} cannot be locked for writing: {error}") from None
        try:
            for leftover in self.directory.glob(".part-*.tmp"):
                leftover.unlink(missing_ok=True)
            self._read_new_parts()
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
            LedgerError: if the disk is full or the folder cannot be written. What was there before is untouched.
        """
        if not self._lock.is_locked:
            raise LedgerError(f"the ledger {self.directory} must be locked before anything is appended")
        if len(requests) != len(outcomes):
            raise UsageError(f"{len(requests)} requests cannot be recorded with {len(outcomes)} outcomes")
        fresh: dict[bytes, tuple[Request, Outcome]] = {}
        for request, outcome in zip(requests, outcomes, strict=True):
            key = outcome_key(fingerprint, request)
            if key in self._rows or key in fresh:
                self.discarded += 1
            else:
                fresh[key] = (request, outcome)
        if fresh:
            part = f"part-{self._last_number + 1:08d}.parquet"
            table = _table(fingerprint, fresh)
            self._write(table, part)
            self._take(table, part)
        return len(fresh)

    def _write(self, table: pa.Table, part: str) -> None:
        temporary = self.directory / f".{part}.tmp"
        try:
            with temporary.open("wb") as file:
                pq.write_table(
                    table,
                    file,
                    compression="zstd",
                    use_dictionary=_REPETITIVE,
                    write_page_checksum=True,
                )
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self.directory / part)
            _sync_directory(self.directory)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise LedgerError(_write_problem(error, self.directory)) from None

    def _read_new_parts(self) -> None:
        try:
            names = sorted(path.name for path in self.directory.glob("*.parquet") if path.name not in self._parts)
        except OSError as error:
            raise LedgerError(f"the ledger folder {self.directory} cannot be read: {error.strerror}") from None
        for name in names:
            self._take(self._read(name), name)

    def _read(self, part: str) -> pa.Table:
        path = self.directory / part
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                found = file.schema_arrow
                version = (found.metadata or {}).get(b"cs_localize.schema", b"").decode(errors="replace")
                if version != str(SCHEMA_VERSION) or not found.equals(_SCHEMA):
                    raise self._bad_part(part, f"not a ledger file of schema {SCHEMA_VERSION}")
                return file.read(columns=_KEPT, use_threads=False)
        except PermissionError:
            raise LedgerError(f"the ledger file {path} cannot be read: permission denied") from None
        except (pa.ArrowException, OSError, ValueError):
            raise self._bad_part(part, "damaged or cut short") from None

    def _take(self, table: pa.Table, part: str) -> None:
        """Adds the rows of a part to the index in memory; all of them or none."""
        keys = _decode_keys(table.column("key"))
        if keys is None:
            raise self._bad_part(part, "a file with malformed keys")
        first = len(self._text)
        rows = dict(zip(keys, range(first, first + len(keys)), strict=True))
        if len(rows) < len(keys) or not self._rows.keys().isdisjoint(rows):
            raise self._bad_part(part, "a file that repeats outcomes the ledger already has")
        self._rows.update(rows)
        self._score.frombytes(table.column("score").to_numpy().tobytes())
        self._correct += table.column("correct").to_numpy().tobytes()
        self._tokens.frombytes(table.column("tokens").to_numpy().tobytes())
        self._text += table.column("text").to_pylist()
        self._parts.add(part)
        numbered = _PART.fullmatch(part)
        if numbered is not None:
            self._last_number = max(self._last_number, int(numbered[1]))

    def _bad_part(self, part: str, problem: str) -> LedgerError:
        return LedgerError(
            f"{self.directory / part} is {problem}; move it away and run again: only its rows are measured again"
        )


def _table(fingerprint: str, fresh: dict[bytes, tuple[Request, Outcome]]) -> pa.Table:
    requests = [request for request, _ in fresh.values()]
    outcomes = [outcome for _, outcome in fresh.values()]
    columns = {
        "key": [key.hex() for key in fresh],
        "task": [request.item.task for request in requests],
        "item": [request.item.id for request in requests],
        "mode": [request.mode for request in requests],
        "ablation": [request.ablation.encode() for request in requests],
        "score": [float(outcome.score) for outcome in outcomes],
        "correct": [bool(outcome.correct) for outcome in outcomes],
        "text": [outcome.text for outcome in outcomes],
        "tokens": [int(outcome.tokens) for outcome in outcomes],
        "fingerprint": [fingerprint] * len(fresh),
    }
    return pa.table(columns, schema=_SCHEMA)


def _decode_keys(column: pa.ChunkedArray) -> list[bytes] | None:
    """The 16-byte keys of a column of hex digits, converted in one go; None if one is malformed."""
    if len(column) == 0:
        return []
    lengths = pc.min_max(pc.binary_length(column)).as_py()
    if lengths["min"] != lengths["max"] or lengths["min"] != 2 * _KEY_BYTES:
        return None
    try:
        packed = bytes.fromhex("".join(column.to_pylist()))
    except ValueError:
        return None
    if len(packed) != len(column) * _KEY_BYTES:
        return None
    return [packed[start : start + _KEY_BYTES] for start in range(0, len(packed), _KEY_BYTES)]


def _sync_directory(directory: Path) -> None:
    """Makes a rename survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_problem(error: OSError, directory: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {directory} is full; free some space and run again: what was measured before is kept"
    return f"the ledger folder {directory} cannot be written: {error.strerror or error}"
