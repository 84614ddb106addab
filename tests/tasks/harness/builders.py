"""Tasks of lm-eval that lie on this machine, one of each kind, and a measurer without Ray."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cs_localize.config import LmEvalConfig
from cs_localize.measure.hf import HFEngine
from cs_localize.measure.ledger import Ledger
from cs_localize.measure.measurer import LedgerMeasurer
from cs_localize.measure.progress import Progress
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.tokens import ItemEncoder
from cs_localize.outcomes import Outcome
from cs_localize.tasks import Capability, get_task

SHARED = Path(__file__).parents[4] / "shared" / "data"
ANIMALS = ("cat", "dog", "horse", "sheep", "goose", "mouse", "bear", "wolf", "crow", "frog", "hen", "owl")
CAPITALS = (("France", "Paris"), ("Japan", "Tokyo"), ("Peru", "Lima"), ("Kenya", "Nairobi"), ("Türkiye", "Ankara"))
PLACES = ("Zürich", "São Paulo", "Kraków", "東京", "Malmö", "Łódź")


def write_task(folder: Path, name: str, docs: Sequence[Mapping[str, Any]], **config: object) -> None:
    """A task of lm-eval's whose test documents lie beside it."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **config,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task, allow_unicode=True), encoding="utf-8")


def write_choice_task(folder: Path, name: str = "own_choice", **config: object) -> None:
    """Multiple choice: one choice is a prefix of another, some are not ASCII, and they differ in length."""
    docs = [
        {
            "question": f"Where is the {word} of {place}?",
            "choices": [f"a street in {place}", word, f"{word} house", place],
            "label": number % 2,
        }
        for place in PLACES
        for number, word in enumerate(ANIMALS[:4])
    ]
    metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
    write_task(
        folder,
        name,
        docs,
        **{
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "metric_list": metrics,
        }
        | config,
    )


def write_blank_task(folder: Path, name: str = "own_blank") -> None:
    """Multiple choice in which every choice has a prompt of its own and one ending is scored after each."""
    docs = [
        {"first": f"The {word} ran because the", "options": [word, "stone"], "ending": "was afraid.", "label": 0}
        for word in ANIMALS
    ]
    write_task(
        folder,
        name,
        docs,
        output_type="multiple_choice",
        doc_to_text="{{label}}",
        doc_to_choice="{{[first + ' ' + options[0], first + ' ' + options[1]]}}",
        doc_to_target="ending",
        metric_list=[{"metric": "acc"}],
    )


def write_word_task(folder: Path, name: str = "own_word", **config: object) -> None:
    """Log-likelihood of a last word."""
    docs = [{"text": f"a {one}, a {other}, a {one}, a {other}"} for one, other in pairwise(ANIMALS)]
    write_task(
        folder,
        name,
        docs,
        **{
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            ],
        }
        | config,
    )


def write_sum_task(folder: Path, name: str = "own_sum", **config: object) -> None:
    """Generated answers under two filters, with two stop strings and three examples in front."""
    docs = [{"sum": f"{a} + {b}", "answer": str(a + b)} for a in range(1, 7) for b in range(1, 7)]
    number = {"function": "regex", "regex_pattern": r"(-?[0-9]+)"}
    write_task(
        folder,
        name,
        docs,
        **{
            "output_type": "generate_until",
            "doc_to_text": "Q: {{sum}}\nA:",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": ["Q:", "\n\n"], "max_gen_toks": 12},
            "num_fewshot": 3,
            "fewshot_config": {"sampler": "first_n"},
            "filter_list": [
                {"name": "first", "filter": [number, {"function": "take_first"}]},
                {"name": "last", "filter": [{**number, "group_select": -1}, {"function": "take_first"}]},
            ],
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
        | config,
    )


def write_gsm8k(folder: Path, **config: object) -> list[dict[str, str]]:
    """lm-eval's gsm8k with the first 120 questions of ``../shared``, from which its examples come too."""
    lines = (SHARED / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:120]
    data = str(folder / "gsm8k.jsonl")
    Path(data).write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = find_spec("lm_eval")
    assert spec is not None
    task = {
        "include": str(Path(str(spec.origin)).parent / "tasks" / "gsm8k" / "gsm8k.yaml"),
        "task": "gsm8k",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"train": data, "test": data}},
        **config,
    }
    (folder / "gsm8k.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return [json.loads(line) for line in lines]


def write_own_tasks(folder: Path) -> None:
    """One task of each kind."""
    write_choice_task(folder)
    write_blank_task(folder)
    write_word_task(folder)
    write_sum_task(folder)


def own_task(folder: Path, name: str, **options: object) -> Capability:
    """A task that lies in that folder."""
    return get_task(name, LmEvalConfig.model_validate({"include_path": str(folder), **options}))


class EngineInProcess:
    """A fleet of one engine in this process."""

    discarded = 0

    def __init__(self, engine: HFEngine) -> None:
        self._engine = engine

    def __enter__(self) -> EngineInProcess:
        return self

    def map(self, requests: Sequence[Request]) -> Iterator[tuple[range, list[Outcome]]]:
        yield range(len(requests)), self._engine.measure(requests)

    def evidence(self) -> dict[int, dict[str, float]]:
        return {}

    def close(self) -> None:
        """It outlives the measurer."""


def measurer(folder: Path, engine: HFEngine, encoder: ItemEncoder, tasks: Mapping[str, Capability]) -> LedgerMeasurer:
    """A measurer of the given tasks with a ledger in that folder."""
    spec = EngineSpec("hf", "", "model", engine.shape)
    progress = Progress(None, io.StringIO())
    return LedgerMeasurer(spec, Ledger(folder), lambda: EngineInProcess(engine), encoder, progress, tasks.__getitem__)
