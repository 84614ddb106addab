"""Unix sockets lie in a temporary folder, and the kernel takes none whose path is long."""

from __future__ import annotations

import os
import tempfile

from cs_localize.errors import UsageError

VLLM_FOLDER = "VLLM_RPC_BASE_PATH"
"""The variable that names the folder of vLLM's sockets; without it they are in the temporary folder."""

_LONGEST_PATH = 107  # bytes
_VLLM_NAME = 36  # bytes, of a UUID


def vllm_sockets_fit(folder: str) -> bool:
    """Whether the kernel takes vLLM's sockets in that folder."""
    return _size(folder) <= _longest_folder(_VLLM_NAME)


def check_vllm_sockets() -> None:
    """Refuses an environment in which vLLM's processes could not talk to each other.

    Raises:
        UsageError: if the paths of their sockets would be too long.
    """
    option = VLLM_FOLDER if VLLM_FOLDER in os.environ else "TMPDIR"
    _check("vLLM", option, os.environ.get(VLLM_FOLDER, tempfile.gettempdir()), _VLLM_NAME)


def check_ray_sockets() -> None:
    """Refuses an environment in which a Ray of this process's own could not start.

    Raises:
        UsageError: if the paths of its sockets would be too long.
    """
    option = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    moment = "0000-00-00_00-00-00_000000"
    longest = f"ray/session_{moment}_{os.getpid()}/sockets/plasma_store"
    _check("Ray", option, os.environ.get(option, "/tmp"), len(longest))


def _check(who: str, option: str, folder: str, name: int) -> None:
    most = _longest_folder(name)
    if _size(folder) > most:
        raise UsageError(
            f"{who} needs a temporary folder whose path has at most {most} bytes, for its sockets; set {option} to "
            f"one, such as /tmp (it has {_size(folder)} now: {folder})"
        )


def _longest_folder(name: int) -> int:
    """The most bytes of the path of a folder, for a name in it of that many."""
    return _LONGEST_PATH - len("/") - name


def _size(folder: str) -> int:
    return len(os.fsencode(folder))
