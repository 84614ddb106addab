from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from cs_localize.errors import CsLocalizeError
from cs_localize.findings import (
    ConfirmFile,
    CrosscheckFile,
    FileT,
    HeadsFile,
    Provenance,
    RankedHead,
    TaskFinding,
    dump_file,
    read_file,
    write_file,
    write_text,
)

GOLDEN = Path(__file__).parent / "confirm" / "golden"


def heads_file(effect: float = 1.25) -> HeadsFile:
    ranked = RankedHead(
        head="L4H2",
        effect=effect,
        interval=(1.0, 1.5),
        specificity=3.5,
        specificity_mean=4.0,
        strongest_control="plurals",
    )
    below = RankedHead(
        head="L0H1", effect=0.0, interval=None, specificity=-0.5, specificity_mean=0.0, strongest_control=None
    )
    finding = TaskFinding(
        named=["L4H2"],
        reason="1 head reaches 80% of the damage of 10",
        ranking=[ranked, below],
        search_curve=[0.0, 4.5],
        baseline_score=-0.5,
        baseline_accuracy=0.75,
        items=40,
        tests_a_head=54.0,
        requests=900,
        baseline_requests=40,
        tokens=32000,
        fit=0.8,
    )
    return HeadsFile(
        model="tiny",
        layers=6,
        heads=4,
        kv_heads=2,
        solver="lasso",
        tasks={"antonyms": finding},
        universal=["L0H0"],
        fragile_layers=[0],
        sweep_requests=960,
        warnings=[],
        provenance=Provenance(
            version="0.1.0",
            command="cs-localize run study.yaml",
            engine="planted-0",
            model_fingerprint="0",
            seed=7,
            packages={"numpy": "2.0"},
        ),
    )


def written(kind: type[FileT], folder: Path) -> tuple[BaseModel, Path]:
    """A finding of every kind and the file it lies in."""
    path = folder / "finding.json"
    if kind is HeadsFile:
        write_file(path, heads_file())
        return heads_file(), path
    name = "confirm.json" if kind is ConfirmFile else "crosscheck.json"
    finding = kind.model_validate_json((GOLDEN / name).read_text(encoding="utf-8"))
    write_file(path, finding)
    return finding, path


every_kind = pytest.mark.parametrize("kind", [HeadsFile, ConfirmFile, CrosscheckFile])


@every_kind
def test_what_was_written_is_what_is_read(kind: type[FileT], tmp_path: Path) -> None:
    finding, path = written(kind, tmp_path)
    assert read_file(path, kind) == finding
    assert dump_file(read_file(path, kind)) == path.read_text(encoding="utf-8")


def test_a_confirmation_from_before_heads_were_tried_in_pairs_can_be_read(tmp_path: Path) -> None:
    finding, path = written(ConfirmFile, tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data.pop("interactions")
    path.write_text(json.dumps(data), encoding="utf-8")
    assert read_file(path, ConfirmFile) == finding.model_copy(update={"interactions": None})


@every_kind
def test_files_carry_schema_1_and_refuse_another(kind: type[FileT], tmp_path: Path) -> None:
    _, path = written(kind, tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["schema"] == 1
    path.write_text(json.dumps({**data, "schema": 2}), encoding="utf-8")
    with pytest.raises(CsLocalizeError, match=f"is not a valid {kind.__name__}: schema: "):
        read_file(path, kind)


@every_kind
def test_a_field_that_the_layout_lacks_is_refused(kind: type[FileT], tmp_path: Path) -> None:
    _, path = written(kind, tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, "surplus": 1}), encoding="utf-8")
    with pytest.raises(CsLocalizeError, match="surplus"):
        read_file(path, kind)


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'{"schema": 1}', b"\xff\xfe"])
def test_an_unreadable_file_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "confirm.json"
    path.write_bytes(content)
    with pytest.raises(CsLocalizeError) as error:
        read_file(path, ConfirmFile)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert ": :" not in str(error.value)


def test_a_missing_file_says_to_run_the_study(tmp_path: Path) -> None:
    with pytest.raises(CsLocalizeError, match="does not exist; run the study first"):
        read_file(tmp_path / "heads.json", HeadsFile)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The pydantic models that an annotation mentions, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
    for inner in get_args(annotation):
        yield from models_in(inner)


@every_kind
def test_every_field_at_every_depth_has_a_description(kind: type[FileT]) -> None:
    bare = {
        f"{model.__name__}.{name}"
        for model in models_in(kind)
        for name, field in model.model_fields.items()
        if not (field.description or "").endswith(".")
    }
    assert bare == set()


def test_the_walk_over_models_reaches_the_inner_ones() -> None:
    assert {model.__name__ for model in models_in(CrosscheckFile)} == {
        "CrosscheckFile",
        "TaskCrosscheck",
        "NeuronSet",
        "OverlapMeasure",
        "ConditionDrop",
        "ImpactOnPerformance",
        "DosePoint",
    }


def test_equal_findings_are_equal_byte_for_byte_whatever_the_last_digits_and_the_sign_of_zero() -> None:
    assert dump_file(heads_file(0.1 + 0.2)) == dump_file(heads_file(0.3))
    assert dump_file(heads_file(-0.0)) == dump_file(heads_file(0.0))
    assert dump_file(heads_file(0.3001)) != dump_file(heads_file(0.3))


def test_a_figure_that_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    write_file(path, heads_file())
    before = path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="JSON"):
        write_file(path, heads_file(float("inf")))
    assert path.read_text(encoding="utf-8") == before


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_text(path, "old")

    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert os.listdir(tmp_path) == ["report.html"]
    assert path.read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_a_file_is_as_for_any_other_that_the_user_makes(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "heads.json"
    usual = os.umask(umask)
    try:
        write_file(path, heads_file())
    finally:
        os.umask(usual)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))  # bytes; a write beyond fails
    try:
        with pytest.raises(OSError, match="File too large") as error:
            write_text(tmp_path / "report.html", "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert error.value.filename == str(tmp_path / "report.html")
    assert os.listdir(tmp_path) == []


def test_findings_cannot_be_changed_after_the_fact() -> None:
    with pytest.raises(ValueError, match="frozen"):
        heads_file().__setattr__("model", "other")
