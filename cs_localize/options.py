"""Options as a user writes them: a YAML file, and ``a.b=c`` on the command line over it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from cs_localize.errors import UsageError, one_line

_YAML_PROBLEMS = (yaml.YAMLError, ValueError, RecursionError)
"""PyYAML lets through what Python says of a 13th month, of 5000 digits, and of brackets in brackets in brackets."""


class _Loader(yaml.SafeLoader):
    """Takes 1e-3 for a number, which is text to YAML 1.1 for want of a dot."""


class _Dumper(yaml.SafeDumper):
    """Writes such text in quotes, so that it is read as text again."""


for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def dump_options(data: object) -> str:
    """Options as YAML, which ``read_options`` reads as the same."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read_options(path: Path, overrides: tuple[str, ...] = (), what: str = "study") -> object:
    """What a YAML file of options holds, with the ``a.b=c`` overrides applied.

    Raises:
        UsageError: if the file is missing or is not YAML, or an override is malformed.
    """
    try:
        data = _read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no {what} file at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    except _YAML_PROBLEMS as error:
        raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from None
    return apply_overrides(data, overrides) if isinstance(data, dict) else data


def apply_overrides(data: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """A copy of the mapping with every ``a.b=c`` set.

    Raises:
        UsageError: if an override is not of that form or goes through something that is not a section.
    """
    result = dict(data)
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not all(path.split(".")):
            raise UsageError(f"--set {override}: write it as option=value, with dots between a section and its option")
        try:
            value = _read_yaml(text)
        except _YAML_PROBLEMS as error:
            raise UsageError(f"--set {override}: the value is not valid YAML: {one_line(error)}") from None
        *sections, option = path.split(".")
        target = result
        for section in sections:
            inner = target.get(section)
            if inner is not None and not isinstance(inner, dict):
                raise UsageError(f"--set {override}: '{section}' is not a section")
            target[section] = target = dict(inner or {})
        target[option] = value
    return result


def _read_yaml(text: str) -> object:
    """What a YAML document holds; a key given twice is an error, since one of the two would be ignored."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_repeated_keys(node: yaml.Node, seen: set[int]) -> None:
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if not isinstance(node, yaml.MappingNode):
        for inner in node.value:
            _refuse_repeated_keys(inner, seen)
        return
    keys: set[str] = set()
    for key, inner in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"'{key.value}' is given twice", problem_mark=key.start_mark)
            keys.add(key.value)
        _refuse_repeated_keys(inner, seen)
