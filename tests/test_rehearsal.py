from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.ray
@pytest.mark.full
def test_a_sweep_that_loses_a_worker_and_a_node_finds_what_a_quiet_one_finds() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/rehearsal.py", "--engine", "planted"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed a worker" in done.stdout
    assert "killed a node" in done.stdout
    assert done.stdout.count("every figure equal: yes") == 2
    assert done.stdout.endswith("same findings: yes\n")
