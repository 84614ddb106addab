"""Tasks of the user's own wherever tasks are named: studies, grids, ablations, jobs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cs_localize.ablate import held_out
from cs_localize.cli import main
from cs_localize.config import DataConfig, dump_study, load_study, parse_study
from cs_localize.errors import UsageError
from cs_localize.findings import HeadsFile, read_file
from cs_localize.grid import load_grid
from cs_localize.study import check_study, run_study
from cs_localize.tasks import content_hash, find_tasks
from tests.studies import planted, write_study
from tests.submit.builders import plan


def write_rows(path: Path, count: int = 60, word: str = "times") -> Path:
    rows = [{"prompt": f"{n} {word} two is", "answer": str(2 * n)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def with_own(**changes: object) -> dict[str, Any]:
    return planted(tasks=["antonyms", "doubling"], data={"doubling": "my.jsonl"}, **changes)


def own_study(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    write_rows(folder / "my.jsonl")
    return write_study(folder / "study.yaml", with_own(**changes))


def test_two_lines_of_a_study_make_a_task_of_a_file_beside_it(tmp_path: Path) -> None:
    study = load_study(own_study(tmp_path))

    assert study.data == {"doubling": DataConfig(file=str(tmp_path / "my.jsonl"))}
    task = check_study(study)["doubling"]
    assert len(task.questions) == 60
    written = tmp_path / "elsewhere.yaml"
    written.write_text(dump_study(study), encoding="utf-8")
    assert load_study(written) == study


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"my task": "a.jsonl"}, "'my task' does not do as a name"),
        ({"../up": "a.jsonl"}, "does not do as a name"),
        ({3: "a.jsonl"}, "does not do as a name"),
        ({"mine": {"template": "{text}"}}, "'data.mine.file' is required"),
        ({"mine": {"file": "a.jsonl", "shot": 2}}, "unknown option 'data.mine.shot'"),
        ({"mine": {"file": "a.jsonl", "shots": True}}, "give a number"),
        (["a.jsonl"], "'data'"),
    ],
)
def test_a_mistake_in_the_data_section_is_named(data: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_study(planted(data=data))


def test_a_template_without_a_place_for_the_prompt_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    study = own_study(tmp_path, data__doubling={"file": "my.jsonl", "template": "Answer:"})

    with pytest.raises(UsageError, match="the template needs"):
        check_study(load_study(study))


@pytest.mark.ray
def test_a_study_of_an_own_task_records_what_was_asked_and_old_results_go_when_it_changes(tmp_path: Path) -> None:
    small = {"design__requests": 150, "confirm__random_draws": 1, "search_items": 20, "held_out_items": 20}
    config = load_study(own_study(tmp_path, **small))
    out = tmp_path / "out"
    result = run_study(config, out)

    asked = content_hash(check_study(config)["doubling"])
    assert result.heads.provenance.data == {"doubling": asked}
    assert result.confirm is not None
    assert set(result.confirm.baseline) == {"antonyms", "doubling"}

    write_rows(tmp_path / "my.jsonl", word="by")
    changed = content_hash(check_study(config)["doubling"])
    assert changed != asked
    again = run_study(config.model_copy(update={"confirm": config.confirm.model_copy(update={"enabled": False})}), out)
    assert again.heads.provenance.data == {"doubling": changed}
    assert not read_file(out / "heads.json", HeadsFile).provenance.current(
        again.heads.provenance.engine, {"doubling": asked}
    )


def test_a_grid_finds_the_files_beside_itself_and_shares_them(tmp_path: Path) -> None:
    write_rows(tmp_path / "my.jsonl")
    base = {name: value for name, value in planted().items() if name not in ("model", "tasks")}
    grid = {
        "base": {**base, "data": {"doubling": "my.jsonl"}},
        "models": ["planted"],
        "task_sets": {"mine": ["doubling", "antonyms"], "words": ["plurals", "antonyms"]},
    }

    cells = load_grid(write_study(tmp_path / "grid.yaml", grid), tmp_path / "out")

    assert [list(check_study(cell.study)) for cell in cells] == [["doubling", "antonyms"], ["plurals", "antonyms"]]


def test_held_out_items_of_an_own_task_can_be_ablated(tmp_path: Path) -> None:
    study = load_study(own_study(tmp_path))

    items = held_out(find_tasks(["doubling", "antonyms"], study.data), limit=5)

    assert {name: len(asked) for name, asked in items.items()} == {"doubling": 5, "antonyms": 5}
    with pytest.raises(UsageError, match="no task 'doubling'"):
        held_out(["doubling"])


@pytest.mark.parametrize(
    ("verb", "arguments"), [("ablate", ["--heads", "L0H0", "--ledger", "ledger"]), ("tasks", ["--baseline"])]
)
def test_a_command_without_a_study_takes_the_own_tasks_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, arguments: list[str]
) -> None:
    study = own_study(tmp_path)
    asked = [verb, *arguments, "--model", "no-such-model", "--tasks", "doubling"]

    assert main(asked) == 2
    assert "no task 'doubling'" in capsys.readouterr().err
    assert main([*asked, "--data", str(study)]) == 2
    assert "no-such-model" in capsys.readouterr().err
    (tmp_path / "my.jsonl").write_text("{", encoding="utf-8")
    assert main([*asked, "--data", str(study)]) == 2
    assert "my.jsonl, line 1: not valid JSON" in capsys.readouterr().err


def test_a_job_takes_the_files_along_and_a_changed_one_is_another_job(tmp_path: Path) -> None:
    study = own_study(tmp_path / "here")
    job = plan(tmp_path, study=study)

    shutil.move(tmp_path / "here" / "my.jsonl", tmp_path / "gone.jsonl")
    root = Path(job.runtime_env["working_dir"])
    assert sorted(path.name for path in root.iterdir()) == ["doubling.jsonl", "study.yaml"]
    assert len(check_study(load_study(root / "study.yaml"))["doubling"].questions) == 60
    with pytest.raises(UsageError, match=r"data\.doubling: there is no file .*my\.jsonl"):
        plan(tmp_path, "absent", study=study)
    write_rows(tmp_path / "here" / "my.jsonl")
    assert plan(tmp_path, "same", study=study).base_id == job.base_id
    write_rows(tmp_path / "here" / "my.jsonl", word="by")
    assert plan(tmp_path, "changed", study=study).base_id != job.base_id


def test_in_a_working_dir_the_files_must_travel_with_the_study(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    study = own_study(folder)

    job = plan(tmp_path, study=study, working_dir=folder)

    assert job.runtime_env["working_dir"] == str(folder)
    for file, excludes in (("my.jsonl", ["*.jsonl"]), ("../my.jsonl", []), (str(folder / "my.jsonl"), [])):
        write_rows(tmp_path / "my.jsonl")
        write_study(study, {**with_own(), "data": {"doubling": file}})
        with pytest.raises(UsageError, match=r"data\.doubling: .* would not travel"):
            plan(tmp_path, f"no-{len(file)}", study=study, working_dir=folder, excludes=excludes)
