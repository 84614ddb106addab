from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cs_localize.cli import main
from tests.studies import planted, run, write_study


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    error = capsys.readouterr().err
    assert error.startswith("cs-localize: ")
    assert error.count("\n") == 1, "one line"
    return code, error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [antonyms]", "'model' is required"),
        ("model: m\ntasks: []", "tasks"),
        ("model: m\ntasks: [antonyms]\ndesing: {}", "unknown option 'desing'"),
        ("model: m\ntasks: [antonyms]\ndesign: {density: 2}", "design.density"),
        ("model: [", "not valid YAML"),
        ("just words", "key: value"),
        ("", "key: value"),
        ("model: planted\ntasks: [antonymz]\nengine: {name: planted}\ncrosscheck: {enabled: false}", "antonymz"),
        ("model: planted\ntasks: [antonyms]\nengine: {name: planted}\ncrosscheck: {enabled: false}", "planted.shape"),
        ("model: no-such-model\ntasks: [antonyms]", "no-such-model"),
        ("model: m\ntasks: [antonyms]\nsolver: {name: magic}", "solver.name"),
    ],
)
def test_a_mistake_in_a_study_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(text, encoding="utf-8")

    code, error = fails(capsys, "run", str(study), "--out", str(tmp_path / "out"))

    assert code == 2
    assert message in error


@pytest.mark.parametrize(
    "override", ["design", "=3", "design.=3", "model.name=3", "design.requests=[", "design.nope=1"]
)
def test_a_malformed_override_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str
) -> None:
    study = write_study(tmp_path / "study.yaml", planted())

    code, _ = fails(capsys, "run", str(study), "--out", str(tmp_path / "out"), "--set", override)

    assert code == 2


def test_a_missing_study_file_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = fails(capsys, "run", "nowhere.yaml")

    assert code == 2
    assert "nowhere.yaml" in error


@pytest.mark.parametrize(
    ("heads", "message"),
    [("L4", "not a head"), ("L0H0=x", "must be a number"), ("L0H0,L0H0", "twice"), ("L99H0", "out of range")],
)
def test_a_mistaken_head_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, heads: str, message: str
) -> None:
    code, error = fails(
        capsys,
        *("ablate", "--model", str(_config_only(tmp_path)), "--heads", heads, "--tasks", "antonyms"),
        *("--ledger", str(tmp_path / "ledger")),
    )

    assert code == 2
    assert message in error


def test_tasks_and_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    assert "antonyms" in capsys.readouterr().out
    assert main(["models"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out


def test_an_unknown_command_or_flag_is_exit_code_2() -> None:
    for arguments in (["fly"], ["tasks", "--fly"], []):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2


def test_output_into_a_pipe_that_closes_is_no_traceback() -> None:
    process = subprocess.run(
        f"{sys.executable} -m cs_localize tasks | head -c 1", shell=True, capture_output=True, text=True, check=False
    )

    assert "Traceback" not in process.stderr


@pytest.mark.ray
def test_a_study_prints_what_it_found_and_where_the_report_lies(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", planted(design__requests=200))

    process = run("run", str(study), "--out", str(tmp_path / "out"), "--set", "confirm.random_draws=1")

    assert process.returncode == 0, process.stderr
    assert "named heads" in process.stdout
    assert str(tmp_path / "out" / "report.html") in process.stdout
    assert "search" in process.stderr


def _config_only(directory: Path) -> Path:
    """A directory that is enough of a model to know its shape."""
    from cs_localize.models import random_model

    return random_model(directory / "model", "llama", seed=0)
