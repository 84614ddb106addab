"""Tasks by name: the built-in ones, those that a program registers, and lm-evaluation-harness's."""

from __future__ import annotations

import importlib.util
from difflib import get_close_matches

from cs_localize.config import LmEvalConfig
from cs_localize.errors import UsageError
from cs_localize.tasks.builtin import BUILT_IN
from cs_localize.tasks.harness import Chat, harness_task, installed, known_names
from cs_localize.tasks.task import Capability, Task
from cs_localize.tasks.tiny import TINY_COPY, TINY_MODSUM, TINY_SORT

_TASKS: dict[str, Task] = {}


def register(task: Task) -> None:
    """Makes a task known under its name.

    Raises:
        UsageError: if the name is taken.
    """
    if task.name in _TASKS:
        raise UsageError(f"a task named '{task.name}' is registered already; give the new one another name")
    _TASKS[task.name] = task


def get_task(name: str, options: LmEvalConfig | None = None, chat: Chat | None = None) -> Capability:
    """The task of that name: a registered one, or a task, group or tag of lm-evaluation-harness.

    Args:
        name: the task's.
        options: how a task of lm-evaluation-harness is asked and graded.
        chat: the model's chat template, where such a task is to be put as a conversation.

    Raises:
        UsageError: if there is none, or it cannot be asked; for a name that is not known the message names the closest
            match and all registered tasks.
    """
    if name in _TASKS:
        task = _TASKS[name]
        if task.needs and importlib.util.find_spec(task.needs) is None:
            raise UsageError(f"task '{name}' needs the package {task.needs}: run pip install 'cs_localize[eval]'")
        return task
    options = options or LmEvalConfig()
    others = known_names(options.include_path)
    if name in others:
        return harness_task(name, options, chat)
    close = get_close_matches(name, _TASKS, n=1) or get_close_matches(name, sorted(others), n=1, cutoff=0.75)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    more = " and those of lm-evaluation-harness"
    if not installed():
        more = "; lm-evaluation-harness, which has many more, comes with pip install 'cs_localize[eval]'"
    raise UsageError(f"no task '{name}'{hint} known tasks: {', '.join(_TASKS)}{more}")


def registered_tasks() -> tuple[Task, ...]:
    """All registered tasks, the built-in ones first."""
    return tuple(_TASKS.values())


def task_names() -> tuple[str, ...]:
    """The names of all registered tasks, the built-in ones first."""
    return tuple(_TASKS)


for _task in (*BUILT_IN, TINY_COPY, TINY_SORT, TINY_MODSUM):
    register(_task)
