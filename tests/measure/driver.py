"""A study in a process of its own, to be killed: ``python -m tests.measure.driver LEDGER LOG REQUESTS DELAY_S``.

Measures the toy requests in two workers and prints the scores, what the stage took and the address of its Ray.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from cs_localize.measure.fleet import Fleet
from cs_localize.measure.ledger import Ledger
from cs_localize.measure.measurer import LedgerMeasurer
from cs_localize.measure.progress import Progress
from cs_localize.measure.tokens import WordEncoder
from tests.measure.toy import load_toy, toy_requests, toy_spec


def main(directory: str, log: str, requests: str, delay_s: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in what it runs in the background
    spec = toy_spec(delay_s=float(delay_s), log=log)
    progress = Progress(Path(log).with_suffix(".jsonl"))
    ledger = Ledger(Path(directory))
    with LedgerMeasurer(
        spec,
        ledger,
        lambda: Fleet(spec, workers=2, threads=1, unit_tokens=60, loader=load_toy, notify=progress.event),
        WordEncoder(),
        progress,
    ) as measurer:
        outcomes = measurer.measure(toy_requests(int(requests)), "search")
        address = ray_address()
    print(json.dumps([[outcome.score for outcome in outcomes], asdict(measurer.counts["search"]), address]))


def ray_address() -> str:
    import ray

    return ray.get_runtime_context().gcs_address


if __name__ == "__main__":
    main(*sys.argv[1:])
