"""The vLLM engine compiled, in one process and in several, and beside plain vLLM with one cache of compiled graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cs_localize.heads import Ablation, Head, Neuron
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.models import random_model, read_shape
from cs_localize.models.files import fingerprint
from tests.measure.process import in_process
from tests.measure.test_vllm_engine import differences, random_requests, tiny, under
from tests.measure.vllm_child import answer_named, answer_split, answer_through_llm, refusal
from tests.vllm_plain import plain_scores

pytestmark = [pytest.mark.vllm, pytest.mark.model]

ABLATIONS = [
    Ablation(),
    Ablation.of([Head(0, 3), Head(1, 1)]),
    Ablation.of([Head(1, 2)], scale=2.0),
    Ablation.to_mean([Head(0, 0), Head(1, 3)]),
    Ablation.of([Head(0, 2)], [Neuron(0, 5), Neuron(1, 60), Neuron(1, 95)]),
]
EFFECT = 0.1  # nats that an ablation at least moves some score


def asked_of(spec: EngineSpec) -> tuple[EngineSpec, list[Request]]:
    """An engine with means, and every item under every ablation."""
    items = random_requests(4, 40, 3)
    spec = replace(spec, mean_prompts=tuple(item.prompt_ids for item in items))
    items = [replace(item, means=spec.means) for item in items]
    return spec, [request for ablation in ABLATIONS for request in under(items, [ablation] * len(items))]


@pytest.mark.full
def test_compiled_graphs_of_plain_vllm_and_of_the_engine_in_one_cache_root_are_not_taken_for_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    spec, asked = asked_of(tiny(tmp_path / "llama", "llama", eager=False))
    expected = load_engine(spec.in_transformers()).measure(asked)
    plain, ablated = expected[:4], expected[4:]
    for start in range(0, len(ablated), 4):
        assert max(differences(ablated[start : start + 4], plain)) > EFFECT
    for round_ in ("first", "with the engine's graph on the disk"):
        stock = in_process(plain_scores, spec, asked[:4])
        assert [outcome.score for outcome in plain] == pytest.approx(stock, abs=1e-3), round_
        ours = in_process(answer_named, spec, {"asked": asked})["asked"]
        assert max(differences(ours, expected)) < 1e-3, round_
    graphs = [path for path in (tmp_path / "vllm").rglob("*") if path.is_file()]
    assert graphs, "nothing was compiled, so nothing was shown"


@pytest.mark.full
@pytest.mark.parametrize(("own_process", "ranks"), [(True, 1), (False, 2)], ids=["engine process", "two ranks"])
def test_in_several_processes_it_agrees_with_transformers_and_faults_raise(
    own_process: bool, ranks: int, tmp_path: Path
) -> None:
    spec, asked = asked_of(tiny(tmp_path / "llama", "llama", tensor_parallel=ranks))
    outcomes, faults = in_process(answer_split, spec, asked, own_process)
    expected = load_engine(spec.in_transformers()).measure(asked)
    assert max(differences(outcomes, expected)) < 1e-3
    assert max(differences(expected[4:8], expected[:4])) > EFFECT
    assert faults["canary"].startswith("MeasurementError: the unablated canary scored")
    assert faults["hook"].startswith("MeasurementError: ")
    assert "\n" not in faults["hook"]


@pytest.mark.full
def test_an_llm_of_two_ranks_does_not_answer_once_the_second_has_lost_a_hook(tmp_path: Path) -> None:
    answered, raised = in_process(answer_through_llm, tiny(tmp_path, "llama"))
    assert answered
    assert raised


@pytest.mark.full
def test_an_architecture_with_other_projections_is_refused_by_name(tmp_path: Path) -> None:
    random_model(tmp_path, "gpt_neox", kv_heads=4)
    spec = EngineSpec("vllm", str(tmp_path), fingerprint(tmp_path), read_shape(tmp_path), "float32")
    refused = in_process(refusal, spec)
    assert refused.endswith("is not recognised: 0 of 2 layers have a module named o_proj")
    assert refused.startswith("MeasurementError: ")
