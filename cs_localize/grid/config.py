"""The grid file: models x task sets x methods, expanded into one validated study a cell."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cs_localize.config import SPARSE_ONLY, StudyConfig, check_files, first_problem, named_files, parse_study
from cs_localize.errors import UsageError
from cs_localize.options import read_options

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LONGEST_FOLDER = 255  # characters of a name, on every common file system
_PLACES = {
    "model": ("models",),
    "tasks": ("task_sets",),
    "controls": ("task_sets", "base"),
    "data": ("base",),
    "ledger": ("base",),
}
"""Options of a study that only some parts of a grid may hold."""

_Overrides = dict[str, Any]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskSet(_Section):
    """Tasks that are localized in one study and control each other."""

    tasks: tuple[str, ...] = Field(min_length=1, description="Capabilities to localize.")
    controls: tuple[str, ...] | None = Field(
        None, description="Tasks that are only measured, at confirmation. Default: those of the base."
    )


def _one_method() -> dict[str, _Overrides]:
    return {"default": {}}


class GridConfig(_Section):
    """A grid of studies: every model with every task set by every method."""

    base: _Overrides = Field(default_factory=dict, description="What all studies share: a study without model, tasks.")
    models: Annotated[dict[str, _Overrides], Field(min_length=1)] = Field(
        description="Models: a list, or by short name the options of a study that differ, 'model' among them."
    )
    task_sets: Annotated[dict[str, TaskSet], Field(min_length=1)] = Field(
        description="Task sets by name: a list of tasks, or 'tasks' and 'controls'."
    )
    methods: Annotated[dict[str, _Overrides], Field(min_length=1)] = Field(
        default_factory=_one_method, description="By name, the options of a study that differ."
    )

    @field_validator("models", mode="before")
    @classmethod
    def _models_by_name(cls, value: object) -> object:
        """A list of models is named after the last part of each path or hub id."""
        if not isinstance(value, list):
            return value
        named: dict[str, _Overrides] = {}
        for model in value:
            if not isinstance(model, str) or not model:
                raise ValueError("list names of models, or give a mapping of short names")
            name = PurePath(model).name
            if name in named:
                raise ValueError(f"two models are called '{name}'; give a mapping of short names")
            named[name] = {"model": model}
        return named

    @field_validator("task_sets", mode="before")
    @classmethod
    def _tasks_listed(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: {"tasks": tasks} if isinstance(tasks, list) else tasks for name, tasks in value.items()}

    @field_validator("models", "task_sets", "methods")
    @classmethod
    def _names_for_folders(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(f"'{name}' does not do as a name; take letters, digits, '.', '_' and '-'")
        return value


@dataclass(frozen=True)
class Cell:
    """One study of a grid.

    Attributes:
        model: short name of the model.
        task_set: name of the task set.
        method: name of the method.
        study: the study.
    """

    model: str
    task_set: str
    method: str
    study: StudyConfig

    @property
    def name(self) -> str:
        """The cell as a reader names it, such as ``tiny-qwen2/words/lasso``."""
        return f"{self.model}/{self.task_set}/{self.method}"

    @property
    def folder(self) -> str:
        """Name of its folder below ``cells``."""
        return f"{self.model}-{self.task_set}-{self.method}"


def load_grid(path: Path, out: Path, overrides: tuple[str, ...] = ()) -> tuple[Cell, ...]:
    """Reads a grid file and expands it; all cells of a model follow each other.

    Args:
        path: the file.
        out: folder of the grid; its ``ledger`` serves all cells unless ``base.ledger`` names another.
        overrides: ``a.b=c``, such as ``base.design.requests=200``, whose values are read as YAML.

    Raises:
        UsageError: one line naming the first thing that is wrong, and the cell where it shows.
    """
    cells = []
    for cell in parse_grid(read_options(path, overrides, "grid"), out, str(path)):
        where = _where(path, cell.name)
        study = cell.study.located(path.parent, where)
        check_files(named_files(study), where)
        cells.append(replace(cell, study=study))
    return tuple(cells)


def parse_grid(data: object, out: Path, source: str = "grid") -> tuple[Cell, ...]:
    """Validates a grid and expands it; see ``load_grid``.

    Raises:
        UsageError: likewise.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{source}: expected 'models:', 'task_sets:' and 'methods:'")
    try:
        grid = GridConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{source}: {first_problem(error)}") from None
    _check_places(grid, source)
    ledger = grid.base.get("ledger")
    shared = {**grid.base, "ledger": os.path.realpath(out / "ledger") if ledger in (None, "") else ledger}
    try:
        merged = _studies(shared, grid)
    except RecursionError:
        raise UsageError(f"{source}: an option holds itself; write it out without '*'") from None
    cells = []
    for model in grid.models:
        for task_set, chosen in grid.task_sets.items():
            for method in grid.methods:
                study = {**merged[model, method], "tasks": list(chosen.tasks)}
                if chosen.controls is not None:
                    study["controls"] = list(chosen.controls)
                where = _where(source, f"{model}/{task_set}/{method}")
                cells.append(Cell(model, task_set, method, parse_study(study, where)))
    _check_folders(cells, source)
    return tuple(cells)


def _where(source: str | Path, cell: str) -> str:
    """What to call a cell in messages."""
    return f"{source}: cell {cell}"


def _check_places(grid: GridConfig, source: str) -> None:
    """Refuses an option where another part of the grid would set it too: one of the two would be ignored."""
    parts = {"base": ("base", grid.base)}
    parts |= {f"models.{name}": ("models", options) for name, options in grid.models.items()}
    parts |= {f"methods.{name}": ("methods", options) for name, options in grid.methods.items()}
    for where, (part, options) in parts.items():
        for option, places in _PLACES.items():
            if option in options and part not in places:
                raise UsageError(f"{source}: '{where}.{option}' is out of place; it belongs in '{places[0]}'")


def _check_folders(cells: list[Cell], source: str) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        if len(cell.folder) > _LONGEST_FOLDER:
            raise UsageError(
                f"{source}: the folder {cell.folder} would have {len(cell.folder)} characters and may have "
                f"{_LONGEST_FOLDER}; give its model, task set or method a shorter name"
            )
        other = seen.setdefault(cell.folder.casefold(), cell)
        if other is not cell:
            raise UsageError(f"{source}: {other.name} and {cell.name} would share a folder; rename one of their parts")


def _studies(shared: _Overrides, grid: GridConfig) -> dict[tuple[str, str], _Overrides]:
    """By model and method, a study without its tasks.

    Some options are for the sparse method: where cells of it share them with others, those others do without.
    Where no cell has a use for them they stay, for the study to refuse.
    """
    pairs = list(product(grid.models, grid.methods))
    sparse = {
        (model, method)
        for model, method in pairs
        if _is_sparse(_merged(_merged(shared, grid.models[model]), grid.methods[method]))
    }
    studies = {}
    for model, method in pairs:
        base, of_model = shared, grid.models[model]
        if (model, method) not in sparse:
            base = _without_sparse(base) if sparse else base
            of_model = _without_sparse(of_model) if any(of == model for of, _ in sparse) else of_model
        studies[model, method] = _merged(_merged(base, of_model), grid.methods[method])
    return studies


def _is_sparse(study: _Overrides) -> bool:
    method = study.get("method", "sparse")
    return bool((method.get("name", "sparse") if isinstance(method, Mapping) else method) == "sparse")


def _without_sparse(options: _Overrides) -> _Overrides:
    """The options but for those that only the sparse method has a use for."""
    kept = dict(options)
    for option in SPARSE_ONLY:
        name, _, only = option.partition(".")
        if not only:
            kept.pop(name, None)
        elif isinstance(section := kept.get(name), Mapping):
            kept[name] = {inner: value for inner, value in section.items() if inner != only}
    return kept


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the changes in place; sections are merged option by option."""
    result = dict(base)
    for name, value in changes.items():
        inner = result.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            result[name] = _merged(inner, value)
        else:
            result[name] = value
    return result
