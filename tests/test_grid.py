from __future__ import annotations

import csv
import errno
import io
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from filelock import FileLock

import cs_localize.grid.run as grid_run
from cs_localize.cli import main
from cs_localize.config import DesignConfig, SelectConfig, SolverConfig, StudyConfig
from cs_localize.errors import UsageError
from cs_localize.folder import StudyResult, load_result
from cs_localize.grid import Cell, CellResult, load_grid, parse_grid
from cs_localize.grid.page import write_page
from cs_localize.grid.recurrence import recurrences
from cs_localize.grid.state import GridFile, write_state
from cs_localize.grid.table import COLUMNS, HeadRow, write_tables
from cs_localize.report import summary_lines
from cs_localize.study import check_study
from tests.studies import planted, run

ROOT = Path(__file__).parent.parent
TASKS = ["antonyms", "capitals", "counting"]


def grid(**changes: object) -> dict[str, Any]:
    """A planted grid of 2 x 2 x 2 cells as its YAML would hold it."""
    base = planted(design__requests=200, confirm__random_draws=1, search_items=30, held_out_items=20)
    del base["model"], base["tasks"]
    base["engine"] |= {"workers": 1, "planted": {**base["engine"]["planted"], "tasks": TASKS}}
    whole: dict[str, Any] = {
        "base": base,
        "models": {"one": {"model": "planted"}, "two": {"model": "planted", "engine": {"planted": {"seed": 1}}}},
        "task_sets": {"pair": TASKS[:2], "other": {"tasks": TASKS[1:], "controls": TASKS[:1]}},
        "methods": {"lasso": {"solver": {"name": "lasso"}}, "cvxpy": {"solver": {"name": "cvxpy"}}},
    }
    return whole | changes


def cells(**changes: object) -> tuple[Cell, ...]:
    return parse_grid(grid(**changes), Path("out"))


def row(model: str = "m", task: str = "antonyms", head: str = "L1H2", **changes: object) -> HeadRow:
    values: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "model": model, "task_set": "s", "method": "x", "task": task, "head": head, "layer": 1, "rank": 1,
        "universal": False, "effect": 1.5, "specificity": 2.0, "requests": 100, "tokens": 900,
    }  # fmt: skip
    return HeadRow(**values | changes)


def result(*rows: HeadRow, method: str = "x", **changes: object) -> CellResult:
    study = StudyConfig(model="m", tasks=("antonyms", "capitals", "counting"))
    values: dict[str, Any] = {"status": "finished", "rows": rows, "requests": 100} | changes
    return CellResult(Cell("m", "s", method, study), Path("out/cells") / f"m-s-{method}", **values)


def test_a_grid_is_every_model_with_every_task_set_by_every_method_model_by_model() -> None:
    assert [cell.name for cell in cells()] == [
        f"{model}/{tasks}/{method}"
        for model in ("one", "two")
        for tasks in ("pair", "other")
        for method in ("lasso", "cvxpy")
    ]
    assert cells()[0].folder == "one-pair-lasso"


def test_what_a_model_or_a_method_changes_is_merged_into_the_base_option_by_option() -> None:
    first, last = cells()[0].study, cells()[-1].study

    assert first.engine.planted["tasks"] == TASKS
    assert "seed" not in first.engine.planted
    assert last.engine.planted["seed"] == 1
    assert last.engine.planted["shape"] == first.engine.planted["shape"]
    assert (first.solver.name, last.solver.name) == ("lasso", "cvxpy")
    assert (last.tasks, last.controls) == (("capitals", "counting"), ("antonyms",))


def test_options_of_the_base_are_for_the_cells_that_use_them() -> None:
    select = {"limit": 2, "resamples": 0, "permutations": 0, "bootstrap": 20}
    base = {"design": {"requests": 300}, "solver": {"name": "omp"}, "select": select}
    masks, thin = cells(
        base=base, models=["m"], task_sets={"s": TASKS}, methods={"masks": {}, "thin": {"method": "thin_sweep"}}
    )
    assert (masks.study.design.requests, masks.study.solver.name) == (300, "omp")
    assert masks.study.select == SelectConfig.model_validate(select)
    assert (thin.study.design, thin.study.solver) == (DesignConfig(), SolverConfig())
    assert thin.study.select == SelectConfig(limit=2)
    with pytest.raises(UsageError, match=r"thin: the method thin_sweep has no use for design.requests"):
        cells(models=["m"], methods={"thin": {"method": {"name": "thin_sweep"}, "design": {"requests": 300}}})


@pytest.mark.parametrize(
    "section", [{"design": {"requests": 300}}, {"solver": {"name": "omp"}}, {"select": {"limit": 2, "bootstrap": 20}}]
)
def test_options_that_no_cell_uses_are_refused(section: dict[str, Any]) -> None:
    thin, both = {"thin": {"method": "thin_sweep"}}, {"masks": {}, "thin": {"method": "thin_sweep"}}
    useless = r"(design.requests|solver.name|select.bootstrap)"
    refused = rf"cell m/s/thin: the method thin_sweep has no use for {useless}; leave it out"
    shared: dict[str, Any] = {"models": ["m"], "task_sets": {"s": TASKS}}
    for parts in (
        {"base": section, "methods": thin},
        {"base": {**section, "method": "thin_sweep"}, "methods": {"thin": {}}},
        {"base": {}, "models": {"m": {"model": "m", **section}}, "methods": thin},
        {"base": {}, "models": {"m": {"model": "m", "method": "thin_sweep", **section}}, "methods": {"thin": {}}},
    ):
        with pytest.raises(UsageError, match=refused):
            cells(**{**shared, **parts})
    one = {"m": {"model": "m", **section}, "o": {"model": "o"}}
    assert [cell.name for cell in cells(**{**shared, "base": {}, "models": one, "methods": both})] == [
        "m/s/masks", "m/s/thin", "o/s/masks", "o/s/thin"
    ]  # fmt: skip


def test_the_method_that_decides_what_is_of_use_is_that_of_the_merged_cell() -> None:
    methods = {"masks": {"method": {"name": "sparse"}}, "few": {"method": {"options": {"requests": 40}}}}
    base = {"method": {"name": "thompson"}, "design": {"requests": 300}}
    masks, few = cells(base=base, models=["m"], task_sets={"s": TASKS}, methods=methods)
    assert (few.study.method.name, few.study.design) == ("thompson", DesignConfig())
    assert masks.study.design.requests == 300


def test_all_cells_share_one_ledger_in_the_folder_of_the_grid_or_the_one_the_base_names() -> None:
    assert {cell.study.ledger for cell in cells()} == {str(Path("out/ledger").resolve())}
    named = grid()
    named["base"]["ledger"] = "elsewhere"
    assert {cell.study.ledger for cell in parse_grid(named, Path("out"))} == {"elsewhere"}


def test_a_task_set_can_do_without_the_controls_of_the_base() -> None:
    shared = {**grid()["base"], "controls": ["copying"]}
    sets = {"kept": ["antonyms"], "none": {"tasks": ["copying"], "controls": []}}
    found = parse_grid(grid(base=shared, task_sets=sets), Path("out"))
    assert {cell.task_set: cell.study.controls for cell in found} == {"kept": ("copying",), "none": ()}


def test_a_name_that_yaml_reads_as_something_else_is_to_be_put_in_quotes() -> None:
    with pytest.raises(UsageError, match="'task_sets': write the name 2024 in quotes"):
        parse_grid(grid(task_sets={2024: ["antonyms"]}), Path("out"))


def test_listed_models_are_called_by_the_last_part_of_their_name() -> None:
    listed = cells(models=["planted", "org/model-1.5B"])

    assert [cell.model for cell in listed[::4]] == ["planted", "model-1.5B"]
    assert listed[-1].study.model == "org/model-1.5B"


def test_a_grid_without_methods_has_one_called_default() -> None:
    data = grid()
    del data["methods"]

    assert {cell.method for cell in parse_grid(data, Path("out"))} == {"default"}


itself: dict[str, Any] = {}
itself["engine"] = itself


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modles": ["m"]}, "unknown option 'modles'"),
        ({"models": []}, "models"),
        ({"models": ["a/m", "b/m"]}, "two models are called 'm'"),
        ({"models": {"a b": {"model": "m"}}}, "'a b' does not do as a name"),
        ({"models": {"one": {}}}, "cell one/pair/lasso: 'model' is required"),
        ({"task_sets": {"none": []}}, "task_sets"),
        ({"task_sets": {"pair": {"tasks": ["antonyms"], "contrls": []}}}, "'task_sets.pair.contrls'"),
        ({"methods": {"a": {"desing": {}}}}, "cell one/pair/a: unknown option 'desing'"),
        ({"methods": {"a": {"design": {"density": 2}}}}, "cell one/pair/a: 'design.density'"),
        ({"methods": {"a": {"tasks": ["antonyms"]}}}, "'methods.a.tasks' is out of place; it belongs in 'task_sets'"),
        ({"methods": {"a": {"ledger": "x"}}}, "'methods.a.ledger' is out of place; it belongs in 'base'"),
        ({"base": {"model": "m"}}, "'base.model' is out of place; it belongs in 'models'"),
        ({"methods": {"a-b": {}, "b": {}}, "task_sets": {"s": ["antonyms"], "s-a": ["antonyms"]}}, "share a folder"),
        ({"methods": {"a": {"solver": {"options": {"alhpa": 1}}}}}, "cell one/pair/a: "),
        ({"methods": {"a": None}}, "'methods.a': give options, as 'name: value' lines"),
        ({"methods": {"m" * 100: {}}, "task_sets": {"s" * 100: ["antonyms"]}, "models": ["m" * 100]}, "shorter name"),
        ({"base": itself, "methods": {"a": itself}}, "an option holds itself"),
        ({"task_sets": {"pair": ["antonyms"], "typo": ["antonymz"]}}, "cell one/typo/lasso: no task 'antonymz'"),
        ({"models": {"one": {"model": "no-such-model", "engine": {"name": "hf"}}}}, "no model 'no-such-model'"),
        ({"methods": {"a": {"crosscheck": {"enabled": True}}}}, "cell one/pair/a: the planted engine has no neurons"),
    ],
)
def test_a_mistake_anywhere_in_a_grid_is_one_line_and_exit_code_2_before_anything_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(grid(**changes), sort_keys=False), encoding="utf-8")

    code = main(["sweep", str(file), "--out", str(tmp_path / "out")])

    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ledger", [None, ""])
def test_a_ledger_left_empty_is_the_grids_own(tmp_path: Path, ledger: str | None) -> None:
    found = parse_grid(grid(base={**grid()["base"], "ledger": ledger}), tmp_path)

    assert {cell.study.ledger for cell in found} == {str(tmp_path.resolve() / "ledger")}


def test_a_folder_that_is_a_link_to_itself_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(grid()), encoding="utf-8")
    (tmp_path / "loop").symlink_to("loop")

    assert main(["sweep", str(file), "--out", str(tmp_path / "loop")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.ray
def test_a_second_sweep_into_a_folder_that_is_in_use_leaves_its_state_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(grid()), encoding="utf-8")
    out = tmp_path / "out"
    (out / "ledger").mkdir(parents=True)
    (out / "grid.json").write_text("of the first", encoding="utf-8")

    with FileLock(out / "ledger" / ".lock"):
        assert main(["sweep", str(file), "--out", str(out)]) == 1

    assert "another study is writing" in capsys.readouterr().err
    assert (out / "grid.json").read_text(encoding="utf-8") == "of the first"


@pytest.mark.parametrize("text", ["", "words", "models: [", "- a"])
def test_a_file_that_is_no_grid_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=r"grid\.yaml"):
        load_grid(file, tmp_path)


def test_a_grid_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no grid file"):
        load_grid(tmp_path / "absent.yaml", tmp_path)


def test_a_folder_of_yaml_tasks_that_is_not_there_is_told_with_the_grid_and_its_first_cell(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    methods = {"here": {}, "away": {"lm_eval": {"include_path": "none"}}}
    file.write_text(yaml.safe_dump(grid(methods=methods), sort_keys=False), encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        load_grid(file, tmp_path)
    assert str(refused.value).startswith(f"{file}: cell one/pair/away: lm_eval.include_path: there is no folder none ")


def test_an_override_reaches_every_cell(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(grid(), sort_keys=False), encoding="utf-8")

    assert {cell.study.seed for cell in load_grid(file, tmp_path, ("base.seed=3",))} == {3}


def test_the_example_is_a_grid_of_studies_that_can_be_run() -> None:
    examples = load_grid(ROOT / "studies" / "grid.yaml", Path("out"))

    assert len(examples) == 8
    for cell in examples:
        check_study(cell.study)


def test_the_columns_of_the_table_stay_as_they_are() -> None:
    assert COLUMNS == (
        "model", "task_set", "method", "task", "head", "layer", "rank", "universal", "effect", "effect_low",
        "effect_high", "specificity", "baseline_accuracy", "accuracy_gone", "accuracy_gone_low",
        "accuracy_gone_high", "accuracy_gone_up_to_rank", "controls_gone", "requests", "tokens",
    )  # fmt: skip


def test_the_two_tables_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [row(), row(head="L3H4", baseline_accuracy=0.9, accuracy_gone=0.8, universal=True)]

    parquet, text = write_tables(tmp_path, rows)

    table = pq.read_table(parquet)
    assert table.column_names == list(COLUMNS)
    assert table.schema.metadata[b"cs_localize.schema"] == b"1"
    with text.open(encoding="utf-8", newline="") as stream:
        written = list(csv.DictReader(stream))
    assert [{k: "" if v is None else str(v) for k, v in r.items()} for r in table.to_pylist()] == written


def test_a_grid_that_named_nothing_has_tables_with_no_rows(tmp_path: Path) -> None:
    parquet, text = write_tables(tmp_path, [])

    assert pq.read_table(parquet).column_names == list(COLUMNS)
    assert text.read_text(encoding="utf-8") == ",".join(COLUMNS) + "\n"


def test_a_head_recurs_where_it_is_named_for_several_tasks_and_tasks_share_it() -> None:
    (found,) = recurrences(
        [
            result(row(), row(task="capitals"), row(task="capitals", head="L3H4"), universal=("L0H1",)),
            result(row(), method="y"),
            result(method="z", status="failed"),
        ]
    )

    assert found.studies == {"antonyms": 2, "capitals": 2, "counting": 2}
    assert found.namings == {"L1H2": {"antonyms": 2, "capitals": 1}, "L3H4": {"capitals": 1}}
    assert found.recurring == {"L1H2": ("antonyms", "capitals")}
    assert found.shared("antonyms", "capitals") == (1, 2)
    assert found.shared("antonyms", "counting") == (0, 1)
    assert found.universal == {"L0H1": 1}


def test_the_index_says_what_failed_and_what_recurs_and_asks_for_nothing_outside_itself(tmp_path: Path) -> None:
    results = [
        result(row(accuracy_gone=0.875), row(task="capitals")),
        result(method="y", status="failed", error="no <memory> left", rows=()),
        result(method="z", status="waiting", rows=()),
    ]
    for one in results:
        one.folder = tmp_path / "cells" / one.folder.name

    page = write_page(tmp_path, results).read_text(encoding="utf-8")

    assert "1 of 3 studies finished, 1 failed and 1 not run yet." in page
    assert "failed: no &lt;memory&gt; left" in page
    assert 'href="cells/m-s-x/report.html"' in page
    assert "L1H2 for antonyms and capitals" in page
    assert "87.5" in page
    assert "//" not in page
    assert "<script" not in page


def test_grid_json_is_what_its_schema_says(tmp_path: Path) -> None:
    one = result(status="failed", error="why", rows=())
    one.folder = tmp_path / "cells" / "m-s-x"

    write_state(tmp_path, [one])

    assert json.loads((tmp_path / "grid.json").read_text(encoding="utf-8")) == {
        "schema": 1,
        "cells": [
            {
                "name": "m/s/x", "model": "m", "task_set": "s", "method": "x", "folder": "cells/m-s-x",
                "status": "failed", "error": "why",
            }
        ],
    }  # fmt: skip


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("error", "reason", "foreseen"),
    [
        (ValueError("operands\ncould not be broadcast"), "ValueError: operands could not be broadcast", False),
        (KeyError("L4H2"), "KeyError: 'L4H2'", False),
        (ValueError("\n"), "ValueError:", False),
        (MemoryError(), "there is not enough memory (no size named); ask for less", True),
        (ModuleNotFoundError(name="cvxpy"), "the package 'cvxpy' is missing", True),
        (OSError(errno.ENOSPC, "No space left", "heads.json"), "the disk is full (heads.json); free some space", True),
        (UsageError("no task"), "no task", True),
    ],
)
def test_any_error_fails_its_cell_alone_and_one_that_nobody_foresaw_is_logged_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    reason: str,
    foreseen: bool,
) -> None:
    def broken(*_: object) -> StudyResult:
        raise error

    monkeypatch.setattr(grid_run, "run_study", broken)
    monkeypatch.setattr(grid_run, "Bench", lambda ledger: nullcontext(SimpleNamespace(session=broken)))

    found = grid_run.run_grid(parse_grid(grid(), tmp_path / "out"), tmp_path / "out", io.StringIO())

    assert [cell.status for cell in found.cells] == ["failed"] * 8
    assert all(str(cell.error).startswith(reason) for cell in found.cells)
    assert len([record for record in caplog.records if record.exc_info]) == (0 if foreseen else 8)


@pytest.mark.ray
def test_a_failed_cell_stops_nothing_and_the_same_command_runs_only_what_is_missing(tmp_path: Path) -> None:
    file, out = tmp_path / "grid.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(grid(), sort_keys=False), encoding="utf-8")
    (out / "cells").mkdir(parents=True)
    (out / "cells" / "one-other-cvxpy").write_text("in the way", encoding="utf-8")

    first = run("sweep", str(file), "--out", str(out))

    assert first.returncode == 1
    assert "Traceback" not in first.stderr
    assert "one/other/cvxpy failed: cannot write to" in first.stderr
    state = GridFile.model_validate_json((out / "grid.json").read_text(encoding="utf-8"))
    assert {cell.name for cell in state.cells if cell.status == "failed"} == {"one/other/cvxpy"}
    assert sum(cell.status == "finished" for cell in state.cells) == 7
    assert "7 of 8 studies finished and 1 failed." in (out / "index.html").read_text(encoding="utf-8")

    # The second method asks what the first asked, of an engine that is loaded already.
    second = events(out / "cells" / "one-pair-cvxpy")
    searched = next(event for event in second if event["event"] == "stage_finished" and event["stage"] == "search")
    assert searched["served"] == searched["done"] > 0
    assert not any(event["event"] == "worker_ready" for event in second)
    assert any(event["event"] == "fleet_taken_over" for event in second)

    (out / "cells" / "one-other-cvxpy").unlink()
    added = out / "cells" / "one-pair-lasso" / "crosscheck.json"  # as `cs-localize crosscheck` would
    added.write_bytes((ROOT / "tests" / "confirm" / "golden" / "crosscheck.json").read_bytes())
    before = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/heads.json")}
    again = run("sweep", str(file), "--out", str(out))

    assert again.returncode == 0, again.stderr
    assert "cell 4/8: one/other/cvxpy" in again.stderr
    assert "lasso" not in again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert added.exists()
    assert "8 of 8 studies finished." in (out / "index.html").read_text(encoding="utf-8")
    rows = pq.read_table(out / "heads.parquet").to_pylist()
    assert {f"{r['model']}/{r['task_set']}/{r['method']}" for r in rows} == {cell.name for cell in cells()}
    for one in out.glob("cells/*"):
        found = load_result(one)
        assert summary_lines(found.heads, found.confirm)
        named = [(task, head) for task, finding in found.heads.tasks.items() for head in finding.named]
        mine = [r for r in rows if one.name == f"{r['model']}-{r['task_set']}-{r['method']}"]
        assert [(r["task"], r["head"]) for r in mine] == named
        assert all(r["accuracy_gone"] == found.confirm.matrix[r["task"]][r["task"]].drop for r in mine if found.confirm)
