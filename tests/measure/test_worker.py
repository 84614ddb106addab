from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.measure.worker import EngineWorker, Loader, claim_cores
from tests.measure import toy

CLAIM_AND_WAIT = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {cores})
from cs_localize.measure.worker import claim_cores
print(claim_cores(1, Path({directory!r})), flush=True)
sys.stdin.read()
"""


def claim_elsewhere(directory: Path) -> subprocess.Popen[str]:
    """Another process that claims one core and keeps it until it ends."""
    script = CLAIM_AND_WAIT.format(cores=os.sched_getaffinity(0), directory=str(directory))
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_core_that_another_process_has_is_not_claimed_until_that_process_is_killed(tmp_path: Path) -> None:
    every = len(os.sched_getaffinity(0))
    with claim_elsewhere(tmp_path) as other:
        assert other.stdout is not None
        assert other.stdout.readline().startswith("(")
        with pytest.raises(UsageError, match=f"asks for {every} cores, but of the {every} of .* other workers use 1"):
            claim_cores(every, tmp_path, patience_s=0)
        other.kill()
        other.wait()
    assert claim_cores(every, tmp_path, patience_s=0) == tuple(sorted(os.sched_getaffinity(0)))


def test_more_cores_than_the_machine_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"asks for 4096 cores, but .* set engine.threads lower"):
        claim_cores(4096, tmp_path)


def loaded(monkeypatch: pytest.MonkeyPatch, loader: Loader = toy.load_toy) -> EngineWorker:
    """A worker in this process, which keeps its cores."""
    monkeypatch.setattr("cs_localize.measure.worker.claim_cores", lambda count: tuple(os.sched_getaffinity(0)))
    worker = EngineWorker(toy.toy_spec(), 1, loader)
    worker.load()
    return worker


def test_a_worker_answers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = toy.toy_requests(5)
    outcomes = loaded(monkeypatch).measure(requests)
    assert [outcome.score for outcome in outcomes] == [toy.toy_outcome(request).score for request in requests]


def test_an_engine_with_another_fingerprint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match="fingerprint is another, the study's is planted-"):
        loaded(monkeypatch, toy.load_another)


def test_a_missing_outcome_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match="1 outcomes for 2 requests"):
        loaded(monkeypatch).measure([toy.toy_request("short"), *toy.toy_requests(1)])


def test_a_score_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match="score of toy/nan under none is nan"):
        loaded(monkeypatch).measure([toy.toy_request("nan")])


def test_a_worker_without_an_engine_refuses_to_answer() -> None:
    with pytest.raises(MeasurementError, match="before its engine was loaded"):
        EngineWorker(toy.toy_spec(), 1, toy.load_toy).measure([])


def test_the_driver_and_an_unloaded_worker_import_neither_torch_nor_ray() -> None:
    script = (
        "import sys, cs_localize.measure.fleet, cs_localize.measure.measurer\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
