"""Figures: colours centred on zero, pictures that stand alone, marks where the numbers are."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_localize.errors import UsageError
from cs_localize.findings import DosePoint, HeadsFile
from cs_localize.report import heatmap_svg
from cs_localize.report.figures import dose_curve, heatmap, knockout_curve, stylesheet
from cs_localize.report.svg import side, strength
from tests.report.builders import HEADS, LAYERS, NAMED, UNIVERSAL, heads_file

SVG = "{http://www.w3.org/2000/svg}"
EFFECTS = st.floats(-1e6, 1e6, allow_nan=False)


def with_effects(effects: dict[str, float], task: str = "antonyms") -> HeadsFile:
    heads = heads_file()
    finding = heads.tasks[task]
    ranking = [entry.model_copy(update={"effect": effects.get(entry.head, 0.0)}) for entry in finding.ranking]
    return heads.model_copy(update={"tasks": {task: finding.model_copy(update={"ranking": ranking})}})


def cells(picture: str) -> dict[str, ET.Element]:
    marks = {}
    for rect in ET.fromstring(picture).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            marks[title.text.split(":")[0]] = rect
    return marks


@given(EFFECTS, st.floats(1e-6, 1e6))
def test_opposite_effects_have_equally_strong_colours_of_different_sides(value: float, limit: float) -> None:
    assert strength(-value, limit) == -strength(value, limit)
    assert -1 <= strength(value, limit) <= 1
    if value:
        assert side(value) != side(-value)


def test_in_the_heat_map_zero_has_no_colour_and_opposite_effects_mirror_each_other() -> None:
    found = cells(heatmap_svg(with_effects({"L3H1": 2.0, "L3H2": -2.0, "L3H3": 1.0, "L3H4": -1.0}), "antonyms"))
    look = {head: (found[head].get("class"), found[head].get("fill-opacity")) for head in found}
    assert look["L3H1"] == ("loss", "1")
    assert look["L3H2"] == ("gain", "1")
    assert look["L3H3"] == ("loss", "0.5")
    assert look["L3H4"] == ("gain", "0.5")
    assert look["L9H0"][1] == "0"


def test_a_heat_map_without_any_effect_has_no_colour() -> None:
    assert {rect.get("fill-opacity") for rect in cells(heatmap_svg(with_effects({}), "antonyms")).values()} == {"0"}


@pytest.mark.parametrize("task", NAMED)
def test_the_heat_map_file_is_svg_with_every_head_at_its_layer_and_row(task: str) -> None:
    picture = heatmap_svg(heads_file(), task)
    root = ET.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert not re.search(r"https?://", picture.replace("http://www.w3.org/2000/svg", ""))
    found = cells(picture)
    assert len(found) == LAYERS * HEADS
    step = float(found["L1H0"].get("x", "")) - float(found["L0H0"].get("x", ""))
    assert float(found["L17H4"].get("x", "")) - float(found["L0H4"].get("x", "")) == 17 * step
    assert float(found["L17H4"].get("y", "")) - float(found["L17H0"].get("y", "")) == 4 * step


def test_named_and_universal_heads_are_outlined_and_say_so() -> None:
    root = ET.fromstring(heatmap_svg(heads_file(), "addition"))
    outlines = [rect.get("class") for rect in root.iter(f"{SVG}rect")]
    assert outlines.count("named") == len(NAMED["addition"]) + 1  # one in the legend
    assert outlines.count("universal") == len(UNIVERSAL) + 1
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert sum(text.endswith(", named") for text in titles) == len(NAMED["addition"])
    assert sum(text.endswith(", universal") for text in titles) == len(UNIVERSAL)


def test_the_heat_map_in_the_page_carries_no_style_of_its_own() -> None:
    assert "<style" not in heatmap(heads_file(), "antonyms")
    assert "<style" in heatmap_svg(heads_file(), "antonyms")


def test_a_heat_map_of_a_task_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(UsageError, match="no task 'rhymes'; it has antonyms"):
        heatmap_svg(heads_file(), "rhymes")


def test_the_knockout_curve_has_a_mark_for_every_k_and_one_for_every_random_draw() -> None:
    picture = knockout_curve([0.8, 0.4, 0.1], [0.9, 0.9, 0.8], 1, [0.0, 0.1])
    root = ET.fromstring(picture)
    titles = [title.text for title in root.iter("title")]
    assert titles == [
        "1 random head: 80.0%",
        "1 random head: 70.0%",
        "controls, k = 0: 90.0%",
        "controls, k = 1: 90.0%",
        "controls, k = 2: 80.0%",
        "target, k = 0: 80.0%",
        "target, k = 1: 40.0%",
        "target, k = 2: 10.0%",
    ]
    height = {circle.findtext("title"): float(circle.get("cy", "")) for circle in root.iter("circle")}
    assert height["target, k = 2: 10.0%"] > height["target, k = 1: 40.0%"] > height["target, k = 0: 80.0%"]


def test_the_dose_curve_is_logarithmic_and_shows_the_level_of_the_heads() -> None:
    dose = [DosePoint(neurons=n, target=1 - n / 100, controls=0.9) for n in (100, 1, 10)]
    root = ET.fromstring(dose_curve(dose, 0.03, 2))
    xs = [float(circle.get("cx", "")) for circle in root.iter("circle")][:3]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.02)
    assert "2 named heads zeroed: 3.0%" in [text.text for text in root.iter("text")]


def test_a_dose_curve_of_one_point_is_still_a_picture() -> None:
    ET.fromstring(dose_curve([DosePoint(neurons=1, target=0.5, controls=0.9)], None, 0))


def scheme(dark: bool) -> dict[str, str]:
    light, night = stylesheet("figures.css").split("@media", 1)
    values = dict(re.findall(r"--([\w-]+): ([^;]+);", light))
    return values | dict(re.findall(r"--([\w-]+): ([^;]+);", night.split("\nsvg")[0])) if dark else values


def rgb(text: str) -> tuple[float, ...]:
    if text.startswith("#"):
        return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))
    return tuple(map(float, text.split()))


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """WCAG 2.2 contrast ratio."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_the_contrast_of_wcag_aa_in_both_schemes_even_on_the_strongest_tint(dark: bool) -> None:
    colours = scheme(dark)
    ground = rgb(colours["ground"])
    for name in ("ink", "muted", "gain"):
        assert contrast(rgb(colours[name]), ground) >= 4.5
    most = float(colours["tint-most"])
    for name in ("tint-loss", "tint-gain"):
        tint = tuple(most * c + (1 - most) * g for c, g in zip(rgb(colours[name]), ground, strict=True))
        assert contrast(rgb(colours["ink"]), tint) >= 4.5
