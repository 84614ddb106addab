"""The same items asked through this package and by lm-eval itself, with its own hf model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_localize.heads import Ablation
from cs_localize.measure.hf import HFEngine
from cs_localize.measure.tokens import Encoder
from cs_localize.models.random import random_model
from cs_localize.outcomes import Item, Outcome
from tests.tasks.harness.builders import measurer, own_task, write_own_tasks, write_sum_task

pytestmark = pytest.mark.model

TASKS = ("own_choice", "own_blank", "own_word", "own_sum")
SCORED = TASKS[:3]
ITEMS = 8

Asked = dict[str, list[tuple[Item, Outcome, list[Outcome]]]]
Samples = dict[str, dict[int, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    write_own_tasks(made)
    # A model of random bytes writes spaces and letters soon, and no sum ever.
    write_sum_task(made, generation_kwargs={"until": [" ", "e", "\n"], "max_gen_toks": 24})
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[HFEngine]:
    loaded = HFEngine(model)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def ours(folder: Path, model: Path, engine: HFEngine, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """By task, every item with its graded outcome and those of its parts."""
    tasks = {name: own_task(folder, name) for name in TASKS}
    found: Asked = {}
    with measurer(tmp_path_factory.mktemp("ledger"), engine, Encoder(model), tasks) as asking:
        for name, task in tasks.items():
            items = task.split(0, ITEMS, 1).search
            requests = [asking.request(item, Ablation(), "generate") for item in items]
            parts = [engine.measure(request.parts) for request in requests]
            found[name] = list(zip(items, asking.measure(requests, "test"), parts, strict=True))
    return found


@pytest.fixture(scope="module")
def theirs(folder: Path, model: Path, ours: Asked) -> Samples:
    """By task and document, lm-eval's samples: one for every filter."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        # In order: lm-eval gives the answers to chosen documents the numbers in the order they are listed in.
        samples={name: sorted(int(item.id) for item, _, _ in asked) for name, asked in ours.items()},
        device="cpu",
        batch_size=8,
        bootstrap_iters=0,
    )
    found: Samples = {name: {} for name in TASKS}
    for name, samples in results["samples"].items():
        for sample in samples:
            found[name].setdefault(int(sample["doc_id"]), []).append(sample)
    return found


@pytest.mark.parametrize("name", SCORED)
def test_every_log_likelihood_and_every_greedy_flag_is_lm_evals(name: str, ours: Asked, theirs: Samples) -> None:
    for item, _, parts in ours[name]:
        (sample,) = theirs[name][int(item.id)]
        responses = [response[0] for response in sample["resps"]]
        assert [part.score for part in parts] == pytest.approx([score for score, _ in responses], abs=1e-3)
        assert [part.correct for part in parts] == [greedy for _, greedy in responses]


@pytest.mark.parametrize("name", SCORED)
def test_scored_answers_are_graded_as_lm_eval_grades_them(name: str, ours: Asked, theirs: Samples) -> None:
    graded = [outcome.correct for _, outcome, _ in ours[name]]
    assert graded == [bool(theirs[name][int(item.id)][0]["acc"]) for item, _, _ in ours[name]]


def test_the_prompts_are_lm_evals(ours: Asked, theirs: Samples) -> None:
    for name, asked in ours.items():
        for item, _, _ in asked:
            arguments = theirs[name][int(item.id)][0]["arguments"]
            assert item.prompt in {argument[0] for argument in arguments}


def test_what_is_generated_ends_where_lm_eval_ends_it(ours: Asked, theirs: Samples) -> None:
    texts = {int(item.id): outcome.text for item, outcome, _ in ours["own_sum"]}
    assert texts == {number: samples[0]["resps"][0][0] for number, samples in theirs["own_sum"].items()}
    assert len(set(map(len, texts.values()))) > 1


def test_the_score_of_a_choice_is_its_margin_and_its_tokens_those_of_all_choices(ours: Asked) -> None:
    assert len({outcome.correct for _, outcome, _ in ours["own_choice"]}) == 2
    for item, outcome, parts in ours["own_choice"]:
        scores = np.array([part.score for part in parts])
        (gold,) = item.gold
        assert outcome.score == pytest.approx(scores[gold] - np.delete(scores, gold).max())
        assert outcome.tokens == sum(part.tokens for part in parts)
        assert len(parts) == len(item.choices) == 4
