from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cs_localize.errors import LedgerError, UsageError
from cs_localize.heads import Ablation, Head, Neuron
from cs_localize.measure.ledger import Ledger, outcome_key
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Item, Outcome
from tests.measure.ledgers import PRINT, append, fill, keys_on_disk, parts
from tests.measure.toy import toy_item, toy_outcome, toy_requests

GOLDEN = Path(__file__).parent / "golden"


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
    keys = keys_on_disk(tmp_path)
    assert len(keys) == len(set(keys)) == 5


def test_an_append_of_repeats_alone_writes_no_file(tmp_path: Path) -> None:
    requests = fill(tmp_path, 2)
    ledger = Ledger(tmp_path)
    with ledger.lock():
        assert append(ledger, requests) == 0
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


def test_a_file_that_an_earlier_version_wrote_is_read() -> None:
    item = Item("antonyms", "hot", "The opposite of hot is", " cold")
    scaled = Ablation.of([Head(1, 2)], [Neuron(0, 7)], 0.5)
    requests = [
        Request(item, (1, 2, 3), (4,), Ablation()),
        Request(item, (1, 2, 3), (4,), scaled),
        Request(item, (1, 2, 3), (4,), Ablation.of([Head(1, 2)]), "generate", 4),
    ]
    ledger = Ledger(GOLDEN)
    first, second, third = (ledger.get(outcome_key("planted-golden", request)) for request in requests)
    assert first == Outcome(-0.25, True, "", 4)
    assert second == Outcome(-3.5, False, "", 4)
    assert third is not None
    assert math.isnan(third.score)
    assert (third.correct, third.text, third.tokens) == (False, " “naïve”", 5)


def test_a_file_written_now_has_the_columns_of_the_one_an_earlier_version_wrote(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    before = pq.read_schema(GOLDEN / "ledger-1.parquet")
    assert pq.read_schema(parts(tmp_path)[0]).equals(before, check_metadata=True)


def test_a_ledger_of_one_engine_leaves_the_others_on_disk(tmp_path: Path) -> None:
    requests = fill(tmp_path, 3)
    ledger = Ledger(tmp_path, "another")
    with ledger.lock():
        assert len(ledger) == 0
        assert append(ledger, requests[:2], "another") == 2
        with pytest.raises(UsageError, match=f"opened for another and cannot record {PRINT}"):
            append(ledger, requests)
    assert len(Ledger(tmp_path, PRINT)) == 3
    assert len(Ledger(tmp_path, "another")) == 2
    assert len(Ledger(tmp_path)) == 5


@pytest.mark.parametrize("works", [0, 1], ids=["the file", "its name"])
def test_a_full_disk_loses_nothing_that_was_written_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: int
) -> None:
    fill(tmp_path, 3)
    ledger = Ledger(tmp_path)
    calls = iter(range(9))

    def no_space(descriptor: int) -> None:
        if next(calls) >= works:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    more = toy_requests(2, first=3)
    with ledger.lock():
        monkeypatch.setattr(os, "fsync", no_space)
        with pytest.raises(LedgerError, match="full; free some space and run again") as caught:
            append(ledger, more)
        assert "\n" not in str(caught.value)
        assert {path.name for path in tmp_path.iterdir()} == {".lock", ".writer", "part-00000001.parquet"}
        monkeypatch.undo()
        assert append(ledger, more) == 2
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


def test_one_ledger_may_be_locked_by_two_measurers_of_one_study(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    request = toy_requests(1)
    with ledger.lock():
        with ledger.lock():
            pass
        assert append(ledger, request) == 1


def test_appending_without_the_lock_is_refused(tmp_path: Path) -> None:
    request = toy_requests(1)
    with pytest.raises(LedgerError, match="must be locked"):
        append(Ledger(tmp_path), request)


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
        append(early, [*requests, *more])
    assert early.discarded == 2
    assert len(Ledger(tmp_path)) == 3


@pytest.mark.parametrize("inside", [".", "ledger"])
def test_a_file_in_the_folders_place_is_a_usage_error(inside: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file or lies inside one; choose a folder"):
        Ledger(tmp_path / "file" / inside)


def test_a_folder_that_cannot_be_made_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(folder: Path, **options: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(LedgerError, match=r"cannot be made: No space left on device; choose another ledger$"):
        Ledger(tmp_path / "ledger")
