"""The page: reads a study's files, checks that they belong together, and fills the template."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from cs_localize.config import StudyConfig, dump_study, load_study
from cs_localize.errors import CsLocalizeError
from cs_localize.findings import (
    ConfirmFile,
    CrosscheckFile,
    HeadsFile,
    dump_file,
    read_file,
    write_text,
)
from cs_localize.methods import damage_cap, make_method
from cs_localize.report import tables
from cs_localize.report.crosscheck import CrosscheckView, crosscheck_view
from cs_localize.report.effect import effect_source
from cs_localize.report.environment import page_environment
from cs_localize.report.figures import heatmap, heatmap_size, knockout_curve, stylesheet
from cs_localize.report.headline import headline, title
from cs_localize.report.numbers import count, fixed, percent
from cs_localize.report.published import published, published_rows
from cs_localize.report.sureness import often_selected


@dataclass(frozen=True)
class TaskFigures:
    """Heat map, ranking and knockout curve of one task; the curve is None where none was measured, ``often`` empty."""

    task: str
    named: list[str]
    reason: str
    heatmap: Markup
    ranking: list[tables.RankingRow]
    often: str
    curve: Markup | None
    has_controls: bool


def write_report(study_dir: Path) -> Path:
    """Writes ``report.html`` into a study's directory from its JSON files and ``study.yaml``.

    Equal files give equal pages, byte for byte. The page asks for nothing outside itself.

    Args:
        study_dir: holds ``heads.json`` and ``study.yaml``, and ``confirm.json`` and ``crosscheck.json`` where the
            study made them.

    Returns:
        The path of the page.

    Raises:
        CsLocalizeError: if a file is missing, invalid or of another study.
    """
    study = load_study(study_dir / "study.yaml")
    heads = read_file(study_dir / "heads.json", HeadsFile)
    confirm_path, crosscheck_path = study_dir / "confirm.json", study_dir / "crosscheck.json"
    confirm = read_file(confirm_path, ConfirmFile) if confirm_path.exists() else None
    crosscheck = read_file(crosscheck_path, CrosscheckFile) if crosscheck_path.exists() else None
    _check_one_study(study, heads, confirm, crosscheck)
    path = study_dir / "report.html"
    write_text(path, render(study, heads, confirm, crosscheck))
    return path


def render(study: StudyConfig, heads: HeadsFile, confirm: ConfirmFile | None, crosscheck: CrosscheckFile | None) -> str:
    """The page as text."""
    environment = page_environment("cs_localize.report")
    environment.filters |= {"count": count, "percent": percent}
    script = stylesheet("readout.js")
    columns = [*heads.tasks, *study.controls]
    return environment.get_template("report.html.j2").render(
        title=title(heads),
        cap=cap if (cap := damage_cap(make_method(study))) is None else fixed(cap, 1),
        effect=effect_source(study),
        headline=headline(heads, confirm),
        study=study,
        study_yaml=dump_study(study),
        heads=heads,
        confirm=confirm,
        crosscheck=crosscheck,
        columns=columns,
        results=tables.result_rows(heads, confirm),
        matrix=tables.matrix_rows(heads, confirm, columns) if confirm else [],
        drops=tables.drop_rows(confirm) if confirm else [],
        counts=tables.count_rows(confirm) if confirm else [],
        pairs=tables.pair_rows(confirm) if confirm else [],
        beside=published_rows(heads, confirm) if confirm else [],
        published=published(),
        figures=[_task_figures(heads, confirm, task) for task in heads.tasks],
        figure_width=heatmap_size(heads)[0],
        universal=tables.universal_rows(heads),
        costs=tables.cost_rows(heads),
        fits=tables.fit_rows(heads),
        scorings=tables.scoring_rows(heads),
        checks=_checks(heads, crosscheck),
        style=Markup(stylesheet("figures.css") + stylesheet("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _task_figures(heads: HeadsFile, confirm: ConfirmFile | None, task: str) -> TaskFigures:
    finding = heads.tasks[task]
    curve = confirm.curve.get(task, []) if confirm else []
    controls = confirm.control_curve.get(task, []) if confirm else []
    random = confirm.random.get(task) if confirm else None
    named = len(finding.named) if len(finding.named) < len(curve) else 0
    drawn = knockout_curve(curve, controls, named, random.draws if random else ()) if len(curve) > 1 else None
    return TaskFigures(
        task=task,
        named=finding.named,
        reason=finding.reason,
        heatmap=Markup(heatmap(heads, task)),
        ranking=tables.ranking_rows(heads, task),
        often=often_selected(heads, task),
        curve=Markup(drawn) if drawn else None,
        has_controls=bool(controls),
    )


def _checks(heads: HeadsFile, crosscheck: CrosscheckFile | None) -> list[CrosscheckView]:
    found = crosscheck.tasks if crosscheck else {}
    return [crosscheck_view(heads, task, result) for task, result in found.items()]


def _check_one_study(
    study: StudyConfig, heads: HeadsFile, confirm: ConfirmFile | None, crosscheck: CrosscheckFile | None
) -> None:
    """Files of different runs must not be shown as one study, nor numbers that are none."""
    if set(heads.tasks) != set(study.tasks):
        raise CsLocalizeError("heads.json and study.yaml list different tasks; run the study again")
    if confirm and not _confirms(study, confirm):
        raise CsLocalizeError("confirm.json and heads.json are of different tasks; run the study again")
    if crosscheck and not set(crosscheck.tasks) <= set(heads.tasks):
        raise CsLocalizeError("crosscheck.json and heads.json are of different tasks; run the study again")
    for name, value in (("heads", heads), ("confirm", confirm), ("crosscheck", crosscheck)):
        try:
            if value is not None:
                dump_file(value)
        except ValueError:
            raise CsLocalizeError(f"{name}.json holds a number that is not finite; run the study again") from None


def _confirms(study: StudyConfig, confirm: ConfirmFile) -> bool:
    known = {*study.tasks, *study.controls}
    measured = set(confirm.universal).union(*confirm.matrix.values())
    complete = known <= set(confirm.baseline) and known <= set(confirm.items)
    return complete and measured <= known and set(confirm.matrix) <= set(study.tasks)
