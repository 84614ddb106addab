from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cs_localize.errors import LedgerError
from cs_localize.measure.ledger import Ledger, outcome_key
from tests.measure.ledgers import PRINT, append, fill, holds, keys_on_disk, parts
from tests.measure.toy import toy_outcome


def keep(share: float) -> Callable[[Path], None]:
    """Cuts a file short."""

    def cut(part: Path) -> None:
        whole = part.read_bytes()
        part.write_bytes(whole[: int(len(whole) * share)])

    return cut


def cut_the_last_byte(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-1])


def make_it_garbage(part: Path) -> None:
    part.write_bytes(bytes(range(256)) * 8)


def zero_a_page(part: Path) -> None:
    whole = bytearray(part.read_bytes())
    whole[10:60] = bytes(50)
    part.write_bytes(whole)


def spoil_a_key(part: Path) -> None:
    table = pq.read_table(part)
    keys = pa.array(["zz" * 16, *table.column("key").to_pylist()[1:]])
    pq.write_table(table.set_column(0, table.schema.field("key"), keys), part)


def shorten_a_key(part: Path) -> None:
    table = pq.read_table(part)
    keys = pa.array(["0", *table.column("key").to_pylist()[1:]])
    pq.write_table(table.set_column(0, table.schema.field("key"), keys), part)


UNKNOWN = "its outcomes, nobody knows how many,"
DAMAGES = [
    (keep(0.0), UNKNOWN),
    (keep(0.001), UNKNOWN),
    (keep(0.5), UNKNOWN),
    (keep(0.99), UNKNOWN),
    (cut_the_last_byte, UNKNOWN),
    (make_it_garbage, UNKNOWN),
    (zero_a_page, "its 3 outcomes"),
    (spoil_a_key, "its 3 outcomes"),
    (shorten_a_key, "its 3 outcomes"),
]


@pytest.mark.parametrize(("damage", "cost"), DAMAGES)
def test_a_damaged_file_is_set_aside_by_name_and_costs_its_own_rows_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], cost: str
) -> None:
    requests = fill(tmp_path, 5, 3, 2)
    part = parts(tmp_path)[1]
    damage(part)
    ledger = Ledger(tmp_path)
    with ledger.lock():
        assert len(ledger) == 7
        assert holds(ledger, [*requests[:5], *requests[8:]])
        assert append(ledger, requests) == 3
    assert holds(Ledger(tmp_path), requests)
    assert part.with_name(f"{part.name}.damaged").exists()
    assert len(keys_on_disk(tmp_path)) == 10
    assert [record.getMessage() for record in caplog.records] == [
        f"{part} was damaged or cut short and is now called {part.name}.damaged; {cost} are measured again when they "
        "are needed"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_reading_alone_leaves_a_damaged_file_where_it_is_and_lists_it(tmp_path: Path) -> None:
    fill(tmp_path, 2, 3)
    cut_the_last_byte(parts(tmp_path)[0])
    zero_a_page(parts(tmp_path)[1])
    names = [part.name for part in parts(tmp_path)]
    assert Ledger(tmp_path).damaged == {names[0]: None, names[1]: 3}
    assert [part.name for part in parts(tmp_path)] == names


def test_a_damaged_last_file_is_not_overwritten_by_the_next_one_that_is_damaged(tmp_path: Path) -> None:
    requests = fill(tmp_path, 2)
    for _ in range(2):
        cut_the_last_byte(parts(tmp_path)[-1])
        ledger = Ledger(tmp_path)
        with ledger.lock():
            append(ledger, requests)
    assert len(list(tmp_path.glob("*.damaged"))) == 2


def test_a_file_that_turns_out_whole_when_the_folder_is_locked_stays(tmp_path: Path) -> None:
    requests = fill(tmp_path, 2)
    part = parts(tmp_path)[0]
    whole = part.read_bytes()
    part.write_bytes(b"")  # as another machine may see a file that was just written
    ledger = Ledger(tmp_path)
    assert len(ledger) == 0
    part.write_bytes(whole)
    with ledger.lock():
        assert holds(ledger, requests)
    assert parts(tmp_path) == [part]


def give_it_another_version(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({"cs_localize.schema": "2"})


def give_it_no_version(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({})


def give_it_other_columns(table: pa.Table) -> pa.Table:
    return table.drop_columns(["tokens"])


def mix_engines(table: pa.Table) -> pa.Table:
    return table.set_column(9, table.schema.field("fingerprint"), pa.array(["one", "two"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (give_it_another_version, "is of ledger schema 2 and this version of cs_localize reads schema 1; give this"),
        (give_it_no_version, "is no file of a ledger; move it out of the folder"),
        (give_it_other_columns, "is no file of a ledger; move it out of the folder"),
        (mix_engines, "mixes outcomes of several engines; move it out of the folder"),
    ],
)
def test_a_whole_file_that_is_not_of_this_schema_is_refused_by_name_and_left_alone(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    fill(tmp_path, 5, 2)
    part = parts(tmp_path)[1]
    pq.write_table(change(pq.read_table(part)), part)
    before = part.read_bytes()
    with pytest.raises(LedgerError, match=message) as caught:
        Ledger(tmp_path)
    assert str(caught.value).startswith(str(part))
    assert part.read_bytes() == before


def test_a_file_without_statistics_is_read_all_the_same(tmp_path: Path) -> None:
    requests = fill(tmp_path, 3)
    part = parts(tmp_path)[0]
    pq.write_table(pq.read_table(part), part, write_statistics=False)
    assert holds(Ledger(tmp_path, PRINT), requests)
    assert len(Ledger(tmp_path, "another")) == 0


def test_a_flipped_byte_costs_rows_or_is_refused_and_changes_no_outcome(tmp_path: Path) -> None:
    requests = fill(tmp_path, 3)
    part = parts(tmp_path)[0]
    whole = part.read_bytes()
    noticed = 0
    for position in range(0, len(whole), 11):
        part.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            ledger = Ledger(tmp_path)
        except LedgerError:
            noticed += 1
            continue
        found = [ledger.get(outcome_key(PRINT, request)) for request in requests]
        assert found in ([None] * 3, list(map(toy_outcome, requests)))
        noticed += bool(ledger.damaged)
    assert noticed > len(whole) / 11 / 2


def test_a_disk_that_cannot_be_read_is_no_damage_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 2)

    def fail(path: Path, mode: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(LedgerError, match=r"part-00000001.parquet cannot be read: Input/output error"):
        Ledger(tmp_path)
    monkeypatch.undo()
    assert len(Ledger(tmp_path)) == 2


@pytest.mark.parametrize("lack", [pa.ArrowMemoryError, MemoryError])
def test_a_lack_of_memory_is_no_damage_of_the_file(
    lack: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 2)

    def fail(file: pq.ParquetFile, **options: object) -> pa.Table:
        raise lack("malloc of size 64 failed")

    monkeypatch.setattr(pq.ParquetFile, "read", fail)
    with pytest.raises(LedgerError, match=r"not enough memory to read the ledger file .*part-00000001.parquet"):
        Ledger(tmp_path)
    monkeypatch.undo()
    assert len(Ledger(tmp_path)) == 2


def test_damage_that_only_a_merge_sees_names_the_file_and_without_it_the_ledger_opens(tmp_path: Path) -> None:
    fill(tmp_path, 30)
    part = parts(tmp_path)[0]
    (tmp_path / "part-00000009.parquet").write_bytes(part.read_bytes())  # rows twice, so the lock merges
    items = pq.read_metadata(part).row_group(0).column(2)
    whole = bytearray(part.read_bytes())
    whole[(items.dictionary_page_offset or items.data_page_offset) + items.total_compressed_size - 2] ^= 255
    part.write_bytes(whole)

    with (
        pytest.raises(LedgerError, match=f"{part.name} is damaged; move it out of the folder"),
        Ledger(tmp_path).lock(),
    ):
        pass

    part.unlink()
    with Ledger(tmp_path).lock():
        assert len(keys_on_disk(tmp_path)) == 30
