"""What the benchmarks of the vLLM engine share: an arm is a process with its own vLLM and its own cache root."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from processes import LineProcess

Order = dict[str, Any]
"""What an arm is asked to do, and what it answers, as JSON."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


class Arm:
    """One arm in a process of its own, which runs the same script with its name behind ``--serve``.

    Args:
        script: the benchmark's file.
        name: the arm.
        arguments: more of the script's arguments.
    """

    def __init__(self, script: str, name: str, arguments: Sequence[str]) -> None:
        self._cache = tempfile.TemporaryDirectory(prefix=f"vllm-{name}-")
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, "VLLM_CACHE_ROOT": self._cache.name}
        self._process = LineProcess([script, "--serve", name, *arguments], environment)

    def __enter__(self) -> Arm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.end()
        self._cache.cleanup()

    def run(self, **order: object) -> Order:
        """Has it carry out an order; the answer holds ``seconds`` besides what the arm says."""
        answer: Order = json.loads(self._process.ask(json.dumps(order)))
        return answer


def serve(make: Callable[[], Callable[[Order], Order]]) -> None:
    """Answers orders until the input ends.

    Args:
        make: loads the arm, and returns what carries out an order and says what there is to say.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    carry_out = make()
    for line in sys.stdin:
        started = time.perf_counter()
        said = carry_out(json.loads(line))
        answers.write(json.dumps({**said, "seconds": time.perf_counter() - started}) + "\n")
        answers.flush()


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"
