"""What the benchmarks of the vLLM engine share: an arm is a process with its own vLLM and its own cache root."""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from cs_localize.measure.spec import DTYPES
from processes import LineProcess, ProcessEnded, positive

Order = dict[str, Any]
"""What an arm is asked to do, or its answer, as JSON. An answer says how much is ``done``, and whatever else."""

CarryOut = Callable[[Order], Order]
"""Carries out an order and returns the answer."""

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


class Turns(NamedTuple):
    """What two arms did in turns.

    Attributes:
        said: answers of ours.
        ours: its rates.
        stock: rates of the other, before, between and after ours.
        ratios: of each of ours to the mean of the two beside it.
    """

    said: list[Order]
    ours: list[float]
    stock: list[float]
    ratios: list[float]


def take_turns(ours: Arm, stock: Arm, order: Order, rounds: int) -> Turns:
    """Measures the rates of two arms in turns, so that a machine that slows down or speeds up weighs on both.

    Args:
        ours: our arm; is also told the ``round``, from 1.
        stock: the other; its ``round`` is 0.
        order: what both are to do.
        rounds: how often ours is measured.
    """
    turns = Turns([], [], [rate(stock.run(**order, round=0))], [])
    for number in range(1, rounds + 1):
        turns.said.append(ours.run(**order, round=number))
        turns.ours.append(rate(turns.said[-1]))
        turns.stock.append(rate(stock.run(**order, round=0)))
        turns.ratios.append(2 * turns.ours[-1] / sum(turns.stock[-2:]))
    return turns


def rate(answer: Order) -> float:
    """What an arm got done a second."""
    return float(answer["done"]) / float(answer["seconds"])


def start(
    parser: argparse.ArgumentParser,
    arms: Mapping[str, Callable[[argparse.Namespace], CarryOut]],
    compare: Callable[[argparse.Namespace], None],
) -> None:
    """Runs a benchmark, or one of its arms where the command line names one behind ``--serve``.

    Args:
        parser: the benchmark's own options; those that all share are added.
        arms: what loads each arm, by name.
        compare: measures the arms and prints.
    """
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a directory, a hub id or a built-in name")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="number format (default: the model's)")
    parser.add_argument("--rounds", type=positive, default=3, help="times that everything is measured (default 3)")
    parser.add_argument("--serve", choices=tuple(arms), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(functools.partial(arms[options.serve], options))
        return
    try:
        compare(options)
    except ProcessEnded as error:
        raise SystemExit(f"{parser.prog}: {error}") from None


def shared_arguments(options: argparse.Namespace) -> list[str]:
    """What every arm is told as well: the model, and its number format."""
    return ["--model", options.model, "--dtype", options.dtype]


def _serve(make: Callable[[], CarryOut]) -> None:
    """Loads an arm and answers orders until the input ends."""
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
