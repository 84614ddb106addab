"""Directories that are made once: under a lock, and either whole or not there."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cs_localize.errors import UsageError, one_line
from cs_localize.models.extras import need

_LOG = logging.getLogger("cs_localize")


def home() -> Path:
    """Where models are kept: ``CS_LOCALIZE_HOME``, or ``~/.cache/cs_localize``."""
    folder = os.environ.get("CS_LOCALIZE_HOME") or "~/.cache/cs_localize"
    try:
        return Path(folder).expanduser().resolve()
    except RuntimeError as error:  # a link to itself, or nobody's home
        raise UsageError(f"'{folder}' is no folder ({one_line(error)}); set CS_LOCALIZE_HOME to one") from None


def model_directory(name: str, recipe: str) -> Path:
    """Where the model made by a recipe is kept; another recipe has another directory, so nothing stale is read."""
    return home() / "models" / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Makes a directory unless it is there, and returns it.

    ``build`` fills a temporary directory beside the target, which is renamed when it is whole. A lock file admits one
    process at a time; the others wait and find the target. What a failed or killed build left behind is removed.

    Args:
        target: the directory to make.
        build: is given an empty directory to fill.

    Raises:
        UsageError: if the directory cannot be written, or the disk is full.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not target.is_dir():
                _build(target, build)
    except Exception as error:
        if isinstance(error, OSError) or _disk_is_full(error):
            raise UsageError(_explain(error, target)) from error
        raise
    return target


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    need("keeping models", "filelock")
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _LOG.info("another process is preparing %s; waiting for it", target.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(target: Path, build: Callable[[Path], None]) -> None:
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed: whoever holds the lock is alone here
    with whole_or_nothing(target, part):
        build(part)
        for file in part.rglob("*"):  # some writers make files for the owner alone; a shared cache is for all
            file.chmod(file.stat().st_mode | (part.stat().st_mode & 0o444))


@contextmanager
def whole_or_nothing(target: Path, part: Path) -> Iterator[None]:
    """Makes the folder ``part``, which takes the target's place when the block ends and is gone if the block fails.

    Args:
        target: not there, or an empty folder.
        part: a new folder beside it.

    Raises:
        OSError: if a folder cannot be made, or the target has been filled meanwhile.
    """
    part.mkdir()
    try:
        yield
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _disk_is_full(error: Exception) -> bool:
    # Safetensors and pip report it in their own words, around those of the system.
    return getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)


def _explain(error: Exception, target: Path) -> str:
    if _disk_is_full(error):
        return f"the disk is full at {target.parent}: make room, or set CS_LOCALIZE_HOME to a folder on another disk"
    if isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS:
        return f"{target.parent} cannot be written; set CS_LOCALIZE_HOME to a folder that can"
    return f"{target} could not be made: {str(error).splitlines()[0]}"
