"""Writes docs/study.md, the page of all options of a study, from the classes that read it.

python docs/options.py
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cs_localize.config import DataConfig, StudyConfig
from cs_localize.methods import METHODS
from cs_localize.recover import SOLVERS

PAGE = Path(__file__).with_name("study.md")
_INTRODUCTION = """# Every option of a study

`python docs/options.py` writes this page from the classes that read a study, and a test holds it to them. Options are
given in the study's YAML, or one by one as `--set design.requests=900`. What is unknown or out of range is refused.
`run` leaves the study in its folder, every default written out.
"""
_WORDS = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", Any: "anything"}
_LIMITS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}", "multiple_of": "multiple of {}"}
_NO_OPTIONS = ("design", "solver", "seed", "slopes", "limit", "reserved")
"""Parameters of methods that come from elsewhere in the study; see ``make_method``."""


def page() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION, *_sections(StudyConfig, "")]
    parts += ["## `data.NAME`\n", f"{_summary(DataConfig)}\n", _table(_rows(DataConfig, "data.NAME."))]
    for option, classes in (("method", METHODS), ("solver", SOLVERS)):
        parts.append(f"## `{option}.options`\n")
        for name, parameters in classes.items():
            rows = list(_parameters(parameters))
            parts += [f"`{option}.name: {name}`: {_summary(parameters)}\n", _table(rows) if rows else "No options.\n"]
    return "\n".join(parts)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """A heading and a table for a class of options, then those of the sections in it."""
    if prefix:
        yield f"## `{prefix[:-1]}`\n"
        yield f"{_summary(model)}\n"
    rows = list(_rows(model, prefix))
    if rows:
        yield _table(rows)
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _sections(inner, f"{prefix}{name}.")


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        if not section and not field.exclude:
            yield f"`{prefix}{name}`", _kind(field.annotation, field.metadata), _default(field), field.description or ""


def _parameters(parameters: Callable[..., object]) -> Iterator[tuple[str, ...]]:
    """What a method or solver takes, as its docstring has it."""
    text = inspect.getdoc(parameters) or ""
    described = {name: " ".join(said.split()) for name, said in re.findall(r"(?m)^    (\w+): ((?:.|\n {8,})+)", text)}
    for name, parameter in inspect.signature(parameters).parameters.items():
        if name not in _NO_OPTIONS:
            meaning = described[name][0].upper() + described[name][1:]
            yield f"`{name}`", _WORDS[type(parameter.default)], _value(parameter.default), meaning


def _kind(annotation: Any, metadata: Iterable[object] = ()) -> str:  # noqa: ANN401  # an annotation is anything
    """What may be written, with its limits."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        fields = [extra for extra in inner[1:] if isinstance(extra, FieldInfo)]
        return _kind(inner[0], [*(limit for field in fields for limit in field.metadata), *metadata])
    if origin in (Union, UnionType):
        return " or ".join(_kind(one, metadata) for one in inner if one is not type(None))
    if origin is Literal:
        *first, last = (f"`{value}`" for value in inner)
        return f"{', '.join(first)} or {last}"
    if origin is tuple:
        return f"list: {_kind(inner[0])}"
    if origin is dict:
        return "options" if inner[1] is Any else f"by name: {_kind(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "file or options"
    limits = [
        words.format(f"{getattr(limit, name):,}")
        for limit in metadata
        for name, words in _LIMITS.items()
        if hasattr(limit, name)
    ]
    return ", ".join([_WORDS[annotation], *limits])


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else _value(field.get_default(call_default_factory=True))


def _value(value: object) -> str:
    return "" if value is None or value == "" else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _summary(described: object) -> str:
    return (inspect.getdoc(described) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = [("option", "type", "default", "meaning"), ("---",) * 4, *rows]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
