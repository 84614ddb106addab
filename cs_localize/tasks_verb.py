"""The verb ``tasks``: what there is to localize, and what a model can do of it. Imports nothing heavy by itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from cs_localize.ablate_verb import ENGINES, add_allow_code_execution, add_data, listed, own_data
from cs_localize.errors import UsageError


def add_tasks(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb to the command line's verbs, the object that ``add_subparsers`` returns."""
    tasks = verbs.add_parser("tasks", help="list the tasks, or measure what a model can do of them")
    tasks.add_argument("--baseline", action="store_true", help="ask a model every item, nothing ablated")
    measuring = tasks.add_argument_group("with --baseline")
    measuring.add_argument("--model", help="a directory, a hub id or a built-in model (default: smollm2-135m-instruct)")
    measuring.add_argument("--tasks", help="task names with commas between (default: those of natural language)")
    measuring.add_argument("--include-path", metavar="DIR", help="your own YAML tasks of lm-eval")
    add_data(measuring)
    add_allow_code_execution(measuring)
    measuring.add_argument("--limit", type=int, help="most items a task, drawn with the seed (default: all)")
    measuring.add_argument("--seed", type=int, help="of that draw (default: 0)")
    measuring.add_argument("--engine", choices=ENGINES, help="who answers (default: vllm)")
    measuring.add_argument("--ledger", type=Path, help="folder of measured outcomes (default: in the cache folder)")
    measuring.add_argument(
        "--log-samples", type=Path, metavar="DIR", help="write results and every answer into a folder, as lm-eval does"
    )
    tasks.set_defaults(run=_tasks)


def _tasks(arguments: argparse.Namespace) -> int:
    if arguments.baseline:
        return _baselines(arguments)
    where = ("model", "tasks", "include_path", "data", "ledger", "log_samples")
    for name in (*where, "limit", "seed", "engine", "allow_code_execution"):
        if getattr(arguments, name) is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} goes with --baseline; add that, or leave it out to list the tasks")
    from cs_localize.tasks import registered_tasks

    for task in registered_tasks():
        print(f"{task.name:<14} {len(task.questions):>5} questions   {task.description}")
    return 0


def _baselines(arguments: argparse.Namespace) -> int:
    from cs_localize.ablate import baselines, baselines_table
    from cs_localize.config import EngineConfig, LmEvalConfig
    from cs_localize.models import home
    from cs_localize.tasks import BUILT_IN

    names = [task.name for task in BUILT_IN] if arguments.tasks is None else listed(arguments.tasks)
    if not names:
        raise UsageError("--tasks names no task; 'cs-localize tasks' lists them")
    found = baselines(
        arguments.model or "smollm2-135m-instruct",
        names,
        limit=arguments.limit,
        seed=arguments.seed or 0,
        engine=EngineConfig(name=arguments.engine or "vllm"),
        ledger=arguments.ledger or home() / "ledger",
        data=own_data(arguments.data, names),
        samples=arguments.log_samples,
        lm_eval=LmEvalConfig(include_path=arguments.include_path).allowing(arguments.allow_code_execution),
    )
    print("\n".join(baselines_table(found)))
    return 0
