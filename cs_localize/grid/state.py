"""How far each cell of a grid is: in memory, and in grid.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cs_localize.findings import dump_file, write_text
from cs_localize.grid.config import Cell
from cs_localize.grid.table import HeadRow

Status = Literal["finished", "failed", "waiting"]


@dataclass
class CellResult:
    """How far a cell is and, once it is finished, what it found.

    Attributes:
        cell: the cell.
        folder: its study's folder.
        status: finished, failed or waiting.
        error: why it failed, in one line.
        rows: its named heads.
        requests: masked search requests of all its tasks.
        universal: heads that hurt nearly all of its tasks, worst first.
        baseline: accuracy of the unmodified model by task; empty where nothing was confirmed.
    """

    cell: Cell
    folder: Path
    status: Status = "waiting"
    error: str | None = None
    rows: tuple[HeadRow, ...] = ()
    requests: int = 0
    universal: tuple[str, ...] = ()
    baseline: Mapping[str, float] = field(default_factory=dict)


class CellState(BaseModel):
    """One cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="The cell: model/task set/method.")
    model: str = Field(description="Short name of the model.")
    task_set: str = Field(description="Name of the task set.")
    method: str = Field(description="Name of the method.")
    folder: str = Field(description="The study's folder, relative to the grid's.")
    status: Status = Field(description="finished: all its files are there; failed: see error; waiting: not run yet.")
    error: str | None = Field(description="Why it failed, in one line; null unless it did.")


class GridFile(BaseModel):
    """grid.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal[1] = Field(1, alias="schema", description="Version of this file's layout.")
    cells: list[CellState] = Field(description="All cells, in the order they run.")


def write_state(out: Path, results: Sequence[CellResult]) -> None:
    """Writes ``grid.json`` into a grid's folder."""
    cells = [
        CellState(
            name=result.cell.name,
            model=result.cell.model,
            task_set=result.cell.task_set,
            method=result.cell.method,
            folder=result.folder.relative_to(out).as_posix(),
            status=result.status,
            error=result.error,
        )
        for result in results
    ]
    write_text(out / "grid.json", dump_file(GridFile(cells=cells)))
