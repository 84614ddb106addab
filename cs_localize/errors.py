"""The errors a user can cause. The CLI prints their message as one line; each says what to change."""

from __future__ import annotations

import errno


class CsLocalizeError(Exception):
    """Base of every error with a message meant for the user. Exit code 1."""

    exit_code = 1


class UsageError(CsLocalizeError):
    """What was asked for does not exist or makes no sense: an unknown head, task, model, option. Exit code 2."""

    exit_code = 2


class MeasurementError(CsLocalizeError):
    """An outcome cannot be shown to have been measured under its ablation, so it is not an outcome."""


class LedgerError(CsLocalizeError):
    """The ledger on disk cannot be read or written."""


class SolverError(CsLocalizeError):
    """A solver did not reach a solution, or was given data it cannot use."""


def explained(error: BaseException) -> str | None:
    """What to tell a user of an error that was to be expected one day; None for any other."""
    if isinstance(error, ModuleNotFoundError):
        return f"the package '{error.name}' is missing; install cs_localize[cpu] or cs_localize[gpu]"
    if isinstance(error, MemoryError):
        return f"there is not enough memory ({str(error) or 'no size named'}); ask for less"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full ({error.filename or 'no file named'}); free some space and run again"
    return str(error) if isinstance(error, CsLocalizeError | OSError) else None


def one_line(text: object, longest: int = 300) -> str:
    """A message of any kind as one line; what is longer is cut, and ends in an ellipsis."""
    line = " ".join(str(text).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
