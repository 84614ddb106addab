from __future__ import annotations

import io
import json
import shlex
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from cs_localize.cli import _parser, main
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.submit import Job, JobServer, connect, exit_code, plan_job, submit_job
from cs_localize.submit import package as packages
from cs_localize.submit.package import pack
from tests.studies import planted, write_study

ROOT = Path(__file__).parent.parent
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


# The id


def test_the_id_is_that_of_the_content_whatever_the_file_is_called_and_however_it_is_written(tmp_path: Path) -> None:
    first = plan(tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text("# a remark\n" + json.dumps(planted(), indent=2), encoding="utf-8")
    again = plan(tmp_path, "again", study=other)

    assert again.base_id == first.base_id
    assert again.entry_point == first.entry_point == "python -m cs_localize run study.yaml --out /shared/out"


@pytest.mark.parametrize(
    "change",
    [
        {"changes": {"seed": 1}},
        {"overrides": ["design.requests=601"]},
        {"out": "/shared/elsewhere"},
        {"pip": ["rich"]},
        {"env": {"A": "B"}},
    ],
)
def test_whatever_changes_what_runs_changes_the_id(tmp_path: Path, change: dict[str, Any]) -> None:
    assert plan(tmp_path, "changed", **change).base_id != plan(tmp_path).base_id


def test_another_version_of_the_package_is_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan(tmp_path)
    monkeypatch.setattr("cs_localize.submit.submission.__version__", "99.0")

    assert plan(tmp_path, "newer").base_id != before.base_id


def test_a_changed_file_that_travels_is_another_job_and_one_left_out_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    study = write_study(folder / "study.yaml", planted())
    (folder / "task.py").write_text("a", encoding="utf-8")
    (folder / "notes.txt").write_text("a", encoding="utf-8")

    def planned(scratch: str) -> str:
        return plan(tmp_path, scratch, study=study, working_dir=folder, excludes=["*.txt"]).base_id

    before = planned("a")
    (folder / "notes.txt").write_text("b", encoding="utf-8")
    unchanged = planned("b")
    (folder / "task.py").write_text("b", encoding="utf-8")

    assert unchanged == before
    assert planned("c") != before


def test_without_a_working_dir_the_resolved_study_travels_alone(tmp_path: Path) -> None:
    made = plan(tmp_path, overrides=["seed=7"])

    root = Path(made.runtime_env["working_dir"])
    assert [path.name for path in root.iterdir()] == ["study.yaml"]
    assert "seed: 7" in (root / "study.yaml").read_text(encoding="utf-8")


def test_in_a_working_dir_the_study_is_run_from_its_place_with_its_overrides(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "studies").mkdir(parents=True)
    study = write_study(folder / "studies" / "my study.yaml", planted())

    made = plan(tmp_path, study=study, working_dir=folder, overrides=["seed=7"], env={"A": "b"}, pip=["rich"])

    expected = "python -m cs_localize run 'studies/my study.yaml' --out /shared/out --set seed=7"
    assert made.entry_point == expected
    assert made.runtime_env == {
        "working_dir": str(folder),
        "excludes": [],
        "pip": ["rich"],
        "env_vars": {"A": "b"},
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "runs/three"}, "--out runs/three: give an absolute path"),
        ({"changes": {"ledger": "ledger"}}, "ledger: ledger: give an absolute path"),
        ({"excludes": ["*.bin"]}, "without --working-dir"),
        ({"working_dir": Path("nowhere")}, "not within --working-dir"),
        ({"overrides": ["desing.requests=3"]}, "unknown option 'desing'"),
    ],
)
def test_a_submission_that_makes_no_sense_is_refused_before_anybody_is_asked(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan(tmp_path, **options)


def test_a_study_that_is_left_out_of_what_travels_is_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", planted())

    with pytest.raises(UsageError, match="left out"):
        plan(tmp_path, study=study, working_dir=tmp_path, excludes=["*.yaml"])


def test_a_pattern_that_is_none_is_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", planted())

    with pytest.raises(UsageError, match="--exclude !: write patterns"):
        plan(tmp_path, study=study, working_dir=tmp_path, excludes=["!"])


def test_a_working_dir_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(UsageError, match="not within --working-dir"):
        plan(tmp_path, working_dir=tmp_path / "loop")


# What travels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {
        "study.yaml": 10,
        "task.py": 20,
        "runs/demo/ledger/part.parquet": 3000,
        "runs/demo/heads.json": 5,
        "weights/model.bin": 2000,
        "data/a.csv": 600,
        "data/b.csv": 400,
        "ignored/big.bin": 9000,
    }.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (tmp_path / "folder" / ".gitignore").write_text("ignored/\n", encoding="utf-8")
    (tmp_path / "folder" / "data" / ".rayignore").write_text("b.csv\n", encoding="utf-8")
    return tmp_path / "folder"


def test_what_is_weighed_is_what_ray_packs(folder: Path, tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package

    package = pack(folder, ["weights"])
    create_package(str(folder), tmp_path / "package.zip", include_gitignore=True, excludes=["weights"])

    with ZipFile(tmp_path / "package.zip") as archive:
        assert {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()} == {
            str(path): size for path, size in package.sizes.items()
        }


def test_a_folder_that_is_too_large_is_refused_with_its_three_largest_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "LARGEST", 4000)

    with pytest.raises(UsageError, match="--exclude") as refused:
        pack(folder)

    largest = str(refused.value).partition("the largest: ")[2]
    assert [part.split(" (")[0] for part in largest.split(", ")] == [
        "runs/demo/ledger/part.parquet",
        "weights/model.bin",
        "data/a.csv",
    ]
    assert pack(folder, ["runs"]).size < 4000


# Not twice


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", "SUCCEEDED"])
def test_a_study_that_runs_or_has_succeeded_is_not_started_again(status: str) -> None:
    client = StubClient({"cs-localize-abc": status})

    assert submit_job(server(client), job()) == ("cs-localize-abc", status.lower())
    assert client.started == []


def test_a_study_that_failed_or_was_stopped_is_started_again_under_the_next_number() -> None:
    client = StubClient({"cs-localize-abc": "FAILED", "cs-localize-abc-2": "STOPPED"})

    assert submit_job(server(client), job()) == ("cs-localize-abc-3", "started")
    assert submit_job(server(client), job()) == ("cs-localize-abc-3", "pending")
    assert client.started == ["cs-localize-abc-3"]


def test_of_two_submissions_at_once_the_later_follows_the_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StubClient({"cs-localize-abc": "RUNNING"})
    asked = server(client)
    answers = iter([None, asked.find("cs-localize-abc"), asked.find("cs-localize-abc")])
    monkeypatch.setattr(asked, "find", lambda _: next(answers))

    assert submit_job(asked, job()) == ("cs-localize-abc", "running")
    assert client.started == []


def test_a_submission_that_the_server_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StubClient()

    def refuse(**_: object) -> str:
        raise RuntimeError("Request failed with status code 500: Traceback (most recent call last):\nValueError: no.\n")

    monkeypatch.setattr(client, "submit_job", refuse)

    with pytest.raises(CsLocalizeError, match=r"^the job server at http://127\.0\.0\.1:8265: ValueError: no\.$"):
        submit_job(server(client), job())


# Following


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", 1, 1),
        ("FAILED", 127, 1),
        ("FAILED", -9, 1),
        ("FAILED", None, 1),
        ("STOPPED", None, 1),
    ],
)
def test_the_exit_code_is_that_of_the_command(status: str, code: int | None, expected: int) -> None:
    assert exit_code(details("a", status, code)) == expected


@pytest.mark.parametrize("cut", [False, True])
def test_following_prints_the_log_once_and_ends_with_the_job(cut: bool) -> None:
    client = StubClient({"a": "RUNNING"}, log="found L4H2\nfound L7H0\n", cut=cut)
    stream = io.StringIO()

    assert server(client).follow("a", stream).status == "SUCCEEDED"
    assert stream.getvalue() == client.log


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubClient:
    """A stub that the command line connects to."""
    client = StubClient()
    monkeypatch.setattr("cs_localize.submit.connect", lambda address: JobServer(cast("Any", client), address))
    return client


def submit(tmp_path: Path, *arguments: str) -> int:
    study = write_study(tmp_path / "study.yaml", planted())
    return main(["submit", str(study), "--out", "/shared/out", *arguments])


def test_submit_follows_and_returns_the_exit_code(
    stub: StubClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stub.log = "measuring\n"

    assert submit(tmp_path) == 0
    shown = capsys.readouterr()
    assert shown.out == stub.log
    assert f"job {stub.started[0]}: started" in shown.err

    assert submit(tmp_path) == 0
    assert "succeeded already; nothing new was started" in capsys.readouterr().err
    assert len(stub.started) == 1


def test_a_job_that_fails_gives_its_exit_code_to_whoever_follows(stub: StubClient) -> None:
    stub.jobs, stub.codes = {"a": "RUNNING"}, {"a": 2}

    assert main(["logs", "a", "--follow"]) == 2


def test_submit_without_following_prints_the_id_alone(
    stub: StubClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert submit(tmp_path, "--no-follow") == 0

    assert capsys.readouterr().out == f"{stub.started[0]}\n"
    assert stub.jobs == {stub.started[0]: "PENDING"}


def test_an_interruption_leaves_the_job_running_and_says_how_to_see_it(
    stub: StubClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stub.interrupted = True

    assert submit(tmp_path, "--address", ADDRESS) == 130

    started = stub.started[0]
    assert stub.jobs == {started: "PENDING"}
    assert f"cs-localize logs {started} --follow --address {ADDRESS}" in capsys.readouterr().err


def test_jobs_are_listed_and_shown(stub: StubClient, capsys: pytest.CaptureFixture[str]) -> None:
    stub.jobs, stub.codes = {"a": "FAILED", "b": "RUNNING"}, {"a": 2}

    assert main(["ls"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["a", "FAILED"], ["b", "RUNNING"]]
    assert main(["status", "a"]) == 0
    shown = capsys.readouterr().out
    assert "FAILED, exit code 2" in shown
    assert "/shared/three" in shown


def test_a_job_is_stopped_once(stub: StubClient, capsys: pytest.CaptureFixture[str]) -> None:
    stub.jobs = {"a": "RUNNING", "b": "SUCCEEDED"}

    assert main(["stop", "a"]) == main(["stop", "b"]) == 0
    assert capsys.readouterr().out == "job a: stopped\njob b: succeeded\n"
    assert stub.jobs == {"a": "STOPPED", "b": "SUCCEEDED"}


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_an_unknown_id_is_one_line_and_exit_code_2(
    stub: StubClient, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main([verb, "nobody", "--address", ADDRESS]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no job 'nobody'" in error
    assert f"cs-localize ls --address {ADDRESS}" in error


@pytest.mark.parametrize("assignment", ["A", "=B"])
def test_an_environment_variable_without_name_or_value_is_refused(
    stub: StubClient, capsys: pytest.CaptureFixture[str], tmp_path: Path, assignment: str
) -> None:
    assert submit(tmp_path, "--env", assignment) == 2
    assert "NAME=VALUE" in capsys.readouterr().err


# Connecting


@contextmanager
def web_server(status: int, body: str) -> Iterator[str]:
    """Something on loopback that gives every question the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_an_address_where_nobody_answers_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"

        assert main(["ls", "--address", address]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"no Ray job server answers at {address}" in error


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "auto", "ray://127.0.0.1:10001"])
def test_an_address_that_is_none_of_a_job_server_says_how_to_write_it(address: str) -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        connect(address)


@pytest.mark.parametrize(("status", "body"), [(404, ""), (200, "<html>"), (200, "[]"), (200, '{"version": 3}')])
def test_a_server_that_is_none_of_ray_is_one_line(status: int, body: str) -> None:
    with web_server(status, body) as address, pytest.raises(UsageError, match="no Ray job server answers"):
        connect(address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:port", "http://two words"])
def test_an_address_that_no_url_has_is_one_line(address: str) -> None:
    with pytest.raises(UsageError, match="no Ray job server answers"):
        connect(address)


def test_a_server_that_speaks_no_http_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-server\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(UsageError, match="no Ray job server answers"):
            connect(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("status", [401, 403])
def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(status: int) -> None:
    with web_server(status, "no token") as address, pytest.raises(UsageError, match="set RAY_AUTH_MODE=token"):
        connect(address)


def test_the_address_that_is_given_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")

    with web_server(200, '{"ray_version": "2.60.0"}') as address:
        assert connect(address).address == address


def test_the_default_address_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")

    assert main(["ls"]) == 2
    assert "http://127.0.0.1:1 " in capsys.readouterr().err


def test_ray_without_its_packages_for_jobs_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.dashboard.modules.job.sdk.requests", None)

    with (
        web_server(200, '{"ray_version": "2.60.0"}') as address,
        pytest.raises(CsLocalizeError, match=r"ray\[default\]"),
    ):
        connect(address)


# The documentation


def test_every_job_is_documented_with_arguments_that_its_command_takes() -> None:
    text = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("ray job submit ")]
    documented = {}
    for interpreter, script, verb, arguments in map(_job_line, lines):
        assert interpreter == "python"
        documented[script] = verb
        assert callable(_parser().parse_args([verb, *arguments]).run)
    assert documented.keys() == {f"jobs/{path.name}" for path in (ROOT / "jobs").glob("*.py")}
    for script, verb in documented.items():
        assert f'main(["{verb}", *sys.argv[1:]])' in (ROOT / script).read_text(encoding="utf-8")


def _job_line(words: list[str]) -> tuple[str, str, str, list[str]]:
    """Interpreter, script, verb and arguments of a documented submission."""
    interpreter, script, *arguments = words[words.index("--") + 1 :]
    verb = {"discover": "run"}.get(Path(script).stem, Path(script).stem)
    return interpreter, script, verb, arguments
