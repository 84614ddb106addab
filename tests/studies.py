"""Studies that tests run: small, planted, complete in seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from cs_localize.config import StudyConfig, parse_study

TASKS = ("antonyms", "capitals", "counting", "plurals")


def planted(**changes: object) -> dict[str, Any]:
    """A planted study as its YAML would hold it."""
    study: dict[str, Any] = {
        "model": "planted",
        "tasks": list(TASKS),
        "search_items": 40,
        "held_out_items": 40,
        "engine": {
            "name": "planted",
            "workers": 2,
            "threads": 1,
            "unit_tokens": 2000,
            "planted": {"shape": {"layers": 12, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 256}},
        },
        "design": {"requests": 600},
        "select": {"by": "tests", "resamples": 5, "permutations": 4},
        "confirm": {"random_draws": 3, "bootstrap": 200},
        "crosscheck": {"enabled": False},
    }
    for path, value in changes.items():
        section: dict[str, Any] = study
        *parents, last = path.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return study


def planted_config(**changes: object) -> StudyConfig:
    """The same, validated."""
    return parse_study(planted(**changes))


def write_study(path: Path, study: dict[str, Any]) -> Path:
    """Writes a study file."""
    path.write_text(yaml.safe_dump(study), encoding="utf-8")
    return path


def command(*arguments: str) -> list[str]:
    """A ``cs-localize`` command line for a process of its own."""
    return [sys.executable, "-m", "cs_localize", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a ``cs-localize`` command in a process of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


def repeated_keys(ledger: Path) -> int:
    """How many keys of a ledger have more than one row."""
    keys: Counter[str] = Counter()
    for part in sorted(ledger.glob("*.parquet")):
        keys.update(pq.read_table(part, columns=["key"]).column("key").to_pylist())
    return sum(count > 1 for count in keys.values())


def wait_for(condition: Callable[[], bool], patience_s: float = 120.0) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def hear_interrupts() -> None:
    """To be called in a new process: a shell has the signal ignored in what it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
