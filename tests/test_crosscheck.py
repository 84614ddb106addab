from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cs_localize import crosscheck
from cs_localize.cli import main
from cs_localize.config import dump_study, parse_study
from cs_localize.crosscheck import crosscheck_study
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.folder import StudyResult
from cs_localize.models import random_model
from cs_localize.study import run_study
from tests.studies import planted_config

TASKS = ("tiny_copy", "tiny_sort", "tiny_modsum")


@pytest.fixture(scope="module")
def searched(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """A finished study of a random model that was not cross-checked."""
    folder = tmp_path_factory.mktemp("searched")
    return run_study(parse_study(study(folder, enabled=False)), folder / "out")


def study(folder: Path, enabled: bool) -> dict[str, object]:
    model = folder / "model"
    return {
        "model": str(model if model.exists() else random_model(model, "llama")),
        "tasks": list(TASKS),
        "search_items": 12,
        "held_out_items": 8,
        "engine": {"name": "hf", "workers": 1, "threads": 1},
        "ledger": str(folder / "ledger"),
        "design": {"requests": 40, "density": 0.2, "fragile_density": 0.2, "pilot": {"requests_a_layer": 0}},
        "select": {"candidates": 4, "items": 8, "limit": 2, "requests": 60, "bootstrap": 20},
        "confirm": {"random_draws": 1, "curve": 1, "bootstrap": 100},
        "crosscheck": {
            "enabled": enabled,
            "tasks": ["tiny_copy"],
            "items": 2,
            "zeroed_items": 1,
            "steps": 3,
            "random_draws": 1,
            "bootstrap": 100,
            "dose": [1],
        },
    }


@pytest.mark.model
@pytest.mark.ray
@pytest.mark.full
def test_a_later_cross_check_is_the_one_the_study_would_have_made(searched: StudyResult, tmp_path: Path) -> None:
    assert searched.crosscheck is None
    folder = searched.out.parent
    at_once = run_study(parse_study(study(folder, enabled=True)), tmp_path)

    later = crosscheck_study(searched.out)

    assert list(later.crosscheck.tasks if later.crosscheck else ()) == ["tiny_copy"]
    assert (later.out / "crosscheck.json").read_bytes() == (at_once.out / "crosscheck.json").read_bytes()
    assert "tiny_copy" in later.report.read_text(encoding="utf-8")

    more = crosscheck_study(searched.out, ["tiny_modsum"])

    assert list(more.crosscheck.tasks if more.crosscheck else ()) == ["tiny_copy", "tiny_modsum"], "none is lost"
    assert more.heads == searched.heads

    again = run_study(parse_study(study(folder, enabled=False)), searched.out)

    assert again.crosscheck == more.crosscheck, "nor when the study runs again"


@pytest.mark.model
@pytest.mark.ray
@pytest.mark.full
def test_a_study_of_another_engine_is_not_cross_checked_with_this_one(searched: StudyResult, tmp_path: Path) -> None:
    for name in ("study.yaml", "confirm.json", "heads.json"):
        (tmp_path / name).write_bytes((searched.out / name).read_bytes())
    heads = (tmp_path / "heads.json").read_text(encoding="utf-8")
    engine = searched.heads.provenance.engine
    (tmp_path / "heads.json").write_text(heads.replace(engine, f"older {engine}"), encoding="utf-8")

    with pytest.raises(UsageError, match="another model, engine or version"):
        crosscheck_study(tmp_path)


@pytest.mark.model
@pytest.mark.ray
@pytest.mark.full
def test_a_study_that_another_run_changes_before_the_ledger_is_locked_is_not_cross_checked(
    searched: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = iter([searched, replace(searched, confirm=None)])
    monkeypatch.setattr(crosscheck, "load_result", lambda out: next(read))

    with pytest.raises(CsLocalizeError, match="changed by another run"):
        crosscheck_study(searched.out)


@pytest.mark.ray
def test_a_study_that_cannot_be_cross_checked_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="no study file"):
        crosscheck_study(tmp_path)

    (tmp_path / "study.yaml").write_text(dump_study(planted_config(confirm__enabled=False)), encoding="utf-8")
    with pytest.raises(UsageError, match=r"confirm\.enabled"):
        crosscheck_study(tmp_path)

    config = planted_config(confirm__random_draws=0)
    (tmp_path / "study.yaml").write_text(dump_study(config), encoding="utf-8")
    with pytest.raises(UsageError, match=r"set confirm\.random_draws to 1 or more"):
        crosscheck_study(tmp_path)

    out = tmp_path / "planted"
    run_study(planted_config(design__requests=200, confirm__random_draws=1), out)
    with pytest.raises(UsageError, match="no neurons"):
        crosscheck_study(out)
    capsys.readouterr()
    for tasks, wrong in (("antonymz", "antonymz"), (",", "names no task")):
        assert main(["crosscheck", str(out), "--tasks", tasks]) == 2
        assert f"--tasks {wrong}: choose among the study's" in capsys.readouterr().err

    (out / "confirm.json").unlink()
    with pytest.raises(CsLocalizeError, match="run the study first"):
        crosscheck_study(out)
