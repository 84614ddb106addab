"""What travels to the cluster with a job: the files of its working directory, weighed before Ray packs them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from cs_localize.errors import UsageError, one_line

_MIB = 2**20
LARGEST = 100 * _MIB
"""Bytes that the job server takes: Ray's packages may have 500 MiB, but it answers 413 to an upload above 100."""

_ENTRY, _END = 76, 22
"""Bytes of a zip file beside contents and names: a file's two headers, and the end of the directory."""

_NEARLY_ALL = 0.9
_SILENT = logging.Logger("cs_localize.submit")  # Ray would tell of every error that it passes on
_SILENT.disabled = True


@dataclass(frozen=True)
class Package:
    """The files that travel.

    Attributes:
        root: the working directory.
        sizes: bytes by path below the root.
    """

    root: Path
    sizes: dict[PurePath, int]

    @property
    def size(self) -> int:
        """Bytes of the zip file that Ray uploads: it does not compress, and names every file twice."""
        return sum(size + _ENTRY + 2 * len(os.fsencode(path)) for path, size in self.sizes.items()) + _END

    def digest(self) -> str:
        """A hash of names and contents."""
        whole = hashlib.sha256()
        for path in sorted(self.sizes):
            with (self.root / path).open("rb") as file:
                whole.update(f"{path}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
        return whole.hexdigest()

    def heaviest(self, count: int = 3) -> list[tuple[PurePath, int]]:
        """The heaviest files and folders directly below the root, each narrowed to what nearly all its weight is in."""
        weights: Counter[PurePath] = Counter()
        for path, size in self.sizes.items():
            for part in (path, *path.parents):
                weights[part] += size
        del weights[PurePath()]
        top = [(path, weight) for path, weight in weights.items() if len(path.parts) == 1]
        largest = sorted(top, key=lambda entry: (-entry[1], entry[0]))[:count]
        return [_narrowed(path, weights) for path, _ in largest]


def pack(root: Path, excludes: Sequence[str] = (), option: str = "--working-dir") -> Package:
    """Lists what Ray will pack of a working directory, by Ray's own rules.

    Args:
        root: the working directory; ``.gitignore`` and ``.rayignore`` files in it hold.
        excludes: patterns as in ``.gitignore``.
        option: what names the folder, for messages.

    Raises:
        UsageError: if it is no folder, or is larger than a job server takes; the message names the largest parts; if a
            name in it is not UTF-8, a .gitignore in it cannot be read, or a link in it leads back to where it is.
    """
    if not root.is_dir():
        raise UsageError(f"{option} {root}: there is no such folder")
    # Private, but nothing else says what Ray will leave out; Ray's version is pinned and a test compares.
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    sizes: dict[PurePath, int] = {}

    def note(path: Path) -> None:
        if path.is_symlink() and _leads_back(path, top):
            raise UsageError(
                f"{option} {root}: the link {path.relative_to(top)} points to a folder that holds it; remove it, or "
                "leave it out with .gitignore"
            )
        if path.is_file():
            sizes[path.relative_to(top)] = path.stat().st_size

    top = root.absolute()
    try:
        excluded = _get_excludes(top, list(excludes))
    except (ValueError, IndexError):  # what the parser of patterns says of '!'
        raise UsageError(f"--exclude {' '.join(excludes)}: write patterns as in .gitignore") from None
    respect_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    try:
        _dir_travel(top, [excluded], note, include_gitignore=respect_gitignore, logger=_SILENT)
    except (ValueError, IndexError) as error:  # likewise, of a file
        raise UsageError(
            f"{option} {root}: a .gitignore or .rayignore in it cannot be read: {one_line(error)}"
        ) from None
    for path in sizes:
        if str(path).encode(errors="replace").decode() != str(path):
            raise UsageError(f"{option} {root}: the name {str(path)!r} is not UTF-8; rename the file")
    package = Package(top, sizes)
    if package.size > LARGEST:
        parts = ", ".join(f"{path} ({_mib(size)})" for path, size in package.heaviest())
        raise UsageError(
            f"{option} {root} has {_mib(package.size)} and Ray takes {_mib(LARGEST)}; the largest: {parts}; "
            "leave out what the job does not need with --exclude or .gitignore"
        )
    return package


def _leads_back(link: Path, top: Path) -> bool:
    """Whether whoever follows a link to a folder, on the way down from the top, comes to that link again."""
    target = os.path.realpath(link)
    above = (folder for folder in link.parents if folder.is_relative_to(top))
    return any(Path(os.path.realpath(folder)).is_relative_to(target) for folder in above)


def _narrowed(path: PurePath, weights: Counter[PurePath]) -> tuple[PurePath, int]:
    inner = max((below for below in weights if below.parent == path), key=weights.__getitem__, default=None)
    if inner is None or weights[inner] < _NEARLY_ALL * weights[path]:
        return path, weights[path]
    return _narrowed(inner, weights)


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"
