"""The folder that an export makes: what is in the way, what goes wrong while it is filled."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from cs_localize.cli import main
from cs_localize.errors import UsageError
from cs_localize.export import export_checkpoint
from cs_localize.models.files import fingerprint
from tests.exports import fails, model


def test_what_is_there_already_is_never_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    before = fingerprint(source)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    given = ("--model", str(source), "--heads", "L0H0", "--out")

    assert "is not empty" in fails(capsys, *given, str(source))
    assert "is a file" in fails(capsys, *given, str(tmp_path / "file"))
    assert f"{tmp_path / 'file'} is a file" in fails(capsys, *given, str(tmp_path / "file" / "below" / "out"))
    assert main(("export", *given, str(tmp_path / "empty"))) == 0

    assert (fingerprint(source), (tmp_path / "file").read_text()) == (before, "mine")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@pytest.mark.parametrize("out", ["loop", "loop/out", "~nobody-of-that-name/out"])
def test_a_folder_that_leads_nowhere_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: str
) -> None:
    source = model(tmp_path / "source")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)

    assert "name another folder" in fails(capsys, "--model", str(source), "--heads", "L0H0", "--out", out)


def test_a_folder_that_is_filled_meanwhile_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "out"

    def meanwhile(*_: object) -> None:
        out.mkdir()
        (out / "mine").write_text("mine")

    monkeypatch.setattr("cs_localize.export.copy_with_zeros", meanwhile)

    with pytest.raises(UsageError, match="is not empty"):
        export_checkpoint(str(source), "L0H0", out)

    assert [file.name for file in out.iterdir()] == ["mine"]
    assert {file.name for file in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("large", ["model.safetensors", "tokenizer.json", "additional_chat_templates/tool_use.jinja"])
def test_a_file_that_the_system_does_not_take_is_said_of_the_copy_and_not_of_the_source(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, large: str
) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "deep" / "out"
    (source / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "additional_chat_templates/tool_use.jinja"):
        (source / name).write_bytes(b" " * (100_000 if large == name else 2))
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))  # bytes; a write beyond fails
    try:
        code = main(("export", "--model", str(source), "--heads", "L0H0", "--out", str(out)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    assert code == 1
    assert capsys.readouterr().err == f"cs-localize: [Errno 27] File too large: '{out}'\n"
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_cannot_be_replaced_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "mounted"
    out.mkdir()

    def busy(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self), None, str(target))

    monkeypatch.setattr(Path, "rename", busy)

    message = fails(capsys, "--model", str(source), "--heads", "L0H0", "--out", str(out))

    assert "mount point; name a new folder in it" in message
    assert {file.name for file in tmp_path.iterdir()} == {"source", "mounted"}


def test_who_may_read_the_folder_is_as_for_any_other_that_the_user_makes(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    usual = os.umask(0o027)
    try:
        export_checkpoint(str(source), "L0H0", tmp_path / "out")
    finally:
        os.umask(usual)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_full_disk_or_an_interruption_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "deep" / "er" / "out"

    def full(*_: object) -> None:
        assert any((tmp_path / "deep" / "er").iterdir()), "some of it is written by then"
        raise error

    monkeypatch.setattr("os.fsync", full)

    code = main(("export", "--model", str(source), "--heads", "L0H0", "--out", str(out)))

    assert code == (1 if isinstance(error, OSError) else 130)
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert (f"the disk is full ({out})" in message) == isinstance(error, OSError)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
