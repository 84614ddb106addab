from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.ci_scripts import ROOT, ci_script

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" tests="3">
<testcase classname="tests.test_a" name="test_one" time="0.01" />
{cases}
</testsuite></testsuites>
"""


# Stands for .venv/bin/python: notes what pip is asked for; the first request fails as FAILURE says.
FAKE_PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && exit 0
[ "$2" = compileall ] && echo "$*" >>compiled && exit 1  # as of a file that is not for this Python
shift 5  # -m pip install -qq --disable-pip-version-check
echo "$*" >>asked
[ "$(wc -l <asked)" -gt 1 ] || [ -z "$FAILURE" ] && exit 0
echo "$FAILURE" >&2
exit 1
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What `make setup` needs of the repository, with a lock of two packages."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / ".ci" / "requirements.lock").write_text("numpy==2.3.5\ntorch==2.13.0+cpu\n", encoding="utf-8")
    return tmp_path


def setup(tree: Path, failure: str = "") -> subprocess.CompletedProcess[str]:
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(FAKE_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    command = [str(tree / ".ci" / "setup")]
    return subprocess.run(command, env=os.environ | {"FAILURE": failure}, capture_output=True, text=True, check=False)


def asked(tree: Path) -> list[str]:
    """What pip was asked for, one line a call."""
    return (tree / "asked").read_text(encoding="utf-8").splitlines()


def test_setup_installs_torch_then_the_lock_then_the_project_none_with_its_dependencies(tree: Path) -> None:
    done = setup(tree)
    assert done.returncode == 0, done.stderr
    assert asked(tree) == [
        "--no-deps --no-compile torch==2.13.0+cpu",
        "--no-deps --no-compile -r .ci/requirements.lock",
        "--no-deps --no-compile --no-build-isolation --editable .",
    ]


def test_setup_compiles_on_all_cores_and_does_not_mind_files_that_do_not_compile(tree: Path) -> None:
    done = setup(tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tree / "compiled").read_text(encoding="utf-8") == "-m compileall -qq -j 0 .venv/lib\n"
    assert (tree / ".venv" / ".stamp").exists()


def test_setup_turns_to_the_torch_index_only_where_the_configured_ones_have_no_such_version(tree: Path) -> None:
    done = setup(tree, failure="ERROR: No matching distribution found for torch==2.13.0+cpu")
    assert done.returncode == 0, done.stderr
    assert asked(tree)[:2] == [
        "--no-deps --no-compile torch==2.13.0+cpu",
        "--no-deps --no-compile --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu",
    ]


def test_setup_that_fails_says_why_and_is_not_taken_for_done(tree: Path) -> None:
    done = setup(tree, failure="ERROR: No space left on device")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert asked(tree) == ["--no-deps --no-compile torch==2.13.0+cpu"]
    assert not (tree / ".venv" / ".stamp").exists()


def test_setup_runs_again_only_when_the_lock_or_the_project_changed(tree: Path) -> None:
    setup(tree)
    setup(tree)
    assert len(asked(tree)) == 3
    (tree / ".ci" / "requirements.lock").write_text("numpy==2.3.6\ntorch==2.13.0+cpu\n", encoding="utf-8")
    setup(tree)
    assert len(asked(tree)) == 6


def case(element: str) -> str:
    return JUNIT.format(cases=f'<testcase classname="tests.test_a" name="test_two">{element}</testcase>')


def test_setup_says_in_one_line_which_python_it_wants_and_touches_nothing(tree: Path) -> None:
    environment = os.environ | {"PYTHON": "python-that-is-not-there"}
    command = [str(tree / ".ci" / "setup")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "setup: 'python-that-is-not-there' does not run; install Python 3.11, or name one: "
        "make setup PYTHON=/path/to/python3.11"
    ]
    assert not (tree / ".venv").exists()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script on a machine with neither a GPU nor ../shared."""
    script = ci_script("check_skips")
    missing = {kind: tmp_path / f"{number}" for number, kind in enumerate(script.ACCEPTED)}
    monkeypatch.setattr(script, "ACCEPTED", missing)
    return script


def verdict(checks: ModuleType, folder: Path, junit: str) -> int:
    path = folder / "tests.xml"
    path.write_text(junit, encoding="utf-8")
    return int(checks.main(str(path)))


def pytest_writes(folder: Path, *options: str, **files: str) -> str:
    """The JUnit file that pytest itself writes for some test files."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(f"import pytest\n{text}", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=out.xml", *options]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return (folder / "out.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "element",
    [
        '<skipped type="pytest.skip" message="no GPU: torch.cuda.is_available() is false" />',
        '<skipped type="pytest.skip" message="no ../shared" />',
        "<skipped type=\"pytest.skip\" message=\"collection skipped\">('a.py', 3, 'Skipped: no GPU')</skipped>",
    ],
)
def test_ci_accepts_a_skip_for_want_of_a_gpu_or_of_the_shared_folder(
    checks: ModuleType, tmp_path: Path, element: str
) -> None:
    assert verdict(checks, tmp_path, case(element)) == 0


@pytest.mark.parametrize("reason", ["no GPU", "no ../shared"])
def test_ci_refuses_a_skip_for_want_of_what_the_machine_has(
    checks: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, reason: str
) -> None:
    checks.ACCEPTED[reason].mkdir()
    assert verdict(checks, tmp_path, case(f'<skipped type="pytest.skip" message="{reason}" />')) == 1
    assert f"tests.test_a::test_two: {reason}" in capsys.readouterr().err


def test_ci_looks_for_the_shared_folder_beside_the_repository() -> None:
    assert ci_script("check_skips").ACCEPTED["no ../shared"] == ROOT.resolve().parent / "shared"


@pytest.mark.parametrize(
    ("element", "objection"),
    [
        ('<skipped type="pytest.skip" message="needs vLLM" />', "tests.test_a::test_two: needs vLLM"),
        ('<skipped type="pytest.skip" message="there is no GPU" />', "tests.test_a::test_two: there is no GPU"),
        ('<skipped type="pytest.skip" message="no GPU, and slow" />', "no GPU, and slow"),
        ('<skipped type="pytest.skip" message="no GPUs here: slow" />', "no GPUs here: slow"),
        ('<skipped type="pytest.skip" message="no ../shared/models" />', "no ../shared/models"),
        ('<skipped type="pytest.skip" message="no ../sharedness: slow" />', "no ../sharedness: slow"),
        ('<skipped type="pytest.skip" message="" />', "tests.test_a::test_two: "),
        ("<skipped />", "tests.test_a::test_two: "),
        ('<skipped message="no GPU" /><skipped message="slow" />', "tests.test_a::test_two: slow"),
        ('<skipped type="pytest.xfail" message="no GPU" />', "tests.test_a::test_two: expected to fail: no GPU"),
        ('<skipped type="pytest.skip" message="collection skipped">(\'a.py\', 3, "Skipped: slow")</skipped>', ": slow"),
        ('<skipped type="pytest.skip" message="collection skipped">Skipped: no GPU</skipped>', ": Skipped: no GPU"),
        ('<failure message="assert 0" />', "1 tests failed"),
        ('<error message="fixture" />', "1 tests failed"),
        ('<skipped message="no GPU" /><error message="teardown" />', "1 tests failed"),
    ],
)
def test_ci_refuses_every_other_skip_and_every_failure(
    checks: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, element: str, objection: str
) -> None:
    assert verdict(checks, tmp_path, case(element)) == 1
    assert objection in capsys.readouterr().err


def test_ci_sees_both_of_two_skips_of_one_name(checks: ModuleType, tmp_path: Path) -> None:
    twice = '<skipped message="slow" /></testcase><testcase classname="tests.test_a" name="test_two"><skipped message='
    assert verdict(checks, tmp_path, case(f'{twice}"no GPU" />')) == 1


@pytest.mark.parametrize(
    ("junit", "objection"),
    [
        ('<testsuites><testsuite name="pytest" tests="0" /></testsuites>', "no test passed"),
        ("", "cannot be read"),
        ("<testsuites><testsuite>", "cannot be read"),
        (JUNIT.format(cases="")[:-30], "cannot be read"),
    ],
)
def test_ci_refuses_a_run_in_which_nothing_ran_or_that_did_not_write_its_results_to_the_end(
    checks: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, junit: str, objection: str
) -> None:
    assert verdict(checks, tmp_path, junit) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert objection in line


def test_ci_refuses_a_run_that_left_no_results(
    checks: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert checks.main(str(tmp_path / "tests.xml")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "tests.xml" in line


def test_ci_reads_the_reasons_that_pytest_itself_writes(tmp_path: Path) -> None:
    junit = pytest_writes(
        tmp_path,
        test_functions=(
            "def test_a(): pass\n"
            "@pytest.mark.skip(reason='no GPU')\n"
            "def test_b(): pass\n"
            "@pytest.mark.xfail(reason='later')\n"
            "def test_c(): assert False\n"
        ),
        test_module='pytest.skip("no ../shared: it\'s elsewhere", allow_module_level=True)\n',
    )
    run = ci_script("check_skips").read_run(junit)
    assert (run.passed, run.failed) == (1, 0)
    assert sorted(reason for _, reason in run.skips) == [
        "expected to fail: later",
        "no ../shared: it's elsewhere",
        "no GPU",
    ]


@pytest.mark.parametrize(
    ("options", "text", "objection"),
    [
        (("-m", "nothing"), "def test_a(): pass\n", "no test passed"),
        ((), "def test_a(): pass\nimport nowhere\n", "1 tests failed"),
        ((), "@pytest.mark.xfail(strict=True)\ndef test_a(): pass\n", "1 tests failed"),
    ],
    ids=["all deselected", "not collected", "unexpectedly passed"],
)
def test_ci_refuses_what_pytest_writes_of_a_run_that_went_wrong(
    checks: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    text: str,
    objection: str,
) -> None:
    assert verdict(checks, tmp_path, pytest_writes(tmp_path, *options, test_one=text)) == 1
    assert objection in capsys.readouterr().err
