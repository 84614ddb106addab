"""Kills writers of a ledger at random instants: ``python -m tests.measure.ledger_kills LEDGER LOG SEED KILLS``.

Each writer is a fork. It checks that the ledger holds all that its predecessors had appended, one row a key, then
appends and notes in the log, before each append, how many outcomes are safe. Exit code 1 if a check failed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from cs_localize.measure import ledger as module
from cs_localize.measure.ledger import Ledger
from tests.measure.ledgers import append, fill, holds, keys_on_disk
from tests.measure.toy import toy_requests

BATCH = 3
LONGEST_S = 0.15


def write(directory: Path, log: Path) -> None:
    """One writer; never returns unless a check fails."""
    log.touch()
    safe = max(map(int, log.read_text().split()), default=0)
    ledger = Ledger(directory)
    found = len(ledger)
    assert found in (safe, safe + BATCH), f"{found} outcomes of {safe}"
    assert holds(ledger, toy_requests(found))
    with ledger.lock(), log.open("a") as file:
        assert len(ledger) == found
        keys = keys_on_disk(directory)
        assert len(keys) == len(set(keys)) == found, f"{len(keys)} rows, {len(set(keys))} keys, {found} outcomes"
        for start in range(found, 4000, BATCH):
            file.write(f"{start}\n")
            file.flush()
            append(ledger, toy_requests(BATCH, first=start))


def main(directory: Path, log: Path, seed: int, kills: int) -> int:
    """Starts and kills writers one after the other."""
    module._MOST_SMALL, module._SMALL_ROWS = 3, 30
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), 1)  # PyArrow imports more when it is first used, which takes longer than a writer lives
    for _ in range(kills):
        child = os.fork()
        if not child:
            try:
                write(directory, log)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        time.sleep(rng.uniform(0.01, LONGEST_S))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return 1  # it ended by itself
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
