"""Files that a study names and that are not there: told with study and option, before anything is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cs_localize.cli import main
from cs_localize.config import load_study, named_files
from cs_localize.errors import UsageError
from cs_localize.grid import load_grid
from cs_localize.tasks import find_tasks
from tests.studies import planted, write_study


def with_file(option: str, file: str) -> dict[str, Any]:
    """A study that names the file in that option."""
    if option == "design.masks":
        return planted(design={"requests": 120, "masks": file})
    return planted(tasks=["antonyms", "doubling"], data={"doubling": file})


def refusal(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("cs-localize: ")


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(("option", "name"), [("data.doubling", "none.jsonl"), ("design.masks", "none.npy")])
@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_missing_file_is_told_with_the_study_and_the_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str, option: str, name: str, absolute: bool
) -> None:
    file = tmp_path / name
    study = write_study(tmp_path / "study.yaml", with_file(option, str(file) if absolute else name))
    out = tmp_path / "out"

    assert refusal(capsys, verb, str(study), "--out", str(out)) == f"{study}: {option}: there is no file {file}"
    file.mkdir()
    assert refusal(capsys, verb, str(study), "--out", str(out)) == f"{study}: {option}: {file} is no file"
    assert not out.exists()


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_an_empty_folder_of_yaml_tasks_is_told_with_the_study(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    study = write_study(tmp_path / "study.yaml", planted(lm_eval={"include_path": "mine"}))

    assert refusal(capsys, verb, str(study)) == f"{study}: lm_eval.include_path: the folder {folder} is empty"


def test_a_grid_tells_the_first_cell_that_asks_for_a_missing_file(tmp_path: Path) -> None:
    base = {name: value for name, value in planted().items() if name not in ("model", "tasks")}
    grid: dict[str, Any] = {
        "base": {**base, "data": {"doubling": "none.jsonl"}},
        "models": ["planted"],
        "task_sets": {"words": ["plurals", "antonyms"]},
    }
    file = tmp_path / "grid.yaml"
    assert load_grid(write_study(file, grid), tmp_path / "out")

    grid["task_sets"]["mine"] = ["doubling", "antonyms"]
    with pytest.raises(UsageError) as refused:
        load_grid(write_study(file, grid), tmp_path / "out")
    where = f"{file}: cell planted/mine/default"
    assert str(refused.value) == f"{where}: data.doubling: there is no file {tmp_path / 'none.jsonl'}"


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("tasks", ["--baseline"]),
        ("ablate", ["--heads", "L0H0", "--ledger", "ledger"]),
        ("ablate", ["--heads", "L0H0", "--out", "out"]),
    ],
)
def test_a_command_that_takes_the_tasks_of_a_study_needs_the_files_of_those_it_asks(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    verb: str,
    arguments: list[str],
) -> None:
    study = write_study(tmp_path / "study.yaml", with_file("data.doubling", "none.jsonl"))
    monkeypatch.chdir(tmp_path)
    command = [verb, *arguments, "--model", "no-such-model", "--data", str(study), "--tasks"]

    missing = f"{study}: data.doubling: there is no file {tmp_path / 'none.jsonl'}"
    assert refusal(capsys, *command, "doubling") == missing
    assert "no-such-model" in refusal(capsys, *command, "antonyms")


def test_the_file_of_a_task_that_a_study_does_not_ask_may_be_missing(tmp_path: Path) -> None:
    content = planted(data={"doubling": "none.jsonl"})
    study = load_study(write_study(tmp_path / "study.yaml", content))

    assert named_files(study) == {}
    assert named_files(study, study.data) == {"data.doubling": str(tmp_path / "none.jsonl")}


@pytest.mark.parametrize("name", ["none.jsonl", "none.py"])
def test_where_no_study_file_is_known_a_missing_file_is_told_with_the_option(tmp_path: Path, name: str) -> None:
    study = load_study(write_study(tmp_path / "study.yaml", with_file("data.doubling", name)))

    with pytest.raises(UsageError, match=rf"^data\.doubling: cannot read {tmp_path / name}: "):
        find_tasks(["doubling"], study.data)
