"""What a capability is: tasks, their graders, the built-in suite, and lm-evaluation-harness's tasks."""

from cs_localize.tasks.builtin import BUILT_IN
from cs_localize.tasks.graders import first_line_equals
from cs_localize.tasks.own import content_hash, find_tasks, questions
from cs_localize.tasks.registry import get_task, register, registered_tasks, task_names
from cs_localize.tasks.split import Split
from cs_localize.tasks.task import Capability, Question, Record, Task, relatives_of

__all__ = [
    "BUILT_IN",
    "Capability",
    "Question",
    "Record",
    "Split",
    "Task",
    "content_hash",
    "find_tasks",
    "first_line_equals",
    "get_task",
    "questions",
    "register",
    "registered_tasks",
    "relatives_of",
    "task_names",
]
