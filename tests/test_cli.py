from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cs_localize.cli import main
from cs_localize.models import random_model
from tests.studies import command, planted, run, write_study


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
        ("model: m\ntasks: [antonyms]\nsolver: {options: {alhpa: 1}}", "no option 'alhpa'"),
        ("model: m\ntasks: [antonyms]\ncrosscheck: {tasks: []}", "crosscheck.tasks"),
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
    ("flag", "value", "message"),
    [
        ("--heads", "L4Q2", "not a head"),
        ("--heads", "L0H0=x", "must be a number"),
        ("--heads", "L0H0,L0H0", "twice"),
        ("--tasks", "antonyms, antonymz", "no task 'antonymz'"),
        ("--tasks", ",", "at least one task"),
        ("--limit", "0", "--limit 0"),
        ("--seed", "-1", "--seed -1"),
        ("--workers", "0", "--workers 0"),
        ("--log-samples", "/dev/null", "cannot write to /dev/null"),
        ("--log-samples", "/dev/null/samples", "cannot write to /dev/null/samples"),
    ],
)
def test_a_mistake_in_an_ablation_is_one_line_and_exit_code_2_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, value: str, message: str
) -> None:
    arguments = {"--model": "m", "--heads": "L0H0", "--tasks": "antonyms", "--ledger": str(tmp_path), flag: value}

    code, error = fails(capsys, "ablate", *(part for pair in arguments.items() for part in pair))

    assert code == 2
    assert message in error


@pytest.mark.model
@pytest.mark.ray
def test_a_head_that_the_model_lacks_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = random_model(tmp_path / "model", "llama", seed=0)
    capsys.readouterr()  # what making the model printed

    code, error = fails(
        capsys,
        *("ablate", "--model", str(model), "--heads", "L99H0", "--tasks", "antonyms"),
        *("--ledger", str(tmp_path / "ledger")),
    )

    assert code == 2
    assert "out of range" in error


def test_a_study_file_is_not_overwritten_by_its_own_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", planted())
    text = study.read_text(encoding="utf-8") + "# why these tasks\n"
    study.write_text(text, encoding="utf-8")

    code, error = fails(capsys, "run", str(study), "--out", str(tmp_path))

    assert code == 2
    assert "--out" in error
    assert study.read_text(encoding="utf-8") == text


def test_a_file_that_cannot_be_written_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "runs/demo/design.npz")

    monkeypatch.setattr("cs_localize.study.run_study", denied)

    code, error = fails(capsys, "demo")

    assert code == 1
    assert "runs/demo/design.npz" in error


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


@pytest.mark.parametrize(
    "shape",
    [
        "3",
        "{layers: 2}",
        "{layers: 2.5, heads: 8, kv_heads: 4, head_dim: 4, ffn: 4}",
        "{layers: true, heads: 8, kv_heads: 4, head_dim: 4, ffn: 4}",
    ],
)
def test_a_planted_shape_that_is_none_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shape: str
) -> None:
    study = write_study(tmp_path / "study.yaml", planted())

    code, error = fails(
        capsys, "run", str(study), "--out", str(tmp_path / "out"), "--set", f"engine.planted.shape={shape}"
    )

    assert code == 2
    assert "each a whole number" in error


def test_what_cannot_be_printed_is_one_line_and_exit_code_1() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        process = subprocess.run(command("tasks"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert process.returncode == 1
    assert process.stderr == "cs-localize: the disk is full (no file named); free some space and run again\n"


def test_a_message_is_one_line_whatever_was_typed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, error = fails(
        capsys, "ablate", "--model", "m" * 5000, "--heads", "L0H0", "--tasks", "antonyms", "--ledger", str(tmp_path)
    )

    assert code in (1, 2)
    assert len(error) < 2000
    assert fails(capsys, "ablate", "--model", "m", "--heads", "L0H0", "--tasks", "two\nlines")[0] == 2
