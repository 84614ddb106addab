from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes import free_ports
from cs_localize.cli import main
from tests.studies import planted, repeated_keys, wait_for, write_study

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster as a user starts it, on ports of its own; yields the address of its job server."""
    port, dashboard, agent = free_ports(3)
    head = subprocess.Popen(
        [
            *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard}"),
            *("--dashboard-host=127.0.0.1", "--object-store-memory=134217728"),
            f"--dashboard-agent-listen-port={agent}",  # jobs go through it; by default it has one port a machine
        ],
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        wait_for(lambda: _takes_jobs(address))
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


def test_submit_runs_a_study_once_and_returns_its_exit_code(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study.yaml", planted(design__requests=200, confirm__random_draws=1))
    arguments = ("submit", str(study), "--out", str(tmp_path / "out"))

    code, log, told = _command(capsys, cluster, *arguments)

    assert code == 0, log + told
    assert "named heads" in log
    assert (tmp_path / "out" / "report.html").exists()
    job = _started(told)
    again, same_log, told = _command(capsys, cluster, *arguments)
    assert (again, same_log) == (0, log)
    assert f"job {job}: succeeded already; nothing new was started" in told
    assert [job, "SUCCEEDED"] in [line.split()[:2] for line in _command(capsys, cluster, "ls")[1].splitlines()]
    assert "SUCCEEDED, exit code 0" in _command(capsys, cluster, "status", job)[1]
    assert _command(capsys, cluster, "logs", job)[1] == log


def test_a_submitted_study_with_a_mistake_ends_with_exit_code_2(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study.yaml", planted(tasks=["antonymz"]))

    code, log, told = _command(capsys, cluster, "submit", str(study), "--out", str(tmp_path / "out"))

    assert code == 2, log + told
    assert "cs-localize: no task 'antonymz'" in log
    assert "Traceback" not in log + told


def test_a_job_that_was_stopped_is_continued_by_the_next_submission(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = planted(tasks=["antonyms", "capitals"], design__requests=200, engine__planted__delay_s=0.2)
    study = write_study(tmp_path / "study.yaml", slow | {"confirm": {"enabled": False}})
    arguments = ("submit", str(study), "--out", str(tmp_path / "out"))
    ledger = tmp_path / "out" / "ledger"
    job = _command(capsys, cluster, *arguments, "--no-follow")[1].strip()
    wait_for(lambda: any(ledger.glob("*.parquet")))

    assert _command(capsys, cluster, "stop", job)[1] == f"job {job}: stopped\n"

    assert not (tmp_path / "out" / "heads.json").exists()
    code, log, told = _command(capsys, cluster, *arguments)
    assert code == 0, log + told
    assert _started(told) == f"{job}-2"
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


def _command(capsys: pytest.CaptureFixture[str], address: str, *arguments: str) -> tuple[int, str, str]:
    """Runs a command about jobs: its exit code, what it printed, and what it told on the way."""
    capsys.readouterr()
    code = main([*arguments, "--address", address])
    return code, *capsys.readouterr()


def _started(told: str) -> str:
    found = re.search(r"job (\S+): started", told)
    assert found, told
    return found.group(1)


def _environment() -> dict[str, str]:
    """Ours without a cluster of somebody else's, and without the token that Ray asks for once it has made one."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
    }


def _takes_jobs(address: str) -> bool:
    listing = subprocess.run(
        [str(BIN / "ray"), "job", "list", "--address", address], env=_environment(), capture_output=True, check=False
    )
    return listing.returncode == 0
