"""Tasks that execute what the model writes: the same prompts and verdicts as lm-eval's, and none of its modules."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from cs_localize import sandbox
from cs_localize.config import LmEvalConfig, dump_study, parse_study
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation
from cs_localize.measure.ledger import Ledger
from cs_localize.measure.measurer import LedgerMeasurer
from cs_localize.measure.progress import Progress
from cs_localize.measure.protocol import Request
from cs_localize.measure.tokens import WordEncoder
from cs_localize.outcomes import Item, Outcome
from cs_localize.sandbox import passes
from cs_localize.tasks import get_task
from cs_localize.tasks.harness import HarnessTask, code, library
from tests.measure.toy import toy_spec
from tests.tasks.harness.problems import COMPLETIONS, DESCRIPTIONS, code_task, write_problems
from tests.tasks.harness.problems import library as lm_evals

SHARED = Path(__file__).parents[4] / "shared" / "data"
NAMES = (
    "humaneval",
    "humaneval_instruct",
    "humaneval_plus",
    "mbpp",
    "mbpp_instruct",
    "mbpp_plus",
    "mbpp_plus_instruct",
)
LAYOUTS: tuple[Callable[[str], str], ...] = (
    lambda solution: solution,
    lambda solution: f"\n{solution}\n```\nThis is it. ```x```",
    lambda solution: solution.replace("return", "return not"),
    lambda solution: "",
    lambda solution: f"{solution}\n```python\nraise ValueError\n```",
    lambda solution: f"python\n{solution}\n```",
)


def generated(text: str) -> list[Outcome]:
    return [Outcome(math.nan, False, text, 9)]


def written(name: str, number: int) -> str:
    """What a model writes to a small problem: a solution or none, with and without what chat models add."""
    solution = COMPLETIONS[number]["canonical_solution"] if "human" in name else DESCRIPTIONS[number]["code"]
    return LAYOUTS[number](solution)


def every(task: HarnessTask) -> list[Item]:
    split = task.split(0)
    return sorted((*split.search, *split.held_out), key=lambda item: int(item.id))


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the package that lm-eval's modules load code_eval with: it executes the programs of these tests."""

    class CodeEval:
        def compute(self, references: list[str], predictions: list[list[str]], k: list[int]) -> tuple[object, object]:
            (test,), ((program,),) = references, predictions
            try:
                exec(f"{program}\n{test}", {})
            except BaseException:
                return {"pass@1": 0.0}, {}
            return {"pass@1": 1.0}, {}

    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "evaluate", types.SimpleNamespace(load=lambda name: CodeEval()))
    yield
    for module in set(sys.modules) - before:
        if module.startswith("lm_eval.tasks."):
            del sys.modules[module]


def lm_evals_samples(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval itself asks such a model and makes of its answers, by task."""
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Parrot(LM):
        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            return [written(str(request.task_name), int(request.doc_id or 0)) for request in requests]

        def loglikelihood(self, requests: list[Instance]) -> None: ...

        def loglikelihood_rolling(self, requests: list[Instance]) -> None: ...

    results = lm_eval.simple_evaluate(
        model=Parrot(),
        tasks=list(NAMES),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        confirm_run_unsafe_code=True,
    )
    samples = results["samples"]
    return {name: sorted(own, key=lambda sample: int(sample["doc_id"])) for name, own in samples.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small problems under every task."""
    made = tmp_path_factory.mktemp("tasks")
    for name in NAMES:
        write_problems(made, name)
    return made


@pytest.fixture(scope="module")
def tasks(folder: Path) -> dict[str, HarnessTask]:
    return {name: code_task(folder, name) for name in NAMES}


@pytest.mark.usefixtures("evaluate")
def test_prompts_stops_and_verdicts_are_lm_evals(folder: Path, tasks: dict[str, HarnessTask]) -> None:
    for name, theirs in lm_evals_samples(folder).items():
        task, items = tasks[name], every(tasks[name])
        assert [item.prompt for item in items] == [sample["arguments"][0][0] for sample in theirs]
        assert {item.stop for item in items} == {tuple(theirs[0]["arguments"][0][1]["until"])}
        metric = task.metric.partition(",")[0]
        verdicts = [task.outcome(item, generated(written(name, int(item.id)))).correct for item in items]
        assert verdicts == [bool(sample[metric]) for sample in theirs], name
        assert set(verdicts) == {True, False}


@pytest.mark.usefixtures("evaluate")
@pytest.mark.parametrize("family", ["humaneval", "mbpp"])
def test_every_stand_in_does_what_the_function_of_lm_eval_does(family: str) -> None:
    spec = importlib.util.spec_from_file_location(f"{family}_of_lm_eval", lm_evals() / family / "utils.py")
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    pieces = ("```", "``", "def", " f", "\n", "python", "x = '```'", "")
    texts = [a + b + c + d for a in pieces for b in pieces for c in pieces for d in pieces]
    docs = [{"prompt": "def f():\n"}] * len(texts)
    for name, stand_in in code._STAND_INS[family].items():
        if name.startswith("build_predictions"):
            answers = [[text] for text in texts]
            assert stand_in(answers, docs) == getattr(theirs, name)(answers, docs)
    if family == "mbpp":
        assert (
            code._literal_of(lm_evals() / "mbpp" / "utils.py", "list_fewshot_samples") == theirs.list_fewshot_samples()
        )


def test_nothing_of_lm_evals_that_executes_code_is_imported(tasks: dict[str, HarnessTask]) -> None:
    for name, task in tasks.items():
        assert not task.outcome(every(task)[0], generated("")).correct
        assert not [module for module in sys.modules if module.startswith(f"lm_eval.tasks.{name.partition('_')[0]}")]


def test_the_search_scores_the_solution_and_executes_nothing(
    tasks: dict[str, HarnessTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "passes", lambda program: pytest.fail("executed"))
    for name, docs, solution in (("humaneval", COMPLETIONS, "canonical_solution"), ("mbpp", DESCRIPTIONS, "code")):
        assert [item.answer for item in every(tasks[name])] == [doc[solution] for doc in docs]
        assert tasks[name].score == "log-probability of the reference answer"


def test_a_question_without_a_solution_is_left_out(tmp_path: Path) -> None:
    docs = [
        {**doc, "canonical_solution": "" if number == 2 else doc["canonical_solution"]}
        for number, doc in enumerate(COMPLETIONS)
    ]
    write_problems(tmp_path, "humaneval", docs)
    split = code_task(tmp_path, "humaneval").split(0)
    assert dict(split.left_out) == {"2": "a question without a solution to score"}


def test_without_the_flag_it_is_refused_in_a_line_that_names_it(tmp_path: Path) -> None:
    write_problems(tmp_path, "humaneval")
    with pytest.raises(UsageError, match=r"^task 'humaneval' is graded by .*; allow that with --allow-code-execution$"):
        get_task("humaneval", LmEvalConfig(include_path=str(tmp_path)))


def test_no_file_can_give_the_flag_and_none_records_it() -> None:
    study = {"model": "m", "tasks": ["humaneval"]}
    with pytest.raises(UsageError, match=r"allow_code_execution': no file can allow this; give --allow-code-execution"):
        parse_study({**study, "lm_eval": {"allow_code_execution": True}})
    allowed = parse_study(study).allowing(True)
    assert allowed.lm_eval.allow_code_execution
    assert dump_study(allowed) == dump_study(parse_study(study))


def test_without_a_sandbox_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_problems(tmp_path, "humaneval")
    monkeypatch.setattr(library, "unavailable", lambda: "code cannot be shut in: unshare: Operation not permitted")
    with pytest.raises(UsageError, match=r"^task 'humaneval' is graded by .*; code cannot be shut in: unshare"):
        code_task(tmp_path, "humaneval")


def test_without_a_sandbox_its_questions_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_problems(tmp_path, "humaneval")
    monkeypatch.setattr(library, "unavailable", lambda: "code cannot be shut in: unshare: Operation not permitted")
    assert get_task("humaneval", LmEvalConfig(include_path=str(tmp_path)).ungraded()).split(0, 1, 1).search


@pytest.mark.parametrize("metrics", [None, [], "pass@1", ["pass@1"], {"metric": "pass@1"}])
def test_metrics_that_are_no_list_of_options_are_refused(metrics: object, tmp_path: Path) -> None:
    write_problems(tmp_path, "humaneval")
    config = yaml.safe_load((tmp_path / "humaneval.yaml").read_text())
    (tmp_path / "humaneval.yaml").write_text(yaml.safe_dump({**config, "metric_list": metrics}))
    with pytest.raises(UsageError, match=r"^task 'humaneval' is graded by executing code"):
        code_task(tmp_path, "humaneval")


@pytest.mark.parametrize("change", ["function", "module", "tries"])
def test_what_is_not_as_in_lm_eval_is_refused(change: str, tmp_path: Path) -> None:
    text = (lm_evals() / "humaneval" / "humaneval.yaml").read_text()
    module = (lm_evals() / "humaneval" / "utils.py").read_text()
    proof = tmp_path / "imported"
    (tmp_path / "utils.py").write_text(module + (f"\nopen({str(proof)!r}, 'w')\n" if change == "module" else ""))
    changed = {"function": ("build_predictions", "build_others"), "module": ("", ""), "tries": ("k: [1]", "k: [1, 8]")}
    (tmp_path / "humaneval.yaml").write_text(text.replace(*changed[change]))
    with pytest.raises(UsageError, match="in a way that this version does not know"):
        code_task(tmp_path, "humaneval")
    assert not proof.exists()


def test_a_copy_of_lm_evals_files_is_known(tmp_path: Path) -> None:
    write_problems(tmp_path, "humaneval")
    text = (lm_evals() / "humaneval" / "humaneval.yaml").read_text()
    (tmp_path / "utils.py").write_bytes((lm_evals() / "humaneval" / "utils.py").read_bytes())
    config = yaml.safe_load((tmp_path / "humaneval.yaml").read_text())
    text = text.replace(
        "dataset_path: openai/openai_humaneval",
        yaml.safe_dump({k: config[k] for k in ("dataset_path", "dataset_kwargs")}),
    )
    (tmp_path / "humaneval.yaml").write_text(text)
    assert code_task(tmp_path, "humaneval").metric == "pass@1,create_test"


def test_a_group_cannot_bring_such_a_task_in(tmp_path: Path) -> None:
    write_problems(tmp_path, "humaneval")
    (tmp_path / "group.yaml").write_text(yaml.safe_dump({"group": "own_group", "task": ["humaneval"]}))
    with pytest.raises(UsageError, match="no group or tag can bring in, such as 'own_group'; name the task itself"):
        code_task(tmp_path, "own_group")


class Fleet:
    """Answers every request with the solution of its item where it is of even number, and else with nothing."""

    discarded = 0

    def __init__(self) -> None:
        self.asked = 0

    def __enter__(self) -> Fleet:
        return self

    def map(self, requests: Sequence[Request]) -> Iterator[tuple[range, list[Outcome]]]:
        self.asked += len(requests)
        texts = [request.item.answer if int(request.item.id) % 2 == 0 else "    pass\n" for request in requests]
        yield range(len(requests)), [Outcome(math.nan, False, text, 5) for text in texts]

    def evidence(self) -> dict[int, dict[str, float]]:
        return {}

    def close(self) -> None: ...


def measured(folder: Path, fleet: Fleet, shown: io.StringIO) -> list[bool]:
    task = code_task(folder, "humaneval")
    progress = Progress(folder / "events.jsonl", shown)
    tasks = {"humaneval": task}
    with LedgerMeasurer(
        toy_spec(), Ledger(folder / "ledger"), lambda: fleet, WordEncoder(), progress, tasks.__getitem__
    ) as asking:
        requests = [asking.request(item, Ablation(), "generate") for item in every(task)]
        return [outcome.correct for outcome in asking.measure(requests, "confirm")]


def test_answers_are_executed_once_and_again_from_the_ledger_by_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_problems(tmp_path, "humaneval")
    executed: list[str] = []
    monkeypatch.setattr(code, "passes", lambda program: bool(executed.append(program)) or passes(program))
    fleet, shown = Fleet(), io.StringIO()
    assert measured(tmp_path, fleet, shown) == [True, False] * 3
    assert len(executed) == len(set(executed)) == 6
    assert "executing" not in shown.getvalue(), "it was done as the answers came"
    assert measured(tmp_path, fleet, shown) == [True, False] * 3
    assert fleet.asked == 6
    assert len(executed) == 12
    assert "confirm: executing answers: 6 requests" in shown.getvalue()


def test_an_interruption_while_answers_are_executed_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_problems(tmp_path, "humaneval")

    def interrupted(program: str) -> bool:
        raise KeyboardInterrupt

    fleet = Fleet()
    with monkeypatch.context() as patch:
        patch.setattr(code, "passes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path, fleet, io.StringIO())
    assert measured(tmp_path, fleet, io.StringIO()) == [True, False] * 3
    assert fleet.asked == 6, "nothing was asked again"


class Wrong(ast.NodeTransformer):
    """Makes every function return something else."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(ast.Tuple([ast.Constant("wrong"), node.value or ast.Constant(None)], ast.Load()))


def graded(docs: Sequence[dict[str, Any]]) -> tuple[list[bool], list[bool]]:
    """Verdicts on the solutions of some problems, and on solutions that return something else."""
    solutions = [doc["prompt"] + doc["canonical_solution"] for doc in docs]
    mutants = [ast.unparse(ast.fix_missing_locations(Wrong().visit(ast.parse(text)))) for text in solutions]
    tests = [f"\n{doc['test']}\ncheck({doc['entry_point']})" for doc in docs]
    programs = [text + test for texts in (solutions, mutants) for text, test in zip(texts, tests, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(sandbox.passes, programs))
    return verdicts[: len(docs)], verdicts[len(docs) :]


def test_solutions_pass_and_mutants_fail() -> None:
    right, wrong = graded(COMPLETIONS)
    assert all(right)
    assert not any(wrong)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared")
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.full)])
def test_solutions_of_humaneval_pass_and_mutants_fail(step: int) -> None:
    docs = [json.loads(line) for line in (SHARED / "HumanEval.jsonl").read_text().splitlines()]
    right, wrong = graded(docs[::step])
    assert len(right) == math.ceil(164 / step)
    assert all(right)
    assert not any(wrong)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared")
def test_humaneval_is_asked_and_graded_as_a_task(tmp_path: Path) -> None:
    write_problems(tmp_path, "humaneval", SHARED / "HumanEval.jsonl")
    task = code_task(tmp_path, "humaneval")
    split = task.split(0, 3, 3)
    for item in (*split.search, *split.held_out):
        assert item.max_tokens == 1024
        assert task.outcome(item, generated(item.answer)).correct
        assert not task.outcome(item, generated("    return None\n")).correct
