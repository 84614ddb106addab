"""What the benchmarks share: a process that answers line by line, free ports, memory, numbers on a command line."""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


class ProcessEnded(Exception):
    """A process ended before it answered."""


class LineProcess:
    """A Python process that answers every line it is given with a line, until its input ends.

    Args:
        arguments: what follows the interpreter's name.
        environment: its whole environment.
        folder: where it runs; by default where this process does.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    def ask(self, line: str) -> str:
        """Gives it a line and waits for the answer.

        Raises:
            ProcessEnded: if it ends without one.
        """
        self._questions.write(f"{line}\n")
        self._questions.flush()
        return self.answer()

    def answer(self) -> str:
        """Its next line; see ``ask``."""
        line = self._answers.readline()
        if not line:
            raise ProcessEnded("the process ended early; its message is above")
        return line.strip()

    def end(self, patience_s: float | None = None) -> None:
        """Ends its input and waits for it."""
        self._questions.close()
        self._process.wait(timeout=patience_s)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def memory_mb() -> float:
    """Resident memory of this process."""
    return float(psutil.Process().memory_info().rss) / 1e6


def positive(text: str) -> int:
    """A whole number of at least 1, for ``argparse``.

    Raises:
        ArgumentTypeError: if it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least 1")
    return int(text)
