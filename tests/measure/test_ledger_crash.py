from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs_localize.measure import ledger as module
from cs_localize.measure.ledger import Ledger
from tests.measure.ledgers import append, fill, holds, keys_on_disk
from tests.measure.toy import toy_requests

STEPS = ("open", "rename", "replace", "unlink", "link", "fsync")


class Crash(BaseException):
    """The machine stops: nothing is done to the disk any more."""


def crash_at(step: int, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Lets so many operations on the disk happen and raises ``Crash`` at every later one; counts them."""
    done = 0

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: object, **options: object) -> object:
            nonlocal done
            if done >= step:
                raise Crash
            done += 1
            return real(*arguments, **options)

        return operation

    for name in STEPS:
        patch.setattr(os, name, wrapped(getattr(os, name)))
    for name in ("open", "rename", "replace", "unlink"):
        patch.setattr(Path, name, wrapped(getattr(Path, name)))
    return lambda: done


def append_three_times_and_merge(directory: Path) -> None:
    ledger = Ledger(directory)
    with ledger.lock():
        for number in range(3):
            append(ledger, toy_requests(2, first=4 + 2 * number))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SMALL", 3)


@pytest.mark.usefixtures("three")
def test_a_crash_before_any_operation_on_the_disk_loses_at_most_the_batch_in_flight(tmp_path: Path) -> None:
    steps = 0
    kept: list[int] = []
    while True:
        directory = tmp_path / str(steps)
        fill(directory, 2, 2)
        with pytest.MonkeyPatch.context() as patch:
            count = crash_at(steps, patch)
            try:
                append_three_times_and_merge(directory)
            except Crash:
                pass
            else:
                break
            assert count() == steps
        ledger = Ledger(directory)
        kept.append(len(ledger))
        assert holds(ledger, toy_requests(len(ledger)))
        with ledger.lock():
            assert len(ledger) == kept[-1]
            assert len(keys_on_disk(directory)) == kept[-1]
            assert append(ledger, toy_requests(10)) == 10 - kept[-1]
        assert holds(Ledger(directory), toy_requests(10))
        assert len(set(keys_on_disk(directory))) == len(keys_on_disk(directory)) == 10
        steps += 1
    assert kept == sorted(kept)
    assert set(kept) == {4, 6, 8, 10}
    assert steps > 40


@pytest.mark.usefixtures("three")
def test_nothing_is_renamed_or_removed_before_what_it_stands_for_is_safe_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1, 1)
    steps: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(first: Any, *arguments: object, **options: object) -> Any:  # noqa: ANN401
            steps.append(f"{name} {first.name}" if isinstance(first, Path) else name)
            return real(first, *arguments, **options)

        return operation

    ledger = Ledger(tmp_path)
    with ledger.lock():
        monkeypatch.setattr(os, "fsync", noted("sync", os.fsync))
        monkeypatch.setattr(Path, "rename", noted("rename", Path.rename))
        monkeypatch.setattr(Path, "unlink", noted("remove", Path.unlink))
        append(ledger, toy_requests(1, first=2))
        monkeypatch.undo()
    assert steps == [
        *("sync", "rename .part-00000003.parquet.tmp", "sync"),
        *("sync", "rename .part-00000004.parquet.tmp", "sync"),
        *(f"remove part-0000000{number}.parquet" for number in (1, 2, 3)),
        "sync",
    ]


def test_writers_killed_at_random_instants_leave_every_outcome_they_had_appended_and_one_row_a_key(
    tmp_path: Path,
) -> None:
    directory, log = tmp_path / "ledger", tmp_path / "safe"
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.ledger_kills", str(directory), str(log), "0", "20"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    safe = int(log.read_text().split()[-1])
    assert safe > 20
    ledger = Ledger(directory)
    with ledger.lock():
        keys = keys_on_disk(directory)
    assert safe <= len(keys) == len(set(keys)) <= safe + 3
    assert holds(ledger, toy_requests(len(keys)))
