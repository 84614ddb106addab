"""What a capability is: tasks, their graders, and the built-in suite."""

from cs_localize.tasks.builtin import BUILT_IN
from cs_localize.tasks.graders import first_line_equals
from cs_localize.tasks.own import content_hash, find_tasks, questions
from cs_localize.tasks.registry import get_task, register, task_names
from cs_localize.tasks.task import Question, Split, Task

__all__ = [
    "BUILT_IN",
    "Question",
    "Split",
    "Task",
    "content_hash",
    "find_tasks",
    "first_line_equals",
    "get_task",
    "questions",
    "register",
    "task_names",
]
