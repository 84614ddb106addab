from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cs_localize.errors import LedgerError, UsageError
from cs_localize.heads import Ablation
from cs_localize.measure.ledger import Ledger, outcome_key
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Outcome
from tests.measure.toy import toy_item, toy_outcome, toy_requests

PRINT = "planted-0123"


def fill(directory: Path, *sizes: int) -> list[Request]:
    """A ledger with one part of each size; the requests in it."""
    ledger = Ledger(directory)
    requests = toy_requests(sum(sizes))
    start = 0
    with ledger.lock():
        for size in sizes:
            chunk = requests[start : start + size]
            ledger.append(PRINT, chunk, [toy_outcome(request) for request in chunk])
            start += size
    return requests


def parts(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.parquet"))


def test_what_was_appended_is_read_back_exactly_by_the_next_process(tmp_path: Path) -> None:
    requests = fill(tmp_path, 5, 3)
    ledger = Ledger(tmp_path)
    assert len(ledger) == 8
    for request in requests:
        assert ledger.get(outcome_key(PRINT, request)) == toy_outcome(request)


def test_generated_text_and_a_score_that_is_not_a_number_survive(tmp_path: Path) -> None:
    item = toy_item(1)
    request = Request(item, (1, 2), (3,), Ablation(), "generate")
    ledger = Ledger(tmp_path)
    with ledger.lock():
        ledger.append(PRINT, [request], [Outcome(float("nan"), True, "naïve “ünïcode”\n", 12)])
    found = Ledger(tmp_path).get(outcome_key(PRINT, request))
    assert found is not None
    assert found.score != found.score
    assert (found.correct, found.text, found.tokens) == (True, "naïve “ünïcode”\n", 12)


def test_an_outcome_of_another_engine_is_not_found(tmp_path: Path) -> None:
    requests = fill(tmp_path, 2)
    ledger = Ledger(tmp_path)
    assert outcome_key(PRINT, requests[0]) in ledger
    assert outcome_key("planted-4567", requests[0]) not in ledger
    assert ledger.get(outcome_key("planted-4567", requests[0])) is None


def test_no_key_gets_a_second_row_and_every_repeat_is_counted(tmp_path: Path) -> None:
    requests = fill(tmp_path, 4)
    ledger = Ledger(tmp_path)
    other = Outcome(-99.0, False, "", 1)
    with ledger.lock():
        written = ledger.append(PRINT, [*requests[:2], *toy_requests(1, first=4) * 2], [other] * 4)
    assert written == 1
    assert ledger.discarded == 3
    assert ledger.get(outcome_key(PRINT, requests[0])) == toy_outcome(requests[0])
    keys = pa.concat_tables([pq.read_table(part) for part in parts(tmp_path)]).column("key").to_pylist()
    assert len(keys) == len(set(keys)) == 5


def test_an_append_of_repeats_alone_writes_no_file(tmp_path: Path) -> None:
    requests = fill(tmp_path, 2)
    ledger = Ledger(tmp_path)
    with ledger.lock():
        assert ledger.append(PRINT, requests, [toy_outcome(request) for request in requests]) == 0
    assert len(parts(tmp_path)) == 1


def test_a_file_says_what_was_asked_in_words(tmp_path: Path) -> None:
    request = fill(tmp_path, 1)[0]
    row = pq.read_table(parts(tmp_path)[0]).to_pylist()[0]
    assert row["task"] == "toy"
    assert row["item"] == request.item.id
    assert row["mode"] == "score"
    assert Ablation.decode(row["ablation"]) == request.ablation
    assert row["fingerprint"] == PRINT
    assert row["key"] == outcome_key(PRINT, request).hex()


def cut_short(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-40])


def make_it_empty(part: Path) -> None:
    part.write_bytes(b"")


def give_it_another_schema(part: Path) -> None:
    pq.write_table(pa.table({"key": ["00" * 16], "score": [1.0]}), part)


def give_it_another_version(part: Path) -> None:
    table = pq.read_table(part)
    pq.write_table(table.replace_schema_metadata({"cs_localize.schema": "2"}), part)


def spoil_a_key(part: Path) -> None:
    table = pq.read_table(part)
    keys = pa.array(["zz" * 16, *table.column("key").to_pylist()[1:]])
    pq.write_table(table.set_column(0, table.schema.field("key"), keys), part)


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        make_it_empty,
        give_it_another_schema,
        give_it_another_version,
        spoil_a_key,
    ],
)
def test_a_damaged_file_is_named_and_without_it_the_rest_is_kept(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    fill(tmp_path, 5, 3)
    part = parts(tmp_path)[1]
    damage(part)
    with pytest.raises(LedgerError, match="move it away and run again: only its rows are measured again") as caught:
        Ledger(tmp_path)
    assert str(part) in str(caught.value)
    part.rename(tmp_path / "moved-away")
    assert len(Ledger(tmp_path)) == 5


def test_a_flipped_byte_is_refused_or_changes_no_outcome(tmp_path: Path) -> None:
    requests = fill(tmp_path, 3)
    part = parts(tmp_path)[0]
    whole = part.read_bytes()
    refused = 0
    for position in range(0, len(whole), 11):
        part.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            ledger = Ledger(tmp_path)
        except LedgerError:
            refused += 1
            continue
        assert [ledger.get(outcome_key(PRINT, request)) for request in requests] == list(map(toy_outcome, requests))
    assert refused > len(whole) / 11 / 2


def test_a_copied_file_is_refused_since_its_keys_would_have_two_rows(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    (tmp_path / "copy.parquet").write_bytes(parts(tmp_path)[0].read_bytes())
    with pytest.raises(LedgerError, match="repeats outcomes"):
        Ledger(tmp_path)


def test_a_full_disk_loses_nothing_that_was_written_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 3)
    ledger = Ledger(tmp_path)

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    more = toy_requests(2, first=3)
    with ledger.lock():
        monkeypatch.setattr(os, "fsync", no_space)
        with pytest.raises(LedgerError, match="full; free some space and run again") as caught:
            ledger.append(PRINT, more, [toy_outcome(request) for request in more])
        assert "\n" not in str(caught.value)
        assert len(list(tmp_path.iterdir())) == 2
        monkeypatch.undo()
        assert ledger.append(PRINT, more, [toy_outcome(request) for request in more]) == 2
    assert len(Ledger(tmp_path)) == 5


def test_a_disk_that_fills_up_while_the_file_is_written_is_reported_in_one_line(tmp_path: Path) -> None:
    script = f"""
import resource, signal
from pathlib import Path
from cs_localize.errors import LedgerError
from cs_localize.measure.ledger import Ledger
from tests.measure.toy import toy_outcome, toy_requests
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
requests = toy_requests(500)
ledger = Ledger(Path({str(tmp_path)!r}))
with ledger.lock():
    try:
        ledger.append("print", requests, [toy_outcome(request) for request in requests])
    except LedgerError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "cannot be written: File too large" in done.stdout
    assert not parts(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_second_driver_is_refused_in_one_line_that_names_the_folder(tmp_path: Path) -> None:
    with Ledger(tmp_path).lock():
        second = Ledger(tmp_path)
        with pytest.raises(LedgerError, match="another study is writing to") as caught, second.lock():
            pass
        assert str(tmp_path) in str(caught.value)
    with second.lock():
        pass


def test_one_ledger_may_be_locked_by_two_measurers_of_one_study(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    request = toy_requests(1)
    with ledger.lock():
        with ledger.lock():
            pass
        assert ledger.append(PRINT, request, [toy_outcome(request[0])]) == 1


def test_appending_without_the_lock_is_refused(tmp_path: Path) -> None:
    request = toy_requests(1)
    with pytest.raises(LedgerError, match="must be locked"):
        Ledger(tmp_path).append(PRINT, request, [toy_outcome(request[0])])


def test_requests_and_outcomes_that_do_not_pair_are_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.lock(), pytest.raises(UsageError, match="2 requests cannot be recorded with 1"):
        ledger.append(PRINT, toy_requests(2), [Outcome(-1.0, True, "", 7)])


def test_what_a_killed_driver_left_half_written_is_removed_when_the_folder_is_locked(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    leftover = tmp_path / ".part-00000002.parquet.tmp"
    leftover.write_bytes(b"PAR1 half a file")
    ledger = Ledger(tmp_path)
    assert len(ledger) == 2
    with ledger.lock():
        assert not leftover.exists()


def test_what_another_driver_appended_meanwhile_is_read_when_the_folder_is_locked(tmp_path: Path) -> None:
    early = Ledger(tmp_path)
    requests = fill(tmp_path, 2)
    with early.lock():
        assert len(early) == 2
        more = toy_requests(1, first=2)
        early.append(PRINT, [*requests, *more], [toy_outcome(request) for request in [*requests, *more]])
    assert early.discarded == 2
    assert len(Ledger(tmp_path)) == 3


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be made"):
        Ledger(tmp_path / "file")
