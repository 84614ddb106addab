"""Tasks that something is wrong with, from the command line: refused in one line, or left out, recorded and counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cs_localize.cli import main
from cs_localize.folder import StudyResult, load_result
from cs_localize.models import random_model
from tests.studies import planted, write_study
from tests.tasks.harness.builders import write_choice_task, write_sum_task, write_task, write_word_task


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def unknown_task(folder: Path) -> None:
    write_word_task(folder, "own_wrod")


def data_gone(folder: Path) -> None:
    write_word_task(folder)
    (folder / "own_word.jsonl").unlink()


def data_on_a_hub(folder: Path) -> None:
    write_word_task(folder, dataset_path="some-body/some-data", dataset_kwargs=None)


def empty_split(folder: Path) -> None:
    write_word_task(folder)
    (folder / "own_word.jsonl").write_text("", encoding="utf-8")


def one_question(folder: Path) -> None:
    write_word_task(folder)
    data = folder / "own_word.jsonl"
    data.write_text(data.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")


def empty_answers(folder: Path) -> None:
    docs = [{"text": f"{number} and"} for number in range(12)]
    write_task(folder, "own_word", docs, doc_to_text="{{text}}", doc_to_target="", target_delimiter="")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (unknown_task, "no task 'own_word'; did you mean 'own_wrod'?"),
        (data_gone, "task 'own_word' or its data (json) cannot be had: FileNotFoundError"),
        (data_on_a_hub, "(some-body/some-data) cannot be had: "),
        (empty_split, "task 'own_word': its evaluation split is empty"),
        (one_question, "task 'own_word' has 1 questions in 1 families, too few"),
    ],
)
def test_a_task_that_cannot_be_had_is_one_line_and_exit_code_2(
    write: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "tasks", tmp_path / "out"
    folder.mkdir()
    write(folder)
    study = planted(tasks=["own_word", "antonyms"], lm_eval__include_path=str(folder))
    own = ("--tasks", "own_word", "--include-path", str(folder))
    for command in (
        ("run", str(write_study(tmp_path / "study.yaml", study)), "--out", str(out)),
        ("tasks", "--baseline", *own, "--model", "no-such-model"),
        ("ablate", *own, "--model", "no-such-model", "--heads", "L0H0"),
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
        assert not (out / "heads.json").exists()


def test_a_metric_that_a_task_has_not_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sum_task(tmp_path)
    options = {"include_path": str(tmp_path), "metric": {"own_sum": "exact_match,frist"}}
    study = write_study(tmp_path / "study.yaml", planted(tasks=["own_sum", "antonyms"], lm_eval=options))
    assert main(["run", str(study), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "task 'own_sum' has no metric 'exact_match,frist'; did you mean 'exact_match,first'?" in said
    assert "exact_match,first or exact_match,last" in said
    assert main(["run", str(study), "--set", "lm_eval.metric={own_smu: acc}", "--out", str(tmp_path / "out")]) == 2
    assert "lm_eval.metric names 'own_smu', which is no task" in capsys.readouterr().err


@pytest.fixture(scope="module")
def result(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """A study of a small real model: answers that are too long, empty, not ASCII, and choices that begin another."""
    folder = tmp_path_factory.mktemp("faulty")
    long = "word " * 500  # bytes are tokens, and the context has 2048
    docs = [
        {"text": f"{'' if number % 6 else long}Größer als {number}?", "answer": "" if number % 6 == 1 else " ja, ß"}
        for number in range(36)
    ]
    config = {"doc_to_target": "answer", "target_delimiter": "", "generation_kwargs": {"max_gen_toks": 4}}
    write_task(folder, "own_text", docs, doc_to_text="{{text}}", **config)
    write_choice_task(folder)
    study = {
        "model": str(random_model(folder / "model", "llama")),
        "tasks": ["own_text", "own_choice"],
        "lm_eval": {"include_path": str(folder)},
        "engine": {"name": "hf", "workers": 1},
        "design": {"requests": 24, "density": 0.2, "fragile_density": 0.2, "pilot": {"requests_a_layer": 0}},
        "select": {"candidates": 2, "limit": 1, "items": 4, "control_items": 4, "resamples": 0, "permutations": 0},
        "confirm": {"random_draws": 1, "curve": 0, "bootstrap": 100, "interactions": False},
        "crosscheck": {"enabled": False},
    }
    assert main(["run", str(write_study(folder / "study.yaml", study)), "--out", str(folder / "out")]) == 0
    return load_result(folder / "out")


@pytest.mark.ray
@pytest.mark.model
def test_items_too_long_or_without_an_answer_are_recorded_left_out_and_counted_in_the_report(
    result: StudyResult,
) -> None:
    long, empty = "longer than the model's context of 2048 tokens", "an answer without tokens"
    expected = {str(number): empty if number % 6 else long for number in range(36) if number % 6 < 2}
    assert result.heads.left_out == {"own_text": expected}
    (told,) = (warning for warning in result.heads.warnings if "left out" in warning)
    assert told.startswith("own_text: 12 items left out: ")
    assert f"6 for {long}" in told
    assert f"6 for {empty}" in told
    assert told.partition(", ")[0].partition("'")[0] in result.report.read_text(encoding="utf-8")
    assert result.confirm is not None
    assert result.heads.tasks["own_text"].items + result.confirm.items["own_text"] == 36 - 12


@pytest.mark.ray
@pytest.mark.model
def test_what_is_not_ascii_and_choices_that_begin_another_are_measured(result: StudyResult) -> None:
    assert result.confirm is not None
    assert result.confirm.items["own_choice"] == 12
    assert result.heads.tasks["own_choice"].items == 12
    assert result.heads.scoring["own_choice"].sequences == 4


@pytest.mark.ray
@pytest.mark.model
def test_a_task_of_which_nothing_is_left_is_refused_by_a_baseline(
    result: StudyResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_answers(tmp_path)
    asking = ("--engine", "hf", "--model", str(result.out.parent / "model"), "--ledger", str(tmp_path / "ledger"))
    assert main(["tasks", "--baseline", *asking, "--tasks", "own_word", "--include-path", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("task 'own_word': every item is left out: an answer without tokens\n")
