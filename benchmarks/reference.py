"""What scoring a reference answer saves over generating: requests a second, and the heads that either reference finds.

    python benchmarks/reference.py [--model DIR_OR_NAME] [--engine vllm|hf] [--rounds N] [--requests N]
                                   [--search N]

Two tasks of lm-evaluation-harness whose answers are generated are made: antonyms, of a word each, and counting, of some
sixty tokens. The search items are asked under random masks, a fresh one for every request, in three ways that take
turns: scored on the task's own answer (``reference: gold``), scored on what the unmodified model answers
(``reference: self``), and generated and graded. Then a small search in each way ranks the heads, the last one by right
and wrong, and the first of the three rankings stand side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from arms import spread
from cs_localize.asking import ask_items, load_tasks
from cs_localize.config import StudyConfig, parse_study
from cs_localize.design import draw_design
from cs_localize.heads import Ablation
from cs_localize.measure.progress import Progress
from cs_localize.measure.protocol import Measurer, Mode, Request
from cs_localize.methods import make_method
from cs_localize.outcomes import Item, Outcome
from cs_localize.seeds import stream
from cs_localize.session import Session, open_session
from cs_localize.tasks import Question, Task, registered_tasks
from processes import positive

TASKS = ("antonyms", "counting_on")
REFERENCES = ("gold", "self")
MOST_GENERATED = 96
COUNTED = 20
DENSITY = 0.05
FIRST = 5


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a directory, a hub id or a built-in name")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm", help="who answers (default: vllm)")
    parser.add_argument("--rounds", type=positive, default=3, help="times that every way is timed (default 3)")
    parser.add_argument("--requests", type=positive, default=200, help="requests of a task and round (default 200)")
    parser.add_argument("--search", type=positive, default=300, help="requests of a search and task (default 300)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reference-") as folder:
        antonyms = next(task for task in registered_tasks() if task.name == "antonyms")
        write_task(Path(folder), antonyms, {"function": "remove_whitespace"})
        # The model counts on past the end: right are answers that start with the numbers asked for.
        numbers = rf"\s*((?:\d+, ){{{COUNTED - 1}}}\d+)"
        write_task(Path(folder), counting_on(), {"function": "regex", "regex_pattern": numbers})
        compare(options, Path(folder))
    return 0


def counting_on() -> Task:
    """Numbers in order, as many in every answer."""
    questions = [
        Question(str(first), f"{first} to {last}", ", ".join(map(str, range(first, last + 1))), str(first))
        for first in range(1, 81)
        for last in [first + COUNTED - 1]
    ]
    shots = [question for question in questions if question.id in ("5", "34", "62")]
    asked = tuple(question for question in questions if question not in shots)
    return Task("counting_on", "numbers in order", asked, tuple(shots), "From {text}:")


def write_task(folder: Path, task: Task, graded: Mapping[str, str]) -> None:
    """A task of lm-eval with the questions, examples and template of one of this package, and a filter of answers."""
    data = folder / f"{task.name}.jsonl"
    documents = [{"prompt": task.template.replace("{text}", q.text), "answer": q.answer} for q in task.questions]
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    examples = [{"prompt": task.template.replace("{text}", q.text), "answer": q.answer} for q in task.shots]
    config = {
        "task": f"words_{task.name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "fewshot_delimiter": "\n",
        "fewshot_config": {"sampler": "first_n", "samples": examples},
        "num_fewshot": len(examples),
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": MOST_GENERATED},
        "filter_list": [{"name": "graded", "filter": [graded, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match"}],
    }
    (folder / f"{task.name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Times the three ways in turn, searches with both references, and prints both."""
    configs = {reference: study(options, folder, reference) for reference in REFERENCES}
    gold = configs["gold"]
    tasks = load_tasks(gold.tasks, gold.lm_eval, gold.model, gold.engine)
    with open_session(gold.model, gold.engine, tasks, folder / "ledger", Progress(None)) as session:
        asked = {reference: ask_items(config, tasks, session.measurer) for reference, config in configs.items()}
        ways: dict[str, tuple[Mapping[str, tuple[Item, ...]], Mode]] = {
            "gold": (asked["gold"].search, "score"),
            "self": (asked["self"].search, "score"),
            "generated": (asked["self"].search, "generate"),
        }
        timed(session, ways, options.requests, "warm-up")
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for way, rate in timed(session, ways, options.requests, f"round {number}").items():
                rates[way].append(rate)
        rankings = {
            way: ranking(Graded(session.measurer) if mode == "generate" else session.measurer, session, gold, items)
            for way, (items, mode) in ways.items()
        }
    print(f"{options.requests} requests of each of {len(TASKS)} tasks, {options.rounds} rounds, median (least .. most)")
    for way, found in rates.items():
        ratios = [rate / base for rate, base in zip(found, rates["generated"], strict=True)]
        print(f"{way:<10} {spread(found, '.1f')} requests/s, {spread(ratios, '.2f')} times generated")
    for task in gold.tasks:
        first = {way: found[task][:FIRST] for way, found in rankings.items()}
        kept = f"{len(asked['self'].search[task])} of {len(asked['gold'].search[task])} items"
        print(f"{task}: the model answers {kept} right")
        for way, heads in first.items():
            shared = len(set(first["self"]) & set(heads))
            print(f"  {way:<10} {' '.join(f'{head:<7}' for head in heads)} {shared} of {FIRST} also with self")


def study(options: argparse.Namespace, folder: Path, reference: str) -> StudyConfig:
    """The study of both tasks with one of the references."""
    return parse_study(
        {
            "model": options.model,
            "tasks": [f"words_{task}" for task in TASKS],
            "lm_eval": {"include_path": str(folder), "reference": reference},
            "engine": {"name": options.engine, "workers": 1},
            "design": {"requests": options.search},
            "crosscheck": {"enabled": False},
        }
    )


def timed(
    session: Session, ways: Mapping[str, tuple[Mapping[str, tuple[Item, ...]], Mode]], count: int, purpose: str
) -> dict[str, float]:
    """Requests a second of every way, each under masks of its own: none finds anything in the ledger or a cache."""
    rates = {}
    for way, (items, mode) in ways.items():
        requests: list[Request] = []
        for task, asked in items.items():
            rng = stream(0, "reference", purpose, way, task)
            rates_of_heads = np.full(session.shape.n_heads, DENSITY)
            design = draw_design("balanced", "request", rates_of_heads, count, len(asked), 1, rng)
            requests += [
                session.measurer.request(
                    asked[item], Ablation.of(session.shape.head(int(head)) for head in np.flatnonzero(mask)), mode
                )
                for mask, item in zip(design.masks, design.items, strict=True)
            ]
        started = time.perf_counter()
        session.measurer.measure(requests, way)
        rates[way] = len(requests) / (time.perf_counter() - started)
    return rates


class Graded:
    """A measurer that generates and grades where a score is asked for; the score is 1 where the answer is right."""

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        """The request to generate; see ``Measurer``."""
        return self._measurer.request(item, ablation, "generate")

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        """The graded answers; see ``Measurer``."""
        return [replace(answer, score=float(answer.correct)) for answer in self._measurer.measure(requests, stage)]


def ranking(
    measurer: Measurer, session: Session, config: StudyConfig, items: Mapping[str, tuple[Item, ...]]
) -> dict[str, list[str]]:
    """All heads by task as the study's method ranks them."""
    relatives: dict[str, frozenset[str]] = {task: frozenset() for task in items}
    found = make_method(config).localize(measurer, session.shape, items, relatives)
    return {task: [str(head) for head in heads] for task, heads in found.ranking.items()}


if __name__ == "__main__":
    sys.exit(main())
