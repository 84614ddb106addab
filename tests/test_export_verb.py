from __future__ import annotations

from pathlib import Path

import pytest

from cs_localize import __version__
from cs_localize.cli import main
from cs_localize.findings import write_file
from cs_localize.models.files import fingerprint
from tests.exports import DOWN_PROJ, O_PROJ, fails, model, read
from tests.report.builders import heads_file


def test_the_model_card_says_what_was_removed_from_what_by_what(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "new" / "out"

    assert main(("export", "--model", str(source), "--heads", "L0G1", "--neurons", "L1N7", "--out", str(out))) == 0

    card = (out / "README.md").read_text()
    for part in (
        f"# {source} without 2 attention heads and 1 FFN neuron",
        f"| its fingerprint | `{fingerprint(source)}` |",
        "| heads removed | L0H2, L0H3 |",
        "| neurons removed | L1N7 |",
        f"cs_localize {__version__}",
        f"`cs-localize export --model {source} --heads L0G1 --neurons L1N7 --out {out}`",
        f"| `{O_PROJ.format(0)}` | 16-23, 24-31 |",
        f"| `{DOWN_PROJ.format(1)}` | 7 |",
    ):
        assert part in card
    printed = capsys.readouterr().out
    assert f"checkpoint: {out}" in printed
    assert fingerprint(out) in printed
    assert fingerprint(out) != fingerprint(source)


def test_the_heads_of_a_study_are_removed_by_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, study = model(tmp_path / "source"), tmp_path / "study"
    study.mkdir()
    (study / "study.yaml").write_text(f"model: {source}\ntasks: [antonyms, capitals]\n")
    found = heads_file()
    named = {"antonyms": "L0H1", "capitals": "L1H1"}
    tasks = {task: found.tasks[task].model_copy(update={"named": [head]}) for task, head in named.items()}
    write_file(study / "heads.json", found.model_copy(update={"model": str(source), "tasks": tasks, "universal": []}))
    given = ("--heads-from", str(study), "--out", str(tmp_path / "out"))

    assert "choose with --task one of antonyms, capitals" in fails(capsys, *given)
    assert "no heads for 'plurals'" in fails(capsys, *given, "--task", "plurals")
    assert main(("export", *given, "--task", "capitals")) == 0

    assert not read(tmp_path / "out")[O_PROJ.format(1)][:, 8:16].any()
    assert (read(tmp_path / "out")[O_PROJ.format(0)] == read(source)[O_PROJ.format(0)]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", "L4Q2"), "not a head"),
        (("--heads", "L0H0=0.5"), "leave the factors out"),
        (("--heads", "L2H0"), "out of range"),
        (("--heads", "L0G2"), "KV groups 0..1"),
        (("--heads", "L0,L0H1"), "twice"),
        (("--neurons", "L0H1"), "not a neuron"),
        (("--neurons", "L0N48"), "out of range"),
        ((), "name at least one head"),
        (("--heads", "L0H0", "--task", "antonyms"), "--heads-from"),
    ],
)
def test_a_mistake_in_what_to_remove_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    source = model(tmp_path / "source")

    assert message in fails(capsys, "--model", str(source), "--out", str(tmp_path / "out"), *arguments)

    assert [file.name for file in tmp_path.iterdir()] == ["source"]
