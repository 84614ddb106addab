"""Calls a function in a Python process of its own: vLLM allows one engine a process, and memory returns at its end."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cs_localize.measure.cluster import worker_environment
from cs_localize.measure.spec import EngineSpec

ROOT = Path(__file__).resolve().parents[2]

ResultT = TypeVar("ResultT")


def in_process(function: Callable[..., ResultT], spec: EngineSpec, *args: object) -> ResultT:
    """``function(spec, *args)``, in the environment of a worker; the function must be importable by name."""
    environment = {**os.environ, **worker_environment(spec, len(os.sched_getaffinity(0))), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        call, result = Path(folder, "call"), Path(folder, "result")
        call.write_bytes(pickle.dumps((function, (spec, *args))))
        command = [sys.executable, "-m", "tests.measure.process", str(call), str(result)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"{function.__name__} failed in its process:\n{done.stderr[-6000:]}")
        value: ResultT = pickle.loads(result.read_bytes())
    return value


if __name__ == "__main__":
    chosen, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps(chosen(*arguments)))
