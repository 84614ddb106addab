"""The main job on the real model, as a newcomer runs it. What it must show is stated here, test by test."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_localize.findings import ConfirmFile, CrosscheckFile, HeadsFile, read_file
from tests.studies import command, repeated_keys

pytestmark = [pytest.mark.model, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(2400)]

TASKS = ("antonyms", "past_tense", "plurals", "capitals", "counting", "addition")
SOLVERS = ("lasso", "cvxpy")


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.full)], ids=["smaller", "whole"])
def demos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo with each solver; the second is served the search by the first one's ledger.

    Unless whole, the first goes without what no test here reads: the curve, and most random draws. So does the second
    in any case, and without the cross-check.
    """
    folder = tmp_path_factory.mktemp("demo")
    smaller = ["confirm.curve=0", "confirm.random_draws=5", "crosscheck.random_draws=5"]
    outs = {}
    for solver in SOLVERS:
        outs[solver] = folder / solver
        options = [f"solver.name={solver}", f"ledger={folder / 'ledger'}"]
        if solver != SOLVERS[0]:
            options += [*smaller, "crosscheck.enabled=false"]
        elif not request.param:
            options += smaller
        arguments = [word for option in options for word in ("--set", option)]
        done = subprocess.run(
            command("demo", "--out", str(outs[solver]), *arguments), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "report" in done.stdout
    return outs


def heads(out: Path) -> HeadsFile:
    return read_file(out / "heads.json", HeadsFile)


def confirm(out: Path) -> ConfirmFile:
    return read_file(out / "confirm.json", ConfirmFile)


def mean_control_drop(found: ConfirmFile, task: str) -> float:
    # past_tense and plurals are relatives: neither controls the other.
    relatives = {"past_tense": {"plurals"}, "plurals": {"past_tense"}}.get(task, set())
    return float(
        np.mean([d.drop for other, d in found.matrix[task].items() if other != task and other not in relatives])
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_search_of_the_demo_spends_at_most_1200_requests_a_task(demos: dict[str, Path], solver: str) -> None:
    found = heads(demos[solver])
    assert tuple(found.tasks) == TASKS
    for finding in found.tasks.values():
        assert finding.requests + finding.baseline_requests <= 1200
        assert 1 <= len(finding.named) <= 5


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_heads_named_for_antonyms_take_it_away_and_spare_the_rest(demos: dict[str, Path], solver: str) -> None:
    found = confirm(demos[solver])
    drop = found.matrix["antonyms"]["antonyms"].drop

    assert drop >= 0.8 * found.baseline["antonyms"]
    assert mean_control_drop(found, "antonyms") <= 0.10
    assert drop >= 5 * found.random["antonyms"].mean_drop


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("task", ["past_tense", "plurals", "capitals", "addition"])
def test_the_heads_named_for_the_other_capabilities_take_them_away_specifically(
    demos: dict[str, Path], solver: str, task: str
) -> None:
    found = confirm(demos[solver])
    drop = found.matrix[task][task].drop

    assert drop >= 0.6 * found.baseline[task]
    assert drop >= 3 * mean_control_drop(found, task)


def test_the_cross_check_sets_heads_against_neurons(demos: dict[str, Path]) -> None:
    checked = read_file(demos["lasso"] / "crosscheck.json", CrosscheckFile).tasks["antonyms"]

    assert checked.neurons.count >= 10
    assert 0.0005 <= checked.neurons.ratio <= 0.005
    assert checked.neurons.completeness >= 0.95
    assert checked.neurons.overlap.max > 3 * checked.neurons.overlap.chance
    assert checked.conditions["random_neurons"]["antonyms"].drop < checked.conditions["neurons"]["antonyms"].drop
    assert checked.ipp.heads < 0


def test_no_ledger_key_has_two_rows_and_every_hook_left_its_evidence(demos: dict[str, Path]) -> None:
    assert repeated_keys(demos["lasso"].parent / "ledger") == 0
    events = [json.loads(line) for line in (demos["lasso"] / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    evidence: list[dict[str, Any]] = [event for event in events if "most_ablations_in_a_step" in event]
    assert evidence
    assert max(event["most_ablations_in_a_step"] for event in evidence) >= 16


def test_the_report_is_one_offline_page_that_names_the_heads(demos: dict[str, Path]) -> None:
    page = (demos["lasso"] / "report.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert "url(http" not in page
    for finding in heads(demos["lasso"]).tasks.values():
        assert all(head in page for head in finding.named)
