"""The ledger at scale: writes outcomes in batches of one work unit, as a study does, and resumes from them.

    python benchmarks/ledger.py [--outcomes 1000000] [--batch 150] [--directory DIR]

Each request is one of a hundred items under a fresh mask of eight heads of 1,024, scored; 150 of 40 tokens fill a work
unit of 6,000. An append that merged small files counts as a merge; every append waits twice for the disk. Memory is
what the process gained over what it had with a ledger of one outcome. Opening is done in a new process, once for the
engine that measured them, which holds them all, and once for another, which holds none. At last as many random keys are
held once by a Python dict and once by the ledger's sorted arrays, with nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cs_localize.heads import Ablation, Head
from cs_localize.measure.ledger import Ledger, outcome_key
from cs_localize.measure.ledger_index import KEY_BYTES, Columns, OutcomeIndex
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Item, Outcome
from processes import memory_mb, positive

ENGINE = "benchmark-engine"
PROMPT_TOKENS = 36
ANSWER_TOKENS = 4
LOOKUPS = 100_000


def main() -> None:
    """Writes, then opens; the same file serves as the process that opens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outcomes", type=positive, default=1_000_000, help="how many to write (default 1000000)")
    parser.add_argument("--batch", type=positive, default=150, help="outcomes of one append (default 150)")
    parser.add_argument("--directory", type=Path, help="where to keep the ledger (default: a temporary folder)")
    parser.add_argument("--open", metavar="FINGERPRINT", help=argparse.SUPPRESS)
    parser.add_argument("--hold", choices=("dict", "arrays"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(opened(options.directory, options.open, options.outcomes)))
        return
    if options.hold:
        hold(options.hold, options.outcomes)
        return
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        directory = options.directory or Path(folder, "ledger")
        write(directory, options.outcomes, options.batch)
        for fingerprint in (ENGINE, "another-engine"):
            command = [sys.executable, __file__, "--open", fingerprint, "--directory", str(directory)]
            done = subprocess.run([*command, "--outcomes", str(options.outcomes)], stdout=subprocess.PIPE, check=True)
            report(fingerprint, json.loads(done.stdout))
    for kind in ("dict", "arrays"):
        subprocess.run([sys.executable, __file__, "--hold", kind, "--outcomes", str(options.outcomes)], check=True)


def write(directory: Path, outcomes: int, batch: int) -> None:
    """Appends and prints what it took."""
    warm_up()
    ledger = Ledger(directory)
    appends: list[float] = []
    merges: list[float] = []
    memory = [memory_mb()]
    with ledger.lock():
        for number, start in enumerate(range(0, outcomes, batch)):
            asked = list(requests(start, min(start + batch, outcomes)))
            answers = [Outcome(-float(start + place) / 7, place % 3 == 0, "", 40) for place in range(len(asked))]
            files = count(directory)
            started = time.perf_counter()
            ledger.append(ENGINE, asked, answers)
            seconds = time.perf_counter() - started
            (merges if count(directory) < files else appends).append(seconds)
            if number % max(1, outcomes // batch // 4) == 0:
                memory.append(memory_mb())
    memory.append(memory_mb())
    size = sum(path.stat().st_size for path in directory.glob("*.parquet"))
    print(f"{outcomes:,} outcomes in appends of {batch}")
    print(
        f"append              {1000 * statistics.median(appends):.1f} ms in the median, {sum(appends):.0f} s in all, "
        f"{outcomes / (sum(appends + merges)):,.0f} outcomes/s with merges"
    )
    if merges:
        print(f"merges              {len(merges)}, {max(merges):.2f} s the longest, {sum(merges):.1f} s in all")
    print(
        f"on disk             {size / 1e6:.0f} MB in {count(directory)} files, {size / outcomes:.0f} bytes an outcome"
    )
    gained = ", ".join(f"{now - memory[0]:.0f}" for now in memory[1:])
    print(f"memory while written {gained} MB gained")


def opened(directory: Path, fingerprint: str, outcomes: int) -> dict[str, float]:
    """Opens the ledger and looks outcomes up."""
    keys = [outcome_key(ENGINE, request) for request in requests(0, min(LOOKUPS, outcomes))]
    Ledger(directory / "none")  # whatever is loaded lazily is loaded now
    warm_up()
    before = memory_mb()
    started = time.perf_counter()
    ledger = Ledger(directory, fingerprint)
    seconds = time.perf_counter() - started
    gained = memory_mb() - before
    started = time.perf_counter()
    with ledger.lock():
        locked = time.perf_counter() - started
    started = time.perf_counter()
    found = sum(ledger.get(key) is not None for key in keys)
    rate = len(keys) / (time.perf_counter() - started)
    return {"held": len(ledger), "open_s": seconds, "lock_s": locked, "memory_mb": gained, "rate": rate, "found": found}


def report(fingerprint: str, result: dict[str, float]) -> None:
    """Prints what opening took."""
    print(
        f"opened for {fingerprint}: {result['held']:,.0f} outcomes in {result['open_s']:.2f} s, "
        f"{result['memory_mb']:.0f} MB gained; lock {1000 * result['lock_s']:.0f} ms; "
        f"{result['rate']:,.0f} lookups/s, {result['found']:,.0f} found"
    )


def hold(kind: str, outcomes: int) -> None:
    """Holds random keys and prints what that takes; the values of the arrays' outcomes are taken off."""
    raw = np.random.default_rng(0).bytes(KEY_BYTES * outcomes)
    numbers = np.zeros(outcomes, np.int64)
    columns = Columns(np.frombuffer(raw, ">u8").reshape(-1, 2), numbers / 1, numbers > 0, numbers, numbers, b"")
    index, rows = OutcomeIndex(), dict[bytes, int]()
    before, started = memory_mb(), time.perf_counter()
    if kind == "dict":
        rows = {raw[start : start + KEY_BYTES]: start for start in range(0, len(raw), KEY_BYTES)}
        values = 0
    else:
        index.extend(columns)
        index.sort()
        values = sum(part.nbytes for part in (columns.score, columns.correct, columns.tokens, columns.text_ends))
    seconds, gained = time.perf_counter() - started, memory_mb() - before - values / 1e6
    keys = [raw[start : start + KEY_BYTES] for start in range(0, len(raw), KEY_BYTES * max(1, outcomes // LOOKUPS))]
    started = time.perf_counter()
    held: OutcomeIndex | dict[bytes, int] = rows if kind == "dict" else index
    found = sum(key in held for key in keys)
    rate = len(keys) / (time.perf_counter() - started)
    print(
        f"keys alone, {kind:<7} {gained:.0f} MB, made in {seconds:.2f} s, {rate:,.0f} lookups/s, {found:,} found",
        flush=True,
    )


def warm_up() -> None:
    """Writes and reads one outcome, so that whatever is loaded at first use is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder))
        with ledger.lock():
            ledger.append(ENGINE, list(requests(0, 1)), [Outcome(0.0, True, "", 1)])
        Ledger(Path(folder))


def requests(first: int, last: int) -> Iterator[Request]:
    """Requests number ``first`` to ``last``, the same in every process."""
    for number in range(first, last):
        heads = [Head(layer, (number >> 5 * layer) % 32) for layer in range(8)]
        prompt = tuple(range(number % 100, number % 100 + PROMPT_TOKENS))
        item = Item("benchmark", f"{number % 100}", "", "")
        yield Request(item, prompt, tuple(range(ANSWER_TOKENS)), Ablation.of(heads))


def count(directory: Path) -> int:
    """Files of the ledger."""
    return sum(path.suffix == ".parquet" for path in directory.iterdir())


if __name__ == "__main__":
    main()
