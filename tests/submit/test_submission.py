from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cs_localize.config import load_study
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.submit import submit_job
from tests.studies import planted, write_study
from tests.submit.builders import StubClient, job, plan, server


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


def test_a_folder_of_yaml_tasks_travels_and_a_job_without_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own" / "deeper").mkdir(parents=True)
    (tmp_path / "own" / "task.yaml").write_text("task: own", encoding="utf-8")
    (tmp_path / "own" / "deeper" / "utils.py").write_text("a", encoding="utf-8")
    study = write_study(tmp_path / "study.yaml", planted(lm_eval={"include_path": "own"}))

    made = plan(tmp_path, study=study)

    root = Path(made.runtime_env["working_dir"])
    there = load_study(root / "study.yaml").lm_eval.include_path
    assert there is not None
    assert Path(there).is_relative_to(root)
    assert (Path(there) / "deeper" / "utils.py").read_text(encoding="utf-8") == "a"
    (tmp_path / "own" / "deeper" / "utils.py").write_text("b", encoding="utf-8")
    assert plan(tmp_path, "changed", study=study).base_id != made.base_id
    in_place = plan(tmp_path, "in place", study=study, working_dir=tmp_path)
    assert in_place.entry_point == "python -m cs_localize run study.yaml --out /shared/out"
    with pytest.raises(UsageError, match=r"lm_eval\.include_path: own would not travel"):
        plan(tmp_path, "left", study=study, working_dir=tmp_path, excludes=["own"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (b".gitignore", b"!\n", "a .gitignore or .rayignore in it cannot be read: "),
        (b".gitignore", b"\xff", "a .gitignore or .rayignore in it cannot be read: "),
        (b".gitignore", b"*\n", "has no file that would travel; see its .gitignore"),
        (b"\xff.yaml", b"", r"is not UTF-8; rename the file"),
    ],
)
def test_a_folder_of_yaml_tasks_that_cannot_travel_is_refused_in_one_line(
    name: bytes, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "task.yaml").write_text("task: own", encoding="utf-8")
    Path(os.fsdecode(os.fsencode(tmp_path / "own") + b"/" + name)).write_bytes(content)
    study = write_study(tmp_path / "study.yaml", planted(lm_eval={"include_path": "own"}))
    with pytest.raises(UsageError, match=message) as refused:
        plan(tmp_path, study=study)
    assert str(refused.value).startswith(f"{study}: lm_eval.include_path")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_eval": {"include_path": "none"}}, "lm_eval.include_path: there is no folder {folder}/none"),
        ({"lm_eval": {"include_path": "study.yaml"}}, "lm_eval.include_path: {folder}/study.yaml is no folder"),
        ({"lm_eval": {"include_path": "empty"}}, "lm_eval.include_path: the folder {folder}/empty is empty"),
        (
            {"lm_eval": {"include_path": "bare"}},
            "lm_eval.include_path: the folder {folder}/bare holds no file that ends in .yaml",
        ),
        (
            {"lm_eval": {"include_path": "dead"}},
            "lm_eval.include_path: cannot read {folder}/dead/task.yaml: No such file or directory",
        ),
        ({"data": {"own": "none.jsonl"}}, "data.own: there is no file {folder}/none.jsonl"),
        ({"data": {"own": "bare"}}, "data.own: {folder}/bare is no file"),
        ({"design": {"masks": "none.npy"}}, "design.masks: there is no file {folder}/none.npy"),
    ],
)
def test_what_a_study_names_and_is_not_there_or_empty_is_told_apart_with_the_study(
    tmp_path: Path, change: dict[str, Any], message: str, in_place: bool
) -> None:
    for name in ("empty", "bare", "dead"):
        (tmp_path / name).mkdir()
    (tmp_path / "bare" / "utils.py").write_text("a", encoding="utf-8")
    (tmp_path / "dead" / "task.yaml").symlink_to("gone.yaml")
    study = write_study(tmp_path / "study.yaml", planted(**change))
    with pytest.raises(UsageError) as refused:
        plan(tmp_path, study=study, working_dir=tmp_path if in_place else None)
    assert str(refused.value) == f"{study}: {message.format(folder=tmp_path)}"


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
