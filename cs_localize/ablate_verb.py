"""The verb ``ablate``: one ablation, or a grid of them. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cs_localize.errors import UsageError

if TYPE_CHECKING:
    from cs_localize.ablate import Scale
    from cs_localize.config import DataConfig

ENGINES = ("vllm", "hf")
"""Engines that answer for a real model."""


def add_ablate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb to the command line's verbs, the object that ``add_subparsers`` returns."""
    ablate = verbs.add_parser("ablate", help="measure tasks with given heads or neurons scaled, or a grid of head sets")
    ablate.add_argument("--model", help="a directory, a hub id or a built-in model (default: that of --heads-from)")
    given = ablate.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--heads",
        help="such as L4H2,L7H0=0.5,L9H1=mean,L3N120; L4G1 is a KV group, L4 a layer; no factor means 0, and mean puts "
        "a head's mean over search items in its place",
    )
    given.add_argument("--heads-from", type=Path, metavar="STUDY", help="the heads named in a finished study's folder")
    ablate.add_argument("--tasks", help="task names with commas between (default: those of --heads-from)")
    ablate.add_argument(
        "--include-path", metavar="DIR", help="your own YAML tasks of lm-eval (default: as in --heads-from)"
    )
    add_data(ablate)
    add_allow_code_execution(ablate)
    ablate.add_argument("--limit", type=int, help="most items a task")
    ablate.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of random controls and items; --heads-from keeps the study's items",
    )
    ablate.add_argument("--engine", choices=ENGINES, help="who answers (default: vllm, or as in --heads-from)")
    ablate.add_argument("--workers", type=int, help="engines (default: one a GPU, or up to two on a CPU)")
    ablate.add_argument(
        "--ledger", type=Path, help="folder of measured outcomes (default: in the cache folder or --out)"
    )
    ablate.add_argument(
        "--log-samples", type=Path, metavar="DIR", help="write results and every answer into a folder, as lm-eval does"
    )
    ablate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    grid = ablate.add_argument_group("grids of ablations", "head sets x scales x tasks, written to a folder")
    grid.add_argument("--out", type=Path, help="the folder: ablation.parquet and summary.csv")
    grid.add_argument("--sets", help="together, single, cumulative, leave-one-out, kv-groups, layers; commas between")
    grid.add_argument("--scales", help="factors or mean, commas between (default: 0)")
    grid.add_argument("--random", type=int, metavar="N", help="N random controls of the same layers for each head list")
    grid.add_argument("--mode", choices=("generate", "score"), help="what is measured (default: generate)")
    ablate.set_defaults(run=_ablate)


def _ablate(arguments: argparse.Namespace) -> int:
    from cs_localize.ablate import ablate, effects_json, effects_table
    from cs_localize.config import EngineConfig, LmEvalConfig
    from cs_localize.models import home

    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers {arguments.workers}: at least 1 is needed")
    if arguments.heads is not None and (arguments.model is None or arguments.tasks is None):
        raise UsageError("--heads needs --model and --tasks beside it")
    wanted = ("out", "heads_from", "sets", "scales", "random", "mode")
    if any(getattr(arguments, name) is not None for name in wanted):
        return _ablate_grid(arguments)
    effects = ablate(
        arguments.model,
        arguments.heads,
        listed(arguments.tasks),
        limit=arguments.limit,
        seed=arguments.seed,
        engine=EngineConfig(name=arguments.engine or "vllm", workers=arguments.workers),
        ledger=arguments.ledger or home() / "ledger",
        samples=arguments.log_samples,
        lm_eval=LmEvalConfig(include_path=arguments.include_path).allowing(arguments.allow_code_execution),
        data=own_data(arguments.data, listed(arguments.tasks)),
    )
    print(effects_json(effects) if arguments.json else "\n".join(effects_table(effects)))
    return 0


def _ablate_grid(arguments: argparse.Namespace) -> int:
    from cs_localize.ablate import (
        AblationGrid,
        ablation_grid,
        effects_json,
        grid_table,
        held_out,
        mean_items,
        of_study,
    )
    from cs_localize.asking import load_tasks
    from cs_localize.config import EngineConfig, LmEvalConfig

    if arguments.out is None:
        raise UsageError("a grid of ablations goes into a folder; name it with --out")
    if arguments.log_samples is not None:
        raise UsageError("--log-samples is for one ablation; the answers of a grid are in its ablation.parquet")
    tasks = [] if arguments.tasks is None else listed(arguments.tasks)
    if arguments.tasks is not None and not tasks:
        raise UsageError("--tasks names no task; 'cs-localize tasks' lists them")
    engine = EngineConfig()
    if arguments.heads_from is not None:
        if arguments.data is not None:
            raise UsageError("--data goes with --heads; --heads-from knows the own tasks of its study")
        study = of_study(arguments.heads_from)
        model, heads, engine = arguments.model or study.study.model, study.heads, study.engine
        own = {"include_path": arguments.include_path} if arguments.include_path is not None else {}
        options = study.study.lm_eval.model_copy(update=own).allowing(arguments.allow_code_execution)
        known = load_tasks(tasks or study.tasks, options, model, engine, study.study.data)
        items, measured_on = study.held_out(known, arguments.limit), study.mean_items(known)
    else:
        model, heads = arguments.model, {"heads": arguments.heads}
        options = LmEvalConfig(include_path=arguments.include_path).allowing(arguments.allow_code_execution)
        known = load_tasks(tasks, options, model, engine, own_data(arguments.data, tasks))
        items = held_out(known, arguments.seed, arguments.limit)
        measured_on = mean_items(known, arguments.seed)
    changes = {"name": arguments.engine, "workers": arguments.workers}
    result = ablation_grid(
        model,
        AblationGrid(
            heads,
            listed("together" if arguments.sets is None else arguments.sets),
            _scales("0" if arguments.scales is None else arguments.scales),
            arguments.random or 0,
            arguments.seed,
        ),
        items,
        out=arguments.out,
        mode=arguments.mode or "generate",
        engine=engine.model_copy(update={name: value for name, value in changes.items() if value is not None}),
        ledger=arguments.ledger,
        tasks=known,
        mean_items=measured_on,
    )
    print(effects_json(result.effects) if arguments.json else "\n".join(grid_table(result.effects)))
    if not arguments.json:
        print(f"\nrows: {result.rows}\nsummary: {result.summary}")
    return 0


def add_data(parser: argparse._ActionsContainer) -> None:
    """Adds the option that makes the tasks of the user's own known to a command that takes no study file."""
    parser.add_argument(
        "--data", type=Path, metavar="STUDY.yaml", help="study file whose 'data:' has the tasks of your own"
    )


def add_allow_code_execution(parser: argparse._ActionsContainer) -> None:
    """Adds the option that lets tasks execute what the model writes, to a command that asks models."""
    parser.add_argument(
        "--allow-code-execution",
        action="store_true",
        default=None,  # not given
        help="execute code that the model writes, shut in, where a task is graded by that (docs/code.md)",
    )


def own_data(study: Path | None, tasks: Sequence[str]) -> dict[str, DataConfig]:
    """The tasks of the user's own that a study file names; none without one.

    Args:
        study: the study file.
        tasks: what is asked; the files of those among them must be there.

    Raises:
        UsageError: if the study cannot be read, or such a file is not there.
    """
    from cs_localize.config import check_files, load_study

    if study is None:
        return {}
    data = load_study(study).data
    check_files({f"data.{name}": data[name].file for name in tasks if name in data}, str(study))
    return data


def listed(text: str) -> list[str]:
    """What a user lists with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _scales(text: str) -> list[Scale]:
    try:
        return ["mean" if scale == "mean" else float(scale) for scale in listed(text)]
    except ValueError:
        raise UsageError(f"--scales {text}: give numbers or mean with commas between, such as 0,0.5,mean") from None
