from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cs_localize.errors import UsageError
from cs_localize.models import home
from cs_localize.models.cache import build_once, model_directory

# Builds a directory and says so in a log; between the two files it waits until it is let go on.
BUILDER = """
import sys, time
from pathlib import Path
from cs_localize.models.cache import build_once

target, log, gate = map(Path, sys.argv[1:])

def build(part):
    with log.open("a") as stream:
        stream.write("built\\n")
    (part / "first").touch()
    while not gate.exists():
        time.sleep(0.01)
    (part / "second").touch()

print(sorted(file.name for file in build_once(target, build).iterdir()))
"""


def start_builder(target: Path, log: Path, gate: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(target), str(log), str(gate)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.01)


def left_behind(target: Path) -> list[str]:
    """What lies beside a target that was never made, apart from its lock."""
    return [path.name for path in target.parent.iterdir() if not path.name.endswith(".lock")]


def test_home_is_the_variable_or_a_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CS_LOCALIZE_HOME", str(tmp_path))
    assert home() == tmp_path.resolve()
    monkeypatch.delenv("CS_LOCALIZE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path.resolve() / ".cache" / "cs_localize"


def test_another_recipe_has_another_directory(empty_home: Path) -> None:
    first, second = model_directory("m", "recipe 1"), model_directory("m", "recipe 2")
    assert first != second
    assert first.parent == second.parent == empty_home / "models"


def test_what_is_there_is_not_built_again(tmp_path: Path) -> None:
    target = build_once(tmp_path / "new" / "model", lambda part: (part / "file").touch())
    assert build_once(target, lambda part: pytest.fail("built twice")) == target
    assert (target / "file").exists()


def test_a_build_that_fails_halfway_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail(part: Path) -> None:
        (part / "half").touch()
        raise UsageError("no such thing")

    with pytest.raises(UsageError, match="no such thing"):
        build_once(target, fail)
    assert left_behind(target) == []
    build_once(target, lambda part: (part / "whole").touch())
    assert [file.name for file in target.iterdir()] == ["whole"]


def test_two_processes_at_once_build_once_and_both_find_the_whole(tmp_path: Path) -> None:
    target, log, gate = tmp_path / "model", tmp_path / "log", tmp_path / "gate"
    first = start_builder(target, log, gate)
    wait_for(log)
    second = start_builder(target, log, gate)
    gate.touch()
    outputs = [process.communicate(timeout=60)[0].strip() for process in (first, second)]
    assert outputs == ["['first', 'second']"] * 2
    assert log.read_text() == "built\n"


def test_after_a_killed_build_the_next_one_starts_afresh(tmp_path: Path) -> None:
    target, log, gate = tmp_path / "model", tmp_path / "log", tmp_path / "gate"
    killed = start_builder(target, log, gate)
    wait_for(log)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert not target.exists()
    build_once(target, lambda part: (part / "other").touch())
    assert [file.name for file in target.iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "the disk is full at .* CS_LOCALIZE_HOME"),
        (RuntimeError("while serializing: I/O error: No space left on device (os error 28)"), "the disk is full at"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "cannot be written; set CS_LOCALIZE_HOME"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "cannot be written; set CS_LOCALIZE_HOME"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "could not be made: .*Input/output error"),
    ],
)
def test_a_disk_that_does_not_take_it_is_reported_in_one_line(tmp_path: Path, error: Exception, message: str) -> None:
    def fail(part: Path) -> None:
        (part / "half").touch()
        raise error

    with pytest.raises(UsageError, match=message) as raised:
        build_once(tmp_path / "model", fail)
    assert "\n" not in str(raised.value)
    assert left_behind(tmp_path / "model") == []


def test_a_home_below_a_file_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="could not be made"):
        build_once(tmp_path / "file" / "models" / "model", lambda part: None)


def test_a_programming_error_in_a_build_is_not_disguised(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "model", fail)


def test_files_that_their_writer_kept_to_itself_become_readable_as_the_rest(tmp_path: Path) -> None:
    def build(part: Path) -> None:
        (part / "file").touch(mode=0o600)

    target = build_once(tmp_path / "model", build)
    assert (target / "file").stat().st_mode & 0o444 == target.stat().st_mode & 0o444
