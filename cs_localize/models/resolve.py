"""From the name a user gives to a directory that every engine can load."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.models import files, hub, smollm2, tiny
from cs_localize.models.extras import need
from cs_localize.models.shape import read_config, read_shape

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine, ready to load.

    Attributes:
        name: as the user gave it.
        path: directory with ``config.json``, safetensors weights and tokenizer.
        shape: its geometry.
        fingerprint: content hash; see ``fingerprint`` in ``cs_localize.models.files`` for what it covers.
    """

    name: str
    path: Path
    shape: ModelShape
    fingerprint: str


class KnownModel(NamedTuple):
    """A model that can be named without a path or a hub id.

    Attributes:
        name: what to write.
        description: one line for listings.
        cached: whether it is on this machine already.
    """

    name: str
    description: str
    cached: bool


@dataclass(frozen=True)
class _Maker:
    description: str
    directory: Callable[[], Path]
    build: Callable[[], Path]


_MAKERS = {
    smollm2.NAME: _Maker(smollm2.DESCRIPTION, smollm2.directory, smollm2.build),
    **{
        name: _Maker(tiny.describe(name), partial(tiny.directory, name), partial(tiny.build, name))
        for name in tiny.RECIPES
    },
}


def known_models() -> list[KnownModel]:
    """The models that this library can make available by itself, in a fixed order."""
    return [KnownModel(name, maker.description, maker.directory().is_dir()) for name, maker in _MAKERS.items()]


def resolve(name: str, *, revision: str | None = None) -> LocalModel:
    """Finds a model, fetching, converting or training it if need be.

    A name is, in this order: a directory with a ``config.json``; one of ``known_models``; a hub id
    ``organisation/model``, looked up in the local hub cache before the hub.

    Args:
        name: the name.
        revision: branch, tag or commit of a hub model.

    Raises:
        UsageError: if there is no such model, it cannot be had, or it cannot be studied.
    """
    if name.encode(errors="replace").decode() != name:  # it is written to files that hold nothing else
        raise UsageError(f"the model's name {name!a} is not valid UTF-8; give its folder another name")
    path = _locate(name, revision)
    missing = files.what_is_missing(path)
    if missing:
        raise UsageError(f"{path} lacks {missing}; a model directory holds what save_pretrained writes")
    _refuse_own_code(name, path)
    return LocalModel(name, path, read_shape(path), files.fingerprint(path))


def _locate(name: str, revision: str | None) -> Path:
    local = Path(name).expanduser()
    is_local = (local / "config.json").is_file()
    if revision is not None and (is_local or name in _MAKERS):
        raise UsageError(f"'{name}' has no revisions; only a hub model has")
    if is_local:
        return local.resolve()
    if name in _MAKERS:
        return _MAKERS[name].build()
    if local.is_dir():
        raise UsageError(f"the directory '{name}' has no config.json; a model directory needs one")
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return hub.fetch(name, revision)
    raise UsageError(_unknown(name))


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _MAKERS, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"no model '{name}': {hint}give a directory, a hub id (organisation/model) or one of {', '.join(_MAKERS)}"


def _refuse_own_code(name: str, path: Path) -> None:
    """A model that transformers can only run with code from its repository is refused: that code is never run."""
    config = read_config(path)
    if "auto_map" not in config:
        return
    need(f"'{name}'", "transformers")
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        raise UsageError(
            f"'{name}' (model_type '{config.get('model_type')}') only runs with Python code of its own (auto_map), "
            "which is never executed here; use a model that transformers supports itself"
        )
