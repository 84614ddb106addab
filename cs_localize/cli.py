"""The command line: thin; every verb calls one public function."""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from cs_localize import __version__
from cs_localize.ablate_verb import add_ablate, add_allow_code_execution, listed
from cs_localize.errors import CsLocalizeError, UsageError, explained, one_line
from cs_localize.export_verb import add_export
from cs_localize.plan_verb import add_plan
from cs_localize.serve_verb import add_serve
from cs_localize.submit_verb import add_job_verbs
from cs_localize.tasks_verb import add_tasks

_LONGEST = 1500  # characters of a message


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when everything asked for is there, 2 for a usage error, 130 when interrupted, 1 otherwise.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _interrupt)
        code = int(arguments.run(arguments))
        if sys.stdout is not None:  # None where the shell closed it
            sys.stdout.flush()  # at exit it would be too late to report a full disk
        return code
    except KeyboardInterrupt:
        return _complain("interrupted; the same command continues where this one stopped", 130)
    except BrokenPipeError:
        # Whoever read the output went away. Python would complain once more when it flushes at exit.
        _discard_output()
        return 1
    except Exception as error:
        reason = explained(error)
        if reason is None:
            raise
        if isinstance(error, OSError) and error.filename is None:
            _discard_output()  # it may have been the output that failed, and would fail once more at exit
        return _complain(reason, error.exit_code if isinstance(error, CsLocalizeError) else 1)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Being told to end, by a scheduler or by ``ray job stop``, is to be interrupted."""
    raise KeyboardInterrupt


def _discard_output() -> None:
    with contextlib.suppress(OSError, AttributeError):  # where it is no file, or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int) -> int:
    print(f"cs-localize: {one_line(message, _LONGEST)}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cs-localize", description="Find the attention heads a language model needs for a capability."
    )
    parser.add_argument("--version", action="version", version=f"cs-localize {__version__}")
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = verbs.add_parser("demo", help="localize six capabilities of a small real model")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="the study's folder (default: %(default)s)")
    _add_set(demo)
    demo.set_defaults(run=_demo)

    run = verbs.add_parser("run", help="run a study; the same command continues a stopped one")
    run.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study file")
    run.add_argument("--out", type=Path, help="the study's folder (default: runs/ and the file's name)")
    run.add_argument(
        "--log-samples", action="store_true", help="write the held-out answers as lm-eval does (confirm.log_samples)"
    )
    _add_set(run)
    add_allow_code_execution(run)
    run.set_defaults(run=_run)

    add_plan(verbs)

    sweep = verbs.add_parser("sweep", help="run a grid of studies: models x task sets x methods on one ledger")
    sweep.add_argument("grid", type=Path, metavar="GRID.yaml", help="the grid file")
    sweep.add_argument("--out", type=Path, help="the grid's folder (default: runs/ and the file's name)")
    _add_set(sweep, "the grid, such as base.seed=1")
    add_allow_code_execution(sweep)
    sweep.set_defaults(run=_sweep)

    add_ablate(verbs)
    add_export(verbs)

    crosscheck = verbs.add_parser("crosscheck", help="set the heads of a finished study against neurons")
    crosscheck.add_argument("study", type=Path, metavar="STUDY_DIR", help="the study's folder")
    crosscheck.add_argument("--tasks", help="task names with commas between (default: as the study says, or all)")
    add_allow_code_execution(crosscheck)
    crosscheck.set_defaults(run=_crosscheck)

    add_job_verbs(verbs)
    add_serve(verbs)

    add_tasks(verbs)
    models = verbs.add_parser("models", help="list the built-in models")
    models.set_defaults(run=_models)

    doctor = verbs.add_parser("doctor", help="check this installation and prove that ablations take effect")
    doctor.add_argument("--model", default="smollm2-135m-instruct", help="model to prove it on (default: %(default)s)")
    _add_set(doctor, "the engine to prove, such as engine.eager=false")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_set(parser: argparse.ArgumentParser, what: str = "the study") -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help=f"override an option of {what}; may be repeated"
    )


def _demo(arguments: argparse.Namespace) -> int:
    with importlib.resources.as_file(importlib.resources.files("cs_localize") / "demo.yaml") as study:
        return _run_study(study, arguments.out, arguments.set, ["cs-localize", "demo", *_out_and_set(arguments)])


def _run(arguments: argparse.Namespace) -> int:
    out = arguments.out or Path("runs") / arguments.study.stem
    if arguments.log_samples:
        arguments.set.append("confirm.log_samples=true")
    _keep_file(arguments.study, out)
    allowed = ["--allow-code-execution"] if arguments.allow_code_execution else []
    command = ["cs-localize", "run", str(arguments.study), *_out_and_set(arguments), *allowed]
    return _run_study(arguments.study, out, arguments.set, command, bool(allowed))


def _keep_file(study: Path, out: Path) -> None:
    """Refuses the one folder in which the study's record would be written over the file that the user wrote."""
    from cs_localize.config import dump_study, load_study

    record = out / "study.yaml"
    if not (study.exists() and record.exists() and record.samefile(study)):
        return
    if study.read_bytes() != dump_study(load_study(study)).encode():
        raise UsageError(f"{study} would be overwritten by the study's own record; choose another folder with --out")


def _out_and_set(arguments: argparse.Namespace) -> list[str]:
    out = [] if arguments.out is None else ["--out", str(arguments.out)]
    return out + [part for override in arguments.set for part in ("--set", override)]


def _run_study(
    study: Path, out: Path, overrides: list[str], command: list[str], allow_code_execution: bool = False
) -> int:
    from cs_localize.config import check_files, load_study, named_files
    from cs_localize.report import summary_lines
    from cs_localize.study import run_study

    config = load_study(study, tuple(overrides)).allowing(allow_code_execution)
    check_files(named_files(config), str(study))
    result = run_study(config, out, command)
    print("\n".join(summary_lines(result.heads, result.confirm, result.crosscheck)))
    print(f"\nreport: {result.report}")
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from cs_localize.grid import load_grid, run_grid

    out = arguments.out or Path("runs") / arguments.grid.stem
    cells = load_grid(arguments.grid, out, tuple(arguments.set))
    allowed = arguments.allow_code_execution
    result = run_grid([replace(cell, study=cell.study.allowing(allowed)) for cell in cells], out)
    print("\n".join(result.summary_lines()))
    return 1 if result.failed else 0


def _crosscheck(arguments: argparse.Namespace) -> int:
    from cs_localize.crosscheck import crosscheck_study
    from cs_localize.report import summary_lines

    tasks = None if arguments.tasks is None else listed(arguments.tasks)
    result = crosscheck_study(arguments.study, tasks, bool(arguments.allow_code_execution))
    print("\n".join(summary_lines(result.heads, result.confirm, result.crosscheck)))
    print(f"\nreport: {result.report}")
    return 0


def _models(arguments: argparse.Namespace) -> int:
    from cs_localize.models import known_models

    for name, description, cached in known_models():
        print(f"{name:<24} {'ready' if cached else 'to be made':<12} {description}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from cs_localize.doctor import diagnose, read_engine

    return 0 if diagnose(arguments.model, sys.stdout, engine=read_engine(tuple(arguments.set))) else 1
