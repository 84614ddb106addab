"""Masks of the user's own from the study file to heads.json and to a job."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cs_localize.cli import main
from cs_localize.config import load_study
from cs_localize.errors import UsageError
from cs_localize.study import data_hashes, run_study
from tests.studies import planted, write_study
from tests.submit.builders import plan


def study(folder: Path, masks: str = "m.jsonl") -> Path:
    """A study with 60 masks of three of its 96 heads."""
    rng = np.random.default_rng(0)
    heads = [f"L{layer}H{head}" for layer in range(12) for head in range(8)]
    lines = [json.dumps([str(head) for head in rng.choice(heads, 3, replace=False)]) for _ in range(60)]
    (folder / "m.jsonl").write_text("\n".join(lines), encoding="utf-8")
    changes = {
        "tasks": ["antonyms", "capitals"],
        "design": {"requests": 120, "masks": masks},
        "confirm__enabled": False,
    }
    return write_study(folder / "study.yaml", planted(**changes, select__requests=1))


@pytest.mark.ray
def test_masks_from_a_file_are_the_design_of_the_study_and_known_by_their_content(tmp_path: Path) -> None:
    config = load_study(study(tmp_path))
    result = run_study(config, tmp_path / "out")

    design = np.load(tmp_path / "out" / "design.npz")
    assert len(np.unique(design["antonyms.masks"], axis=0)) == 60
    assert (design["antonyms.masks"].sum(axis=1) == 3).all()
    for finding in result.heads.tasks.values():
        assert finding.coherence is not None
        assert finding.overlap == pytest.approx(3 * 3 / 96, abs=0.05)
    page = result.report.read_text(encoding="utf-8")
    assert "Coherence" in page
    before = result.heads.provenance.data
    assert list(before) == ["design.masks"]
    (tmp_path / "m.jsonl").write_text('["L0H0"]\n', encoding="utf-8")
    assert data_hashes(config, {}) != before


def test_masks_travel_with_a_job_and_a_job_without_them_is_refused(tmp_path: Path) -> None:
    path = study(tmp_path)
    job = plan(tmp_path, study=path)
    carried = Path(job.runtime_env["working_dir"])
    assert (carried / "design.masks.jsonl").read_bytes() == (tmp_path / "m.jsonl").read_bytes()
    assert load_study(carried / "study.yaml").design.masks == str(carried / "design.masks.jsonl")
    (tmp_path / "m.jsonl").write_text('["L0H0"]\n', encoding="utf-8")
    assert plan(tmp_path, "changed", study=path).base_id != job.base_id
    with pytest.raises(UsageError, match=r"design.masks: m.jsonl would not travel"):
        plan(tmp_path, "left", study=path, working_dir=tmp_path, excludes=["*.jsonl"])


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ("none.npy", "study.yaml: design.masks: there is no file "),
        ("study.yaml", "is neither .npy nor .npz nor .jsonl"),
        ("wrong.jsonl", "wrong.jsonl, line 1: L99H0 is out of range: this model has layers 0..11 and heads 0..7"),
        ("one.jsonl", "1 masks and 40 items make 40 different requests, and 120 were asked for; lower design.requests"),
    ],
)
def test_a_mistake_in_the_masks_is_one_line_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, masks: str, message: str
) -> None:
    path = study(tmp_path, masks)
    (tmp_path / "wrong.jsonl").write_text('["L99H0"]', encoding="utf-8")
    (tmp_path / "one.jsonl").write_text('["L1H0"]', encoding="utf-8")
    assert main(["plan", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
