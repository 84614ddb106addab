"""Tasks by name. The built-in ones are there from the start; a program may register its own."""

from __future__ import annotations

from difflib import get_close_matches

from cs_localize.errors import UsageError
from cs_localize.tasks.builtin import BUILT_IN
from cs_localize.tasks.task import Task
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


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
        UsageError: if there is none; the message names the closest match and all known tasks.
    """
    if name not in _TASKS:
        close = get_close_matches(name, _TASKS, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ";"
        raise UsageError(f"no task '{name}'{hint} known tasks: {', '.join(_TASKS)}")
    return _TASKS[name]


def task_names() -> tuple[str, ...]:
    """The names of all registered tasks, the built-in ones first."""
    return tuple(_TASKS)


for _task in (*BUILT_IN, TINY_COPY, TINY_SORT, TINY_MODSUM):
    register(_task)
