from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cs_localize.ablate import (
    AblationGrid,
    AblationGridResult,
    ablate,
    ablation_grid,
    baselines,
    held_out,
    mean_items,
    of_study,
)
from cs_localize.ablate.effects import SUMMARY_COLUMNS
from cs_localize.ablate.grid import ROW_COLUMNS
from cs_localize.asking import load_tasks
from cs_localize.cli import main
from cs_localize.config import LmEvalConfig
from cs_localize.errors import UsageError
from cs_localize.folder import StudyResult
from cs_localize.study import run_study
from tests.studies import planted_config
from tests.tasks.harness.builders import write_task

KINDS = ("together", "single", "cumulative")


@pytest.fixture(scope="module")
def study(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    config = planted_config(tasks=["antonyms", "capitals"], design__requests=300, confirm__random_draws=1)
    return run_study(config, tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def measured(study: StudyResult, tmp_path_factory: pytest.TempPathFactory) -> AblationGridResult:
    heads = of_study(study.out)
    out = tmp_path_factory.mktemp("grid")
    return ablation_grid(
        heads.study.model,
        AblationGrid(heads.heads, KINDS, scales=(0, 0.5, "mean"), draws=2),
        heads.held_out(),
        out=out,
        mode="score",
        engine=heads.engine,
        mean_items=mean_items(["antonyms", "capitals"]),
    )


def test_the_columns_of_both_tables_stay_as_they_are() -> None:
    assert ROW_COLUMNS == (
        "model", "heads_of", "kind", "part", "heads", "size", "scale", "intervention", "task", "item", "correct",
        "baseline_correct", "score", "baseline_score", "response", "tokens",
    )  # fmt: skip
    assert SUMMARY_COLUMNS == (
        "model", "heads_of", "kind", "part", "heads", "size", "scale", "intervention", "task", "items", "baseline",
        "accuracy", "drop", "drop_low", "drop_high", "p", "p_holm", "damage",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["ablation.parquet", "summary.csv"])
def test_a_folder_in_the_place_of_a_table_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)

    code = main(
        ["ablate", "--model", "no-such-model", "--heads", "L0H0", "--tasks", "antonyms", "--out", str(tmp_path / "out")]
    )

    assert code == 2
    assert f"{name} is a folder" in capsys.readouterr().err


@pytest.mark.ray
def test_the_same_heads_under_two_kinds_are_one_test_with_one_interval(measured: AblationGridResult) -> None:
    alike: dict[tuple[object, ...], set[tuple[float, ...]]] = {}
    for effect in measured.effects:
        key = (frozenset(effect.heads.split(",")), effect.intervention, effect.task)
        alike.setdefault(key, set()).add((effect.drop_low, effect.drop_high, effect.p, effect.p_holm))
    assert len(alike) < len(measured.effects)
    assert all(len(found) == 1 for found in alike.values())
    smallest = min(effect.p for effect in measured.effects)
    assert min(effect.p_holm for effect in measured.effects) == pytest.approx(min(1.0, smallest * len(alike)))


@pytest.mark.ray
def test_there_is_one_row_for_every_condition_task_and_item(study: StudyResult, measured: AblationGridResult) -> None:
    rows = pq.read_table(measured.rows)
    heads = of_study(study.out).heads
    sets = sum(1 + 2 * len(text.split(",")) + 2 for text in heads.values())

    assert rows.column_names == list(ROW_COLUMNS)
    assert rows.num_rows == sets * 3 * 2 * 40
    keys = {
        tuple(row.values())
        for row in rows.select(["heads_of", "kind", "part", "intervention", "task", "item"]).to_pylist()
    }
    assert len(keys) == rows.num_rows
    assert None not in rows.column("score").to_pylist()


@pytest.mark.ray
def test_the_summary_can_be_computed_from_the_rows(measured: AblationGridResult) -> None:
    with measured.summary.open(encoding="utf-8", newline="") as stream:
        summary = list(csv.DictReader(stream))
    rows = pq.read_table(measured.rows).to_pylist()

    assert len(summary) == len(measured.effects) == len(rows) // 40
    for line in summary[:6]:
        mine = [
            row
            for row in rows
            if all(str(row[name]) == line[name] for name in ("heads_of", "kind", "part", "intervention", "task"))
        ]
        lost = sum(row["baseline_correct"] - row["correct"] for row in mine) / len(mine)
        damage = sum(row["baseline_score"] - row["score"] for row in mine) / len(mine)
        assert float(line["drop"]) == pytest.approx(lost)
        assert float(line["damage"]) == pytest.approx(damage)


@pytest.mark.ray
def test_named_heads_hurt_their_task_more_than_random_ones_and_half_scaled_less_than_zeroed(
    measured: AblationGridResult,
) -> None:
    damage = {
        (effect.kind, effect.part, effect.intervention): effect.damage
        for effect in measured.effects
        if effect.heads_of == effect.task == "antonyms" and effect.damage is not None
    }

    assert damage["together", "", "0"] > 3 * damage["random", "0", "0"]
    assert damage["together", "", "0"] > damage["together", "", "0.5"] > 0
    assert damage["cumulative", "1", "0"] == damage["single", damage_first(measured), "0"]
    assert damage["together", "", "mean"] > 3 * damage["random", "0", "mean"]
    scales = {(effect.scale, effect.intervention) for effect in measured.effects}
    assert scales == {(0.0, "0"), (0.5, "0.5"), (None, "mean")}


def test_a_grid_with_means_needs_items_to_measure_them_on(tmp_path: Path) -> None:
    grid = AblationGrid({"a": "L0H0"}, scales=("mean",))
    with pytest.raises(UsageError, match="'mean' needs items"):
        ablation_grid("nowhere", grid, held_out(["antonyms"], limit=1), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def damage_first(measured: AblationGridResult) -> str:
    return next(effect.part for effect in measured.effects if (effect.kind, effect.task) == ("single", "antonyms"))


@pytest.mark.ray
def test_the_verb_takes_heads_items_and_engine_from_a_study_and_finds_its_confirmation_in_the_ledger(
    study: StudyResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = study.out / "ledger"
    parts = sorted(ledger.glob("*.parquet"))
    arguments = ["ablate", "--heads-from", str(study.out), "--out", str(tmp_path), "--ledger", str(ledger)]

    assert main(arguments) == 0
    assert sorted(ledger.glob("*.parquet")) == parts, "the named heads together are what the confirmation zeroed"
    confirm = study.confirm
    assert confirm is not None
    with (tmp_path / "summary.csv").open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            if line["heads_of"] in confirm.matrix:
                assert float(line["drop"]) == pytest.approx(confirm.matrix[line["heads_of"]][line["task"]].drop)
    assert "antonyms together" in capsys.readouterr().out

    more = [
        *arguments,
        "--sets",
        "single",
        "--scales",
        "0,mean",
        "--random",
        "1",
        "--limit",
        "10",
        "--tasks",
        "capitals",
    ]
    assert main(more) == 0
    parts = sorted(ledger.glob("*.parquet"))
    first = (tmp_path / "ablation.parquet").read_bytes()
    assert main(more) == 0
    assert sorted(ledger.glob("*.parquet")) == parts, "the second time nothing is measured"
    assert (tmp_path / "ablation.parquet").read_bytes() == first
    assert not list(tmp_path.glob(".*"))


@pytest.mark.ray
def test_heads_are_replaced_by_means_over_search_items_and_the_ledger_serves_them(
    study: StudyResult, tmp_path: Path
) -> None:
    heads = of_study(study.out)
    ((task, named),) = list(heads.heads.items())[:1]
    spelled = ",".join(f"{head}=mean" for head in named.split(","))
    effects, rows = [], []
    for _ in range(2):
        effects += ablate(heads.study.model, spelled, [task], limit=6, engine=heads.engine, ledger=tmp_path / "ledger")
        rows.append(pq.read_table(tmp_path / "ledger").num_rows)
    assert effects[0] == effects[1]
    assert effects[0].drop > 0
    assert rows == [12, 12]


@pytest.mark.ray
def test_questions_that_the_model_cannot_be_asked_are_left_out_as_a_study_leaves_them_out(
    local_ray: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    docs = [{"sum": f"{a} + 1 =", "answer": "" if a % 3 else str(a + 1)} for a in range(30)]
    write_task(tmp_path, "own_sums", docs, doc_to_text="{{sum}}", doc_to_target="answer")
    options = LmEvalConfig(include_path=str(tmp_path))
    engine, ledger = planted_config(engine__planted__tasks=["own_sums"]).engine, tmp_path / "ledger"
    tasks = load_tasks(["own_sums"], options, "planted", engine)
    items = held_out(tasks)
    whole = [item for item in items["own_sums"] if item.answer.strip()]
    told = f"own_sums: {15 - len(whole)} items left out: {15 - len(whole)} for an answer without tokens"
    measured_on = mean_items(tasks, seed=0)
    empty = sum(not item.answer.strip() for item in measured_on)
    told_of_means = (
        f"{empty} of {len(measured_on)} items to measure the means of heads on are left out: "
        f"{empty} for an answer without tokens"
    )

    (effect,) = ablate("planted", "L1H1=mean", ["own_sums"], engine=engine, ledger=ledger, lm_eval=options)
    assert caplog.messages == [told_of_means, told]
    grid = ablation_grid(
        "planted", AblationGrid({"heads": "L1H1"}), items, out=tmp_path, engine=engine, ledger=ledger, tasks=tasks
    )
    assert caplog.messages == [told_of_means, told, told]
    (base,) = baselines("planted", ["own_sums"], engine=engine, ledger=ledger, lm_eval=options)

    assert 0 < len(whole) < 15
    assert [effect.items, *(row.items for row in grid.effects)] == [len(whole)] * 2
    assert caplog.messages[3] == "own_sums: 20 items left out: 20 for an answer without tokens"
    assert (base.items, base.of) == (10, 30)
    (event,) = (event for event in events(tmp_path) if event["event"] == "left_out")
    assert event["task"] == "own_sums"
    assert event["items"].keys() == {item.id for item in items["own_sums"] if item not in whole}


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
