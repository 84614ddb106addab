"""A study's folder: what lies in it, and how it is made ready for another run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs_localize.config import StudyConfig, dump_study
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.findings import ConfirmFile, CrosscheckFile, HeadsFile, read_file, write_text
from cs_localize.measure.spec import EngineSpec

_RESULTS = ("design.npz", "heads.json", "confirm.json", "crosscheck.json", "report.html")
_SAMPLES = "lm_eval/*/*_*.json*"


@dataclass(frozen=True)
class StudyResult:
    """What a study left on disk.

    Attributes:
        out: the study's folder.
        heads: the finding.
        confirm: its confirmation on held-out items; None where the study switches it off.
        crosscheck: heads against neurons; None likewise.
        report: the page.
    """

    out: Path
    heads: HeadsFile
    confirm: ConfirmFile | None
    crosscheck: CrosscheckFile | None
    report: Path


def load_result(out: Path) -> StudyResult:
    """A finished study from its folder.

    Raises:
        CsLocalizeError: if a file is missing or damaged.
    """
    confirm = read_file(out / "confirm.json", ConfirmFile) if (out / "confirm.json").exists() else None
    checked = read_file(out / "crosscheck.json", CrosscheckFile) if (out / "crosscheck.json").exists() else None
    return StudyResult(out, read_file(out / "heads.json", HeadsFile), confirm, checked, out / "report.html")


def make_folder(out: Path) -> None:
    """Makes a study's folder unless it is there.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None


def clear_folder(config: StudyConfig, out: Path, spec: EngineSpec, data: dict[str, str]) -> None:
    """Takes away the results of another study or engine that the folder may hold; its ledger stays useful.

    Otherwise a study that is interrupted would leave new heads beside the confirmation of the old ones. Whether answers
    are logged makes no other study: results stay, and answers that are not to be logged any more go.

    Args:
        config: the study.
        out: its folder.
        spec: its engine.
        data: hashes of its tasks of the user's own, by name.

    Raises:
        UsageError: if the folder cannot be written.
    """
    text = dump_study(config)
    path = out / "study.yaml"
    try:
        recorded = path.read_bytes() if path.exists() else b""
        same = recorded in {text.encode(), dump_study(_logging(config, not config.confirm.log_samples)).encode()}
        kept = same and _heads_are_of(out / "heads.json", spec, data)
        stale = [] if kept else [out / name for name in _RESULTS]
        if not kept or not config.confirm.log_samples:
            stale += out.glob(_SAMPLES)
        for file in stale:
            file.unlink(missing_ok=True)
        if not kept or recorded != text.encode():
            write_text(path, text)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None


def _logging(config: StudyConfig, log_samples: bool) -> StudyConfig:
    confirm = config.confirm.model_copy(update={"log_samples": log_samples})
    return config.model_copy(update={"confirm": confirm})


def _heads_are_of(path: Path, spec: EngineSpec, data: dict[str, str]) -> bool:
    try:
        return read_file(path, HeadsFile).provenance.current(spec.fingerprint, data)
    except CsLocalizeError:
        return False
