"""The study file as a whole: its sections, what they ask of each other, and reading and writing it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import (
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from cs_localize.config.sections import (
    ConfirmConfig,
    CrosscheckConfig,
    DataConfig,
    DesignConfig,
    EngineConfig,
    LmEvalConfig,
    MethodConfig,
    Section,
    SelectConfig,
    SolverConfig,
)
from cs_localize.errors import UsageError
from cs_localize.options import dump_options, read_options

_OPTIONS = "give options, as 'name: value' lines"
_EXPECTED = {
    "dict_type": _OPTIONS,
    "model_type": _OPTIONS,
    "tuple_type": "give a list, in brackets with commas between",
    "string_type": "give text, a number in quotes",
    "too_short": "give at least one",
}
"""What to write, by the kind of pydantic's complaint, where it speaks of Python's types."""

_RESERVED = ("design.masks", "universal", "universal-heads")
"""What a task cannot be called, since results have it beside the names of tasks."""

SPARSE_ONLY = ("design", "solver", "select.resamples", "select.permutations", "select.bootstrap")
"""Sections, and options of one, that no method but sparse has a use for."""

_TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class StudyConfig(Section):
    """One study: a model, its capabilities, and how they are localized."""

    model: str = Field(min_length=1, description="A directory, a hub id or a built-in model name.")
    tasks: tuple[str, ...] = Field(min_length=1, description="Capabilities to localize; each controls the others.")
    controls: tuple[str, ...] = Field((), description="Tasks that are only measured, at confirmation.")
    data: dict[str, DataConfig] = Field(
        default_factory=dict, description="Tasks of your own by name: a file, or 'file' and options."
    )
    search_items: int | None = Field(None, ge=1, description="Search items a task. Default: half of its items.")
    held_out_items: int | None = Field(None, ge=1, description="Held-out items a task. Default: the other half.")
    seed: int = Field(0, ge=0, description="Seed of splits, masks and resamples.")
    ledger: str | None = Field(
        None,
        pattern=r"^[^\x00]*$",
        description="Folder of measured outcomes shared by studies. Default: the study's own.",
    )
    lm_eval: LmEvalConfig = LmEvalConfig()
    engine: EngineConfig = EngineConfig()
    method: MethodConfig = MethodConfig()
    design: DesignConfig = DesignConfig()
    solver: SolverConfig = SolverConfig()
    select: SelectConfig = SelectConfig()
    confirm: ConfirmConfig = ConfirmConfig()
    crosscheck: CrosscheckConfig = CrosscheckConfig()

    @field_validator("data", mode="before")
    @classmethod
    def _files_by_name(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        for name in value:
            if not isinstance(name, str) or not _TASK_NAME.fullmatch(name):
                raise ValueError(f"{name!r} does not do as a name; take letters, digits, '.', '_' and '-'")
        return {name: {"file": given} if isinstance(given, str) else given for name, given in value.items()}

    @field_validator("tasks", "controls")
    @classmethod
    def _no_duplicates(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} is listed twice")
        taken = sorted(set(names) & set(_RESERVED))
        if taken:
            raise ValueError(f"a task cannot be called '{taken[0]}', which is a word of the results; rename it")
        return names

    @model_validator(mode="after")
    def _tasks_and_controls_apart(self) -> StudyConfig:
        both = sorted(set(self.tasks) & set(self.controls))
        if both:
            raise ValueError(
                f"{', '.join(both)} is both in tasks and in controls; a task of the study is a control already"
            )
        if self.select.by == "knockoffs" and self.method.name != "sparse":
            raise ValueError("knockoffs need the masks of the method sparse; name it, or set select.by to tests")
        ignored = [given for option in SPARSE_ONLY for given in _given(self, option)]
        if self.method.name != "sparse" and ignored:
            raise ValueError(
                f"the method {self.method.name} has no use for {ignored[0]}; leave it out, or name the method sparse"
            )
        drawn = (self.design.kind, self.design.unit, self.design.knock_out, self.design.masks)
        if self.select.by == "knockoffs" and drawn != ("bernoulli", "request", "head", None):
            raise ValueError(
                "knockoffs need masks of heads drawn independently for every request; set design.kind to bernoulli, "
                "design.unit to request and design.knock_out to head, or select.by to tests"
            )
        if self.crosscheck.enabled and not (self.confirm.enabled and self.confirm.random_draws):
            raise ValueError("the cross-check needs the confirmation with random draws; set crosscheck.enabled: false")
        if self.design.rounds > 1 and (self.design.knock_out != "head" or self.design.masks is not None):
            raise ValueError(
                "rounds after the masks knock out single heads and need masks drawn over them; set design.rounds to 1, "
                "or leave out design.knock_out and design.masks"
            )
        unknown = sorted(set(self.crosscheck.tasks or ()) - set(self.tasks))
        if unknown:
            raise ValueError(f"crosscheck.tasks names {', '.join(unknown)}, which is not in tasks")
        if len(set(self.crosscheck.tasks or ())) < len(self.crosscheck.tasks or ()):
            raise ValueError("crosscheck.tasks names a task twice")
        return self

    def allowing(self, code_execution: bool | None) -> StudyConfig:
        """The study with the word of whoever gives the command on whether what a model writes may be executed."""
        return self.model_copy(update={"lm_eval": self.lm_eval.allowing(code_execution)})

    def located(self, folder: Path, source: str = "study") -> StudyConfig:
        """The study with the files and folders that it names as absolute paths; relative ones are in the folder.

        Args:
            folder: where they are.
            source: what to call the study in messages.

        Raises:
            UsageError: if the folder of its own YAML tasks is relative and not there.
        """
        at = {
            name: data.model_copy(update={"file": os.path.abspath(folder / data.file)})
            for name, data in self.data.items()
        }
        design = self.design
        if design.masks is not None:
            design = design.model_copy(update={"masks": os.path.abspath(folder / design.masks)})
        lm_eval = self.lm_eval
        if (written := lm_eval.include_path) is not None:
            include_path = os.path.abspath(folder / written)
            # An absolute one is looked for when tasks are loaded: the record of a study outlives the folder.
            if not os.path.isabs(written) and not os.path.isdir(include_path):
                looked = f"beside the study: {include_path} was looked for"
                raise UsageError(f"{source}: lm_eval.include_path: there is no folder {written} {looked}")
            lm_eval = lm_eval.model_copy(update={"include_path": include_path})
        return self.model_copy(update={"data": at, "design": design, "lm_eval": lm_eval})


def _given(study: StudyConfig, option: str) -> list[str]:
    """What of a section, or of an option of one, is not its default; a study that is written down has them all."""
    name, _, only = option.partition(".")
    section = getattr(study, name)
    defaults = type(section)()
    return [
        f"{name}.{field}" for field, value in section if field == (only or field) and value != getattr(defaults, field)
    ]


def parse_study(data: object, source: str = "study") -> StudyConfig:
    """Validates a study.

    Args:
        data: what the YAML holds.
        source: what to call it in messages.

    Raises:
        UsageError: one line naming the first thing that is wrong.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{source}: expected 'key: value' lines such as 'model: smollm2-135m-instruct'")
    try:
        return StudyConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{source}: {first_problem(error)}") from None


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> StudyConfig:
    """Reads a study file and applies ``a.b=c`` overrides, whose values are read as YAML.

    Raises:
        UsageError: if the file is missing, is not YAML or does not describe a study.
    """
    return parse_study(read_options(path, overrides), str(path)).located(path.parent, str(path))


def dump_study(study: StudyConfig) -> str:
    """The study as YAML, every default written out."""
    return dump_options(study.model_dump(mode="json"))


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with some options, in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown option '{where}'{more}"
    if first["type"] == "missing":
        return f"'{where}' is required{more}"
    if first["loc"][-1:] == ("[key]",):
        section = ".".join(str(part) for part in first["loc"][:-2])
        return f"'{section}': write the name {first['input']!r} in quotes{more}"
    message = _EXPECTED.get(first["type"], first["msg"].removeprefix("Value error, "))
    return f"'{where}': {message}{more}" if where else f"{message}{more}"
