"""The study files in ``studies/``: each is one, and each names a model and tasks that the paper has."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cs_localize.config import StudyConfig, load_study
from cs_localize.report.published import published
from cs_localize.study import check_study

FOLDER = Path(__file__).parent.parent / "studies"
PAPER = {
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
}


def paper_study(name: str) -> StudyConfig:
    return load_study(FOLDER / f"{name}.yaml")


@pytest.mark.parametrize(("name", "model"), PAPER.items())
def test_every_model_of_the_paper_has_a_study_on_published_tasks(name: str, model: str) -> None:
    study = paper_study(name)

    assert study.model == model
    assert {*study.tasks, *study.controls} <= set(published().table)
    assert set(published().found_on["math"]) <= set(study.tasks)
    assert study.select.limit == published().heads_zeroed
    assert study.confirm.curve == len(published().math_curves["gsm8k"]) - 1


def test_the_studies_of_the_paper_differ_in_the_model_alone() -> None:
    assert len({paper_study(name).model_copy(update={"model": "any"}).model_dump_json() for name in PAPER}) == 1


def test_every_other_file_is_a_study_or_a_grid_of_tasks_that_are_there() -> None:
    others = {path.stem for path in FOLDER.iterdir()} - set(PAPER)

    assert others == {"grid", "three"}, "a new file needs a test here"
    assert check_study(load_study(FOLDER / "three.yaml"))
    assert "task_sets" in yaml.safe_load((FOLDER / "grid.yaml").read_text(encoding="utf-8"))
