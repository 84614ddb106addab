"""The errors a user can cause. The CLI prints their message as one line; each says what to change."""

from __future__ import annotations


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


def one_line(text: object, longest: int = 300) -> str:
    """A message of any kind as one line; what is longer is cut, and ends in an ellipsis."""
    line = " ".join(str(text).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
