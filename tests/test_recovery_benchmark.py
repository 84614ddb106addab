from __future__ import annotations

import csv
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.recover import make_solver
from tests.ci_scripts import ROOT


def test_every_method_is_compared_at_its_requests_and_the_planted_heads_are_found(tmp_path: Path) -> None:
    options = ["--repeats", "1", "--heads", "270", "--named", "5", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/recovery.py", *options], cwd=ROOT, capture_output=True, check=True)
    with (tmp_path / "recovery.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {int(row["requests"]) for row in rows if row["method"] == "lasso"} == {90, 180, 270, 540, 1080}
    methods = {row["method"] for row in rows}
    assert methods >= {"cvxpy", "exhaustive", "omp", "oracle", "random", "thin sweep", "thompson"}
    assert methods >= {"2 rounds", "3 rounds", "2 rounds, saturating", "3 rounds, saturating"}
    recall = {row["method"]: float(row["recall"]) for row in rows if row["requests"] in ("0", "1080", "10800")}
    assert recall["exhaustive"] == 1.0
    assert recall["lasso"] > 0.8
    assert recall["random"] < 0.3
    picture = ElementTree.parse(tmp_path / "recovery.svg").getroot()
    panels = picture.findall("{*}g")
    assert [panel.findtext("{*}text") for panel in panels] == [
        f"{mark}, N = 270, k = 5" for mark in ("hit", "recall", "damage")
    ]
    for panel in panels:
        assert len(panel.findall("{*}polyline")) == len(methods - {"random"}), (
            "what asks nothing has no place on the axis"
        )


def test_groups_are_fitted_to_optimality_where_heads_outnumber_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a smaller regularisation or longer steps the interior-point method stops short of such masks' optimum.
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    recovery = import_module("recovery")
    options = PlantedOptions(recovery.TASKS, 7, n_specific=10, decay=0.8, background=0.01)
    table = recovery.measured(PlantedEngine(recovery.SHAPES[512], options), 2048, 7)
    fitted = make_solver("cvxpy", group=0.5).fit(recovery.first_of(table, 170))
    assert fitted.effects_.max() > 0.5
