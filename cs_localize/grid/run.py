"""Running a grid: cell after cell on one bench; what is finished is left alone, what fails stops nothing else."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from cs_localize.config import dump_study
from cs_localize.errors import CsLocalizeError, UsageError, explained, one_line
from cs_localize.folder import StudyResult, load_result, make_folder
from cs_localize.grid.config import Cell
from cs_localize.grid.page import write_page
from cs_localize.grid.recurrence import recurrences
from cs_localize.grid.state import CellResult, write_state
from cs_localize.grid.table import head_rows, write_tables
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.tokens import ItemEncoder
from cs_localize.session import Bench, engine_spec
from cs_localize.study import check_study, data_hashes, run_study

_LOG = logging.getLogger("cs_localize")
_LONGEST = 500  # characters of the reason for a failure


@dataclass(frozen=True)
class GridResult:
    """What a grid left on disk.

    Attributes:
        out: the grid's folder.
        cells: all cells, in the order they run.
        index: the page over all studies.
        tables: one row for every cell, task and named head, as Parquet and as CSV.
    """

    out: Path
    cells: tuple[CellResult, ...]
    index: Path
    tables: tuple[Path, Path]

    @property
    def failed(self) -> tuple[CellResult, ...]:
        """The cells that failed."""
        return tuple(result for result in self.cells if result.status == "failed")

    def summary_lines(self) -> list[str]:
        """The cells and what recurs, as lines of text for a terminal."""
        width = max(len(result.cell.name) for result in self.cells)
        lines = [f"{result.cell.name:<{width}}  {_outcome(result)}" for result in self.cells]
        for recurrence in recurrences(self.cells):
            for head, tasks in recurrence.recurring.items():
                lines.append(f"{recurrence.model}: {head} is named for {', '.join(tasks)}")
        return [*lines, "", f"index: {self.index}", f"table: {self.tables[0]}, {self.tables[1].name}"]


def run_grid(cells: Sequence[Cell], out: Path, stream: TextIO = sys.stderr) -> GridResult:
    """Runs the studies of a grid, or continues them, each in ``<out>/cells/<model>-<task set>-<method>``.

    Cells of one engine follow each other, so that its model stays loaded. Index and tables are written anew after every
    cell, so an interrupted grid has them too.

    Args:
        cells: what ``load_grid`` returns.
        out: the grid's folder; made when missing.
        stream: where the progress of the cells is told.

    Raises:
        UsageError: naming the cell, if a study cannot be run as it is described; before anything is measured.
        LedgerError: if the ledger is damaged or in use.
    """
    prepared = _prepare(cells, out)
    make_folder(out / "cells")
    for one in prepared:
        study = one.finished()
        if study is not None:
            one.take(study)
    results = tuple(one.result for one in prepared)
    missing = [(number, one) for number, one in enumerate(prepared, 1) if one.result.status != "finished"]
    if not missing:
        _write(out, results)
    else:
        with Bench(_ledger(cells)) as bench:
            _write(out, results)  # under the ledger's lock: what another driver is writing stays as it is
            for number, one in missing:
                cell = f"cell {number}/{len(prepared)}: {one.result.cell.name}"
                print(cell, file=stream, flush=True)
                one.run(bench)
                if one.result.error:
                    print(f"{cell} failed: {one.result.error}", file=stream, flush=True)
                _write(out, results)
    return GridResult(out, results, out / "index.html", (out / "heads.parquet", out / "heads.csv"))


@dataclass(eq=False)
class _Prepared:
    """A cell and what asks its model."""

    result: CellResult
    spec: EngineSpec
    encoder: ItemEncoder
    data: dict[str, str]

    def finished(self) -> StudyResult | None:
        """The study as an earlier run left it, if it is this study, of this version and engine, and complete."""
        config, folder = self.result.cell.study, self.result.folder
        try:
            if (folder / "study.yaml").read_bytes() != dump_study(config).encode():
                return None
            study = load_result(folder)
        except (OSError, CsLocalizeError):
            return None
        complete = (
            ((folder / "design.npz").exists() or study.heads.method != "sparse")
            and (study.confirm is not None or not config.confirm.enabled)
            and (study.crosscheck is not None or not config.crosscheck.enabled)  # it may have been added later
            and study.report.exists()
        )
        return study if complete and study.heads.provenance.current(self.spec.fingerprint, self.data) else None

    def run(self, bench: Bench) -> None:
        """Runs the study and notes how it ended."""
        config, folder = self.result.cell.study, self.result.folder
        command = ["cs-localize", "run", str(folder / "study.yaml"), "--out", str(folder)]
        try:
            self.take(
                run_study(config, folder, command, partial(bench.session, self.spec, self.encoder, config.engine))
            )
        except Exception as error:
            reason = explained(error)
            if reason is None:
                _LOG.exception("%s: an error that cs_localize does not know; please report it", self.result.cell.name)
                reason = f"{type(error).__name__}: {error}"
            self.result.status = "failed"
            self.result.error = one_line(reason, _LONGEST)

    def take(self, study: StudyResult) -> None:
        """Keeps what the index and the tables need; whole studies of a large grid would fill the memory."""
        self.result.status = "finished"
        self.result.rows = tuple(head_rows(self.result.cell, study.heads, study.confirm))
        self.result.requests = sum(finding.requests for finding in study.heads.tasks.values())
        self.result.universal = tuple(study.heads.universal)
        self.result.baseline = study.confirm.baseline if study.confirm is not None else {}


def _outcome(result: CellResult) -> str:
    if result.error:
        return f"failed: {result.error}"
    found = {task: [row.head for row in result.rows if row.task == task] for task in result.cell.study.tasks}
    return "; ".join(f"{task} {' '.join(heads) or 'none'}" for task, heads in found.items())


def _prepare(cells: Sequence[Cell], out: Path) -> list[_Prepared]:
    """Every cell with its engine, cells of one engine together; whatever cannot be run is refused here."""
    engines: dict[str, tuple[EngineSpec, ItemEncoder]] = {}
    found = []
    for cell in cells:
        config = cell.study
        try:
            tasks = check_study(config)
            planted = sorted(tasks) if config.engine.name == "planted" else []  # it plants heads for each of them
            key = json.dumps([config.model, config.engine.model_dump(mode="json"), planted])
            if key not in engines:
                engines[key] = engine_spec(config.model, config.engine, tuple(tasks))
        except UsageError as error:
            raise UsageError(f"cell {cell.name}: {error}") from None
        result = CellResult(cell, out / "cells" / cell.folder)
        found.append((key, _Prepared(result, *engines[key], data_hashes(config, tasks))))
    order = list(engines)
    return [one for _, one in sorted(found, key=lambda pair: order.index(pair[0]))]


def _ledger(cells: Sequence[Cell]) -> Path:
    """The ledger that all cells share: two of them would need two locks and share nothing."""
    ledgers = {cell.study.ledger for cell in cells}
    ledger = ledgers.pop()
    if ledgers or ledger is None:
        raise UsageError("the cells of a grid must name one ledger; make them with load_grid")
    return Path(ledger)


def _write(out: Path, results: Sequence[CellResult]) -> None:
    write_state(out, results)
    write_page(out, results)
    write_tables(out, [row for result in results for row in result.rows])
