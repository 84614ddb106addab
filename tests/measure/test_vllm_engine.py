"""The vLLM engine on a real model and on tiny ones; each engine runs once, in a process of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_localize.heads import Ablation, Head, Neuron
from cs_localize.measure.proof import agreement, proof_requests, random_ablations
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.measure.tokens import Encoder
from cs_localize.models import random_model, read_shape, resolve
from cs_localize.models.files import fingerprint
from cs_localize.outcomes import Item, Outcome
from tests.measure.process import in_process
from tests.measure.vllm_child import (
    Answers,
    answer_in_what_fits,
    answer_named,
    conform,
    crowd,
    damage_of_heads,
    study,
)

pytestmark = [pytest.mark.vllm, pytest.mark.model]

SHOTS = "hot -> cold\nbig -> small\nfast -> slow\nhappy -> sad\n"
PAIRS = ("up down", "old young", "left right", "hard soft", "light dark", "rich poor", "wet dry", "high low")
NEURON_SLOTS = 8
LEAST_DAMAGE = 0.2  # nats; a head that moves scores less does not count as one that matters
NOISE = 0.02  # nats; the least floor allowed, since repeated baselines here often agree to the last bit


def smollm2() -> EngineSpec:
    local = resolve("smollm2-135m-instruct")
    resources = {"neuron_slots": NEURON_SLOTS, "kv_cache_gib": 1}
    return EngineSpec("vllm", str(local.path), local.fingerprint, local.shape, resources=resources)


def antonyms(spec: EngineSpec, shots: str = SHOTS) -> list[Request]:
    encoder = Encoder(Path(spec.model_dir))
    words = [pair.split() for pair in PAIRS]
    items = [Item("antonyms", first, f"{shots}{first} ->", f" {second}") for first, second in words]
    return [Request(item, *encoder.encode(item), Ablation()) for item in items]


def under(requests: Sequence[Request], ablations: Sequence[Ablation]) -> list[Request]:
    return [replace(requests[i % len(requests)], ablation=ablation) for i, ablation in enumerate(ablations)]


def differences(first: Sequence[Outcome], second: Sequence[Outcome]) -> list[float]:
    return [abs(a.score - b.score) for a, b in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def heads_that_matter() -> list[Head]:
    spec = smollm2()
    candidates = [Head(layer, head) for layer in range(3) for head in range(spec.shape.heads)]
    damage = in_process(damage_of_heads, spec.in_transformers(), antonyms(spec)[:4], candidates)
    ranked = sorted(zip(damage, candidates, strict=True), reverse=True)
    return [head for lost, head in ranked[:6] if lost > LEAST_DAMAGE]


@pytest.fixture(scope="module")
def batches(heads_that_matter: list[Head]) -> dict[str, list[Request]]:
    """What is asked of both engines: 20 ablations of 14 heads as scores and next tokens, and 20 neuron ablations."""
    assert len(heads_that_matter) >= 3
    spec, rng = smollm2(), np.random.default_rng(0)
    requests = antonyms(spec)
    ablations = random_ablations(spec.shape, 20, 14, rng, each_holds=heads_that_matter)
    compared = proof_requests(requests * 5, ablations)
    neurons = [
        Ablation.of(
            neurons=(Neuron(int(layer), int(n)) for layer in range(30) for n in rng.choice(1536, 154, replace=False))
        )
        for _ in range(20)
    ]
    return {
        "ablated": under(requests, ablations),
        "plain": under(requests, [Ablation()] * 20),
        "compared": compared,
        "compared, unablated": [replace(request, ablation=Ablation()) for request in compared],
        "neurons": under(requests, neurons),
    }


@pytest.fixture(scope="module")
def long_requests() -> list[Request]:
    """Items behind one long prefix, under the empty ablation and five others in turn."""
    spec = smollm2()
    items = antonyms(spec, SHOTS * 4)[:3]
    ablations = [Ablation(), *random_ablations(spec.shape, 5, 40, np.random.default_rng(1))]
    assert len(items[0].prompt_ids) > 64
    return [replace(item, ablation=ablation) for item in items for ablation in ablations]


@pytest.fixture(scope="module")
def found(batches: dict[str, list[Request]], long_requests: list[Request]) -> dict[str, Any]:
    return in_process(study, smollm2(), batches, long_requests)


@pytest.fixture(scope="module")
def reference(batches: dict[str, list[Request]]) -> Answers:
    asked = {name: batches[name] for name in ("compared", "compared, unablated", "neurons")}
    return in_process(answer_named, smollm2().in_transformers(), asked)


@pytest.fixture(scope="module")
def exact(batches: dict[str, list[Request]]) -> Answers:
    """The same comparisons in float32, where nothing but the knockout itself can differ."""
    asked = {name: batches[name] for name in ("compared", "neurons")}
    return in_process(answer_named, replace(smollm2(), dtype="float32"), asked)


def test_it_agrees_with_transformers_under_twenty_ablations(exact: Answers, reference: Answers) -> None:
    agreed = agreement(exact["compared"], reference["compared"])
    assert agreed.same_token >= 0.95
    assert agreed.score_difference < 1e-3


def test_it_disagrees_with_unablated_transformers(exact: Answers, reference: Answers) -> None:
    unablated = agreement(exact["compared"], reference["compared, unablated"])
    assert unablated.score_difference > 0.5


def test_in_the_models_own_bfloat16_it_agrees_wherever_the_model_is_not_destroyed(
    found: dict[str, Any], reference: Answers
) -> None:
    # One of the 20 ablations leaves a model on whose scores transformers in bfloat16 and in float32 differ by nats too.
    agreed = agreement(found["compared"], reference["compared"])
    scored = slice(0, None, 2)
    apart = differences(found["compared"][scored], reference["compared"][scored])
    unablated = differences(found["compared"][scored], reference["compared, unablated"][scored])
    assert agreed.same_token >= 0.9
    assert np.median(apart) <= 0.05
    assert np.median(unablated) >= 10 * np.median(apart)


def test_one_mixed_batch_equals_separate_runs(found: dict[str, Any]) -> None:
    assert found["evidence of ablated"]["most_ablations_in_a_step"] >= 16
    floor = max(differences(found["plain"], found["plain alone"]))
    assert max(differences(found["ablated"], found["ablated alone"])) <= max(2 * floor, NOISE)
    assert np.mean(differences(found["ablated"], found["plain"])) > 0.5


def test_neuron_ablations_agree_with_transformers_though_they_outnumber_the_slots(
    found: dict[str, Any], exact: Answers, reference: Answers, batches: dict[str, list[Request]]
) -> None:
    assert len({request.ablation for request in batches["neurons"]}) > 2 * NEURON_SLOTS
    assert max(differences(exact["neurons"], reference["neurons"])) < 1e-3
    assert np.mean(differences(found["neurons"], found["plain"])) > 0.5
    before, after = (found[f"evidence of {name}"] for name in ("compared, unablated", "neurons"))
    assert after["neuron_ablated_token_rows"] > before["neuron_ablated_token_rows"]
    assert before["neuron_ablated_token_rows"] == 15, "until then only the canary was asked, once, when it was loaded"


@pytest.mark.parametrize("other", ["again", "backwards"])
def test_ablations_that_share_a_long_prefix_do_not_share_its_cache(found: dict[str, Any], other: str) -> None:
    prefix = found["prefix"]
    assert max(differences(prefix["forwards"], prefix[other])) <= NOISE


def test_without_a_salt_they_would(found: dict[str, Any]) -> None:
    prefix = found["prefix"]
    (_, nothing), (contaminated, cached) = prefix["unsalted"]
    assert (nothing, cached >= 64) == (0, True)
    assert abs(contaminated.score - prefix["forwards"][1].score) > 10 * NOISE


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("unknown layer", "UsageError: L30H0 is out of range"),
        ("unknown head", "UsageError: L0H9 is out of range"),
        ("unknown neuron", "UsageError: L0N1536 is out of range"),
        ("unablated canary", "MeasurementError: the unablated canary scored"),
        ("ablated canary", "MeasurementError: the ablated canary scored"),
        ("neuron canary", "MeasurementError: the neuron canary scored"),
        ("answer's rows", "MeasurementError: the canary scored"),
        ("hook removed", "MeasurementError: the hook on o_proj of layer 3 scaled"),
        ("no ablation named", "MeasurementError: request"),
        ("interrupted before", "MeasurementError: an earlier call of this engine broke off"),
    ],
)
def test_a_fault_raises_one_line(found: dict[str, Any], fault: str, message: str) -> None:
    assert found["faults"]["none"] == found["faults"]["neuron canary off, no neurons"] == ""
    assert found["faults"][fault].startswith(message)
    assert "\n" not in found["faults"][fault]


@pytest.mark.parametrize("canary", ["unablated canary", "ablated canary", "neuron canary", "answer's rows"])
def test_a_canary_that_is_off_tells_what_the_model_computes_in(found: dict[str, Any], canary: str) -> None:
    assert "; the model computes in bfloat16, whose rounding can do that; " in found["faults"][canary]


def tiny(directory: Path, architecture: str, **resources: object) -> EngineSpec:
    random_model(directory, architecture)
    resources = {"kv_cache_gib": 1, "max_num_seqs": 16, **resources}
    return EngineSpec(
        "vllm", str(directory), fingerprint(directory), read_shape(directory), "float32", resources=resources
    )


def random_requests(n: int, prompt: int, answer: int) -> list[Request]:
    rows = np.random.default_rng(2).integers(32, 120, (n, prompt + answer)).tolist()
    return [
        Request(Item("random", str(i), "", "x"), tuple(ids[:prompt]), tuple(ids[prompt:]), Ablation())
        for i, ids in enumerate(rows)
    ]


def test_another_architecture_conforms_and_agrees_with_transformers(tmp_path: Path) -> None:
    requests, rng = random_requests(4, 40, 3), np.random.default_rng(3)
    spec = tiny(tmp_path / "qwen3", "qwen3", neuron_slots=3)
    prompts = [*(request.prompt_ids for request in requests), requests[0].prompt_ids[:35]]  # two share a prefix
    spec = replace(spec, mean_prompts=tuple(prompts))
    requests = [replace(request, means=spec.means) for request in requests]
    ablations = random_ablations(spec.shape, 6, 2, rng)
    neurons = [Neuron(int(layer), int(n)) for layer in range(2) for n in rng.choice(96, 20, replace=False)]
    mixed = [*ablations, *(Ablation.of([Head(0, i)], neurons[i::4]) for i in range(4)), Ablation.of(neurons=neurons)]
    means = [Ablation.to_mean(heads) for heads in ([Head(0, 1)], [Head(1, 2), Head(0, 3)], spec.shape.all_heads())]
    both = [Ablation.decode("L0H0=mean,L0H1,L1H2=2,L1N7=0.5"), Ablation.of([Head(0, 2)], scale=0.5)]
    long = replace(random_requests(1, 40, 40)[0], means=spec.means)
    other_end = replace(long, answer_ids=(*long.answer_ids[:-1], long.answer_ids[0]))
    alike = [replace(request, ablation=ablation) for ablation in ablations[:2] for request in (long, other_end)]
    asked = [*under(requests, [Ablation(), *mixed, *means, *both]), *alike]
    answers = in_process(conform, spec, requests, asked)
    assert answers["asked again"] >= 2, "the cache held first tokens of no answer, so nothing was shown of that"
    expected = load_engine(spec.in_transformers()).measure(asked)
    assert max(differences(answers["asked"], expected)) < 1e-3
    unablated = [expected[0].score] * len(expected)
    assert max(abs(o.score - u) for o, u in zip(expected, unablated, strict=True)) > 0.1
    same, again, other = answers["graph names"]
    assert same == again != other, "a graph compiled for other intervention code would be taken from the disk"
    assert not answers["left behind"], "an engine that is killed would leave a file in the temporary folder"


def test_requests_cut_into_chunks_and_preempted_succeed_with_the_same_outcome(tmp_path: Path) -> None:
    spec = tiny(tmp_path / "crowded", "llama", max_num_batched_tokens=24)
    shape = spec.shape
    requests = under(random_requests(8, 28, 12), random_ablations(shape, 8, 2, np.random.default_rng(4)))
    # What generates grows while it runs and takes the room of what is still being read in, scored answers among it.
    requests = [
        request if i % 2 else replace(request, mode="generate", max_tokens=12) for i, request in enumerate(requests)
    ]
    assert len(requests[0].prompt_ids) > spec.resources["max_num_batched_tokens"]
    alone, together, preempted = in_process(crowd, spec, requests, 4)
    assert preempted & {1, 3, 5, 7}, "no scored answer gave way"
    assert preempted & {0, 2, 4, 6}, "nothing that generates gave way"
    expected = load_engine(spec.in_transformers()).measure(requests)
    # Random tokens are no text, which the two engines spell differently.
    assert [outcome.text for outcome in together] == [outcome.text for outcome in alone]
    for outcomes in (alone, together):
        assert max(differences(outcomes[1::2], expected[1::2])) < 1e-3
        assert [outcome.correct for outcome in outcomes] == [outcome.correct for outcome in expected]


def test_a_context_that_the_cache_cannot_hold_is_cut_to_what_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    spec = tiny(tmp_path, "llama", max_num_seqs=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4_000_000}))
    requests = random_requests(3, 20, 3)
    outcomes, refused = in_process(answer_in_what_fits, spec, requests)
    assert max(differences(outcomes, load_engine(spec.in_transformers()).measure(requests))) < 1e-3
    assert re.match(
        r"UsageError: item '0' .* needs 2000003 tokens, the KV cache \(engine\.kv_cache_gib on a CPU", refused
    )
