"""The page says what the files say, asks for nothing outside itself, and trusts no string in them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.findings import HeadsFile
from cs_localize.recover import make_solver
from cs_localize.report import write_report
from cs_localize.report.numbers import MINUS
from tests.report.builders import (
    NAMED,
    UNIVERSAL,
    confirm_file,
    crosscheck_file,
    heads_file,
    renamed,
    study_config,
    write_study,
)

VOID = {"meta", "link", "br"}
HOSTILE = "<script>alert(1)</script>\"'&\x0b"


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed, in order. Collects text, titles, attributes and element names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_study(tmp_path_factory.mktemp("study"), heads_file(), confirm_file(), crosscheck_file())
    return write_report(folder).read_text(encoding="utf-8")


def rendered(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_every_tag_of_the_page_is_closed_in_order(html: str) -> None:
    assert html.startswith("<!DOCTYPE html>")
    assert "table" in Page(html).tags


def test_the_page_refers_to_nothing_outside_itself(html: str) -> None:
    page = Page(html)
    targets = [
        value or "" for name, value in page.attributes if name in {"src", "href", "xlink:href", "action", "srcset"}
    ]
    assert targets
    assert all(target.startswith("#") or target == "data:," for target in targets)
    assert not re.search(r"https?://|url\(|@import", html)
    assert not set(page.tags) & {"img", "iframe", "object", "embed", "video", "audio"}


def test_links_within_the_page_lead_somewhere(html: str) -> None:
    page = Page(html)
    ids = {value for name, value in page.attributes if name == "id"}
    assert {value[1:] for name, value in page.attributes if name == "href" and value and value[0] == "#"} <= ids


def test_the_policy_allows_the_one_script_of_the_page_and_no_other(html: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_every_picture_in_the_page_is_well_formed_xml(html: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(pictures) >= 13  # six heat maps, six knockout curves, a dose curve
    for picture in pictures:
        ET.fromstring(picture)


def test_an_effect_edited_in_heads_json_is_found_in_the_page(tmp_path: Path) -> None:
    folder = write_study(tmp_path, heads_file(), confirm_file(), crosscheck_file())
    path = folder / "heads.json"
    before = rendered(folder)
    data = json.loads(path.read_text(encoding="utf-8"))
    entry = next(entry for entry in data["tasks"]["capitals"]["ranking"] if entry["head"] == "L17H4")
    entry["effect"] = 1.98765
    path.write_text(json.dumps(data), encoding="utf-8")
    after = rendered(folder)
    assert "1.988" not in before
    assert "L17H4: effect 1.988 nats" in after  # the heat map
    assert "<td>1.988</td>" in after  # the ranking


def test_an_effect_edited_far_down_the_ranking_is_found_in_the_page(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    path = folder / "heads.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["tasks"]["plurals"]["ranking"][150]["effect"] = -0.43219
    path.write_text(json.dumps(data), encoding="utf-8")
    assert f"{data['tasks']['plurals']['ranking'][150]['head']}: effect {MINUS}0.432 nats" in rendered(folder)


def test_the_page_shows_q_and_frequency_of_named_heads_and_what_to_expect_of_heads_without_an_effect(html: str) -> None:
    assert "<td>0.034<small>96.7%</small></td>" in html
    assert "1 head selected in at least 75.0% of the resamples" in html
    assert "at most 0.74 of them would be expected there: a yardstick, not a promise" in html
    assert "adjusted for all candidates of all tasks (Benjamini-Hochberg), and must not exceed 0.1" in html


def test_every_named_and_universal_head_is_in_the_page(html: str) -> None:
    words = Page(html).words
    for head in {head for named in NAMED.values() for head in named} | set(UNIVERSAL):
        assert head in words


def test_headline_and_table_say_what_was_found_and_what_was_not(html: str) -> None:
    words = Page(html).words
    assert "5 of 6 capabilities depend on 1 to 5 heads each, of 270 in smollm2-135m-instruct" in words
    assert "loses 67.4% (plurals) to 96.1% (antonyms) of its held-out accuracy" in words
    assert "No heads were named for counting." in words
    assert (
        "The search took 1,010 masked requests for each; a sweep of every head on the same items takes 15,120" in words
    )


def test_the_matrix_tells_intervals_and_p_values_on_hover_and_in_plain_numbers(html: str) -> None:
    hovers = [value for name, value in Page(html).attributes if name == "title"]
    assert "antonyms: 77.0% to 3.0%, drop 74.0 points [68.0, 80.0], p <0.001 (Holm)" in hovers
    assert "<td>77.0%</td><td>3.0%</td><td>74.0</td><td>[68.0, 80.0]</td><td>&lt;0.001</td>" in html


def test_pairs_that_stand_out_are_listed_and_no_others(html: str, tmp_path: Path) -> None:
    section = Page(re.findall(r'<section id="pairs">.*?</section>', html, re.DOTALL)[0]).words
    assert "L7H0 L12H3" in section
    assert "backup1.250[1.050, 1.450]25.0[15.0, 35.0]20<0.001" in section
    assert "L9H5 L14H8" in section
    assert "L7H1" not in section
    assert "L12H3 L14H8" not in section
    quiet = confirm_file().model_copy(update={"interactions": None})
    page = rendered(write_study(tmp_path, heads_file(), quiet, crosscheck_file()))
    assert 'id="pairs"' not in page
    assert 'href="#pairs"' not in page


def test_the_cost_is_set_beside_a_sweep_and_a_thin_sweep(html: str) -> None:
    words = Page(html).words
    assert "15,120 requests a task" in words
    sweep_tokens = round(15_120 * 51_233 / (1010 + 56))
    assert f"<td>15,120</td><td>{sweep_tokens:,}</td><td>6.7%" in html
    assert "</span></td><td>3.7</td>" in html  # 1,010 requests over 270 heads


def test_the_cross_check_shows_conditions_overlap_attribution_and_verdict(html: str) -> None:
    words = Page(html).words
    assert "the heads are the more specific handle" in words
    for said in (
        "CNL neurons",
        "random neurons",
        "60, 0.130% of all FFN neurons",
        f"{MINUS}74.0 points",
        "18.0%",
        "0.610",
    ):
        assert said in words


def test_warnings_provenance_and_the_command_are_in_the_page(html: str) -> None:
    words = Page(html).words
    for said in ("its 56 search items are few", "cs-localize run study.yaml --out runs/demo", "3b1f7c0e5d9a42688fd0"):
        assert said in words


def test_hostile_strings_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    heads = renamed(heads_file(), "antonyms", HOSTILE)
    provenance = heads.provenance.model_copy(update={"command": f"run; {HOSTILE}"})
    heads = heads.model_copy(update={"model": HOSTILE, "warnings": [HOSTILE], "provenance": provenance})
    html = rendered(write_study(tmp_path, heads))
    page = Page(html)
    assert page.tags.count("script") == 1
    assert "alert(1)" in page.words
    for picture in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(picture)


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({}, ("There is no confirm.json yet", "There is no cross-check of heads against neurons yet.")),
        (
            {"confirm": {"enabled": False}, "crosscheck": {"enabled": False}},
            (
                "The study switched the confirmation off",
                "The study switched the cross-check of heads against neurons off.",
            ),
        ),
    ],
)
def test_a_missing_file_becomes_a_sentence_that_says_why(
    tmp_path: Path, switches: dict[str, Any], said: tuple[str, ...]
) -> None:
    words = Page(rendered(write_study(tmp_path, study=study_config(**switches)))).words
    for sentence in (*said, "held-out items have not confirmed them", "Knockout curves come from the confirmation"):
        assert sentence in words


def test_equal_files_give_equal_pages_byte_for_byte(tmp_path: Path) -> None:
    first, second = (
        write_report(write_study(tmp_path / name, heads_file(), confirm_file(), crosscheck_file())).read_bytes()
        for name in ("first", "second")
    )
    assert first == second


def test_tasks_that_are_only_controls_have_a_column_of_their_own(tmp_path: Path) -> None:
    study = study_config(controls=("copying",))
    confirm = confirm_file()
    drop = confirm.matrix["antonyms"]["antonyms"].model_copy(update={"accuracy": 0.8125, "drop": 0.1525})
    matrix = {task: drops | {"copying": drop} for task, drops in confirm.matrix.items()}
    levels = {"baseline": confirm.baseline | {"copying": 0.965}, "items": confirm.items | {"copying": 60}}
    confirm = confirm.model_copy(update={"matrix": matrix, **levels})
    html = rendered(write_study(tmp_path, confirm=confirm, study=study))
    assert '<th scope="col">addition</th><th scope="col">copying</th>' in html
    assert html.count('">15.2</td>') == len(matrix)


def test_a_study_of_one_task_without_controls_or_random_heads_is_still_told(tmp_path: Path) -> None:
    heads = heads_file()
    heads = heads.model_copy(update={"tasks": {"antonyms": heads.tasks["antonyms"]}, "universal": [], "warnings": []})
    confirm = confirm_file()
    confirm = confirm.model_copy(
        update={
            "matrix": {"antonyms": {"antonyms": confirm.matrix["antonyms"]["antonyms"]}},
            "baseline": {"antonyms": 0.77},
            "universal": {},
            "contrast": {},
            "random": {},
            "control_curve": {"antonyms": []},
        }
    )
    found = crosscheck_file().tasks["antonyms"].model_copy(update={"dose": [], "conditions": {}})
    crosscheck = crosscheck_file().model_copy(update={"tasks": {"antonyms": found}})
    words = Page(rendered(write_study(tmp_path, heads, confirm, crosscheck))).words
    assert (
        "Zeroing 1 head of 270 in smollm2-135m-instruct takes antonyms from 77.0% to 3.0% on held-out items." in words
    )
    assert "No dose curve" in words


@pytest.mark.parametrize("name", ["lasso", "cvxpy"])
def test_the_cap_the_methods_mention_is_the_solvers_own(tmp_path: Path, name: str) -> None:
    default = make_solver(name).get_params()["floor"]
    for folder, options, cap in (("default", {}, default), ("chosen", {"floor": 3.5}, 3.5)):
        study = study_config(solver={"name": name, "options": options})
        words = Page(rendered(write_study(tmp_path / folder, study=study))).words
        assert f"capped at {cap:.1f} nats" in words


def test_files_of_different_studies_are_refused(tmp_path: Path) -> None:
    folder = write_study(tmp_path, study=study_config(("antonyms",)))
    with pytest.raises(CsLocalizeError, match=r"heads\.json and study\.yaml list different tasks"):
        write_report(folder)
    write_study(tmp_path, renamed(heads_file(), "plurals", "opposites"), confirm_file())
    with pytest.raises(CsLocalizeError, match=r"confirm\.json and heads\.json are of different tasks"):
        write_report(folder)


def test_a_number_that_is_not_finite_is_refused_and_leaves_no_page(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    path = folder / "heads.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["tasks"]["plurals"]["fit"] = float("nan")
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CsLocalizeError, match=r"heads\.json"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_head_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    heads: HeadsFile = heads_file().model_copy(update={"universal": ["L30H0"]})
    with pytest.raises(CsLocalizeError, match="L30H0, but its model has 30 layers of 9 heads"):
        write_report(write_study(tmp_path, heads))


def test_a_folder_without_a_study_is_refused_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no study file"):
        write_report(tmp_path)
