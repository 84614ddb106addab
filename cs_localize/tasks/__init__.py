"""What a capability is: tasks, their graders, and the built-in suite."""

from cs_localize.tasks.graders import first_line_equals
from cs_localize.tasks.registry import get_task, register, task_names
from cs_localize.tasks.task import Question, Split, Task

__all__ = ["Question", "Split", "Task", "first_line_equals", "get_task", "register", "task_names"]
