from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cs_localize.errors import LedgerError
from cs_localize.measure.ledger import Ledger
from tests.measure.ledgers import append, fill
from tests.measure.toy import toy_requests

HOLD = """
import sys, time
from pathlib import Path
from cs_localize.measure.ledger import Ledger
with Ledger(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(600)
"""


def start_holder(directory: Path) -> subprocess.Popen[str]:
    """A process that holds a ledger until it is killed."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def write_marker(directory: Path, host: str, pid: int = 41) -> Path:
    marker = directory / ".writer"
    marker.write_text(json.dumps({"host": host, "pid": pid, "since": "2026-01-31T12:00:00Z"}))
    return marker


def refusal(ledger: Ledger) -> str:
    with pytest.raises(LedgerError) as caught, ledger.lock():
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_second_driver_is_refused_in_one_line_that_says_who_holds_the_folder_until_it_is_killed(
    tmp_path: Path,
) -> None:
    holder = start_holder(tmp_path)
    second = Ledger(tmp_path)
    try:
        message = refusal(second)
        assert f"another study is writing to {tmp_path}: process {holder.pid} on {socket.gethostname()}" in message
        assert "since 20" in message
        assert message.endswith("wait for it to end, or give this one another ledger")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / ".writer").exists()
    with second.lock():
        assert json.loads((tmp_path / ".writer").read_text())["pid"] == os.getpid()
    assert not (tmp_path / ".writer").exists()


def test_a_second_ledger_object_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    second = Ledger(tmp_path)
    with Ledger(tmp_path).lock():
        assert f"process {os.getpid()} on" in refusal(second)
    with second.lock():
        pass


def test_a_writer_on_another_machine_is_believed_and_the_line_says_what_to_delete_once_it_is_gone(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path)
    marker = write_marker(tmp_path, "elsewhere")
    message = refusal(ledger)
    assert "process 41 on elsewhere, since 2026-01-31T12:00:00Z" in message
    assert message.endswith(f"if it runs no more, delete {marker}")
    assert {path.name for path in tmp_path.iterdir()} == {".lock", ".writer"}
    marker.unlink()
    with ledger.lock():
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": 1}', b"\xff"])
def test_a_marker_that_names_nobody_is_not_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".writer").write_bytes(content)
    assert f"delete {tmp_path / '.writer'}" in refusal(Ledger(tmp_path))


def test_without_flock_the_marker_alone_stops_a_second_driver_and_no_marker_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    second = Ledger(tmp_path)
    with Ledger(tmp_path).lock():
        assert f"process {os.getpid()} on" in refusal(second)
    with second.lock():
        pass
    write_marker(tmp_path, socket.gethostname())
    assert f"if it runs no more, delete {tmp_path / '.writer'}" in refusal(second)


def test_a_link_whose_answer_was_lost_on_the_way_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_and_lose_the_answer(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link_and_lose_the_answer)
    with Ledger(tmp_path).lock():
        assert json.loads((tmp_path / ".writer").read_text())["pid"] == os.getpid()


def test_a_driver_whose_marker_was_deleted_stops_before_it_writes_and_leaves_the_next_ones_alone(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path)
    with ledger.lock():
        (tmp_path / ".writer").unlink()
        with pytest.raises(LedgerError, match="was taken away while this study writes to"):
            append(ledger, toy_requests(1))
        marker = write_marker(tmp_path, "elsewhere")
    assert marker.exists()
    assert not list(tmp_path.glob("*.parquet"))


def test_a_folder_that_cannot_be_linked_in_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    assert refusal(Ledger(tmp_path)).endswith("cannot be locked for writing: Operation not permitted")
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}
    fill(tmp_path, 1)


def test_what_a_process_that_was_killed_while_it_took_the_lock_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / f".writer-{socket.gethostname()}-41.tmp"
    leftover.write_text("half")
    with Ledger(tmp_path).lock():
        assert not leftover.exists()
