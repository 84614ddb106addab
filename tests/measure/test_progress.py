from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cs_localize.errors import LedgerError
from cs_localize.measure.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_come_every_few_seconds_and_once_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream, clock)
    with progress.stage("search", 1200):
        progress.advance(200, served=200)
        for _ in range(10):
            clock.now += 1
            progress.advance(100)
    assert stream.getvalue().splitlines() == [
        "search: 700/1,200, 100.0/s, 5 s left",
        "search: 1,200 requests in 10 s, 200 of them from the ledger",
    ]


def test_a_stage_served_by_the_ledger_alone_promises_no_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream, clock)
    with progress.stage("search", 10):
        clock.now += 6
        progress.advance(5, served=5)
        progress.advance(5, served=5)
    assert stream.getvalue().splitlines() == ["search: 5/10", "search: 10 requests in 6 s, 10 of them from the ledger"]


@pytest.mark.parametrize(("seconds", "text"), [(59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7380, "2 h 3 min")])
def test_long_times_are_told_in_minutes_and_hours(seconds: float, text: str) -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream, clock)
    with progress.stage("search", 1):
        clock.now += seconds
        progress.advance(1)
    assert f"search: 1 requests in {text}" in stream.getvalue()


def test_a_terminal_gets_a_bar_with_counts_and_rate() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(None, stream, clock)
    with progress.stage("search", 30):
        clock.now += 2
        progress.advance(30)
    shown = stream.getvalue()
    assert "search" in shown
    assert "30/30" in shown
    assert "15.0/s" in shown


def test_lines_tell_how_many_workers_are_up_and_what_is_new_of_the_best_heads() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream, clock)
    with progress.stage("naming", 400):
        progress.event("worker_ready", alive=2)
        progress.note("antonyms L4H2")
        for alive in (2, 1, 1):
            progress.event("worker_lost", alive=alive)
            clock.now += 5
            progress.advance(100)
        progress.note("antonyms L4H2 L5H1")
        progress.advance(100)
    assert stream.getvalue().splitlines() == [
        "naming: 100/400, 20.0/s, 15 s left, 2 workers; best so far: antonyms L4H2",
        "naming: 200/400, 20.0/s, 10 s left, 1 worker",
        "naming: 300/400, 20.0/s, 5 s left, 1 worker",
        "naming: 400 requests in 15 s; best so far: antonyms L4H2 L5H1",
    ]


def test_a_terminal_shows_workers_and_best_heads_that_were_known_before_the_stage_or_came_within_it() -> None:
    stream = Terminal()
    progress = Progress(None, stream, Clock())
    progress.event("worker_ready", alive=3)
    progress.note("counting L7H0")
    with progress.stage("naming", 10):
        pass
    before = stream.getvalue()
    assert "3 workers" in before
    assert "counting L7H0" in before
    with progress.stage("naming", 10):
        progress.event("worker_lost", alive=1)
        progress.note("counting [L7H1]")
    assert "1 worker" in stream.getvalue().removeprefix(before)
    assert "counting [L7H1]" in stream.getvalue().removeprefix(before)


def test_what_is_best_is_recorded_when_it_changes(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "events.jsonl", io.StringIO(), Clock())
    for best in ("L1H1", "L1H1", "L2H2"):
        progress.note(best)
    assert [event["text"] for event in read(tmp_path / "events.jsonl")] == ["L1H1", "L2H2"]


def test_every_event_is_one_json_line_with_a_utc_time_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out" / "events.jsonl"
    progress = Progress(path, io.StringIO(), Clock())
    progress.event("worker_ready", worker=0, cores=(1, 2), note="naïve")
    with progress.stage("search", 4):
        progress.advance(4, served=1)
    found = read(path)
    assert [event["event"] for event in found] == ["worker_ready", "stage_started", "stage_finished"]
    assert found[0]["cores"] == [1, 2]
    assert (found[2]["stage"], found[2]["done"], found[2]["served"]) == ("search", 4, 1)
    stamp = datetime.fromisoformat(str(found[0]["time"]))
    assert stamp.tzinfo == UTC


def test_a_stage_that_fails_is_recorded_as_stopped_and_prints_no_end(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = Progress(tmp_path / "events.jsonl", stream, Clock())
    with pytest.raises(KeyboardInterrupt), progress.stage("search", 4):
        raise KeyboardInterrupt
    assert read(tmp_path / "events.jsonl")[-1]["event"] == "stage_stopped"
    assert stream.getvalue() == ""


def test_a_study_that_continues_appends_and_does_not_join_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = Progress(path, io.StringIO())
    first.event("one")
    first.close()
    path.write_bytes(path.read_bytes() + b'{"time": "2026')
    second = Progress(path, io.StringIO())
    second.event("two")
    lines = path.read_text().splitlines()
    assert [json.loads(lines[0])["event"], lines[1], json.loads(lines[2])["event"]] == ["one", '{"time": "2026', "two"]


def test_events_that_cannot_be_written_are_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"cannot write .*: Is a directory"):
        Progress(tmp_path, io.StringIO())
    progress = Progress(Path("/dev/full"), io.StringIO())
    with pytest.raises(LedgerError, match="cannot write /dev/full: No space left on device"):
        progress.event("one")


def test_counting_outside_a_stage_is_a_mistake_in_the_program() -> None:
    with pytest.raises(RuntimeError, match="outside a stage"):
        Progress(None, io.StringIO()).advance(1)
