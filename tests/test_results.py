"""Answers in lm-eval's files: its own fields, its own values, read by its own tools."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cs_localize.ablate import ablate
from cs_localize.cli import main
from cs_localize.config import load_study
from cs_localize.heads import Ablation
from cs_localize.outcomes import Item, Outcome
from cs_localize.results import write_answers
from cs_localize.study import check_study, run_study
from cs_localize.tasks import get_task
from cs_localize.tasks.task import Capability
from tests.studies import planted, planted_config, write_study
from tests.tasks.harness.builders import own_task, write_choice_task, write_sum_task, write_word_task

GOLDEN = Path(__file__).parent / "golden" / "lm_eval"
WHEN = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
KINDS = {"own_choice": write_choice_task, "own_word": write_word_task, "own_sum": write_sum_task}


def words(item: Item) -> str:
    """What the test's model writes to a prompt: a sum, right or wrong."""
    first, second = (int(word) for word in item.prompt.rpartition("Q: ")[2].split()[0:3:2])
    return f" {first + second + first % 2}, I say"


def score(prompt: str, text: str) -> float:
    """The log-probability that the test's model gives to a continuation."""
    return -0.5 - (sum(map(ord, prompt + text)) % 97)


def outcomes_of(task: Capability, items: tuple[Item, ...]) -> list[tuple[Item, Outcome]]:
    answered = []
    for item in items:
        pairs = item.choices or ((item.prompt, item.answer),)
        parts = [Outcome(score(*pair), len(pair[1]) % 2 == 0, "", 5) for pair in pairs]
        generated = [Outcome(math.nan, False, words(item), 5)] if item.max_tokens else parts
        answered.append((item, task.outcome(item, generated)))
    return answered


def read(folder: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    (results,) = folder.rglob("results_*.json")
    samples = {
        path.name.removeprefix("samples_").rpartition("_")[0]: [
            json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in folder.rglob("samples_*.jsonl")
    }
    return json.loads(results.read_text(encoding="utf-8")), samples


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lm-eval writes for the same model, with the folder of the tasks beside it."""
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    class Model(LM):
        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            return [words(Item("", "", request.args[0], "")) for request in requests]

        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
            return [(score(*request.args), len(request.args[1]) % 2 == 0) for request in requests]

        def loglikelihood_rolling(self, requests: list[Instance]) -> None: ...

    folder = tmp_path_factory.mktemp("tasks")
    for name, write in KINDS.items():
        write(folder, name)
    with pytest.MonkeyPatch.context() as patch:
        # lm-eval would resample in forked processes, which hang now and then where other threads hold locks.
        patch.setenv("DISABLE_MULTIPROC", "1")
        results = lm_eval.simple_evaluate(
            model=Model(),
            tasks=list(KINDS),
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=100,
        )
    samples = results.pop("samples")
    tracker = EvaluationTracker(output_path=str(folder / "theirs"))
    tracker.general_config_tracker.model_name_sanitized = "model"
    tracker.save_results_aggregated(results, samples)
    for name, rows in samples.items():
        tracker.save_results_samples(name, rows)
    return folder


@pytest.fixture(scope="module")
def ours(theirs: Path) -> Path:
    tasks = {name: own_task(theirs, name) for name in KINDS}
    splits = {name: task.split(0) for name, task in tasks.items()}
    answered = {name: outcomes_of(tasks[name], (*s.search, *s.held_out)) for name, s in splits.items()}
    write_answers(theirs / "ours", tasks, answered, Ablation(), "model", "vllm", WHEN)
    return theirs / "ours"


def test_every_sample_has_the_fields_and_values_that_lm_eval_writes(ours: Path, theirs: Path) -> None:
    own, others = read(ours)[1], read(theirs / "theirs")[1]
    assert own.keys() == others.keys() == KINDS.keys()
    for name, rows in own.items():
        reference = {(row["doc_id"], row["filter"]): row for row in others[name]}
        assert len(rows) >= 11
        for row in rows:
            other = reference[row["doc_id"], row["filter"]]
            (metric,) = row.pop("metrics")
            assert metric in other.pop("metrics")
            if name == "own_sum":
                # lm-eval's own also has do_sample and the like; the numbers here are those that it was asked with
                for options in (row, other):
                    options["arguments"]["gen_args_0"]["arg_1"] = options["arguments"]["gen_args_0"]["arg_1"]["until"]
            assert row == {field: other[field] for field in row}
            assert {field for field in other if field not in row} <= {"acc", "acc_norm", "perplexity", "exact_match"}


def test_every_value_of_the_results_has_the_name_that_lm_eval_gives_it(ours: Path, theirs: Path) -> None:
    own, others = read(ours)[0], read(theirs / "theirs")[0]
    assert set(own) - set(others) == {"cs_localize_version"}
    for name in KINDS:
        assert set(own["results"][name]) <= set(others["results"][name]) | {"name"}
        for section in ("versions", "n-shot"):
            assert own[section][name] == others[section][name]
        assert set(own["higher_is_better"][name]) <= set(others["higher_is_better"][name])
    # Every document of this task is asked on both sides; of the others some are examples.
    assert own["results"]["own_word"]["acc,none"] == pytest.approx(others["results"]["own_word"]["acc,none"])
    stderr = others["results"]["own_word"]["acc_stderr,none"]
    assert own["results"]["own_word"]["acc_stderr,none"] == pytest.approx(stderr)
    assert own["task_hashes"].keys() == KINDS.keys()


def test_lm_evals_own_tools_read_the_files(ours: Path) -> None:
    import datasets
    from lm_eval.utils import get_results_filenames, get_sample_results_filenames, make_table

    names = [str(path) for path in ours.iterdir()]
    assert get_results_filenames(names) == [str(ours / "results_2026-01-02T03-04-05.678901.json")]
    assert len(get_sample_results_filenames(names)) == 3
    results, samples = read(ours)
    table = make_table(results)
    assert all(f"|{name}" in table for name in KINDS)
    assert "|own_sum   |" in table
    for path in ours.glob("samples_*.jsonl"):
        loaded = datasets.load_dataset("json", data_files=str(path), split="train")
        assert len(loaded) in {len(rows) for rows in samples.values()}


def test_a_group_has_a_line_of_its_own_over_those_of_its_members(tmp_path: Path) -> None:
    from lm_eval.utils import make_table

    for name in ("own_one", "own_two"):
        write_word_task(tmp_path, name, tag="own_tag")
    task = own_task(tmp_path, "own_tag")
    answered = {"own_tag": outcomes_of(task, task.split(0).search)}
    write_answers(tmp_path / "out", {"own_tag": task}, answered, Ablation(), "model", "vllm", WHEN)
    results, samples = read(tmp_path / "out")
    assert set(samples) == {"own_one", "own_two"}
    assert set(results["group_subtasks"]["own_tag"]) == {"own_one", "own_two"}
    right = [outcome.correct for _, outcome in answered["own_tag"]]
    assert results["results"]["own_tag"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert "own_tag" in make_table(results, "groups")
    assert "- own_one" in make_table(results)


def test_a_task_beside_a_group_that_has_it_cannot_be_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_word_task(tmp_path, "own_one", tag="own_tag")
    study = write_study(
        tmp_path / "study.yaml",
        planted(tasks=["own_one", "antonyms"], controls=["own_tag"], lm_eval__include_path=str(tmp_path)),
    )
    heads = ("ablate", "--model", "m", "--heads", "L0H0")
    own = ("--tasks", "own_one,own_tag", "--include-path", str(tmp_path), "--log-samples", str(tmp_path / "out"))
    run = ("run", str(study), "--out", str(tmp_path / "study"), "--log-samples")
    for command in (run, (*heads, *own), ("tasks", "--baseline", *own)):
        assert main(command) == 2
        assert "tasks 'own_one' and 'own_tag' both have questions of 'own_one'" in capsys.readouterr().err
    assert check_study(load_study(study)), "without samples it is a study"


def test_the_files_of_built_in_tasks_are_the_golden_ones_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cs_localize.results.__version__", "0")
    write_golden(tmp_path)
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.iterdir()}


def write_golden(folder: Path) -> None:
    """Two answers to each of two built-in tasks."""
    texts = {"antonyms": (" wrong", " {}\nhot ->"), "swearing": (" damn hell!", " nothing, très bien")}
    tasks = {name: get_task(name) for name in texts}
    answered = {}
    for name, task in tasks.items():
        items = task.split(0, 2, 2).search
        answered[name] = [
            (item, task.outcome(item, [Outcome(math.nan, False, text.replace("{}", item.answer.strip()), 9)]))
            for item, text in zip(items, texts[name], strict=True)
        ]
    write_answers(folder, tasks, answered, Ablation.decode("L4H2"), "some/model", "vllm", WHEN)


@pytest.mark.ray
def test_a_study_and_a_baseline_leave_the_files_where_samples_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "design__requests": 150,
        "confirm__random_draws": 1,
        "search_items": 20,
        "held_out_items": 20,
        "confirm__interactions": False,
    }
    study = write_study(tmp_path / "study.yaml", planted(tasks=["antonyms", "swearing"], **small))
    out = tmp_path / "out"
    assert main(["run", str(study), "--out", str(out), "--log-samples"]) == 0
    confirm = json.loads((out / "confirm.json").read_text())
    folders = {path.name for path in (out / "lm_eval").iterdir()}
    assert folders >= {"baseline", *(f"without-{task}" for task in confirm["matrix"])}
    for folder in folders - {"without-universal-heads"}:
        results, samples = read(out / "lm_eval" / folder)
        target = folder.removeprefix("without-")
        for task in ("antonyms", "swearing"):
            metric = "exact_match,none" if task == "antonyms" else "profane,none"
            expected = confirm["matrix"].get(target, {}).get(task, {"accuracy": confirm["baseline"][task]})["accuracy"]
            assert results["results"][task][metric] == pytest.approx(expected, abs=1e-5)
            assert len(samples[task]) == 20
        assert results["config"]["ablation"] == "" if folder == "baseline" else results["config"]["ablation"]
    counted = sum(row["profanities"] for row in read(out / "lm_eval" / "baseline")[1]["swearing"])
    assert counted == confirm["counts"]["swearing"]["baseline"]
    run_study(planted_config(tasks=["antonyms", "swearing"], **small), out)
    assert not list((out / "lm_eval").glob("*/*"))
    capsys.readouterr()


@pytest.mark.ray
def test_an_ablation_leaves_the_files_with_and_without_it(tmp_path: Path) -> None:
    engine = planted_config(engine__planted__tasks=["antonyms"]).engine
    (effect,) = ablate(
        "planted", "L1H1", ["antonyms"], limit=20, engine=engine, ledger=tmp_path / "ledger", samples=tmp_path / "out"
    )
    for folder, level, spelled in (("baseline", effect.baseline, ""), ("ablated", effect.accuracy, "L1H1")):
        results, samples = read(tmp_path / "out" / folder)
        assert results["results"]["antonyms"]["exact_match,none"] == pytest.approx(level)
        assert results["config"]["ablation"] == spelled
        assert len(samples["antonyms"]) == 20


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    from cs_localize.errors import UsageError

    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        write_answers(tmp_path / "file", {}, {}, Ablation(), "m", "vllm", WHEN)
