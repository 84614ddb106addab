"""Small programming problems in the two forms that lm-eval's tasks have them, and YAML that asks them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from cs_localize.config import LmEvalConfig
from cs_localize.tasks import get_task
from cs_localize.tasks.harness import HarnessTask

_FUNCTIONS = (
    ("double", "n", "twice n", "return 2 * n", (("2", "4"), ("0", "0"), ("-3", "-6"))),
    ("longest", "words", "the longest of some words", "return max(words, key=len)", (("['a', 'bcd']", "'bcd'"),) * 3),
    (
        "digits",
        "n",
        "the sum of the digits of n",
        "return sum(map(int, str(n)))",
        (("12", "3"), ("0", "0"), ("99", "18")),
    ),
    ("is_even", "n", "whether n is even", "return n % 2 == 0", (("2", "True"), ("7", "False"), ("0", "True"))),
    ("reverse", "text", "a text from its end", "return text[::-1]", (("'abc'", "'cba'"), ("''", "''"), ("'x'", "'x'"))),
    ("count", "items", "how many items there are", "return len(items)", (("[1, 2]", "2"), ("[]", "0"), ("'abc'", "3"))),
)

COMPLETIONS: tuple[dict[str, Any], ...] = tuple(
    {
        "task_id": f"Own/{number}",
        "prompt": f'def {name}({parameter}):\n    """Returns {text}."""\n',
        "canonical_solution": f"    {body}\n",
        "test": "\n\ndef check(candidate):\n"
        + "".join(f"    assert candidate({given}) == {wanted}\n" for given, wanted in tests),
        "entry_point": name,
    }
    for number, (name, parameter, text, body, tests) in enumerate(_FUNCTIONS)
)
"""As HumanEval has them: a prompt to continue."""

DESCRIPTIONS: tuple[dict[str, Any], ...] = tuple(
    {
        "task_id": 11 + number,
        "text": f"Write a function to find {text}.",
        "code": f"def {name}({parameter}):\n    {body}",
        "test_list": [f"assert {name}({given}) == {wanted}" for given, wanted in tests],
    }
    for number, (name, parameter, text, body, tests) in enumerate(_FUNCTIONS)
)
"""As MBPP has them: a description with three tests."""


def library() -> Path:
    """The folder of lm-eval's tasks."""
    spec = find_spec("lm_eval")
    assert spec is not None
    return Path(str(spec.origin)).parent / "tasks"


def write_problems(folder: Path, name: str, docs: Sequence[Mapping[str, Any]] | Path | None = None) -> None:
    """A task of lm-eval's that executes code, with other problems: a file of them, some, or the small ones above."""
    family = name.partition("_")[0]
    if docs is None:
        docs = COMPLETIONS if family == "humaneval" else DESCRIPTIONS
    data = docs if isinstance(docs, Path) else folder / f"{name}.jsonl"
    if not isinstance(docs, Path):
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    config = {
        "include": str(library() / family / f"{name}.yaml"),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data)}},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def code_task(folder: Path, name: str, **options: object) -> HarnessTask:
    """A task that lies in that folder, allowed to execute code."""
    config = LmEvalConfig.model_validate({"include_path": str(folder), **options})
    task = get_task(name, config.allowing(True))
    assert isinstance(task, HarnessTask)
    return task
