from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cs_localize.ablate import AblationGrid
from cs_localize.cli import _parser, main
from cs_localize.grid import load_grid

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
LINES = [line.partition(" #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
# Small enough for a test, and nothing else changed.
SMALLER = (
    "--set design.requests=150 --set search_items=12 --set held_out_items=8 --set select.items=4 "
    "--set select.candidates=2 --set select.limit=2 --set confirm.random_draws=2 --set confirm.curve=2 "
    "--set crosscheck.items=2 --set crosscheck.random_draws=2 --set crosscheck.steps=3 "
    "--set crosscheck.random_on=target --set confirm.random_on=target"
)


def commands(start: str) -> list[str]:
    return [line for line in LINES if line.startswith(start)]


ALONE = [line for line in commands("cs-localize ablate") if "--out" not in line]


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert commands("make") == ["make demo", "make test"]
    assert {"demo", "test"} <= set(targets)


def test_every_command_of_the_readme_is_one_this_file_knows() -> None:
    known = ("make ", "cs-localize ", "ray job submit ")

    assert all(line.startswith(known) for line in LINES), LINES


@pytest.mark.parametrize("line", [*commands("cs-localize tasks"), *commands("cs-localize models")])
def test_the_listing_commands_work_as_written(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.model
def test_the_plan_command_works_as_written_and_the_readme_quotes_it(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = commands("cs-localize plan")
    assert main([*shlex.split(line)[1:], "--repeats", "1"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1]
    assert f"```text\n{table}\n" in README


@pytest.mark.model
@pytest.mark.full
def test_what_the_readme_expects_of_a_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = commands("cs-localize plan")
    assert main(shlex.split(line)[1:]) == 0
    expected = capsys.readouterr().out.partition("\nexpected: ")[2].partition("\nSimulated: ")[0]
    assert f"\nexpected: {expected}\n```" in README


@pytest.mark.model
@pytest.mark.vllm
@pytest.mark.ray
def test_the_run_commands_work_as_written_but_smaller(tmp_path: Path) -> None:
    lines = commands("cs-localize run")
    assert lines
    for line in lines:
        smaller = line.replace("runs/three", str(tmp_path / "three"))
        smaller = re.sub(r"--set design\.requests=\d+", "", smaller)
        _works(f"{smaller} {SMALLER}")
    assert (tmp_path / "three" / "report.html").exists()


@pytest.mark.model
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.parametrize("line", [*ALONE, *commands("cs-localize doctor")])
def test_the_ablate_and_doctor_commands_work_as_written(line: str) -> None:
    _works(line)


def test_the_commands_for_grids_are_understood_and_their_files_are_there(tmp_path: Path) -> None:
    lines = [*commands("cs-localize sweep"), *(line for line in commands("cs-localize ablate") if line not in ALONE)]
    assert len(lines) == 2
    for line in lines:
        arguments = _parser().parse_args(shlex.split(line)[1:])
        if arguments.run.__name__ == "_sweep":
            assert load_grid(ROOT / arguments.grid, tmp_path)
        else:
            AblationGrid({"named": "L0H0"}, arguments.sets.split(","), [float(s) for s in arguments.scales.split(",")])


@pytest.mark.model
def test_the_export_command_works_as_written(tmp_path: Path) -> None:
    (line,) = commands("cs-localize export")
    assert main(shlex.split(line.replace("runs/without", str(tmp_path / "without")))[1:]) == 0
    assert (tmp_path / "without" / "model.safetensors").is_file()


def test_the_jobs_of_the_readme_are_the_jobs_of_the_repository() -> None:
    for line in commands("ray job submit"):
        script = next(word for word in shlex.split(line) if word.startswith("jobs/"))
        assert (ROOT / script).is_file()
        assert "--working-dir ." in line


def test_the_submit_command_is_understood_and_its_study_is_there() -> None:
    (line,) = commands("cs-localize submit")
    arguments = _parser().parse_args(shlex.split(line)[1:])
    assert (ROOT / arguments.study).is_file()


def test_every_local_file_the_readme_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def _works(line: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        shlex.split(line), cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
