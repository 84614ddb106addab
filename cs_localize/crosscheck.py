"""The cross-check of a study that has been run: its heads against neurons, for all of its tasks or some."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cs_localize.config import StudyConfig, check_files, load_study, named_files, parse_study
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.folder import StudyResult, load_result
from cs_localize.heads import Head
from cs_localize.measure.progress import Progress
from cs_localize.study import Study, check_study, data_hashes, own_session


def crosscheck_study(out: Path, tasks: Sequence[str] | None = None, allow_code_execution: bool = False) -> StudyResult:
    """Sets the heads of a finished study against neurons, whether or not the study asked for that itself.

    Args:
        out: the study's folder; gets ``crosscheck.json`` and a new report.
        tasks: which of its tasks, beside those that are cross-checked already. Default: those that the study names
            for it, or all.
        allow_code_execution: whether what the model writes may be executed, where a task is graded by that.

    Raises:
        UsageError: if the study has no such task or no confirmation with random heads, a file that it names is gone, or
            it was measured by another model, engine or version than there is now.
        CsLocalizeError: if a file of the study is missing, damaged, or changed by another run meanwhile.
    """
    config = load_study(out / "study.yaml")
    wanted = _tasks_to_check(config, tasks)
    if not config.confirm.enabled:
        raise UsageError(f"{out} has no confirmation to compare with; set confirm.enabled to true and run it again")
    if not config.confirm.random_draws:
        raise UsageError(
            f"{out} has no random heads to compare with; set confirm.random_draws to 1 or more and run it again"
        )
    finished = load_result(out)
    if finished.confirm is None:
        raise CsLocalizeError(f"{out / 'confirm.json'} does not exist; run the study first")
    if config.engine.name == "planted":
        raise UsageError(f"{out} was measured by the planted engine, which has no neurons to cross-check")
    section = {"enabled": True, "tasks": list(dict.fromkeys(wanted))}
    config = parse_study(
        {**config.model_dump(mode="json"), "crosscheck": {**config.crosscheck.model_dump(), **section}}
    )
    config = config.allowing(allow_code_execution)
    check_files(named_files(config), str(out / "study.yaml"))
    known = check_study(config)
    with closing(Progress(out / "events.jsonl")) as progress:
        with own_session(config, out, known, progress) as session:
            if load_result(out) != finished:  # it was read before the ledger was locked
                raise CsLocalizeError(f"{out} was changed by another run meanwhile; ask again")
            if not finished.heads.provenance.current(session.spec.fingerprint, data_hashes(config, known)):
                raise UsageError(
                    f"{out} was measured by another model, engine or version, or on other data, than there is now; "
                    "run the study again"
                )
            named = {task: tuple(map(Head.parse, found.named)) for task, found in finished.heads.tasks.items()}
            study = Study(config, out, known, session, progress)
            study.crosscheck(named, finished.confirm)
        return study.finish()


def _tasks_to_check(config: StudyConfig, tasks: Sequence[str] | None) -> Sequence[str]:
    if tasks is None:
        return config.crosscheck.tasks or config.tasks
    unknown = sorted(set(tasks) - set(config.tasks))
    if unknown or not tasks:
        wrong = ", ".join(unknown) or "names no task"
        raise UsageError(f"--tasks {wrong}: choose among the study's, {', '.join(config.tasks)}")
    return tasks
