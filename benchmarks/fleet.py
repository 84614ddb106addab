"""The fleet: two engines against one, outcomes per second, and the driver's memory.

    python benchmarks/fleet.py scaling [--model DIR_OR_NAME] [--requests N]
    python benchmarks/fleet.py rate [--outcomes N]
    python benchmarks/fleet.py memory [--outcomes N]

``scaling`` gives the same requests of a search, a fresh mask each, to one vLLM worker with one core and then to two
with one core each, and compares tokens per second once all are loaded. ``rate`` and ``memory`` use the planted engine,
whose answers cost next to nothing, so that what remains is the fleet: ``rate`` counts outcomes per second through two
workers, ``memory`` prints the driver's resident memory along the way. No ledger is kept here; what it keeps of every
outcome in memory is its own figure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from cs_localize.config import EngineConfig
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.cluster import RaySession
from cs_localize.measure.fleet import Fleet
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.tokens import ItemEncoder
from cs_localize.session import engine_spec
from cs_localize.tasks import get_task
from processes import memory_mb, positive

TASKS = ("antonyms", "capitals", "past_tense", "plurals")
DENSITY = 0.06
SCALING_UNIT_TOKENS = 2000  # many units, so that the last of them leaves no worker idle for long
PLANTED_SHAPE = {"layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536}
STAGE = 20_000
REPORT_EVERY = 100_000


def main() -> None:
    """Runs one part and prints what it measured."""
    parser = argparse.ArgumentParser(description="Speed and memory of the fleet.")
    parts = parser.add_subparsers(dest="part", required=True)
    scaling_ = parts.add_parser("scaling", help="two vLLM workers against one")
    scaling_.add_argument("--model", default="smollm2-135m-instruct", help="a directory, a hub id or a built-in name")
    scaling_.add_argument("--requests", type=positive, default=1000, help="requests of each run (default %(default)s)")
    for name, default in (("rate", 60_000), ("memory", 1_000_000)):
        part = parts.add_parser(name)
        part.add_argument("--outcomes", type=positive, default=default, help="how many (default %(default)s)")
    options = parser.parse_args()
    with RaySession():
        if options.part == "scaling":
            scaling(options.model, options.requests)
        elif options.part == "rate":
            rate(options.outcomes)
        else:
            memory(options.outcomes)


def scaling(model: str, requests: int) -> None:
    """Tokens per second of one and of two vLLM workers."""
    spec, encoder = engine_spec(model, EngineConfig(name="vllm"), TASKS)
    rng = np.random.default_rng(0)
    rates = []
    for workers in (1, 2):
        with Fleet(spec, workers, threads=1, unit_tokens=SCALING_UNIT_TOKENS) as fleet:
            warm_up(fleet, workers, masked_requests(120, spec.shape, encoder, rng))
            asked = masked_requests(requests, spec.shape, encoder, np.random.default_rng(1))
            started = time.perf_counter()
            tokens = sum(outcome.tokens for _, outcomes in fleet.map(asked) for outcome in outcomes)
            seconds = time.perf_counter() - started
        rates.append(tokens / seconds)
        print(
            f"{workers} worker{'s' if workers > 1 else ' '} with one core: {requests:,} requests, {tokens:,} tokens in "
            f"{seconds:.1f} s, {rates[-1]:.0f} tokens/s, {requests / seconds:.1f} requests/s",
            flush=True,
        )
    print(f"ratio: {rates[1] / rates[0]:.3f}")


def rate(outcomes: int) -> None:
    """Outcomes per second of two planted workers."""
    spec, encoder = planted()
    rng = np.random.default_rng(0)
    with Fleet(spec, 2, threads=1) as fleet:
        warm_up(fleet, 2, masked_requests(STAGE, spec.shape, encoder, rng))
        asked = masked_requests(outcomes, spec.shape, encoder, rng)
        started, cpu = time.perf_counter(), time.process_time()
        found = sum(len(answers) for _, answers in fleet.map(asked))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"{found:,} outcomes in {seconds:.1f} s: {found / seconds:,.0f} outcomes/s")
    print(f"driver: {cpu / seconds:.0%} of a core, {cpu / found * 1e6:.0f} us an outcome")


def memory(outcomes: int) -> None:
    """Resident memory of the driver while outcomes pass through it, stage after stage."""
    spec, encoder = planted()
    rng = np.random.default_rng(0)
    started, found = time.perf_counter(), 0
    with Fleet(spec, 2, threads=1) as fleet:
        while found < outcomes:
            asked = masked_requests(min(STAGE, outcomes - found), spec.shape, encoder, rng)
            for _, answers in fleet.map(asked):
                found += len(answers)
            if found % REPORT_EVERY < STAGE or found == outcomes:
                seconds = time.perf_counter() - started
                print(f"{found:>9,} outcomes, {seconds:6.1f} s: {memory_mb():.0f} MB", flush=True)


def planted() -> tuple[EngineSpec, ItemEncoder]:
    """The planted engine, as large as the small real model."""
    return engine_spec("planted", EngineConfig(name="planted", planted={"shape": PLANTED_SHAPE}), TASKS)


def warm_up(fleet: Fleet, workers: int, requests: Sequence[Request]) -> None:
    """Gives the fleet work, at least a unit for each worker, until every worker has loaded and answered."""
    while len(fleet.placements) < workers or not all(fleet.placements):
        list(fleet.map(requests))
    list(fleet.map(requests))


def masked_requests(n: int, shape: ModelShape, encoder: ItemEncoder, rng: np.random.Generator) -> list[Request]:
    """Requests as of a search: items of several tasks, each under a mask of its own."""
    items = [item for task in TASKS for item in get_task(task).split(0, 40, 40).search]
    encoded = [encoder.encode(item) for item in items]
    masks = rng.random((n, shape.n_heads)) < DENSITY
    return [
        Request(
            items[number % len(items)],
            *encoded[number % len(items)],
            Ablation.of(shape.head(int(head)) for head in np.flatnonzero(mask)),
        )
        for number, mask in enumerate(masks)
    ]


if __name__ == "__main__":
    main()
