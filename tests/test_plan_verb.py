from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cs_localize.cli import main
from cs_localize.findings import HeadsFile, read_file, write_file
from cs_localize.study import run_study
from tests.studies import planted, planted_config, write_study

TINY = {"layers": 12, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 256}
SMALL = {"tasks": ["antonyms", "capitals"], "design__requests": 120, "confirm__enabled": False}


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments, "--repeats", "1"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def study(tmp_path: Path) -> str:
    return str(write_study(tmp_path / "study.yaml", planted(**SMALL)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_study(planted_config(**SMALL), tmp_path_factory.mktemp("earlier")).out


def test_a_plan_is_printed_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], study: str, tmp_path: Path
) -> None:
    code, out, err = plan(capsys, study, "--out", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert out.startswith("planted: 96 heads\n")
    assert "no rate is known" in out
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


@pytest.mark.parametrize(("rate", "hours"), [("24 requests", 192 / 24 / 3600), ("1token", None)])
def test_a_given_rate_turns_into_hours(
    capsys: pytest.CaptureFixture[str], study: str, rate: str, hours: float | None
) -> None:
    _, out, _ = plan(capsys, study, "--rate", rate, "--json")
    search = next(stage for stage in json.loads(out)["stages"] if stage["name"] == "search")
    assert search["hours"] == pytest.approx(hours or search["total"]["tokens"] / 3600)


@pytest.mark.parametrize("rate", ["40", "0requests", "fast", "-3tokens", "40 items"])
def test_a_rate_without_a_unit_or_a_number_is_one_line(
    capsys: pytest.CaptureFixture[str], study: str, rate: str
) -> None:
    code, _, err = plan(capsys, study, f"--rate={rate}")
    assert code == 2
    assert err == f"cs-localize: --rate {rate}: give what is answered a second, such as 40requests or 2000tokens\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": ["antonymz"]},
        {"crosscheck__enabled": True, "confirm__enabled": True},
        {"solver__options": {"alhpa": 1}},
        {"engine__planted": {}},
    ],
)
def test_a_study_that_cannot_run_cannot_be_planned_for_the_same_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object]
) -> None:
    file = str(write_study(tmp_path / "study.yaml", planted(**{**SMALL, **changes})))
    assert main(["run", file, "--out", str(tmp_path / "out")]) == 2
    refused = capsys.readouterr().err.splitlines()[-1]
    code, _, err = plan(capsys, file)
    assert (code, err) == (2, f"{refused}\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"design__requests": 24}, "design.requests is 24 and the pilot alone takes 24"),
        ({"design__density": 0.001}, "raise the density"),
        ({"design__unit": "block", "design__block": 50}, "a block of 50 items"),
        ({"search_items": 4000}, "ask for fewer"),
        (
            {"engine__planted": {"shape": TINY, "strongest": "much"}},
            "the planted engine's 'strongest' must be a number",
        ),
    ],
)
def test_numbers_that_make_no_design_are_refused_as_a_run_refuses_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    code, _, err = plan(capsys, str(write_study(tmp_path / "study.yaml", planted(**{**SMALL, **changes}))))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.ray
def test_an_earlier_study_lends_its_pilot_and_its_rate(
    capsys: pytest.CaptureFixture[str], study: str, finished: Path
) -> None:
    code, out, _ = plan(capsys, study, "--out", str(finished))
    assert code == 0
    assert "(background from the pilot's spread, the rest assumed)" in " ".join(out.split())
    assert re.search(
        r"hours: at [\d,.]+ requests a second when scored and [\d,.]+ when generated", " ".join(out.split())
    )
    _, out, _ = plan(capsys, study, "--out", str(finished), "--set", "seed=1")
    assert "(assumed, until a pilot was run)" in " ".join(out.split()), "another seed has another pilot"


@pytest.mark.ray
def test_a_study_of_another_engine_or_with_broken_events_lends_no_rate(
    capsys: pytest.CaptureFixture[str], study: str, finished: Path, tmp_path: Path
) -> None:
    heads = read_file(finished / "heads.json", HeadsFile)
    events = (finished / "events.jsonl").read_bytes()
    other = heads.provenance.model_copy(update={"engine": "another"})
    for name, provenance, text in (("other", other, events), ("broken", heads.provenance, b'[]\n{"event": "stage_fin')):
        (tmp_path / name).mkdir()
        write_file(tmp_path / name / "heads.json", heads.model_copy(update={"provenance": provenance}))
        (tmp_path / name / "events.jsonl").write_bytes(text)
        _, out, _ = plan(capsys, study, "--out", str(tmp_path / name))
        assert "no rate is known" in out


@pytest.mark.ray
def test_the_rate_is_measured_on_the_spot_and_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], study: str, tmp_path: Path
) -> None:
    code, out, _ = plan(capsys, study, "--measure", "--json")
    assert code == 0
    rate = json.loads(out)["rate"]
    assert rate["unit"] == "tokens"
    assert min(rate["scored"], rate["generated"]) > 0
    assert rate["source"] == "measured on 64 and 32 requests"
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


def test_a_study_by_another_method_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    changes = {**SMALL, "method": "thin_sweep", "design": {}, "select": {}}
    del changes["design__requests"]
    code, _, err = plan(capsys, str(write_study(tmp_path / "study.yaml", planted(**changes))))
    assert code == 2
    assert "the study's is 'thin_sweep'; set method: sparse" in err
