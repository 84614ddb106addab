from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from tests.ci_scripts import ROOT


def test_every_method_is_judged_by_what_it_promises(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    arguments = ["benchmarks/error_control.py", "--repeats", "3", "--requests", "300", "--out", str(path)]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=True)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rates = {"BH": 3, "Holm": 3, "knockoffs": 2, "stability": 3, "first k": 1}
    assert [row["method"] for row in rows] == [method for method, count in rates.items() for _ in range(count)]
    assert {row["repeats"] for row in rows} == {"3"}
    false = {(row["method"], row["asked"]): float(row["false"]) for row in rows}
    found = {(row["method"], row["asked"]): float(row["found"]) for row in rows}
    assert found["BH", "0.1"] > 0.8
    assert false["BH", "0.1"] < 0.2 < false["first k", "-"]
