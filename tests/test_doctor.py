from __future__ import annotations

import io
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cs_localize import doctor
from cs_localize.cli import main
from cs_localize.config import EngineConfig
from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.models import random_model
from cs_localize.outcomes import Item, Outcome

COUNTERS = {"ablated_token_rows": 100.0, "neuron_ablated_token_rows": 20.0, "most_ablations_in_a_step": 9.0}
LINES = ("hook", "in one step", "noise floor", "in a batch", "change", "empty", "through the cache", "agreement")


def answers(scores: Sequence[float], text: str = " cold") -> list[Outcome]:
    """Scores, each followed by a generated token."""
    return [o for score in scores for o in (Outcome(score, True, "", 9), Outcome(math.nan, False, text, 9))]


def written(*texts: str) -> list[Outcome]:
    return [Outcome(math.nan, False, text, 9) for text in texts]


PLAIN, ABLATED = answers([-1.0, -2.0]), answers([-4.0, -6.0])
SOUND = doctor.Evidence(
    plain=PLAIN,
    plain_again=[PLAIN, answers([-1.01, -2.0])],
    ablated=ABLATED,
    ablated_again=answers([-4.0, -6.01]),
    counters=COUNTERS,
    kinds=["heads zeroed"] * 2 + ["halved"] * 2,
    exact=ABLATED,
    prefixed=answers([-3.0, -5.0])[::2],
    free=written(" cold", " down"),
    cached=96,
    oracle=answers([-4.001, -6.0]),
    oracle_prefixed=answers([-3.001, -5.0])[::2],
    stock=written(" cold", " down"),
)


def test_sound_evidence_passes_every_check_in_one_line_each() -> None:
    found = list(doctor.checks(SOUND))
    assert [passed for passed, _ in found] == [True] * len(LINES)
    assert all(word in text and "\n" not in text for word, (_, text) in zip(LINES, found, strict=True))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("hook", replace(SOUND, counters={**COUNTERS, "neuron_ablated_token_rows": 0})),
        ("in one step", replace(SOUND, counters={**COUNTERS, "most_ablations_in_a_step": 1})),
        ("noise floor", replace(SOUND, plain_again=[PLAIN, answers([-1.2, -2.0])])),
        ("in a batch", replace(SOUND, ablated_again=answers([-4.0, -6.2]))),
        ("change", replace(SOUND, ablated=PLAIN, ablated_again=PLAIN)),
        ("empty", replace(SOUND, free=written(" cold", " up"))),
        ("empty", replace(SOUND, free=[*written(" cold"), Outcome(math.nan, False, " down", 8)])),
        ("through the cache", replace(SOUND, prefixed=answers([-3.0, -3.0])[::2])),
        ("through the cache", replace(SOUND, cached=0)),
        ("agreement", replace(SOUND, oracle=answers([-4.1, -6.0]))),
        ("agreement", replace(SOUND, oracle=answers([-4.0, -6.015]))),  # little on average, but all of it in one kind
        ("agreement", replace(SOUND, oracle=answers([-4.0, -6.0], " hot"))),
    ],
)
def test_a_fault_fails_its_own_check_and_no_other(line: str, fault: doctor.Evidence) -> None:
    failed = [text for passed, text in doctor.checks(fault) if not passed]
    assert [line in text for text in failed] == [True], failed


class Workers:
    """Engines whose every batch but those of one request takes 32 tokens from the cache, as a few-shot prefix would.

    Attributes:
        asked: of every call the engine, its dtype, and the cores and GPUs it was given.
        batches: what the last engine of a name was asked.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int, float]] = []
        self.batches: dict[str, Sequence[Sequence[Request]]] = {}

    def __call__(self, function: object, spec: EngineSpec, batches: Any, cores: int, gpus: float = 0) -> object:  # noqa: ANN401  # one batch or several
        self.asked.append((spec.name, spec.dtype, cores, gpus))
        if function is doctor.stock_answers:
            return [Outcome(math.nan, False, "", 9)] * len(batches)
        self.batches[spec.name] = batches
        sizes = [len(batch) for batch in batches]
        counts = [32.0 * min(number + 1, sum(size > 1 for size in sizes)) for number in range(len(sizes))]
        evidence = [{**COUNTERS, "cached_prompt_tokens": count} for count in counts]
        return [[Outcome(-1.0, True, "", 9)] * size for size in sizes], evidence


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Those that the doctor asks on a machine with two GPUs and 8 cores."""
    asked = Workers()
    monkeypatch.setattr(doctor, "run_on_worker", asked)
    monkeypatch.setattr(doctor, "fleet_size", lambda engine: (1, 8, 0) if engine.name == "hf" else (1, 1, 2))
    return asked


def gather(engine: EngineConfig) -> doctor.Evidence:
    spec = EngineSpec("vllm", "", "", ModelShape(layers=2, heads=40, kv_heads=20, head_dim=3, ffn=20))
    scored = [Request(Item("t", "1", "a", " b"), (1, 2), (3,), Ablation())] * 2
    return doctor._gather(spec, engine, scored, None)


def test_tokens_from_the_cache_are_those_of_the_requests_behind_one_prefix(workers: Workers) -> None:
    found = gather(EngineConfig())
    assert len(found.prefixed) == 5
    assert found.cached == 0


def test_the_oracle_has_all_cores_also_beside_a_gpu(workers: Workers) -> None:
    gather(EngineConfig(tensor_parallel=2))
    vllm = [("vllm", "auto", 1, 2), ("vllm", "float32", 1, 2), ("vllm", "float32", 1, 2)]
    assert workers.asked == [*vllm, ("hf", "float32", 8, 0)]


def test_halved_heads_and_heads_replaced_by_their_means_are_compared_with_transformers_too(workers: Workers) -> None:
    found = gather(EngineConfig())
    compared, *_ = workers.batches["hf"]
    kinds: dict[str, set[str]] = {}
    for kind, request in zip(found.kinds, compared, strict=True):
        kinds.setdefault(kind, set()).add(request.ablation.encode())
    assert {kind: len(ablations) for kind, ablations in kinds.items()} == {
        "heads zeroed": 8,
        "halved": 2,
        "replaced by their means": 2,
        "neurons zeroed": 4,
    }
    assert all(entry.endswith("=0.5") for text in kinds["halved"] for entry in text.split(","))
    assert all(entry.endswith("=mean") for text in kinds["replaced by their means"] for entry in text.split(","))
    (line,) = [text for _, text in doctor.checks(found) if text.startswith("agreement")]
    assert all(f"{kind} 0.0000" in line for kind in kinds)


def test_stock_vllm_runs_with_the_options_of_the_engine_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Stock:
        def __init__(self, **options: object) -> None:
            given.update(options)

        def generate(self, *_: object, **__: object) -> list[object]:
            return []

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Stock, SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.inputs", SimpleNamespace(TokensPrompt=dict))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # so that it is put back
    settings, resources = {"model_impl": "transformers"}, {"eager": False, "tensor_parallel": 2}
    spec = EngineSpec("vllm", "m", "", ModelShape(2, 4, 2, 3, 20), "float32", settings, resources)
    assert doctor.stock_answers(spec, []) == []
    assert (given["model"], given["dtype"], given["model_impl"]) == ("m", "float32", "transformers")
    assert (given["enforce_eager"], given["tensor_parallel_size"]) == (False, 2)
    assert not {"worker_cls", "additional_config", "logits_processors"} & given.keys()


def test_the_engine_to_prove_is_what_overrides_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[EngineSpec, EngineConfig]] = []

    def found(spec: EngineSpec, engine: EngineConfig, scored: Sequence[Request], context: object) -> doctor.Evidence:
        assert spec.mean_prompts
        assert {request.means for request in scored} == {spec.means}
        seen.append((spec, engine))
        return SOUND

    monkeypatch.setattr(doctor, "_gather", found)
    monkeypatch.setattr(doctor, "RaySession", io.StringIO)  # any context manager
    given = [
        "engine.eager=false",
        "engine.tensor_parallel=2",
        "engine.model_impl=transformers",
        "engine.dtype=bfloat16",
    ]
    assert main(["doctor", *(part for each in given for part in ("--set", each))]) == 0
    ((spec, engine),) = seen
    assert engine == EngineConfig(eager=False, tensor_parallel=2, model_impl="transformers", dtype="bfloat16")
    assert (spec.resources["eager"], spec.resources["tensor_parallel"], spec.dtype) == (False, 2, "bfloat16")
    assert spec.settings["model_impl"] == "transformers"
    said = "ok    engine vllm: dtype=bfloat16, eager=false, tensor_parallel=2, model_impl=transformers"
    assert said in capsys.readouterr().out.splitlines()
    assert main(["doctor"]) == 0
    assert "ok    engine vllm: the defaults of a study" in capsys.readouterr().out.splitlines()


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.model
@pytest.mark.ray
def test_a_compiled_engine_of_two_ranks_is_proved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    random_model(tmp_path, "llama")
    options = ["--set", "engine.eager=false", "--set", "engine.tensor_parallel=2"]
    assert main(["doctor", "--model", str(tmp_path), *options]) == 0, capfd.readouterr().out
    assert "replaced by their means 0.0000" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("design.requests=3", "--set design.requests=3: the doctor has options of the engine alone"),
        ("model=tiny", "--set model=tiny: the doctor has options of the engine alone"),
        ("engine.eager", "--set engine.eager: write it as option=value"),
        ("engine=fast", "doctor: 'engine': give options, as 'name: value' lines"),
        ("engine.eagre=false", "doctor: unknown option 'engine.eagre'"),
        ("engine.dtype=int8", "doctor: 'engine.dtype': Input should be 'auto', 'bfloat16' or 'float32'"),
        ("engine.name=hf", "engine.name hf: what the doctor proves is the engine vllm"),
        ("engine.workers=2", "engine.workers 2: the doctor starts one engine at a time"),
    ],
)
def test_an_option_that_the_doctor_lacks_is_one_line_and_exit_code_2(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--set", override]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"cs-localize: {message}")
    assert said.err.count("\n") == 1
    assert said.out == "", "nothing is checked before"
    with pytest.raises(UsageError):
        doctor.read_engine((override,))


def test_what_the_engine_cannot_prove_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object) -> doctor.Evidence:
        raise MeasurementError("the hook on o_proj of layer 3 scaled 0 token rows")

    monkeypatch.setattr(doctor, "_gather", lost)
    monkeypatch.setattr(doctor, "RaySession", io.StringIO)  # any context manager
    assert main(["doctor", "--model", "smollm2-135m-instruct"]) == 1
    assert "FAIL  the hook on o_proj of layer 3 scaled 0 token rows" in capsys.readouterr().out.splitlines()
