from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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
        "--no-deps torch==2.13.0+cpu",
        "--no-deps -r .ci/requirements.lock",
        "--no-deps --no-build-isolation --editable .",
    ]


def test_setup_turns_to_the_torch_index_only_where_the_configured_ones_have_no_such_version(tree: Path) -> None:
    done = setup(tree, failure="ERROR: No matching distribution found for torch==2.13.0+cpu")
    assert done.returncode == 0, done.stderr
    assert asked(tree)[:2] == [
        "--no-deps torch==2.13.0+cpu",
        "--no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu",
    ]


def test_setup_that_fails_says_why_and_is_not_taken_for_done(tree: Path) -> None:
    done = setup(tree, failure="ERROR: No space left on device")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert asked(tree) == ["--no-deps torch==2.13.0+cpu"]
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


@pytest.mark.parametrize(
    "element",
    [
        '<skipped type="pytest.skip" message="no GPU: torch.cuda.is_available() is false" />',
        '<skipped type="pytest.skip" message="no ../shared" />',
        "<skipped type=\"pytest.skip\" message=\"collection skipped\">('a.py', 3, 'Skipped: no GPU')</skipped>",
    ],
)
def test_ci_accepts_a_skip_for_want_of_a_gpu_or_of_the_shared_folder(element: str, tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(case(element), encoding="utf-8")
    assert ci_script("check_skips").main(str(path)) == 0


@pytest.mark.parametrize(
    ("element", "objection"),
    [
        ('<skipped type="pytest.skip" message="needs vLLM" />', "tests.test_a::test_two: needs vLLM"),
        ('<skipped type="pytest.skip" message="there is no GPU" />', "tests.test_a::test_two: there is no GPU"),
        ('<skipped type="pytest.xfail" message="no GPU" />', "tests.test_a::test_two: expected to fail: no GPU"),
        ('<skipped type="pytest.skip" message="collection skipped">(\'a.py\', 3, "Skipped: slow")</skipped>', "slow"),
        ('<failure message="assert 0" />', "1 tests failed"),
        ('<error message="fixture" />', "1 tests failed"),
    ],
)
def test_ci_refuses_every_other_skip_and_every_failure(
    element: str, objection: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(case(element), encoding="utf-8")
    assert ci_script("check_skips").main(str(path)) == 1
    assert objection in capsys.readouterr().err


def test_ci_refuses_a_run_in_which_nothing_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tests.xml"
    path.write_text('<testsuites><testsuite name="pytest" tests="0" /></testsuites>', encoding="utf-8")
    assert ci_script("check_skips").main(str(path)) == 1
    assert "no test passed" in capsys.readouterr().err


def test_ci_reads_the_reasons_that_pytest_itself_writes(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_functions.py").write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "@pytest.mark.skip(reason='no GPU')\n"
        "def test_b(): pass\n"
        "@pytest.mark.xfail(reason='later')\n"
        "def test_c(): assert False\n",
        encoding="utf-8",
    )
    (tmp_path / "test_module.py").write_text(
        "import pytest\npytest.skip('no ../shared', allow_module_level=True)\n", encoding="utf-8"
    )
    subprocess.run([sys.executable, "-m", "pytest", "-q", "--junitxml=out.xml"], cwd=tmp_path, check=True)
    passed, failed, skips = ci_script("check_skips").read_run((tmp_path / "out.xml").read_text(encoding="utf-8"))
    assert (passed, failed) == (1, 0)
    assert sorted(skips.values()) == ["expected to fail: later", "no ../shared", "no GPU"]
