"""A study as a job: its id, its command, what travels with it; and that it is not started twice."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs_localize import __version__
from cs_localize.config import INCLUDE_PATH, StudyConfig, check_files, dump_study, named_files, parse_study
from cs_localize.errors import UsageError
from cs_localize.options import read_options
from cs_localize.submit.package import pack
from cs_localize.submit.server import JobServer

_STUDY = "study.yaml"
_YAML_TASKS = "_include_path"
"""The folder of the user's own YAML tasks where it travels; no task, whose file lies beside it, can be called so."""


@dataclass(frozen=True)
class Job:
    """What is submitted.

    Attributes:
        base_id: names the content; the submission id of the first attempt.
        entry_point: the command, for a shell in the working directory on the cluster.
        runtime_env: Ray's description of the environment.
        metadata: shown beside the job.
    """

    base_id: str
    entry_point: str
    runtime_env: dict[str, Any]
    metadata: dict[str, str]


def plan_job(
    study: Path,
    out: Path,
    scratch: Path,
    overrides: Sequence[str] = (),
    working_dir: Path | None = None,
    excludes: Sequence[str] = (),
    pip: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    allow_code_execution: bool = False,
) -> Job:
    """Makes a job of a study; asks nobody.

    Args:
        study: the study file; within ``working_dir`` where one is given.
        out: the study's folder on the cluster.
        scratch: an empty folder that lasts until the job is submitted; the study travels from there where no
            ``working_dir`` is given.
        overrides: ``a.b=c`` options of the study.
        working_dir: a folder that travels with the job.
        excludes: what of it does not, as patterns of ``.gitignore``.
        pip: packages to install for the job.
        env: environment variables of the job and its workers.
        allow_code_execution: whether the job may execute what the model writes, where a task is graded by that.

    Raises:
        UsageError: if the study is none, a file of it is not there, a path would be lost with the job, or the folder is
            too large.
    """
    config = parse_study(read_options(study, tuple(overrides)), str(study))
    _check_paths(config, out)
    if working_dir is None:
        if excludes:
            raise UsageError("--exclude: there is nothing to leave out without --working-dir")
        _check_files(config, study, study.parent)
        config = _with_files(config, study, scratch)
        (scratch / _STUDY).write_text(dump_study(config), encoding="utf-8")
        root, name, settings = scratch, _STUDY, []
    else:
        root, name = working_dir, _within(study, working_dir)
        _check_files(config, study, (root / name).parent)
        settings = [part for override in overrides for part in ("--set", override)]
    package = pack(root, excludes)
    if Path(name) not in package.sizes:
        raise UsageError(f"{study} is left out of what travels; see --exclude, .gitignore and .rayignore")
    if allow_code_execution:
        settings = [*settings, "--allow-code-execution"]
    for option, file in _files(config).items():
        place = Path(os.path.normpath(Path(name).parent / file))
        if not any(place in (path, *path.parents) for path in package.sizes):
            raise UsageError(
                f"{study}: {option}: {file} would not travel; it must be in --working-dir, named relative to the "
                "study, and not be excluded"
            )
    entry_point = shlex.join(["python", "-m", "cs_localize", "run", name, "--out", str(out), *settings])
    environment: dict[str, Any] = {}
    if pip:
        environment["pip"] = list(pip)
    if env:
        environment["env_vars"] = dict(env)
    travels = "" if working_dir is None and not _files(config) else package.digest()
    content = [__version__, config.model_dump(mode="json"), entry_point, environment, travels]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    carried = {"working_dir": str(root), "excludes": list(excludes)}
    return Job(
        base_id=f"cs-localize-{digest}",
        entry_point=entry_point,
        runtime_env=carried | environment,
        metadata={"study": study.name, "out": str(out)},
    )


def submit_job(server: JobServer, job: Job) -> tuple[str, str]:
    """Starts a job, unless the same runs or has succeeded. One that failed or was stopped is started again.

    Returns:
        Its submission id, and ``started`` or what the job that is already there is: ``pending``, ``running`` or
        ``succeeded``.

    Raises:
        CsLocalizeError: if the server does not take it.
    """
    for attempt in itertools.count(1):
        submission_id = job.base_id if attempt == 1 else f"{job.base_id}-{attempt}"
        there = server.find(submission_id)
        if there is None:
            if server.start(submission_id, job.entry_point, job.runtime_env, job.metadata):
                return submission_id, "started"
            there = server.job(submission_id)
        if there.status not in ("FAILED", "STOPPED"):
            return submission_id, there.status.lower()
    raise AssertionError("unreachable")


def _check_paths(config: StudyConfig, out: Path) -> None:
    """The folder in which a job runs goes away with it."""
    if not out.is_absolute():
        raise UsageError(f"--out {out}: give an absolute path on the cluster; what a job writes elsewhere is lost")
    if config.ledger is not None and not Path(config.ledger).is_absolute():
        raise UsageError(
            f"ledger: {config.ledger}: give an absolute path on the cluster; what a job writes elsewhere is lost"
        )


def _files(config: StudyConfig) -> dict[str, str]:
    """What travels: the files of all tasks of the user's own, whether the study asks them or not."""
    return named_files(config, config.data)


def _check_files(config: StudyConfig, study: Path, folder: Path) -> None:
    """Refuses a study whose files are not there, or whose YAML tasks are none or cannot be read.

    Args:
        config: the study.
        study: its file, for messages.
        folder: where the files that it names are.

    Raises:
        UsageError: if so.
    """
    check_files(_files(config), str(study), folder)
    if (include_path := config.lm_eval.include_path) is None:
        return
    try:
        for path in sorted((folder / include_path).rglob("*.yaml")):
            path.open("rb").close()
    except OSError as error:
        raise UsageError(f"{study}: {INCLUDE_PATH}: cannot read {error.filename}: {error.strerror}") from None


def _with_files(config: StudyConfig, study: Path, scratch: Path) -> StudyConfig:
    """The study with its files copied to where it travels from, each under the name of its task or option."""
    copies = {}
    for option, file in _files(config).items():
        source = study.parent / file
        try:
            if option == INCLUDE_PATH:
                copies[option] = _YAML_TASKS
                sizes = pack(source, option=f"{study}: {option}").sizes
                if not sizes:
                    raise UsageError(f"{study}: {option}: {source} has no file that would travel; see its .gitignore")
                for path in sizes:
                    (scratch / _YAML_TASKS / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source / path, scratch / _YAML_TASKS / path)
            else:
                copies[option] = f"{option.removeprefix('data.')}{source.suffix}"
                shutil.copyfile(source, scratch / copies[option])
        except OSError as error:
            raise UsageError(f"{study}: {option}: cannot read {error.filename}: {error.strerror}") from None
    data = {task: own.model_copy(update={"file": copies[f"data.{task}"]}) for task, own in config.data.items()}
    design = config.design.model_copy(update={"masks": copies.get("design.masks")})
    lm_eval = config.lm_eval.model_copy(update={"include_path": copies.get(INCLUDE_PATH)})
    return config.model_copy(update={"data": data, "design": design, "lm_eval": lm_eval})


def _within(study: Path, working_dir: Path) -> str:
    try:
        return str(Path(os.path.realpath(study)).relative_to(os.path.realpath(working_dir)))
    except ValueError:
        raise UsageError(f"{study} is not within --working-dir {working_dir}, so it would not travel") from None
