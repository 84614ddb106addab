"""Commands on tasks that execute what the model writes: who may say that they do, and a whole study with one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cs_localize import doctor
from cs_localize.cli import main
from cs_localize.folder import load_result
from cs_localize.submit import plan_job
from cs_localize.tasks.harness import library
from tests.studies import planted, run, write_study
from tests.tasks.harness.problems import COMPLETIONS, write_problems

FLAG = "--allow-code-execution"


def problems(copies: int) -> list[dict[str, Any]]:
    """The small ones, each under several names."""
    names = [(doc, doc["entry_point"], f"{doc['entry_point']}_{copy}") for copy in range(copies) for doc in COMPLETIONS]
    return [{**doc, "prompt": doc["prompt"].replace(old, new, 1), "entry_point": new} for doc, old, new in names]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_problems(tmp_path, "humaneval", problems(8))
    content = planted(
        tasks=["humaneval", "antonyms"],
        search_items=20,
        held_out_items=20,
        design__requests=150,
        select__requests=60,
        confirm__random_draws=1,
        confirm__curve=1,
        confirm__interactions=False,
        lm_eval__include_path=str(tmp_path),
    )
    return write_study(tmp_path / "study.yaml", content)


def refusal(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_without_the_flag_every_command_refuses_in_one_line(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", str(study.parent / "out"))
    heads = ("ablate", "--model", "smollm2-135m-instruct", "--heads", "L0H0", "--tasks", "humaneval")
    own = ("--include-path", str(study.parent))
    for command in (("run", str(study), *out), (*heads, *own), (*heads, *own, "--scales", "0", *out)):
        assert f"executing code that the model writes; allow that with {FLAG}" in refusal(capsys, *command)
    grid = study.with_name("grid.yaml")
    base = yaml.safe_load(study.read_text())
    models, sets = [base.pop("model")], {"code": base.pop("tasks")}
    write_study(grid, {"models": models, "task_sets": sets, "methods": {"sparse": {}}, "base": base})
    assert f"allow that with {FLAG}" in refusal(capsys, "sweep", str(grid), *out)
    assert FLAG in refusal(capsys, "tasks", "--baseline", "--tasks", "humaneval")
    assert f"{FLAG} goes with --baseline" in refusal(capsys, "tasks", FLAG)
    assert FLAG in refusal(capsys, "plan", str(study), "--measure")
    assert not (study.parent / "out").exists()


def test_no_file_and_no_override_of_one_can_allow_it(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = ("--set", "lm_eval.allow_code_execution=true")
    for command in (
        ("run", str(study), *override),
        ("run", str(study), FLAG, *override),
        ("plan", str(study), *override),
    ):
        assert f"no file can allow this; give {FLAG} on the command line" in refusal(capsys, *command)
    content = yaml.safe_load(study.read_text())
    content["lm_eval"]["allow_code_execution"] = True
    write_study(study, content)
    assert "no file can allow this" in refusal(capsys, "run", str(study), FLAG)


def test_what_a_plan_sets_for_itself_is_no_option_of_a_study(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "run", str(study), FLAG, "--set", "lm_eval.grades=false")
    assert "'lm_eval.grades': a plan alone sets this; leave it out" in told


def test_a_plan_executes_nothing_and_needs_neither_flag_nor_sandbox(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: "code cannot be shut in: unshare: Operation not permitted")
    assert main(["plan", str(study), "--repeats", "2", "--rate", "100requests"]) == 0
    assert "confirmation" in capsys.readouterr().out
    assert "code cannot be shut in" in refusal(capsys, "plan", str(study), "--measure", FLAG)


def test_a_job_is_told_on_its_command_line(study: Path, tmp_path: Path) -> None:
    jobs = {}
    for allowed in (False, True):
        scratch = tmp_path / str(allowed)
        scratch.mkdir()
        jobs[allowed] = plan_job(study, Path("/data/out"), scratch, allow_code_execution=allowed)
        assert "allow_code_execution" not in (scratch / "study.yaml").read_text()
    assert jobs[True].entry_point == f"{jobs[False].entry_point} {FLAG}"
    assert jobs[True].base_id != jobs[False].base_id


def test_the_doctor_says_whether_code_can_be_shut_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_prove", lambda *given: None)
    monkeypatch.setattr(doctor, "_check_packages", lambda say: None)
    for reason in ("", "unshare: Operation not permitted"):
        monkeypatch.setattr(doctor, "unavailable", lambda reason=reason: reason)
        said = io.StringIO()
        assert doctor.diagnose("any", said), "no fault of the installation"
        assert (reason or "model-written code can be shut in: no network") in said.getvalue()


@pytest.mark.ray
@pytest.mark.full
def test_a_study_names_and_confirms_by_what_the_programs_do_and_again_without_the_model(study: Path) -> None:
    command = ("run", str(study), "--out", str(study.parent / "out"), FLAG)
    finished = run(*command)
    assert finished.returncode == 0, finished.stderr
    first = load_result(study.parent / "out")
    assert first.confirm is not None
    assert first.confirm.baseline["humaneval"] > 0.4, "the planted model answers with the solution"
    assert first.heads.provenance.command.endswith(FLAG)
    assert first.heads.scoring["humaneval"].metric == "pass@1,create_test"
    assert "allow_code_execution" not in (study.parent / "out" / "study.yaml").read_text()
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert "confirm: executing answers: " in again.stderr
    last = json.loads((study.parent / "out" / "events.jsonl").read_text().splitlines()[-1])
    assert all(count["measured"] == 0 for count in last["counts"].values())
    assert load_result(study.parent / "out").confirm == first.confirm
