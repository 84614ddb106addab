"""Filling ledgers, and what is in their files, for the tests of the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cs_localize.measure.ledger import Ledger, outcome_key
from cs_localize.measure.protocol import Request
from tests.measure.toy import toy_outcome, toy_requests

PRINT = "planted-0123"


def append(ledger: Ledger, requests: list[Request], fingerprint: str = PRINT) -> int:
    """Appends what the toy engine answers."""
    return ledger.append(fingerprint, requests, [toy_outcome(request) for request in requests])


def fill(directory: Path, *sizes: int) -> list[Request]:
    """A ledger with one file of each size; the requests in it."""
    ledger = Ledger(directory)
    requests = toy_requests(sum(sizes))
    start = 0
    with ledger.lock():
        for size in sizes:
            append(ledger, requests[start : start + size])
            start += size
    return requests


def parts(directory: Path) -> list[Path]:
    """The files that hold outcomes."""
    return sorted(directory.glob("*.parquet"))


def keys_on_disk(directory: Path) -> list[str]:
    """The keys of all files, as they lie there."""
    columns = [pq.read_table(part, columns=["key"]) for part in parts(directory)]
    return list(pa.concat_tables(columns).column("key").to_pylist()) if columns else []


def holds(ledger: Ledger, requests: Iterable[Request]) -> bool:
    """Whether a ledger has the toy engine's outcome for all of these."""
    return all(ledger.get(outcome_key(PRINT, request)) == toy_outcome(request) for request in requests)
