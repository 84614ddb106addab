from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_localize.measure import ledger as module
from cs_localize.measure import ledger_index
from cs_localize.measure.ledger import Ledger, outcome_key
from cs_localize.outcomes import Outcome
from tests.measure.ledgers import PRINT, keys_on_disk, parts
from tests.measure.toy import toy_requests

REQUESTS = toy_requests(24)
KEYS = [outcome_key(PRINT, request) for request in REQUESTS]

Batch = list[tuple[int, int]]
Step = tuple[str, Batch, int, float]
steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "reopen", "cut", "copy"]),
        st.lists(st.tuples(st.integers(0, len(REQUESTS) - 1), st.integers(0, 3)), min_size=1, max_size=6),
        st.integers(0, 99),
        st.floats(0, 0.999),
    ),
    max_size=14,
)


def outcome(value: int) -> Outcome:
    """One of four outcomes that a request may get, told apart by every field."""
    return Outcome(-value / 3, value % 2 == 0, "ä" * value, value)


def append(directory: Path, ledger: Ledger, model: dict[bytes, Outcome], batch: Batch) -> None:
    """Appends to both; a key keeps its first outcome."""
    before = len(model)
    for number, value in batch:
        model.setdefault(KEYS[number], outcome(value))
    with ledger.lock():
        requests = [REQUESTS[number] for number, _ in batch]
        written = ledger.append(PRINT, requests, [outcome(value) for _, value in batch])
        assert written == len(model) - before
        assert sorted(keys_on_disk(directory)) == sorted(key.hex() for key in model)


def cut(directory: Path, model: dict[bytes, Outcome], which: int, share: float) -> None:
    """Cuts a file short; what no other file holds is lost to the model."""
    part = parts(directory)[which % len(parts(directory))]
    keys = {bytes.fromhex(key) for key in pq.read_table(part).column("key").to_pylist()}
    whole = part.read_bytes()
    part.unlink()
    for key in keys - {bytes.fromhex(key) for key in keys_on_disk(directory)}:
        del model[key]
    part.write_bytes(whole[: int(len(whole) * share)])


def check(ledger: Ledger, model: dict[bytes, Outcome]) -> None:
    assert len(ledger) == len(model)
    for key in KEYS:
        assert (key in ledger) == (key in model)
        assert ledger.get(key) == model.get(key)


def live(directory: Path, story: list[Step]) -> None:
    """Follows a story with a ledger and a dict, and compares them after every step."""
    ledger, model = Ledger(directory), dict[bytes, Outcome]()
    for number, (kind, batch, which, share) in enumerate(story):
        if kind == "append":
            append(directory, ledger, model, batch)
        elif kind == "cut" and parts(directory):
            cut(directory, model, which, share)
        elif kind == "copy" and parts(directory):
            shutil.copy(parts(directory)[which % len(parts(directory))], directory / f"copy-{number}.parquet")
        if kind != "append":
            ledger = Ledger(directory)
        check(ledger, model)
        check(Ledger(directory, PRINT), model)
        assert len(Ledger(directory, "another")) == 0
        if kind in ("cut", "copy"):
            with ledger.lock():
                assert sorted(keys_on_disk(directory)) == sorted(key.hex() for key in model)
            check(ledger, model)


@settings(max_examples=50, deadline=None)
@given(steps)
def test_any_sequence_of_appends_reopenings_merges_cuts_and_copies_holds_what_a_dict_holds(story: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(module, "_MOST_SMALL", 3)  # merges and sorts after a handful of outcomes
        patch.setattr(module, "_SMALL_ROWS", 8)
        patch.setattr(module, "_MOST_MERGED", 32)
        patch.setattr(ledger_index, "_MOST_RECENT", 4)
        live(Path(folder), story)
