"""Tasks of lm-evaluation-harness: its documents, prompts, filters and metrics, asked through this package's engines."""

from __future__ import annotations

from cs_localize.tasks.harness.leaf import Chat
from cs_localize.tasks.harness.library import check_folder, installed, known_names
from cs_localize.tasks.harness.task import HarnessTask, harness_task

__all__ = ["Chat", "HarnessTask", "check_folder", "harness_task", "installed", "known_names"]
