"""The files and folders that a study names, and whether they are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from cs_localize.config.study import StudyConfig
from cs_localize.errors import UsageError

INCLUDE_PATH = "lm_eval.include_path"
"""The option that names the folder of the user's own YAML tasks."""


def named_files(study: StudyConfig, tasks: Iterable[str] | None = None) -> dict[str, str]:
    """The files of a study, and its folder of YAML tasks, by the option that names them.

    Args:
        study: the study.
        tasks: those of the user's own tasks whose files are meant. Default: the ones that the study asks.
    """
    asked = (*study.tasks, *study.controls) if tasks is None else tasks
    files = {f"data.{name}": study.data[name].file for name in asked if name in study.data}
    others = {"design.masks": study.design.masks, INCLUDE_PATH: study.lm_eval.include_path}
    return files | {option: file for option, file in others.items() if file is not None}


def check_files(files: Mapping[str, str], source: str, folder: Path = Path()) -> None:
    """Refuses files that are not there, and a folder of YAML tasks that is not there or holds none.

    Args:
        files: by the option that names them, as ``named_files`` gives them.
        source: what to call the study in messages.
        folder: where relative ones are.

    Raises:
        UsageError: if so.
    """
    for option, file in files.items():
        path, named = folder / file, f"{source}: {option}"
        if option == INCLUDE_PATH:
            check_yaml_folder(path, named)
            continue
        try:
            if not path.is_file():
                found = f"{path} is no file" if path.exists() else f"there is no file {path}"
                raise UsageError(f"{named}: {found}")
        except OSError as error:
            raise UsageError(f"{named}: cannot read {path}: {error.strerror}") from None


def check_yaml_folder(folder: Path, named: str = INCLUDE_PATH) -> None:
    """Refuses a folder of YAML tasks that is not there or holds none.

    Args:
        folder: where they should be, in it or in folders of it.
        named: the option that names it, for messages.

    Raises:
        UsageError: if there is no such folder, it cannot be read, or no file in it ends in ``.yaml``.
    """
    try:
        if not folder.is_dir():
            found = f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"
            raise UsageError(f"{named}: {found}")
        empty = not any(folder.iterdir())
        has_tasks = any(folder.rglob("*.yaml"))
    except OSError as error:
        raise UsageError(f"{named}: cannot read {folder}: {error.strerror}") from None
    if not has_tasks:
        what = "is empty" if empty else "holds no file that ends in .yaml"
        raise UsageError(f"{named}: the folder {folder} {what}")
