"""Tasks of the user's own: questions from a JSON Lines file, or from a function in a Python file."""

from __future__ import annotations

import codecs
import hashlib
import json
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from cs_localize.config import DataConfig, LmEvalConfig
from cs_localize.errors import UsageError, one_line
from cs_localize.tasks.harness import Chat
from cs_localize.tasks.registry import get_task, task_names
from cs_localize.tasks.task import Capability, Question, Task

_MARK = "_yields_questions"
_FIELDS = ("prompt", "answer", "choices", "id", "family")

_Source = TypeVar("_Source", bound=Callable[[], Iterable[Mapping[str, object]]])


def questions(function: _Source) -> _Source:
    """Marks a function without parameters as the source of a task, which is called as the function is.

    It returns or yields a mapping for every question: ``prompt`` and ``answer``, and if wanted ``choices``, ``id`` and
    ``family``, as a line of a JSON Lines file has them.
    """
    setattr(function, _MARK, True)
    return function


def find_tasks(
    names: Iterable[str],
    data: Mapping[str, DataConfig],
    options: LmEvalConfig | None = None,
    chat: Chat | None = None,
) -> dict[str, Capability]:
    """Tasks by name: those of the user's own that are among the names, and those of ``get_task``.

    Args:
        names: the tasks wanted.
        data: where the user's own come from, by name. A Python file among them is run.
        options: how tasks of lm-evaluation-harness are asked and graded.
        chat: the model's chat template, where such tasks are to be put as conversations.

    Raises:
        UsageError: if there is no such task, a file is not as it must be, or a name is that of a registered task.
    """
    wanted = tuple(dict.fromkeys(names))
    for name in data:
        if name in task_names():
            raise UsageError(f"data.{name}: there is a task of that name already; choose another")
    known = {*wanted, *data, *task_names()}
    for name in wanted:
        for relative in data[name].relatives if name in data else ():
            if relative not in known:
                raise UsageError(f"data.{name}: no task '{relative}' to be a relative; 'cs-localize tasks' lists them")
    return {name: _own_task(name, data[name]) if name in data else get_task(name, options, chat) for name in wanted}


def content_hash(task: Task) -> str:
    """A hash of all that a task asks: its questions, its shots and how they are put."""
    content = [
        task.template,
        [_content(shot) for shot in task.shots],
        [_content(question) for question in task.questions],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _content(question: Question) -> dict[str, object]:
    """What a question says; without choices as it was hashed before there were any."""
    return {name: value for name, value in asdict(question).items() if name != "choices" or value}


def _own_task(name: str, data: DataConfig) -> Task:
    path = Path(data.file)
    rows = _of_function(path, name) if path.suffix == ".py" else _of_lines(path, name)
    found = _checked(rows)
    if not found:
        raise UsageError(f"{path} holds no question; give one a line, such as {{'prompt': '2 + 2 =', 'answer': '4'}}")
    if data.shots >= len(found):
        raise UsageError(f"data.{name}: {data.shots} shots leave none of {len(found)} questions to ask; take fewer")
    return Task(
        name=name,
        description=f"from {path.name}",
        questions=tuple(found[data.shots :]),
        shots=tuple(found[: data.shots]),
        template=data.template,
        relatives=frozenset(data.relatives),
    )


def _of_lines(path: Path, name: str) -> Iterator[tuple[str, object]]:
    """What the lines of the file hold, and where each is; empty lines are passed over."""
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise UsageError(f"data.{name}: cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not valid JSON: {one_line(error)}") from None
        yield where, row


def _of_function(path: Path, name: str) -> Iterator[tuple[str, object]]:
    """What the function of that name gives, and which of its questions each is."""
    if not path.is_file():
        raise UsageError(f"data.{name}: cannot read {path}: there is no such file")
    try:
        marked = {key: value for key, value in runpy.run_path(str(path)).items() if getattr(value, _MARK, False)}
        rows = list(marked[name]()) if name in marked else []
    except Exception as error:  # whatever the user's code raises is the user's to mend
        raise UsageError(f"{path}: {type(error).__name__}: {one_line(error)}") from None
    if name not in marked:
        there = ", ".join(marked) or "none"
        raise UsageError(f"{path} has no function '{name}' marked with @questions; there is {there}")
    for number, row in enumerate(rows, 1):
        yield f"{path}, question {number} of {name}", row


def _checked(rows: Iterable[tuple[str, object]]) -> list[Question]:
    found: list[Question] = []
    places: dict[str, str] = {}
    for where, row in rows:
        question = _question(where, row)
        if question.id in places:
            same = f"{where}: '{one_line(question.id, 60)}' is asked already, {places[question.id]}"
            raise UsageError(f"{same}; leave one out, or give both an 'id'")
        if bool(question.choices) != bool((found or [question])[0].choices):
            first = next(iter(places.values()))
            raise UsageError(f"{where}: give every question of a task 'choices', or none; the first is {first}")
        places[question.id] = where
        found.append(question)
    return found


def _question(where: str, row: object) -> Question:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: expected fields such as {{'prompt': '2 + 2 =', 'answer': '4'}}")
    unknown = [str(name) for name in row if name not in _FIELDS]
    if unknown:
        raise UsageError(f"{where}: unknown field '{one_line(unknown[0], 60)}'; there are {', '.join(_FIELDS)}")
    prompt = _text(where, row, "prompt")
    answer = _text(where, row, "answer")
    if prompt != prompt.rstrip():
        raise UsageError(f"{where}: 'prompt' ends in white space; leave it out, the answer follows after a space")
    if answer != answer.strip() or "\n" in answer:
        raise UsageError(f"{where}: 'answer' must be one line without white space around it")
    choices = _choices(where, row["choices"], answer) if "choices" in row else ()
    return Question(
        id=_text(where, row, "id") if "id" in row else prompt,
        text=prompt,
        answer=answer,
        family=_text(where, row, "family") if "family" in row else prompt,
        choices=choices,
    )


def _choices(where: str, given: object, answer: str) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or len(given) < 2:
        raise UsageError(f"{where}: 'choices' must be a list of at least two, the answer among them")
    choices = tuple(_text(where, {"choice": choice}, "choice") for choice in given)
    for choice in choices:
        if choice != choice.strip() or "\n" in choice:
            raise UsageError(f"{where}: a choice must be one line without white space around it")
        if choices.count(choice) > 1:
            raise UsageError(f"{where}: the choice '{one_line(choice, 60)}' is there twice")
    if answer not in choices:
        raise UsageError(f"{where}: the answer '{one_line(answer, 60)}' is not among the choices")
    return choices


def _text(where: str, row: Mapping[Any, object], field: str) -> str:
    if field not in row:
        raise UsageError(f"{where}: '{field}' is missing")
    value = row[field]
    if not isinstance(value, str):
        raise UsageError(f"{where}: '{field}' must be text in quotes")
    if not value.strip():
        raise UsageError(f"{where}: '{field}' is empty")
    if value.encode(errors="replace").decode() != value:
        raise UsageError(f"{where}: '{field}' has half of a surrogate pair, which is no text")
    return value
