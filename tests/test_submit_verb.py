from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, cast

import pytest

from cs_localize.cli import _parser, main
from cs_localize.submit import JobServer
from tests.studies import planted, write_study
from tests.submit.builders import ADDRESS, StubClient

ROOT = Path(__file__).parents[1]


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
