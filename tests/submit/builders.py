from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ray.job_submission import JobDetails, JobStatus, JobType

from cs_localize.submit import Job, JobServer, plan_job
from tests.studies import planted, write_study

ADDRESS = "http://127.0.0.1:8265"


@dataclass
class StubClient:
    """A job server in memory: the jobs it has, and what was asked of it."""

    jobs: dict[str, str] = field(default_factory=dict)
    log: str = ""
    codes: dict[str, int] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    interrupted: bool = False
    cut: bool = False
    broken: bool = False

    def submit_job(self, *, submission_id: str, **_: object) -> str:
        if submission_id in self.jobs:
            raise RuntimeError(f"Request failed with status code 400: Job {submission_id} already exists.")
        self.started.append(submission_id)
        self.jobs[submission_id] = "PENDING"
        return submission_id

    def get_job_info(self, submission_id: str) -> JobDetails:
        if submission_id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {submission_id} does not exist.")
        return details(submission_id, self.jobs[submission_id], self.codes.get(submission_id))

    def list_jobs(self) -> list[JobDetails]:
        return [self.get_job_info(name) for name in self.jobs]

    def stop_job(self, submission_id: str) -> bool:
        self.jobs[submission_id] = "STOPPED"
        return True

    async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
        if self.interrupted:
            raise KeyboardInterrupt
        yield self.log[:5]
        if self.cut:  # the connection ends early, once
            self.cut = False
            return
        if self.broken:
            self.broken = False
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
        yield self.log[5:]
        self.jobs[submission_id] = "SUCCEEDED" if not self.codes.get(submission_id) else "FAILED"


def details(submission_id: str, status: str, code: int | None = None) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION,
        submission_id=submission_id,
        status=JobStatus(status),
        entrypoint="python -m cs_localize run study.yaml",
        driver_exit_code=code,
        start_time=1_800_000_000_000,
        metadata={"study": "three.yaml", "out": "/shared/three"},
    )


def server(client: StubClient) -> JobServer:
    return JobServer(cast("Any", client), ADDRESS, sleep=lambda _: None)


def job(base_id: str = "cs-localize-abc") -> Job:
    return Job(base_id, "true", {}, {})


def plan(
    tmp_path: Path,
    scratch: str = "scratch",
    out: str = "/shared/out",
    study: Path | None = None,
    changes: dict[str, object] | None = None,
    working_dir: Path | None = None,
    env: dict[str, str] | None = None,
    **lists: list[str],
) -> Job:
    folder = tmp_path / scratch
    folder.mkdir()
    study = study or write_study(tmp_path / "study.yaml", planted(**(changes or {})))
    return plan_job(study, Path(out), folder, working_dir=working_dir, env=env, **lists)
