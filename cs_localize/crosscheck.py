"""The cross-check of a study that has been run: its heads against neurons, for all of its tasks or some."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from cs_localize.config import StudyConfig, load_study, parse_study
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.folder import StudyResult, load_result
from cs_localize.heads import Head
from cs_localize.measure.progress import Progress
from cs_localize.report import write_report
from cs_localize.session import open_session
from cs_localize.study import Study, check_study


def crosscheck_study(out: Path, tasks: Sequence[str] | None = None) -> StudyResult:
    """Sets the heads of a finished study against neurons, whether or not the study asked for that itself.

    Args:
        out: the study's folder; gets ``crosscheck.json`` and a new report.
        tasks: which of its tasks, beside those that are cross-checked already. Default: those that the study names
            for it, or all.

    Raises:
        UsageError: if the study has no such task or no confirmation with random heads, or was measured by another
            model, engine or version than there is now.
        CsLocalizeError: if a file of the study is missing, damaged, or changed by another run meanwhile.
    """
    config = load_study(out / "study.yaml")
    if not config.confirm.enabled:
        raise UsageError(f"{out} has no confirmation to compare with; set confirm.enabled to true and run it again")
    if not config.confirm.random_draws:
        raise UsageError(
            f"{out} has no random heads to compare with; set confirm.random_draws to 1 or more and run it again"
        )
    finished = load_result(out)
    if finished.confirm is None:
        raise CsLocalizeError(f"{out / 'confirm.json'} does not exist; run the study first")
    wanted = {*(finished.crosscheck.tasks if finished.crosscheck else ()), *_tasks_to_check(config, tasks)}
    section = {"enabled": True, "tasks": [task for task in config.tasks if task in wanted]}
    config = parse_study(
        {**config.model_dump(mode="json"), "crosscheck": {**config.crosscheck.model_dump(), **section}}
    )
    known = check_study(config)
    with closing(Progress(out / "events.jsonl")) as progress:
        ledger = Path(config.ledger or out / "ledger")
        with open_session(config.model, config.engine, tuple(known), ledger, progress) as session:
            if load_result(out) != finished:  # it was read before the ledger was locked
                raise CsLocalizeError(f"{out} was changed by another run meanwhile; ask again")
            if not finished.heads.provenance.current(session.spec.fingerprint):
                raise UsageError(
                    f"{out} was measured by another model, engine or version than there is now; run the study again"
                )
            named = {task: tuple(map(Head.parse, found.named)) for task, found in finished.heads.tasks.items()}
            checked = Study(config, out, known, session, progress).crosscheck(named, finished.confirm)
        report = write_report(out)
        progress.event("study_finished", report=str(report))
    return replace(finished, crosscheck=checked, report=report)


def _tasks_to_check(config: StudyConfig, tasks: Sequence[str] | None) -> Sequence[str]:
    if tasks is None:
        return config.crosscheck.tasks or config.tasks
    unknown = sorted(set(tasks) - set(config.tasks))
    if unknown or not tasks:
        raise UsageError(f"--tasks {', '.join(unknown)}: choose among the study's, {', '.join(config.tasks)}")
    return tasks
