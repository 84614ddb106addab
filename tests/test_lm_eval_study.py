"""A study of lm-eval's tasks, one of choices and one of generated answers, on the small real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cs_localize.folder import StudyResult, load_result
from cs_localize.tasks import registered_tasks
from tests.studies import run, write_study
from tests.tasks.harness.builders import write_sum_task, write_task

pytestmark = [pytest.mark.model, pytest.mark.vllm, pytest.mark.ray]


def write_opposites(folder: Path) -> None:
    """Which of three words is the opposite of a word?"""
    (antonyms,) = (task for task in registered_tasks() if task.name == "antonyms")
    answers = [question.answer for question in antonyms.questions[:36]]
    docs = [
        {"word": question.text, "choices": [answers[n - 7], question.answer, answers[n - 13]], "label": 1}
        for n, question in enumerate(antonyms.questions[:36])
    ]
    write_task(
        folder,
        "opposites",
        docs,
        output_type="multiple_choice",
        doc_to_text="The opposite of {{word}} is",
        doc_to_choice="choices",
        doc_to_target="label",
        metric_list=[{"metric": "acc"}],
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    write_opposites(folder)
    write_sum_task(folder)
    return write_study(
        folder / "study.yaml",
        {
            "model": "smollm2-135m-instruct",
            "tasks": ["opposites", "own_sum"],
            "search_items": 12,
            "held_out_items": 10,
            "lm_eval": {"include_path": str(folder), "reference": "self", "metric": {"own_sum": "exact_match,last"}},
            "engine": {"workers": 1},
            "design": {"requests": 60, "pilot": {"requests_a_layer": 0}},
            "select": {"candidates": 2, "limit": 1, "items": 8, "control_items": 6, "requests": 20},
            "confirm": {"random_draws": 1, "curve": 1, "bootstrap": 100},
            "crosscheck": {"enabled": False},
        },
    )


@pytest.fixture(scope="module")
def result(study: Path) -> StudyResult:
    finished = run("run", str(study), "--out", str(study.parent / "out"))
    assert finished.returncode == 0, finished.stderr
    return load_result(study.parent / "out")


def test_both_tasks_are_localized_and_confirmed_by_their_own_metric(result: StudyResult) -> None:
    assert result.confirm is not None
    assert set(result.heads.tasks) == set(result.confirm.baseline) == {"opposites", "own_sum"}
    assert result.confirm.items == {"opposites": 10, "own_sum": 10}
    assert all(level > 0.4 for level in result.confirm.baseline.values()), "the model knows both"


def test_the_files_and_the_report_say_what_was_scored_and_what_confirms(result: StudyResult) -> None:
    choice, generated = result.heads.scoring["opposites"], result.heads.scoring["own_sum"]
    assert (choice.score, choice.metric) == ("log-probability margin of the right choice", "acc,none")
    assert (generated.score, generated.metric) == ("log-probability of the reference answer", "exact_match,last")
    assert (choice.sequences, generated.sequences) == (3, 1)
    assert choice.correlation is not None
    assert choice.correlation > 0.5, "a right choice has a positive margin"
    page = result.report.read_text(encoding="utf-8")
    assert all(words in page for words in (choice.score, generated.score, choice.metric, generated.metric))


def test_what_the_model_answers_wrongly_is_left_out_of_the_search_and_counted(result: StudyResult) -> None:
    left_out = result.heads.left_out.get("own_sum", {})
    assert result.heads.tasks["own_sum"].items == 12 - len(left_out)
    assert bool(left_out) == any(warning.startswith("own_sum: ") for warning in result.heads.warnings)


def test_every_choice_is_counted_and_every_token(result: StudyResult) -> None:
    events = [json.loads(line) for line in (result.out / "events.jsonl").read_text().splitlines()]
    counts = events[-1]["counts"]
    assert counts["search"]["asked"] == 60 * (3 + 1)
    assert result.heads.tasks["opposites"].tokens > 3 * 60 * 4


def test_given_heads_are_ablated_on_tasks_of_ones_own_folder(study: Path) -> None:
    out = study.parent / "ablation"
    model = ("--model", "smollm2-135m-instruct", "--engine", "hf", "--workers", "1")
    own = ("--tasks", "opposites,own_sum", "--include-path", str(study.parent), "--limit", "2")
    finished = run("ablate", *model, *own, "--heads", "L4H2", "--out", str(out))
    assert finished.returncode == 0, finished.stderr
    lines = (out / "summary.csv").read_text().splitlines()
    assert len(lines) == 1 + 2
