from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from cs_localize.config import dump_study
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.findings import dump_file
from cs_localize.folder import StudyResult, clear_folder, load_result
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.planted import PlantedEngine
from cs_localize.report import write_report
from cs_localize.session import engine_spec
from cs_localize.study import run_study
from cs_localize.tasks import get_task
from tests.studies import TASKS, command, hear_interrupts, planted, planted_config, repeated_keys, wait_for, write_study

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(scope="module")
def finished(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    return run_study(planted_config(), tmp_path_factory.mktemp("study"))


def test_a_study_ranks_each_tasks_strongest_planted_head_first(finished: StudyResult) -> None:
    config = planted_config()
    spec, _ = engine_spec(config.model, config.engine, TASKS)
    engine = PlantedEngine.from_spec(spec)

    for task, finding in finished.heads.tasks.items():
        assert finding.ranking[0].head == str(next(iter(engine.truth(task))))
        assert finding.named[0] == finding.ranking[0].head


@pytest.mark.parametrize("solver", ["lasso", "cvxpy"])
def test_both_solvers_are_reachable_from_a_study_and_name_the_same_first_head(
    finished: StudyResult, tmp_path: Path, solver: str
) -> None:
    config = planted_config(solver__name=solver, ledger=str(finished.out / "ledger"), confirm__enabled=False)

    result = run_study(config, tmp_path)

    assert result.heads.solver == solver
    for task, finding in result.heads.tasks.items():
        assert finding.named[0] == finished.heads.tasks[task].named[0]


def test_a_study_leaves_every_file_the_design_promises(finished: StudyResult) -> None:
    names = {path.name for path in finished.out.iterdir()}

    assert {"study.yaml", "design.npz", "ledger", "heads.json", "confirm.json", "report.html", "events.jsonl"} <= names
    assert (finished.out / "heads.json").read_text(encoding="utf-8") == dump_file(finished.heads)
    for line in (finished.out / "events.jsonl").read_text(encoding="utf-8").splitlines():
        assert "event" in json.loads(line)


def closing_counts(finished: StudyResult) -> dict[str, dict[str, int]]:
    events = [json.loads(line) for line in (finished.out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    counts: dict[str, dict[str, int]] = next(event for event in events if event["event"] == "study_finished")["counts"]
    return counts


def test_the_requests_of_a_task_are_the_masked_rows_of_the_ledger(finished: StudyResult) -> None:
    tables = [pq.read_table(part) for part in (finished.out / "ledger").glob("*.parquet")]
    rows = [row for table in tables for row in table.select(["task", "item", "mode", "ablation"]).to_pylist()]
    searched = {(task, item.id) for task in TASKS for item in get_task(task).split(0, 40, 40).search}
    masked = [row for row in rows if row["ablation"] and (row["task"], row["item"]) in searched]
    scored = [row for row in masked if row["mode"] == "score"]
    beside = closing_counts(finished)["scoring"]["measured"]
    several = Counter(row["task"] for row in scored if "," in row["ablation"])
    requests = planted_config().design.requests
    assert all(requests <= count <= requests + 30 for count in several.values()), "the design's, and the named heads'"
    assert 0 < sum("," not in row["ablation"] for row in scored) <= len(TASKS) * 10 * 24 + beside, "candidates alone"
    # The naming of one task asks the others' items as controls, so only the sum over tasks is exact.
    spent = sum(finding.requests for finding in finished.heads.tasks.values()) + beside
    assert len(masked) <= spent <= len(masked) + 0.02 * spent, "repeated requests are asked once and are few"


def test_the_masks_of_the_search_see_no_held_out_item(finished: StudyResult) -> None:
    tables = [pq.read_table(part) for part in (finished.out / "ledger").glob("*.parquet")]
    rows = [row for table in tables for row in table.select(["task", "item", "mode", "ablation"]).to_pylist()]
    held_out = {(task, item.id) for task in TASKS for item in get_task(task).split(0, 40, 40).held_out}
    # Pairs of named heads are scored on held-out items too, at the confirmation; masks are those of the designs.
    shape = ModelShape(**planted_config().engine.planted["shape"])
    heads = list(shape.all_heads())
    with np.load(finished.out / "design.npz") as design:
        masks = np.concatenate([design[f"{task}.masks"] for task in TASKS])
    asked = {Ablation.of(heads[i] for i in np.flatnonzero(mask)).encode() for mask in masks}
    masked = {(row["task"], row["item"]) for row in rows if row["mode"] == "score" and row["ablation"] in asked}
    assert len(masked) == 40 * len(TASKS)
    assert not masked & held_out


def test_the_closing_event_says_what_each_stage_took(finished: StudyResult) -> None:
    events = [json.loads(line) for line in (finished.out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    closing = next(event for event in events if event["event"] == "study_finished")
    stages = {event["stage"] for event in events if event["event"] == "stage_finished"}
    assert set(closing["counts"]) == stages
    for count in closing["counts"].values():
        assert count["asked"] == count["served"] + count["measured"]
    rows = sum(pq.read_metadata(part).num_rows for part in (finished.out / "ledger").glob("*.parquet"))
    assert sum(count["measured"] for count in closing["counts"].values()) == rows


def test_zeroing_the_named_heads_hurts_their_task_more_than_the_controls(finished: StudyResult) -> None:
    confirm = finished.confirm
    assert confirm is not None
    for task, row in confirm.matrix.items():
        controls = [drop.drop for other, drop in row.items() if other != task]
        assert row[task].drop > 3 * max(sum(controls) / len(controls), 0.01)


def test_an_edited_effect_in_heads_json_shows_on_the_page(finished: StudyResult, tmp_path: Path) -> None:
    for name in ("heads.json", "confirm.json", "study.yaml"):
        (tmp_path / name).write_bytes((finished.out / name).read_bytes())
    data = json.loads((tmp_path / "heads.json").read_text(encoding="utf-8"))
    data["tasks"]["antonyms"]["ranking"][0]["effect"] = 4.3217
    (tmp_path / "heads.json").write_text(json.dumps(data), encoding="utf-8")

    page = write_report(tmp_path).read_text(encoding="utf-8")

    assert "4.32" in page
    assert "4.32" not in (finished.out / "report.html").read_text(encoding="utf-8")


def test_the_same_study_again_measures_nothing_and_writes_the_same_bytes(finished: StudyResult) -> None:
    before = {name: (finished.out / name).read_bytes() for name in ("heads.json", "confirm.json", "report.html")}
    parts = sorted((finished.out / "ledger").glob("*.parquet"))

    run_study(planted_config(), finished.out)

    assert {name: (finished.out / name).read_bytes() for name in before} == before
    assert sorted((finished.out / "ledger").glob("*.parquet")) == parts


def test_another_study_in_the_same_folder_takes_the_old_results_away_and_keeps_the_ledger(
    finished: StudyResult, tmp_path: Path
) -> None:
    (tmp_path / "study.yaml").write_text(dump_study(planted_config(seed=1)), encoding="utf-8")
    (tmp_path / "confirm.json").write_text("{}", encoding="utf-8")

    run_study(
        planted_config(confirm__enabled=False, ledger=str(finished.out / "ledger"), design__requests=200), tmp_path
    )

    assert not (tmp_path / "confirm.json").exists()


def test_whether_answers_are_logged_takes_no_result_away(finished: StudyResult, tmp_path: Path) -> None:
    quiet, logging = planted_config(), planted_config(confirm__log_samples=True)
    spec, _ = engine_spec(quiet.model, quiet.engine, quiet.tasks)
    samples = tmp_path / "lm_eval" / "baseline" / "results_1.json"
    samples.parent.mkdir(parents=True)
    samples.write_text("{}", encoding="utf-8")
    (tmp_path / "study.yaml").write_text(dump_study(quiet), encoding="utf-8")
    shutil.copy(finished.out / "heads.json", tmp_path)
    (tmp_path / "crosscheck.json").write_text("{}", encoding="utf-8")

    for config, kept in ((logging, True), (quiet, False)):
        clear_folder(config, tmp_path, spec, {})
        assert (tmp_path / "study.yaml").read_text(encoding="utf-8") == dump_study(config)
        assert (tmp_path / "crosscheck.json").exists()
        assert samples.exists() == kept


def test_new_heads_of_another_engine_never_lie_beside_the_old_confirmation(
    finished: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    config = planted_config(ledger=str(finished.out / "ledger"))
    (tmp_path / "study.yaml").write_text(dump_study(config), encoding="utf-8")
    for name in ("heads.json", "confirm.json", "report.html"):
        text = (finished.out / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace(finished.heads.provenance.engine, "older"), encoding="utf-8")
    monkeypatch.setattr("cs_localize.study.Study.confirm", interrupted)

    with pytest.raises(KeyboardInterrupt):
        run_study(config, tmp_path)

    assert load_result(tmp_path).heads.provenance == finished.heads.provenance
    assert not (tmp_path / "confirm.json").exists()
    assert not (tmp_path / "report.html").exists()


def test_a_driver_interrupted_terminated_and_killed_ends_with_the_same_heads_json(
    finished: StudyResult, tmp_path: Path
) -> None:
    study = write_study(tmp_path / "study.yaml", planted(engine__planted__delay_s=0.2, confirm__enabled=False))
    arguments = command("run", str(study), "--out", str(tmp_path / "out"))
    ledger = tmp_path / "out" / "ledger"
    measured = 0
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        log = tmp_path / kind.name
        with log.open("wb") as stderr:
            driver = subprocess.Popen(
                arguments,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=hear_interrupts,
            )
        wait_for(lambda before=measured: _rows(ledger) >= before + 100)
        os.kill(driver.pid, kind)
        code = driver.wait(timeout=60)
        if kind == signal.SIGKILL:
            assert code == -kind
        else:
            assert code == 130
            assert log.read_text(encoding="utf-8").splitlines()[-1].startswith("cs-localize: interrupted")
        measured = _rows(ledger)

    last = subprocess.run(arguments, capture_output=True, text=True, check=False)

    assert last.returncode == 0, last.stderr
    assert measured < _rows(ledger)
    assert repeated_keys(ledger) == 0
    expected = json.loads((finished.out / "heads.json").read_text(encoding="utf-8"))
    found = json.loads((tmp_path / "out" / "heads.json").read_text(encoding="utf-8"))
    found["provenance"]["command"] = expected["provenance"]["command"]
    assert found == expected


def test_a_planted_study_refuses_the_cross_check(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"crosscheck\.enabled to false"):
        run_study(planted_config(crosscheck__enabled=True), tmp_path)


def test_a_pilot_that_takes_all_requests_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"design\.requests is 24 and the pilot alone takes 24"):
        run_study(planted_config(design__requests=24), tmp_path)


def test_an_unknown_task_is_one_line_and_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="antonym"):
        run_study(planted_config(tasks=["antonymz"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(CsLocalizeError, match="--out"):
        run_study(planted_config(), tmp_path / "file")


def test_a_study_file_in_the_folder_that_somebody_broke_is_written_anew(finished: StudyResult, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_bytes(b"\xff\xfe\x00")
    config = planted_config(confirm__enabled=False, ledger=str(finished.out / "ledger"))

    run_study(config, tmp_path)

    assert (tmp_path / "study.yaml").read_text(encoding="utf-8") == dump_study(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"design__density": 0.001}, "raise the density"),
        ({"design__unit": "block", "design__block": 50}, "a block of 50 items"),
        ({"design__requests": 3, "design__pilot": {"requests_a_layer": 0}}, r"raise design\.requests"),
    ],
)
def test_numbers_that_make_no_design_are_refused_before_anything_is_measured(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run_study(planted_config(tasks=["antonyms"], **changes), tmp_path)
    assert not list((tmp_path / "ledger").glob("*.parquet"))


def test_a_second_study_into_a_folder_that_is_in_use_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("of the first", encoding="utf-8")
    (tmp_path / "heads.json").write_text("of the first", encoding="utf-8")
    other = FileLock(tmp_path / "ledger" / ".lock")
    (tmp_path / "ledger").mkdir()

    with other, pytest.raises(CsLocalizeError, match="another study is writing"):
        run_study(planted_config(), tmp_path)

    for name in ("study.yaml", "heads.json"):
        assert (tmp_path / name).read_text(encoding="utf-8") == "of the first"


def _rows(ledger: Path) -> int:
    """Outcomes on disk; 0 while a file of them is just being merged into another."""
    try:
        return sum(pq.read_metadata(part).num_rows for part in ledger.glob("*.parquet"))
    except FileNotFoundError:
        return 0
