"""Qwen, end to end: models trained on the spot, localized through vLLM and Ray, held against a sweep of every head."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cs_localize.config import parse_study
from cs_localize.folder import StudyResult
from cs_localize.heads import ModelShape
from cs_localize.measure.progress import Progress
from cs_localize.recover import specificity
from cs_localize.session import Bench, engine_spec
from cs_localize.study import run_study
from cs_localize.sweep import sweep
from cs_localize.tasks import get_task
from tests.studies import command, repeated_keys, wait_for, write_study

pytestmark = [pytest.mark.model, pytest.mark.vllm, pytest.mark.ray]

TASKS = ("tiny_copy", "tiny_sort", "tiny_modsum")
MODELS = ("tiny-qwen2", "tiny-qwen3")


def study(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "tasks": list(TASKS),
        "search_items": 40,
        "held_out_items": 40,
        "engine": {"workers": 1, "dtype": "float32", "unit_tokens": 500},
        # Among so few heads knockouts interact: little more than one head a mask keeps effects those of single heads.
        "design": {"requests": 800, "density": 0.07, "fragile_density": 0.07, "pilot": {"heads_a_mask": 1}},
        "select": {"candidates": 6, "items": 20, "limit": 3},
        "confirm": {"random_draws": 3, "curve": 4, "bootstrap": 200},
        "crosscheck": {"enabled": False},
    }


@dataclass(frozen=True)
class Localized:
    """A study of a tiny model, and the truth about its heads from the same engine.

    Attributes:
        result: what the study found.
        shape: the model's geometry.
        effects: mean damage of every single head in nats, ``[tasks, n_heads]``.
    """

    result: StudyResult
    shape: ModelShape
    effects: NDArray[np.float64]


@pytest.fixture(scope="module", params=MODELS)
def localized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Localized:
    config, out = parse_study(study(request.param)), tmp_path_factory.mktemp(request.param)
    tasks = {name: get_task(name) for name in TASKS}
    items = {name: task.split(0, 40, 40).search for name, task in tasks.items()}
    spec, encoder = engine_spec(config.model, config.engine, TASKS)
    with Bench(out / "ledger") as bench:
        result = run_study(config, out, session=partial(bench.session, spec, encoder, config.engine))
        with bench.session(spec, encoder, config.engine, tasks, Progress(None)) as session:
            damage = sweep(session.measurer, session.shape, items)
    return Localized(result, spec.shape, np.stack([damage[task].mean(axis=0) for task in TASKS]))


def test_the_tiny_model_has_the_capabilities(localized: Localized) -> None:
    confirm = localized.result.confirm
    assert confirm is not None
    assert all(confirm.baseline[task] >= 0.9 for task in TASKS)


def test_the_heads_a_sweep_finds_are_found_through_vllm_and_ray(localized: Localized) -> None:
    shape, effects, found = localized.shape, localized.effects, localized.result.heads

    for number, task in enumerate(TASKS):
        by_effect = [head.head for head in sorted(found.tasks[task].ranking, key=lambda head: -head.effect)]
        order = np.argsort(-effects[number])
        needed = [str(shape.head(int(i))) for i in order if effects[number, i] >= effects[number].max() / 2]
        missed = set(needed) - set(by_effect[: len(needed) + 1])
        assert len(missed) <= len(needed) / 4, f"{task}: the sweep finds {needed}, the study {by_effect[:6]}"
        if effects[number, order[0]] >= 1.5 * effects[number, order[1]]:
            assert by_effect[0] == needed[0], f"{task}: {needed[0]} stands out in the sweep"

    # Some of these tasks share all their heads; the sweep says which have one of their own.
    truth = specificity(effects, TASKS, {}).strongest
    told_apart = [number for number in range(len(TASKS)) if truth[number].max() >= 1.0]
    assert len(told_apart) >= 2
    for number in told_apart:
        specific = [head.head for head in found.tasks[TASKS[number]].ranking[:3]]
        best = str(shape.head(int(truth[number].argmax())))
        assert best in specific, f"{TASKS[number]}: the sweep finds {best} most specific, the study {specific}"


@pytest.mark.parametrize("localized", [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.full)], indirect=True)
def test_a_killed_worker_and_a_killed_driver_change_none_of_the_named_heads(
    localized: Localized, tmp_path: Path
) -> None:
    config = study(localized.result.heads.model)
    arguments = command("run", str(write_study(tmp_path / "study.yaml", config)), "--out", str(tmp_path / "out"))
    ledger, events = tmp_path / "out" / "ledger", tmp_path / "out" / "events.jsonl"
    driver = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(ledger.glob("*.parquet"))) >= 3)
    os.kill(_told(events, "worker_ready")[0]["pid"], signal.SIGKILL)
    wait_for(lambda: len(_told(events, "worker_ready")) >= 2)
    survived = len(list(ledger.glob("*.parquet")))
    wait_for(lambda: len(list(ledger.glob("*.parquet"))) >= survived + 2)
    driver.send_signal(signal.SIGKILL)
    driver.wait(timeout=60)

    again = subprocess.run(arguments, capture_output=True, text=True, check=False)

    assert again.returncode == 0, again.stderr
    assert len(_told(events, "worker_lost")) == 1
    found = json.loads((tmp_path / "out" / "heads.json").read_text(encoding="utf-8"))
    named = {task: finding["named"] for task, finding in found["tasks"].items()}
    assert named == {task: finding.named for task, finding in localized.result.heads.tasks.items()}
    assert repeated_keys(ledger) == 0


def _told(events: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == kind]
