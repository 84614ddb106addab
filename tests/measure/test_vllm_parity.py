"""The vLLM engine against transformers, architecture by architecture, as ``benchmarks/parity.py`` measures it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from benchmarks.parity import DTYPES, MODELS, MODES, TRANSFORMERS_BACKEND, Parity, measured, table
from tests.ci_scripts import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.model]

EXACT = 1e-4  # nats between the engines in float32; docs/engine.md has 3e-5 at most
ROUNDED = 3  # times what rounding alone does to transformers in bfloat16; docs/engine.md has 2 at most
EFFECT = 0.1  # nats that every intervention moves a score on average


def check(found: list[Parity]) -> None:
    """Every intervention agrees, and does something to agree on."""
    for parity in found:
        where = f"{parity.model} {parity.mode} {parity.dtype}"
        assert (parity.rounding > 0) == (parity.dtype == "bfloat16"), where
        assert max(parity.apart.values()) <= max(EXACT, ROUNDED * parity.rounding), (where, parity.apart)
        assert min(parity.effect.values()) >= EFFECT, (where, parity.effect)


# Llama and Qwen3 are asked in test_vllm_engine; each model and mode comes once, with every intervention.
@pytest.mark.parametrize(
    ("mode", "models"),
    [
        ("eager", ["mistral", "gemma3_text", "phi3", "olmo2", "smollm3", TRANSFORMERS_BACKEND]),
        ("compiled", ["qwen2"]),
    ],
)
def test_architectures_agree_with_transformers_under_every_intervention(mode: str, models: list[str]) -> None:
    found = measured(mode, models, ["float32"])
    assert [(parity.model, parity.mode) for parity in found] == [(model, mode) for model in models]
    check(found)
    code = {parity.model: parity.code for parity in found}
    for model in {"olmo2", "smollm3", TRANSFORMERS_BACKEND} & code.keys():
        assert code.pop(model) == "TransformersForCausalLM"
    assert "TransformersForCausalLM" not in code.values()


def test_the_documented_table_has_every_model_mode_and_dtype() -> None:
    rows = [
        line.split(" | ")
        for line in (ROOT / "docs" / "engine.md").read_text(encoding="utf-8").splitlines()
        if line.count(" | ") == 11
    ]
    assert {(row[0].removeprefix("| "), row[3], row[2]) for row in rows[1:]} == set(product(MODELS, DTYPES, MODES))
    assert len(rows) == 1 + len(MODELS) * len(DTYPES) * len(MODES)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_all_models_agree_in_every_mode_and_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    found = [parity for mode in MODES for parity in measured(mode, MODELS, DTYPES)]
    with capsys.disabled():  # what a test prints is shown only where it fails
        print(f"\n{table(found)}")
    check(found)


MEASURED = """
from itertools import product

from benchmarks import parity


def measured(mode, models, dtypes):
    rounding, nats = {"float32": 0.0, "bfloat16": 0.01}, {"none": 0.0, "zero": 0.0}
    return [parity.Parity(m, "Code", mode, d, nats, rounding[d], {"zero": 1.0}) for m, d in product(models, dtypes)]


parity.measured = measured
"""


def test_the_full_matrix_shows_its_table_though_pytest_captures(tmp_path: Path) -> None:
    (tmp_path / "without_engines.py").write_text(MEASURED, encoding="utf-8")
    test = f"{__file__}::{test_all_models_agree_in_every_mode_and_dtype.__name__}"
    command = [sys.executable, "-m", "pytest", "-ra", "-m", "", "-p", "without_engines", test]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(MODELS) * len(DTYPES) * len(MODES)
