"""Running a program in the sandbox, and whether it ran to its end."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import site
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

from cs_localize.errors import CsLocalizeError

_INSIDE = Path(__file__).with_name("inside.py")
_MOST_OUTPUT = 4096  # bytes
_CANNOT_HOLD = "\nraise AssertionError\n"


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        cpu_s: seconds of processor time of each of its processes.
        wall_s: seconds until all of them are ended.
        memory_mib: address space of each process in MiB.
        disk_mib: size of its folder, and of any file, in MiB.
        files: open files of each process.
        processes: processes and threads at once.
    """

    cpu_s: int = 3
    wall_s: float = 20.0
    memory_mib: int = 1024
    disk_mib: int = 16
    files: int = 64
    processes: int = 8


DEFAULT_LIMITS = Limits()


def passes(program: str, limits: Limits = DEFAULT_LIMITS) -> bool:
    """Whether a program, tests included, runs to its end without an exception.

    One that does is run again with a last line that fails. If it reaches its end then too, something in it makes tests
    pass that do not hold, and it has not passed.

    Args:
        program: Python source.
        limits: what it may use.

    Raises:
        CsLocalizeError: if the sandbox cannot be had.
    """
    return _completes(program, limits) and not _completes(program + _CANNOT_HOLD, limits)


@cache
def unavailable() -> str:
    """Why there is no sandbox on this machine; empty if there is one. Tries it once."""
    try:
        return "" if passes("assert 1 + 1 == 2") else "a program without a mistake did not pass"
    except CsLocalizeError as error:
        return str(error)


def _completes(program: str, limits: Limits) -> bool:
    nonce = secrets.token_hex(32)
    task = {"program": program, "nonce": nonce, "parent": os.getpid(), "packages": _packages(), **asdict(limits)}
    # No site, so that nothing of the user's starts by itself; -P, so that the modules beside the script are not found.
    command = [sys.executable, "-P", "-s", "-S", "-B", str(_INSIDE)]
    with os.fdopen(os.memfd_create("program"), "w+b") as given:
        given.write(json.dumps(task).encode())
        given.seek(0)
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0"},  # the same text, the same verdict
            cwd="/",
            start_new_session=True,
        )
    with process:
        try:
            written, state = _read(process, time.monotonic() + limits.wall_s)
        finally:
            _end(process)
    if state != b"ready":
        reason = state.decode(errors="replace") or "it did not start"
        raise CsLocalizeError(f"model-written code cannot be shut in on this machine: {reason}; see docs/code.md")
    return written == nonce.encode()


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """What comes out of both pipes until both are closed, the time is up, or it is more than there can be."""
    assert process.stdout is not None
    assert process.stderr is not None
    found: dict[IO[bytes], bytes] = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for pipe in found:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and max(map(len, found.values())) < _MOST_OUTPUT:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                pipe = next(pipe for pipe in found if pipe is key.fileobj)
                more = os.read(pipe.fileno(), _MOST_OUTPUT)
                found[pipe] += more
                if not more:
                    selector.unregister(pipe)
    return found[process.stdout], found[process.stderr]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the first process, which has not been waited for yet, and with it all of its namespace."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _packages() -> list[str]:
    """Folders of installed packages; tests of some problems need NumPy."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    return list(dict.fromkeys(path for path in paths if os.path.isdir(path)))
