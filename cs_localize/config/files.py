"""The files and folders that a study names, and whether they are there."""

from __future__ import annotations

from pathlib import Path

from cs_localize.errors import UsageError

INCLUDE_PATH = "lm_eval.include_path"
"""The option that names the folder of the user's own YAML tasks."""


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
