"""The arithmetic behind docs/scale.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import scale
from tests.ci_scripts import ROOT

WAVE = (scale.LLAMA, scale.H100, scale.FORMATS["long"], scale.BATCH)


def test_the_document_quotes_what_the_script_prints() -> None:
    done = subprocess.run([sys.executable, "benchmarks/scale.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"```text\n{done.stdout}```" in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("model", "millions"), [(scale.LLAMA, 8030.3), (scale.SMOLLM2, 134.5)])
def test_the_geometry_adds_up_to_the_parameters_that_the_models_have(model: scale.Model, millions: float) -> None:
    assert model.parameters / 1e6 == pytest.approx(millions, abs=0.05)


def test_requests_under_one_mask_cost_less_where_the_shots_are_long_and_nothing_less_where_they_fill_no_block() -> None:
    def wave(name: str, same_mask: int) -> float:
        return scale.wave_s(scale.LLAMA, scale.H100, scale.FORMATS[name], scale.BATCH, same_mask, generate=False)

    assert wave("long", 48) < wave("long", 8) < wave("long", 1)
    assert wave("short", 48) == wave("short", 1)


def test_a_faster_machine_takes_less_time_and_half_the_speed_never_more_than_twice() -> None:
    usual = scale.wave_s(*WAVE, 1, generate=True)
    slow = scale.Machine(scale.H100.flops / 2, scale.H100.bandwidth / 2)
    assert usual < scale.wave_s(scale.LLAMA, slow, *WAVE[2:], 1, generate=True) <= 2 * usual


def test_no_number_of_engines_outruns_the_driver() -> None:
    stage = scale.Stage(1_000_000, 1)
    short = scale.FORMATS["short"]
    assert stage.seconds(scale.LLAMA, scale.H100, short, 64) == 1_000_000 / scale.DRIVER_RATE
    assert stage.seconds(scale.LLAMA, scale.H100, short, 1) > 1_000_000 / scale.DRIVER_RATE
