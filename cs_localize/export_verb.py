"""The verb ``export``: a checkpoint with heads or neurons removed. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from cs_localize.errors import UsageError
from cs_localize.heads import Neuron


def add_export(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb to the command line's verbs, the object that ``add_subparsers`` returns."""
    export = verbs.add_parser("export", help="write a checkpoint with given heads or neurons removed")
    export.add_argument("--model", help="a directory, a hub id or a built-in model (default: that of --heads-from)")
    given = export.add_mutually_exclusive_group()
    given.add_argument("--heads", help="such as L4H2,L7H0; L4G1 is a KV group, L4 a layer")
    given.add_argument("--heads-from", type=Path, metavar="STUDY", help="the heads named in a finished study's folder")
    export.add_argument("--task", help="whose heads of --heads-from: a task, or universal (default: if there is one)")
    export.add_argument("--neurons", help="such as L3N17,L3N120")
    export.add_argument("--out", type=Path, required=True, help="the folder to make; must be new or empty")
    export.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from cs_localize.export import export_checkpoint

    if arguments.task is not None and arguments.heads_from is None:
        raise UsageError("--task chooses among the heads of a study; name the study with --heads-from")
    model, heads = arguments.model, arguments.heads
    if arguments.heads_from is not None:
        studied, heads = _of_study(arguments.heads_from, arguments.task)
        model = model or studied
    if model is None:
        raise UsageError("name the model with --model")
    removed = ",".join(filter(None, [heads, *_neurons(arguments.neurons)]))
    made = export_checkpoint(model, removed, arguments.out, command=_command(arguments))
    print(f"{model} without {removed}\n\ncheckpoint: {arguments.out}\nfingerprint: {made.fingerprint}")
    return 0


def _of_study(folder: Path, task: str | None) -> tuple[str, str]:
    """The model of a study and the heads it named for a task."""
    from cs_localize.ablate import of_study

    study = of_study(folder)
    if task is None and len(study.heads) == 1:
        (heads,) = study.heads.values()
    elif task in study.heads:
        heads = study.heads[task]
    else:
        wanted = f"no heads for '{task}'" if task else "heads for more than one task"
        raise UsageError(f"the study in {folder} has {wanted}; choose with --task one of {', '.join(study.heads)}")
    return study.study.model, heads


def _neurons(text: str | None) -> list[str]:
    return [str(Neuron.parse(name)) for name in (text or "").split(",") if name.strip()]


def _command(arguments: argparse.Namespace) -> list[str]:
    flags = ("model", "heads", "heads_from", "task", "neurons", "out")
    given = [(f"--{flag.replace('_', '-')}", getattr(arguments, flag)) for flag in flags]
    return [
        "cs-localize",
        "export",
        *(word for flag, value in given if value is not None for word in (flag, str(value))),
    ]
