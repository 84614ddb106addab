from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cs_localize.errors import LedgerError
from cs_localize.measure import ledger as module
from cs_localize.measure import ledger_index
from cs_localize.measure.ledger import Ledger, outcome_key
from tests.measure.ledgers import PRINT, append, fill, holds, keys_on_disk, parts
from tests.measure.toy import toy_outcome, toy_requests


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four small files are merged; a file of ten outcomes is not small."""
    monkeypatch.setattr(module, "_MOST_SMALL", 4)
    monkeypatch.setattr(module, "_SMALL_ROWS", 10)
    monkeypatch.setattr(module, "_MOST_MERGED", 40)


@pytest.mark.usefixtures("four")
def test_small_files_are_merged_while_appending_and_every_outcome_stays(tmp_path: Path) -> None:
    requests = fill(tmp_path, *[1] * 35)
    assert len(parts(tmp_path)) < 4 + 4
    assert sorted(keys_on_disk(tmp_path)) == sorted(outcome_key(PRINT, request).hex() for request in requests)
    assert holds(Ledger(tmp_path), requests)


def test_many_small_files_are_merged_when_the_folder_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = fill(tmp_path, *[1] * 35)
    assert len(parts(tmp_path)) == 35
    monkeypatch.setattr(module, "_MOST_SMALL", 4)
    ledger = Ledger(tmp_path)
    assert len(parts(tmp_path)) == 35
    with ledger.lock():
        assert len(parts(tmp_path)) < 4
        assert holds(ledger, requests)
        assert append(ledger, requests) == 0
    assert holds(Ledger(tmp_path), requests)


@pytest.mark.usefixtures("four")
def test_a_merged_file_says_all_that_the_small_ones_said_and_holds_one_engine(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    requests = toy_requests(8)
    with ledger.lock():
        for request in requests:
            append(ledger, [request], "one")
            append(ledger, [request], "two")
    tables = [pq.read_table(part) for part in parts(tmp_path)]
    assert max(map(len, tables)) > 1
    assert all(len(set(table.column("fingerprint").to_pylist())) == 1 for table in tables)
    rows = {(row["fingerprint"], row["ablation"]): row for table in tables for row in table.to_pylist()}
    assert len(rows) == 16
    for request in requests:
        row = rows["two", request.ablation.encode()]
        assert (row["key"], row["item"]) == (outcome_key("two", request).hex(), request.item.id)


def test_a_copied_file_gives_no_key_a_second_row_and_is_merged_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests = fill(tmp_path, 2, 3)
    shutil.copy(parts(tmp_path)[0], tmp_path / "copy.parquet")
    ledger = Ledger(tmp_path)
    assert len(ledger) == 5
    assert not caplog.records
    with ledger.lock():
        assert holds(ledger, requests)
    assert len(keys_on_disk(tmp_path)) == 5
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} held 2 outcomes more than once, none of them with other values; the first of each is kept"
    ]
    assert holds(Ledger(tmp_path), requests)


def test_of_two_outcomes_under_one_key_the_first_is_kept_and_the_other_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests = fill(tmp_path, 3)
    table = pq.read_table(parts(tmp_path)[0])
    scores = pa.array([table.column("score")[0].as_py(), -77.0, float("nan")])
    changed = table.set_column(5, table.schema.field("score"), scores)
    for name in ("part-00000002.parquet", "part-00000003.parquet"):
        pq.write_table(changed, tmp_path / name)
    ledger = Ledger(tmp_path)
    with ledger.lock():
        assert holds(ledger, requests)
    assert "held 6 outcomes more than once, 4 of them with other values" in caplog.text
    assert len(keys_on_disk(tmp_path)) == 3
    assert holds(Ledger(tmp_path), requests)


def test_a_reader_whose_files_are_merged_away_under_it_reads_the_merged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = fill(tmp_path, *[1] * 6)
    read_part = module.read_part
    waiting = [None]

    def merge_first(path: Path, fingerprint: str | None) -> object:
        if waiting:
            waiting.pop()
            monkeypatch.setattr(module, "_MOST_SMALL", 2)
            with Ledger(tmp_path).lock():
                assert len(parts(tmp_path)) == 1
        return read_part(path, fingerprint)

    monkeypatch.setattr(module, "read_part", merge_first)
    assert holds(Ledger(tmp_path), requests)


def test_a_folder_whose_files_keep_vanishing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1)

    def vanish(path: Path, fingerprint: str | None) -> object:
        raise FileNotFoundError(path)

    monkeypatch.setattr(module, "read_part", vanish)
    with pytest.raises(LedgerError, match="its files keep vanishing"):
        Ledger(tmp_path)


@pytest.mark.usefixtures("four")
def test_a_disk_that_is_full_when_files_are_merged_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = toy_requests(5)
    fill(tmp_path, 1, 1, 1)
    ledger = Ledger(tmp_path)
    fsync = os.fsync
    calls = iter(range(9))

    def full_after_the_append(descriptor: int) -> None:
        if next(calls) >= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with ledger.lock():
        monkeypatch.setattr(os, "fsync", full_after_the_append)
        with pytest.raises(LedgerError, match="is full; free some space and run again"):
            append(ledger, requests[3:4])
        monkeypatch.undo()
        assert holds(ledger, requests[:4])
        assert append(ledger, requests[3:]) == 1
    assert holds(Ledger(tmp_path), requests)
    assert len(keys_on_disk(tmp_path)) == 5


@pytest.mark.usefixtures("four")
def test_a_file_that_is_gone_or_damaged_when_it_is_to_be_merged_is_one_line(tmp_path: Path) -> None:
    requests = fill(tmp_path, 1, 1, 1)
    ledger = Ledger(tmp_path)
    with ledger.lock():
        parts(tmp_path)[0].write_bytes(b"")
        with pytest.raises(LedgerError, match="is damaged; move it out of the folder"):
            append(ledger, toy_requests(1, first=3))
    again = Ledger(tmp_path)
    with again.lock():
        assert append(again, [*requests, *toy_requests(1, first=3)]) == 1


def test_outcomes_are_found_whether_they_were_just_added_or_sorted_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_index, "_MOST_RECENT", 5)
    requests = toy_requests(40)
    ledger = Ledger(tmp_path)
    with ledger.lock():
        for start in range(0, 40, 3):
            append(ledger, requests[start : start + 3])
            assert holds(ledger, requests[: start + 3])
            assert len(ledger) == min(start + 3, 40)
        assert append(ledger, requests) == 0
    assert ledger.discarded == 40
    assert ledger.get(outcome_key("another", requests[0])) is None


def test_keys_that_share_their_first_half_are_told_apart() -> None:
    index = ledger_index.OutcomeIndex()
    outcomes = {bytes(8) + bytes([number] * 8): toy_outcome(toy_requests(1, first=number)[0]) for number in range(9)}
    for key, outcome in outcomes.items():
        index.add(key, outcome)
    index._unsorted.append(ledger_index.np.frombuffer(b"".join(index._recent), ">u8").reshape(-1, 2))
    index._recent = {}
    assert len(index.sort()) == 0
    assert {key: index.get(key) for key in outcomes} == outcomes
    assert bytes(16) in index
    assert bytes(8) + b"\xff" * 8 not in index
