"""The ledger's files: each is whole or not there, holds outcomes of one engine, and is never changed, only merged."""

from __future__ import annotations

import binascii
import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cs_localize.errors import LedgerError
from cs_localize.measure.ledger_index import KEY_BYTES, Columns
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


@dataclass(frozen=True)
class Part:
    """One file.

    Attributes:
        name: of the file.
        rows: outcomes in it.
        fingerprint: of the engine that measured them; empty where there are none.
    """

    name: str
    rows: int
    fingerprint: str


class DamagedPart(Exception):
    """A file is damaged or cut short; the ledger deals with it and no user sees this.

    Attributes:
        rows: outcomes it had, if its footer still says so.
    """

    def __init__(self, rows: int | None) -> None:
        super().__init__(rows)
        self.rows = rows


def part_table(fingerprint: str, fresh: Mapping[bytes, tuple[Request, Outcome]]) -> pa.Table:
    """Outcomes of one engine by their keys, as the table of a file."""
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


def write_part(path: Path, table: pa.Table) -> None:
    """Writes a new file, safe on disk when this returns.

    Raises:
        LedgerError: if the disk is full or the folder cannot be written; then there is no such file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file, compression="zstd", use_dictionary=_REPETITIVE, write_page_checksum=True)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # on a dead file system nothing can be taken back
            temporary.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise LedgerError(_write_problem(error, path.parent)) from None


def read_part(path: Path, fingerprint: str | None) -> tuple[Part, Columns | None]:
    """Reads a file; of one by another engine than the given one the footer alone.

    Raises:
        DamagedPart: if it is damaged or cut short.
        LedgerError: if it is whole and no ledger file of this version, or cannot be read.
        FileNotFoundError: if it is gone.
    """
    rows = None
    try:
        with path.open("rb") as source, pq.ParquetFile(source, page_checksum_verification=True) as file:
            rows = file.metadata.num_rows
            _check_schema(path, file.schema_arrow)
            part = Part(path.name, rows, _fingerprint(path, file))
            if fingerprint not in (None, part.fingerprint):
                return part, None
            return part, _columns(file.read(columns=_KEPT, use_threads=False))
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise _read_problem(path, error, rows) from None


def merge_parts(paths: Sequence[Path], into: Path) -> int:
    """Writes the outcomes of several files of one engine as one new file and removes them.

    Stopped at any instant it loses none: the old files go once the new one is safe on disk. Of a key that several files
    hold, the first file's outcome is kept.

    Returns:
        The number of outcomes written.

    Raises:
        LedgerError: if a file cannot be read or the new one not be written; then the old files are all there.
    """
    table = pa.concat_tables([_to_merge(path) for path in paths])
    first: dict[str, int] = {}
    for row, key in enumerate(table.column("key").to_pylist()):
        first.setdefault(key, row)
    if len(first) < len(table):
        table = table.take(list(first.values()))
    write_part(into, table)
    try:
        for path in paths:
            path.unlink(missing_ok=True)
        sync_folder(into.parent)
    except OSError as error:
        raise LedgerError(_write_problem(error, into.parent)) from None
    return len(table)


def sync_folder(folder: Path) -> None:
    """Makes what was renamed and removed in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_merge(path: Path) -> pa.Table:
    try:
        return _whole(path)
    except DamagedPart:  # perhaps in a column that opening the ledger does not read, so running again would not help
        raise LedgerError(
            f"{path} is damaged; move it out of the folder: its outcomes are measured again when they are needed"
        ) from None
    except FileNotFoundError:
        raise LedgerError(f"{path} was removed meanwhile; run the study again") from None


def _whole(path: Path) -> pa.Table:
    try:
        with path.open("rb") as source, pq.ParquetFile(source, page_checksum_verification=True) as file:
            return file.read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise _read_problem(path, error, None) from None


def _check_schema(path: Path, found: pa.Schema) -> None:
    version = (found.metadata or {}).get(b"cs_localize.schema", b"").decode(errors="replace")
    if not version or (version == str(SCHEMA_VERSION) and not found.equals(_SCHEMA)):
        raise LedgerError(f"{path} is no file of a ledger; move it out of the folder")
    if version != str(SCHEMA_VERSION):
        raise LedgerError(
            f"{path} is of ledger schema {version} and this version of cs_localize reads schema {SCHEMA_VERSION}; give "
            "this study another ledger"
        )


def _fingerprint(path: Path, file: pq.ParquetFile) -> str:
    """The engine of a file, from the statistics in its footer where it has them."""
    column = _SCHEMA.get_field_index("fingerprint")
    found: set[str] = set()
    for number in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(number).column(column).statistics
        if statistics is not None and statistics.has_min_max:
            found |= {statistics.min, statistics.max}
        else:
            found.update(file.read_row_group(number, columns=["fingerprint"]).column(0).to_pylist())
    if len(found) > 1:
        raise LedgerError(f"{path} mixes outcomes of several engines; move it out of the folder")
    return next(iter(found), "")


def _columns(table: pa.Table) -> Columns:
    lengths = pc.binary_length(table.column("key")).to_numpy()
    if (lengths != 2 * KEY_BYTES).any():
        raise ValueError("malformed keys")
    keys = np.frombuffer(binascii.unhexlify(_joined(table.column("key"))), ">u8").astype(np.uint64)
    return Columns(
        keys.reshape(-1, 2),
        table.column("score").to_numpy(),
        table.column("correct").to_numpy(),
        table.column("tokens").to_numpy(),
        np.cumsum(pc.binary_length(table.column("text")).to_numpy(), dtype=np.int64),
        _joined(table.column("text")),
    )


def _joined(column: pa.ChunkedArray) -> bytes:
    """All strings of a column, one after the other, without an object for each."""
    pieces = []
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        if len(chunk) and data is not None:
            ends = np.frombuffer(offsets, np.int32)
            pieces.append(data.to_pybytes()[ends[chunk.offset] : ends[chunk.offset + len(chunk)]])
    return b"".join(pieces)


def _read_problem(path: Path, error: Exception, rows: int | None) -> Exception:
    """What to raise: the system's own errors, which have a number, and a lack of memory say nothing of the content."""
    if isinstance(error, FileNotFoundError):
        return error
    if isinstance(error, MemoryError):  # Python's own or Arrow's
        return LedgerError(f"there is not enough memory to read the ledger file {path}")
    if isinstance(error, OSError) and error.errno is not None:
        return LedgerError(f"the ledger file {path} cannot be read: {error.strerror}")
    return DamagedPart(rows)


def _write_problem(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full; free some space and run again: what was measured before is kept"
    return f"the ledger folder {folder} cannot be written: {error.strerror or error}"
