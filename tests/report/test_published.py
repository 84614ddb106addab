from __future__ import annotations

import re
from pathlib import Path

import pytest

from cs_localize.findings import ConfirmFile, CountShare, HeadsFile, TaskCounts
from cs_localize.report import write_report
from cs_localize.report.published import published, published_rows
from tests.report.builders import confirm_file, heads_file, study_config, write_study

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
RENAMED = {"antonyms": "gsm8k", "past_tense": "boolq", "plurals": "swearing", "capitals": "rhyming"}


def renamed(task: str) -> str:
    return RENAMED.get(task, task)


def heads(model: str = MODEL) -> HeadsFile:
    """The findings of the builders under names of published tasks."""
    made = heads_file()
    tasks = {renamed(task): finding for task, finding in made.tasks.items()}
    return made.model_copy(update={"model": model, "tasks": tasks})


def confirm() -> ConfirmFile:
    made = confirm_file()
    fields = ("items", "baseline", "baseline_ci", "universal", "contrast", "random", "curve", "control_curve")
    changes = {field: {renamed(task): value for task, value in getattr(made, field).items()} for field in fields}
    matrix = {
        renamed(task): {renamed(other): drop for other, drop in drops.items()} for task, drops in made.matrix.items()
    }
    left = {task: CountShare(count=12, share=0.25, ci=(0.1, 0.4)) for task in matrix}
    counts = {"swearing": TaskCounts(baseline=48, without=left, random=[])}
    return made.model_copy(update={**changes, "matrix": matrix, "counts": counts})


def test_the_published_values_are_whole_and_agree_with_each_other() -> None:
    known = published()
    columns = {"base", *known.found_on}
    assert len(known.table) == 10
    assert all(set(values) == columns for values in known.table.values())
    assert {task for tasks in known.found_on.values() for task in tasks} <= set(known.table)
    assert all(len(curve) == 11 for curve in known.math_curves.values())
    for task in ("gsm8k", "arithmetic"):
        curve = known.math_curves[task]
        assert (curve[0], curve[known.heads_zeroed]) == (known.table[task]["base"], known.table[task]["math"])
    means = {"general": ("hellaswag", "boolq", "arc_challenge", "mmlu"), "code": ("mbpp", "humaneval_instruct")}
    for group, tasks in means.items():
        for k, column in ((0, "base"), (known.heads_zeroed, "math")):
            mean = sum(known.table[task][column] for task in tasks) / len(tasks)
            assert known.math_curves[group][k] == pytest.approx(mean, abs=0.011)


@pytest.mark.parametrize("name", [MODEL, "/models/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"])
def test_what_was_measured_stands_beside_what_is_published_for_model_task_and_kind_of_heads(name: str) -> None:
    measured = confirm()
    rows = {(row.heads_of, row.task): row for row in published_rows(heads(name), measured)}

    asked = {"gsm8k", "boolq", "swearing", "rhyming"}
    assert set(rows) == {(of, task) for of in ("gsm8k", "swearing", "rhyming") for task in asked}
    row = rows["gsm8k", "boolq"]
    assert row.heads == "1 / 5"
    assert (row.before, row.before_published) == ("93.0%", "84.1%")
    assert row.after == f"{100 * measured.matrix['gsm8k']['boolq'].accuracy:.1f}%"
    assert row.after_published == "82.7%"
    assert rows["rhyming", "rhyming"].after_published == "31.0%"


def test_a_count_is_compared_as_a_share_of_the_unablated_one_and_not_at_all_without() -> None:
    measured = confirm()
    row = next(row for row in published_rows(heads(), measured) if row.heads_of == row.task == "swearing")
    assert (row.before, row.before_published, row.after, row.after_published) == ("100.0%", "100.0%", "25.0%", "14.6%")
    uncounted = published_rows(heads(), measured.model_copy(update={"counts": {}}))
    assert "swearing" not in {row.task for row in uncounted}


def test_the_report_has_a_row_for_every_count_under_every_head_set(tmp_path: Path) -> None:
    made = heads()
    study = study_config(tuple(made.tasks), model=MODEL)
    page = write_report(write_study(tmp_path, made, confirm(), study=study)).read_text(encoding="utf-8")
    (table,) = re.findall(r'<table id="counts">.*?</table>', page, re.DOTALL)
    assert table.count("<td>48</td><td>12</td><td>25.0%</td>") == len(confirm().matrix)


def test_another_model_has_no_published_values() -> None:
    for name in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B-Instruct", "smollm2-135m-instruct"):
        assert published_rows(heads(name), confirm()) == []


def test_the_report_has_the_table_where_there_are_published_values_and_only_there(tmp_path: Path) -> None:
    made = heads()
    study = study_config(tuple(made.tasks), model=MODEL)
    page = write_report(write_study(tmp_path / "a", made, confirm(), study=study)).read_text(encoding="utf-8")

    (table,) = re.findall(r'<table id="published">.*?</table>', page, re.DOTALL)
    assert "arXiv 2603.03335" in table
    assert table.count('<td class="text">gsm8k</td><td class="text">') == 4
    assert "<td>93.0%</td><td>84.1%</td>" in table
    other = write_report(write_study(tmp_path / "b", heads_file(), confirm_file())).read_text(encoding="utf-8")
    assert 'id="published"' not in other


def test_own_tasks_are_in_the_provenance_of_the_page(tmp_path: Path) -> None:
    made = heads_file()
    own = made.model_copy(update={"provenance": made.provenance.model_copy(update={"data": {"antonyms": "c0ffee"}})})

    page = write_report(write_study(tmp_path, own)).read_text(encoding="utf-8")

    assert "<dt>Own task antonyms</dt><dd><code>c0ffee</code></dd>" in page
