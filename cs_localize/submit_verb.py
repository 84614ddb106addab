"""The verbs ``submit``, ``status``, ``logs``, ``stop`` and ``ls`` of the command line."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cs_localize.ablate_verb import add_allow_code_execution
from cs_localize.errors import UsageError, one_line

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

    from cs_localize.submit.server import JobServer

_ADDRESS = "http://127.0.0.1:8265"


def add_job_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verbs to the command line's."""
    submit = verbs.add_parser("submit", help="run a study as a job of a Ray cluster")
    submit.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study file")
    submit.add_argument("--out", type=Path, required=True, metavar="DIR", help="the study's folder on the cluster")
    submit.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override an option of the study; may be repeated"
    )
    submit.add_argument(
        "--working-dir",
        type=Path,
        metavar="DIR",
        help="folder that travels with it (default: the study and the files it names)",
    )
    submit.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out of it, as in .gitignore; repeatable",
    )
    submit.add_argument("--pip", action="append", default=[], metavar="PACKAGE", help="install for the job; repeatable")
    submit.add_argument(
        "--env", action="append", default=[], metavar="A=B", help="environment variable of the job; repeatable"
    )
    submit.add_argument(
        "--no-follow", action="store_true", help="print the job's id and leave, without waiting for its end"
    )
    add_allow_code_execution(submit)
    _add_address(submit, _submit)
    for name, run, text in (
        ("status", _status, "show how a job is doing"),
        ("logs", _logs, "show what a job printed"),
        ("stop", _stop, "stop a job; what it measured stays in its ledger"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("id", metavar="ID", help="the job's submission id")
        if name == "logs":
            verb.add_argument(
                "--follow", action="store_true", help="go on until the job ends, and return its exit code"
            )
        _add_address(verb, run)
    _add_address(verbs.add_parser("ls", help="list the jobs of a Ray cluster"), _ls)


def _add_address(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_API_SERVER_ADDRESS") or _ADDRESS,
        help=f"the cluster's job server (default: RAY_API_SERVER_ADDRESS, or {_ADDRESS})",
    )
    parser.set_defaults(run=run)


def _submit(arguments: argparse.Namespace) -> int:
    from cs_localize.submit import connect, plan_job, submit_job

    with tempfile.TemporaryDirectory(prefix="cs_localize-") as scratch:
        job = plan_job(
            arguments.study,
            arguments.out,
            Path(scratch),
            overrides=arguments.set,
            working_dir=arguments.working_dir,
            excludes=arguments.exclude,
            pip=arguments.pip,
            env=_variables(arguments.env),
            allow_code_execution=bool(arguments.allow_code_execution),
        )
        server = connect(arguments.address)
        submission_id, state = submit_job(server, job)
    _tell(f"job {submission_id}: {state}" + ("" if state == "started" else " already; nothing new was started"))
    if state == "succeeded":
        _tell(f"its study is in {arguments.out} on the cluster; another --out runs it again")
    if arguments.no_follow:
        print(submission_id)
        return 0
    return _follow(server, submission_id)


def _status(arguments: argparse.Namespace) -> int:
    from cs_localize.submit import connect

    details = connect(arguments.address).job(arguments.id)
    code = "" if details.driver_exit_code is None else f", exit code {details.driver_exit_code}"
    metadata = details.metadata or {}
    rows = {
        "id": details.submission_id,
        "status": f"{details.status}{code}",
        "started": _time(details.start_time),
        "ended": _time(details.end_time),
        "command": details.entrypoint,
        **metadata,
        "message": _message(details),
    }
    print("\n".join(f"{name:<8} {value}" for name, value in rows.items() if value))
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    from cs_localize.submit import connect

    server = connect(arguments.address)
    if arguments.follow:
        return _follow(server, arguments.id)
    print(server.logs(arguments.id), end="")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from cs_localize.submit import connect

    details = connect(arguments.address).stop(arguments.id)
    print(f"job {arguments.id}: {details.status.lower()}")
    return 0


def _ls(arguments: argparse.Namespace) -> int:
    from cs_localize.submit import connect

    for details in connect(arguments.address).jobs():
        print(f"{details.submission_id}  {details.status:<9}  {_time(details.start_time):<20}  {details.entrypoint}")
    return 0


def _follow(server: JobServer, submission_id: str) -> int:
    """Shows a job's log to its end; an interruption here is none of the job."""
    from cs_localize.submit import exit_code

    try:
        details = server.follow(submission_id, sys.stdout)
    except KeyboardInterrupt:
        _tell(
            f"job {submission_id} goes on; `cs-localize logs {submission_id} --follow --address {server.address}` "
            f"shows it, `cs-localize stop {submission_id} --address {server.address}` ends it"
        )
        return 130
    code = exit_code(details)
    _tell(f"job {submission_id}: {details.status.lower()}" + (f": {_message(details)}" if code else ""))
    return code


def _variables(assignments: list[str]) -> dict[str, str]:
    found = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator or not name:
            raise UsageError(f"--env {assignment}: write it as NAME=VALUE")
        found[name] = value
    return found


def _message(details: JobDetails) -> str:
    """The first line of what Ray says; the job's last lines follow it there."""
    return one_line((details.message or "").strip().partition("\n")[0])


def _time(milliseconds: int | None) -> str:
    if not milliseconds:
        return ""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _tell(line: str) -> None:
    print(f"cs-localize: {line}", file=sys.stderr)
