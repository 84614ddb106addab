"""Tasks of lm-eval that execute what the model writes, without the modules that lm-eval has for them.

Those modules execute code when they are imported. What a task's YAML takes from them is written anew here, and what is
data in them is read without importing them.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from cs_localize.outcomes import Outcome
from cs_localize.sandbox import passes
from cs_localize.tasks.harness.leaf import Leaf, Unaskable

_FUNCTION = re.compile(r"(/.+)\.(\w+)")
_FENCED = re.compile(r"\w*\n?(.*?)\n?```", re.DOTALL)
_STRUCTURE = ("tag", "group", "task_list")
_SOLUTIONS = ("canonical_solution", "code")

_Answers = Sequence[Sequence[str]]
_Documents = Sequence[Mapping[str, Any]]


def executes(config: object) -> bool:
    """Whether an lm-eval task, as its YAML has it, is graded by executing code."""
    if isinstance(config, Mapping) and config.get("unsafe_code"):
        return True
    return any("code_eval" in module.read_text(encoding="utf-8") for module, _ in _functions(config))


def with_stand_ins(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of such a task with this package's functions for those it names, marked as executing code.

    Returns:
        None if it names a function that has no stand-in, or asks for more than one try a question.
    """
    families = {_family(module) for module, _ in _functions(config)}
    if families not in ({"humaneval"}, {"mbpp"}):
        return None
    (family,) = families
    stand_ins = _STAND_INS[str(family)]
    metrics = config.get("metric_list") or ()
    tries = [metric.get("k", [1]) if isinstance(metric, Mapping) else None for metric in metrics]
    if tries not in ([1], [[1]]) or not {name for _, name in _functions(config)} <= stand_ins.keys():
        return None
    plain = {key: value for key, value in config.items() if key not in _STRUCTURE}
    return {**_replaced(plain, stand_ins), "unsafe_code": True}


class CodeLeaf(Leaf):
    """A task whose answers are programs, right if they pass the tests of their document; see ``Leaf``.

    What lm-eval computes as the metric is the program that decides. It runs in the sandbox, once however often it is
    asked about.
    """

    def right(self, number: int, parts: Sequence[Outcome]) -> bool:
        """Whether the answer to a document passes its tests.

        Raises:
            CsLocalizeError: if the sandbox cannot be had.
        """
        program = self._program(number, parts)
        if program not in self._verdicts:
            self._verdicts[program] = passes(program)
        return self._verdicts[program]

    def unjudged(self, answers: Iterable[tuple[int, Sequence[Outcome]]]) -> list[str]:
        """The programs that answers to documents make, each once, without those that have run."""
        programs = (self._program(number, parts) for number, parts in answers)
        return [program for program in dict.fromkeys(programs) if program not in self._verdicts]

    def judge(self, programs: Sequence[str]) -> Iterator[None]:
        """Runs programs side by side, one a core, and keeps the verdicts; yields after each.

        Raises:
            CsLocalizeError: if the sandbox cannot be had.
        """
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for program, passed in zip(programs, pool.map(passes, programs), strict=True):
                self._verdicts[program] = passed
                yield

    @cached_property
    def _verdicts(self) -> dict[str, bool]:
        return {}

    def _program(self, number: int, parts: Sequence[Outcome]) -> str:
        (generated,) = parts
        return str(self._values(self._task.task_docs[number], [generated.text], self.metric))

    def _offered(self) -> list[str]:
        return [f"{name},{ensemble.name}" for ensemble in self._task._filters for name in self._task._metric_fn_list]

    def _reference(self, doc: Mapping[str, Any]) -> str:
        """The solution that the document has; its target is the tests."""
        for name in _SOLUTIONS:
            if doc.get(name):
                return str(doc[name])
        raise Unaskable("a question without a solution to score")


def _functions(config: object) -> Iterator[tuple[Path, str]]:
    """The functions that a configuration names, by module; those of lm-eval's own packages have no path."""
    if isinstance(config, str):
        found = _FUNCTION.fullmatch(config)
        if found and Path(f"{found[1]}.py").is_file():
            yield Path(f"{found[1]}.py"), found[2]
    elif isinstance(config, Mapping | list):
        for value in config.values() if isinstance(config, Mapping) else config:
            yield from _functions(value)


def _family(module: Path) -> str | None:
    """Which of lm-eval's modules that execute code this one is, or is a copy of."""
    spec = importlib.util.find_spec("lm_eval")
    tasks = Path(str(spec and spec.origin)).parent / "tasks"
    theirs = ((family, tasks / family / "utils.py") for family in _STAND_INS)
    same = (family for family, path in theirs if path.is_file() and path.read_bytes() == module.read_bytes())
    return next(same, None)


def _replaced(value: Any, stand_ins: Mapping[str, Callable[..., object]]) -> Any:  # noqa: ANN401  # what YAML can hold
    if isinstance(value, Mapping):
        return {key: _replaced(inner, stand_ins) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, stand_ins) for inner in value]
    for module, name in _functions(value):
        return _literal_of(module, name) if stand_ins[name] is _literal_of else stand_ins[name]
    return value


def _literal_of(module: Path, function: str) -> object:
    """What a function returns that does nothing but return a literal, read from its source."""
    for statement in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            (only,) = statement.body
            if isinstance(only, ast.Return) and only.value is not None:
                return ast.literal_eval(only.value)
    raise ValueError(f"{module} has no function {function} that returns a literal alone")


def _metric(name: str) -> Callable[..., str]:
    """A metric of that name whose value is the program that decides: the answer, then the tests."""

    def program(references: Sequence[str], predictions: Sequence[str | Sequence[str]], k: object = None) -> str:
        (tests,), (answer,) = references, predictions
        return f"{answer if isinstance(answer, str) else answer[0]}\n{tests}"

    program.__name__ = name
    return program


def _after_prompt(answers: _Answers, docs: _Documents) -> list[list[str]]:
    """The answer goes on where the prompt ends."""
    return [[doc["prompt"] + answer for answer in own] for own, doc in zip(answers, docs, strict=True)]


def _after_prompt_up_to_fence(answers: _Answers, docs: _Documents) -> list[list[str]]:
    """Likewise, and ends where the block of code does that the prompt has opened."""
    return _after_prompt([[answer.partition("```")[0] for answer in own] for own in answers], docs)


def _up_to_fence(answers: _Answers, docs: _Documents) -> list[list[str]]:
    """The answer ends where the block of code does that the prompt has opened; it is nothing if that stays open.

    As in lm-eval, a word at the very start is taken for the name of the block's language and left out.
    """
    found = [[_FENCED.match(answer) for answer in own] for own in answers]
    return [[match[1] if match else "" for match in own] for own in found]


_STAND_INS: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "humaneval": {
        "pass_at_k": _metric("pass@1"),
        "build_predictions": _after_prompt,
        "build_predictions_instruct": _after_prompt_up_to_fence,
    },
    "mbpp": {
        "pass_at_1": _metric("pass_at_1"),
        "build_predictions": _up_to_fence,
        "list_fewshot_samples": _literal_of,
    },
}
