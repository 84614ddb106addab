"""The study files in ``studies/``: each is one, and each names a model and tasks that the paper has."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cs_localize.config import StudyConfig, load_study
from cs_localize.grid import load_grid
from cs_localize.report.published import published
from cs_localize.study import check_study
from cs_localize.tasks import get_task

GRIDS = ("paper-code", "paper-words")
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


def test_the_grids_of_the_paper_ask_its_other_tasks_of_all_its_models(tmp_path: Path) -> None:
    cells = [cell for name in GRIDS for cell in load_grid(FOLDER / f"{name}.yaml", tmp_path)]
    tasks = {task for cell in cells for task in cell.study.tasks} | set(paper_study("llama-3.1-8b").tasks)
    controls = {task for cell in cells for task in cell.study.controls}

    for name in GRIDS:
        assert [cell.study.model for cell in cells if cell.task_set == name.removeprefix("paper-")] == [*PAPER.values()]
    assert tasks | {"arc_challenge", "mmlu"} == set(published().table)
    assert controls <= set(published().table)
    assert {task for found_on in published().found_on.values() for task in found_on} <= tasks
    words = next(cell.study for cell in cells if cell.task_set == "words")
    for name in words.tasks:
        assert len(get_task(name).split(words.seed, words.search_items, words.held_out_items).search) == 38


def test_every_other_file_is_a_study_or_a_grid_of_tasks_that_are_there() -> None:
    others = {path.stem for path in FOLDER.iterdir()} - set(PAPER) - set(GRIDS)

    assert others == {"grid", "three"}, "a new file needs a test here"
    assert check_study(load_study(FOLDER / "three.yaml"))
    assert "task_sets" in yaml.safe_load((FOLDER / "grid.yaml").read_text(encoding="utf-8"))
