from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.studies import command, planted, repeated_keys, wait_for, write_study

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster as a user starts it, on ports of its own; yields the address of its job server."""
    port, dashboard = _free_ports(2)
    head = subprocess.Popen(
        [
            *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard}"),
            *("--dashboard-host=127.0.0.1", "--object-store-memory=134217728"),
        ],
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        _wait_for_jobs(address)
        yield address
    finally:
        head.terminate()
        head.wait(timeout=60)


def test_discover_runs_under_ray_job_submit_and_returns_the_exit_code(cluster: str, tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", planted(design__requests=200, confirm__random_draws=1))

    job = _submit(cluster, "jobs/discover.py", str(study), "--out", str(tmp_path / "out"))

    assert job.returncode == 0, job.stdout + job.stderr
    heads = json.loads((tmp_path / "out" / "heads.json").read_text(encoding="utf-8"))
    assert all(finding["named"] for finding in heads["tasks"].values())


def test_a_job_with_a_mistake_fails_with_one_line(cluster: str, tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", planted(tasks=["antonymz"]))

    job = _submit(cluster, "jobs/discover.py", str(study), "--out", str(tmp_path / "out"))

    assert job.returncode != 0
    assert "cs-localize: " in job.stdout + job.stderr
    assert "Traceback" not in job.stdout


def test_submit_runs_a_study_once_and_returns_its_exit_code(cluster: str, tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", planted(design__requests=200, confirm__random_draws=1))
    arguments = ("submit", str(study), "--out", str(tmp_path / "out"), "--address", cluster)

    first = _command(*arguments)

    assert first.returncode == 0, first.stdout + first.stderr
    assert "named heads" in first.stdout
    assert (tmp_path / "out" / "report.html").exists()
    again = _command(*arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "succeeded already; nothing new was started" in again.stderr
    assert "named heads" in again.stdout
    job = first.stderr.split()[2].removesuffix(":")
    assert [line.split()[1] for line in _command("ls", "--address", cluster).stdout.splitlines() if job in line] == [
        "SUCCEEDED"
    ]
    assert "SUCCEEDED, exit code 0" in _command("status", job, "--address", cluster).stdout
    assert _command("logs", job, "--address", cluster).stdout == again.stdout


def test_a_submitted_study_with_a_mistake_ends_with_exit_code_2(cluster: str, tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", planted(tasks=["antonymz"]))

    done = _command("submit", str(study), "--out", str(tmp_path / "out"), "--address", cluster)

    assert done.returncode == 2, done.stdout + done.stderr
    assert "cs-localize: no task 'antonymz'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_job_that_was_stopped_is_continued_by_the_next_submission(cluster: str, tmp_path: Path) -> None:
    study = write_study(
        tmp_path / "study.yaml", planted(design__requests=200, confirm__enabled=False, engine__planted__delay_s=0.3)
    )
    arguments = ("submit", str(study), "--out", str(tmp_path / "out"), "--address", cluster)
    ledger = tmp_path / "out" / "ledger"
    job = _command(*arguments, "--no-follow").stdout.strip()
    wait_for(lambda: any(ledger.glob("*.parquet")))

    stopped = _command("stop", job, "--address", cluster)

    assert stopped.stdout == f"job {job}: stopped\n", stopped.stderr
    assert not (tmp_path / "out" / "heads.json").exists()
    again = _command(*arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"job {job}-2: started" in again.stderr
    assert (tmp_path / "out" / "heads.json").exists()
    assert repeated_keys(ledger) == 0


@pytest.mark.vllm
@pytest.mark.model
def test_ablate_runs_under_ray_job_submit_on_the_real_model(cluster: str, tmp_path: Path) -> None:
    job = _submit(
        *(cluster, "jobs/ablate.py", "--model", "smollm2-135m-instruct", "--heads", "L0H0,L0H1", "--tasks", "copying"),
        *("--limit", "8", "--workers", "1", "--ledger", str(tmp_path / "ledger")),
    )

    assert job.returncode == 0, job.stdout + job.stderr
    assert "copying" in job.stdout


def _submit(address: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(str(BIN / "ray"), "job", "submit", "--address", address, "--working-dir", str(ROOT)),
            *("--", str(BIN / "python"), script, *arguments),
        ],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=_environment(), capture_output=True, text=True, check=False, timeout=200
    )


def _environment() -> dict[str, str]:
    """Ours without a cluster of somebody else's, and without the token that Ray asks for once it has made one."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
    }


def _wait_for_jobs(address: str, patience_s: float = 90.0) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        listing = subprocess.run(
            [str(BIN / "ray"), "job", "list", "--address", address],
            env=_environment(),
            capture_output=True,
            check=False,
        )
        if listing.returncode == 0:
            return
        assert time.monotonic() < deadline, listing.stderr
        time.sleep(1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
