from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.measure.toy import toy_outcome, toy_requests

N_REQUESTS = 300
UNIT = 10  # at most, of the driver's 60 tokens
IN_FLIGHT = 2 * 2 * UNIT  # two workers, two units each


def start(tmp_path: Path, delay_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.measure.driver",
            str(tmp_path / "ledger"),
            str(tmp_path / "measured"),
            str(N_REQUESTS),
            str(delay_s),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_parts(directory: Path, n: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len(list(directory.glob("*.parquet"))) < n:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "nothing was measured for a minute"
        time.sleep(0.02)


@pytest.mark.ray
def test_a_driver_killed_and_then_interrupted_ends_with_the_same_outcomes_when_started_again(tmp_path: Path) -> None:
    directory = tmp_path / "ledger"
    for parts, kind in ((4, signal.SIGKILL), (12, signal.SIGINT)):
        stopped = start(tmp_path, delay_s=0.2)
        wait_for_parts(directory, parts, stopped)
        stopped.send_signal(kind)
        assert stopped.wait(timeout=60) != 0
    kept = sum(pq.read_metadata(part).num_rows for part in directory.glob("part-*.parquet"))
    assert kept < N_REQUESTS

    last = start(tmp_path, delay_s=0.0)
    output, errors = last.communicate(timeout=120)
    assert last.returncode == 0, errors
    scores, count, address = json.loads(output)
    assert scores == [toy_outcome(request).score for request in toy_requests(N_REQUESTS)]
    assert address.startswith("127.0.0.1:")
    assert count["asked"] == N_REQUESTS
    assert count["served"] == kept
    assert count["measured"] == N_REQUESTS - kept
    assert count["tokens"] == 6 * N_REQUESTS

    measured = Counter((tmp_path / "measured").read_text().split())
    assert len(measured) == N_REQUESTS
    assert sum(measured.values()) - N_REQUESTS <= 2 * IN_FLIGHT
    keys = pa.concat_tables([pq.read_table(part) for part in directory.glob("*.parquet")]).column("key").to_pylist()
    assert len(keys) == len(set(keys)) == N_REQUESTS
