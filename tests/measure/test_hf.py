from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, Head, ModelShape, Neuron
from cs_localize.measure.hf import HFEngine
from cs_localize.measure.hooks import AblationHooks
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.models.files import fingerprint
from cs_localize.models.shape import read_shape
from tests.measure.conformance import check_engine, check_refused_requests, check_refused_specs
from tests.measure.tiny_models import EOS, KINDS, NEWLINE, save_tiny_model, tiny_request

pytestmark = pytest.mark.model

GEOMETRY = {"vocab_size": 40, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 24}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[HFEngine]:
    engine = HFEngine(llama)
    yield engine
    engine.close()


def edited(directory: Path, edit: Callable[[torch.nn.Module], None]) -> HFEngine:
    """The same model with its weights changed, asked without any ablation."""
    engine = HFEngine(directory)
    with torch.no_grad():
        edit(engine.model)
    return engine


def with_means(directory: Path, requests: list[Request], batch_size: int = 32) -> HFEngine:
    """An engine that has measured the means of heads on the prompts of the requests."""
    prompts, resources = tuple(request.prompt_ids for request in requests), {"batch_size": batch_size}
    spec = EngineSpec("hf", str(directory), fingerprint(directory), read_shape(directory), resources=resources)
    return HFEngine.from_spec(replace(spec, mean_prompts=prompts))


def scores(engine: HFEngine, requests: list[Request]) -> list[float]:
    return [outcome.score for outcome in engine.measure(requests)]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_hf_engine_keeps_the_contract_of_engines(kind: str, tmp_path: Path) -> None:
    requests = [tiny_request(seed, prompt=4 + 3 * seed, answer=1 + seed % 3) for seed in range(5)]
    engine = with_means(save_tiny_model(tmp_path, kind), requests, batch_size=7)
    check_engine(engine, requests)
    check_refused_requests(engine, requests[0])


def test_score_is_the_log_probability_of_every_answer_token_given_all_before_it(engine: HFEngine) -> None:
    request = tiny_request(0, answer=3)
    with torch.no_grad():
        logits = engine.model(torch.tensor([request.prompt_ids + request.answer_ids])).logits[0].float()
    first = len(request.prompt_ids) - 1
    steps = logits.log_softmax(-1)[first : first + 3]
    expected = sum(float(steps[i, token]) for i, token in enumerate(request.answer_ids))
    (outcome,) = engine.measure([request])
    assert outcome.score == pytest.approx(expected, abs=1e-5)
    assert not outcome.correct
    best = replace(request, answer_ids=(int(steps[0].argmax()),))
    assert engine.measure([best])[0].correct


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_outcomes_do_not_depend_on_what_else_is_in_the_batch(attention: str, llama: Path) -> None:
    spec = EngineSpec("hf", str(llama), "", read_shape(llama), settings={"attention": attention})
    engine = HFEngine.from_spec(spec)
    ablations = [Ablation(), Ablation.of([Head(0, 1)]), Ablation.of([Head(2, 3)], [Neuron(1, 5)])]
    scored = [tiny_request(i, ablations[i % 3], prompt=3 + 2 * i, answer=1 + i % 3) for i in range(9)]
    written = [replace(request, mode="generate", max_tokens=3 + i) for i, request in enumerate(scored)]
    requests = [request for pair in zip(scored, written, strict=True) for request in pair]
    alone = [engine.measure([request])[0] for request in requests]
    for one, other in zip(engine.measure(requests), alone, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-4, nan_ok=True)
        assert (one.correct, one.text, one.tokens) == (other.correct, other.text, other.tokens)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0, -1.0])
def test_scaling_a_head_equals_scaling_its_columns_of_o_proj(factor: float, engine: HFEngine, llama: Path) -> None:
    width = engine.shape.head_dim

    def scale_columns(model: torch.nn.Module) -> None:
        for layer, head in ((1, 2), (2, 0)):
            model.get_parameter(f"model.layers.{layer}.self_attn.o_proj.weight")[
                :, head * width : (head + 1) * width
            ] *= factor

    ablation = Ablation.of([Head(1, 2), Head(2, 0)], scale=factor)
    requests = [tiny_request(seed) for seed in range(4)]
    expected = scores(edited(llama, scale_columns), requests)
    assert scores(engine, [replace(request, ablation=ablation) for request in requests]) == expected
    assert scores(engine, requests) != expected


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_mean_is_taken_over_every_token_of_every_prompt_and_put_in_place_of_the_head(
    batch_size: int, llama: Path
) -> None:
    prompts = [tiny_request(seed, prompt=3 + 4 * seed) for seed in range(4)]
    heads, width = [Head(1, 2), Head(2, 0)], read_shape(llama).head_dim

    def put_means_in_place(model: torch.nn.Module) -> None:
        inputs: dict[int, list[torch.Tensor]] = {layer: [] for layer in (1, 2)}
        projections = {layer: model.get_submodule(f"model.layers.{layer}.self_attn.o_proj") for layer in (1, 2)}
        handles = [
            projection.register_forward_pre_hook(lambda _, x, layer=layer: inputs[layer].append(x[0][0]))
            for layer, projection in projections.items()
        ]
        for request in prompts:
            model(torch.tensor([request.prompt_ids]))
        for handle in handles:
            handle.remove()
        for head in heads:
            columns, part = projections[head.layer].weight, slice(head.head * width, (head.head + 1) * width)
            mean = torch.cat(inputs[head.layer])[:, part].mean(0)
            projections[head.layer].bias = torch.nn.Parameter(columns[:, part] @ mean)
            columns[:, part] = 0.0

    engine = with_means(llama, prompts, batch_size)
    requests = [tiny_request(seed, prompt=5 + seed) for seed in range(4, 8)]
    expected = scores(edited(llama, put_means_in_place), requests)
    ablation = Ablation.to_mean(heads)
    asked = [replace(request, ablation=ablation, means=engine.means) for request in requests]
    assert scores(engine, asked) == pytest.approx(expected, abs=1e-4)
    zeroed = [replace(request, ablation=Ablation.of(heads)) for request in requests]
    assert scores(engine, zeroed) != pytest.approx(expected, abs=1e-2)


def test_an_engine_without_prompts_for_means_refuses_to_replace_a_head_by_its_mean(engine: HFEngine) -> None:
    with pytest.raises(UsageError, match="needs prompts to measure the means of heads on"):
        engine.measure([tiny_request(0, Ablation.to_mean([Head(0, 0)]))])
    applied = engine.hooks.applied([Ablation.to_mean([Head(0, 0)])])
    with pytest.raises(MeasurementError, match="L0H0 cannot be replaced by its mean, which was not measured"), applied:
        pass


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_scaling_a_neuron_equals_scaling_its_column_of_down_proj(factor: float, engine: HFEngine, llama: Path) -> None:
    def scale_columns(model: torch.nn.Module) -> None:
        model.get_parameter("model.layers.0.mlp.down_proj.weight")[:, [3, 17]] *= factor

    ablation = Ablation.of(neurons=[Neuron(0, 3), Neuron(0, 17)], scale=factor)
    requests = [tiny_request(seed) for seed in range(4)]
    expected = scores(edited(llama, scale_columns), requests)
    assert scores(engine, [replace(request, ablation=ablation) for request in requests]) == expected
    assert scores(engine, requests) != expected


def test_generated_text_is_decoded_under_the_ablation_at_every_step(engine: HFEngine, llama: Path) -> None:
    def knock_out(model: torch.nn.Module) -> None:
        width = engine.shape.head_dim
        model.get_parameter("model.layers.1.self_attn.o_proj.weight")[:, : 2 * width] = 0.0

    ablation = Ablation.of([Head(1, 0), Head(1, 1)])
    requests = [tiny_request(seed, mode="generate") for seed in range(6)]
    expected = [outcome.text for outcome in edited(llama, knock_out).measure(requests)]
    ablated = engine.measure([replace(request, ablation=ablation) for request in requests])
    assert [outcome.text for outcome in ablated] == expected
    assert [outcome.text for outcome in engine.measure(requests)] != expected


def test_contributions_of_single_heads_add_up_to_the_layers_attention_output(engine: HFEngine) -> None:
    heads = [Head(1, head) for head in range(engine.shape.heads)]
    only_one = [Ablation.of(set(heads) - {head}) for head in heads]
    outputs: list[torch.Tensor] = []
    projection = engine.model.get_submodule("model.layers.1.self_attn.o_proj")
    handle = projection.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    ids = torch.tensor([tiny_request(0).prompt_ids] * (len(heads) + 1))
    with engine.hooks.applied([*only_one, Ablation()]), engine.hooks.proven():
        engine.model(ids)
    handle.remove()
    torch.testing.assert_close(outputs[0][:-1].sum(0), outputs[0][-1])


def test_greedy_text_equals_that_of_transformers_own_generate(engine: HFEngine) -> None:
    for seed in range(5):
        request = replace(tiny_request(seed, mode="generate"), max_tokens=12)
        full = engine.model.generate(
            torch.tensor([request.prompt_ids]), attention_mask=torch.ones(1, 6), max_new_tokens=12, do_sample=False,
            pad_token_id=EOS,
        )[0, 6:].tolist()  # fmt: skip
        ends = [i for i, token in enumerate(full) if token in (NEWLINE, EOS)]
        expected = tuple(full[: ends[0] + 1] if ends else full)
        assert engine.generate_ids([request]) == [expected]


def save_byte_tokenizer(directory: Path) -> None:
    """A byte-level BPE in place of the model's tokenizer; some of its tokens end within a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=266, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["né € 日本 € 語😀 €"] * 5, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def test_text_that_is_cut_off_within_a_character_ends_before_it_as_with_vllm(tmp_path: Path) -> None:
    save_byte_tokenizer(save_tiny_model(tmp_path))
    engine = HFEngine(tmp_path)
    rng = random.Random(0)
    unfinished = 0
    for _ in range(300):
        text = "".join(rng.choices("né € 日本語😀\n", k=rng.randint(1, 9)))
        ids = engine.tokenizer.encode(text)
        ids = ids[: rng.randint(1, len(ids))]
        stream = decoders.DecodeStream(skip_special_tokens=True)  # vLLM's own
        streamed = "".join(stream.step(engine.tokenizer.backend_tokenizer, token) or "" for token in ids)
        assert engine.decode(ids) == streamed
        assert text.startswith(streamed)
        unfinished += streamed != engine.tokenizer.decode(ids)
    assert 50 < unfinished < 250


def test_bytes_that_make_no_character_stay_where_more_text_follows(tmp_path: Path) -> None:
    save_byte_tokenizer(save_tiny_model(tmp_path))
    engine = HFEngine(tmp_path)
    (half, *_), (letter,) = engine.tokenizer.encode("ß"), engine.tokenizer.encode("n")
    assert engine.decode([letter, half, letter]) == "n\N{REPLACEMENT CHARACTER}n"
    assert engine.decode([half, letter, half, half]) == "\N{REPLACEMENT CHARACTER}n"
    assert engine.decode([half]) == ""


@pytest.mark.parametrize("last", [NEWLINE, EOS])
def test_generation_ends_with_a_newline_or_the_end_of_sequence_and_text_stops_before_it(last: int, llama: Path) -> None:
    def write_w5_twice_then_end(model: torch.nn.Module) -> None:
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        embedding = model.get_parameter("model.embed_tokens.weight")
        embedding.copy_(torch.eye(*embedding.shape))
        head = model.get_parameter("lm_head.weight").zero_()
        for now, following in ((10, 5), (5, 7), (7, last), (last, 9)):
            head[following, now] = 1.0

    engine = edited(llama, write_w5_twice_then_end)
    request = replace(tiny_request(0, mode="generate"), prompt_ids=(4, 10))
    (whole,) = engine.measure([request])
    assert whole.text.strip() == "w5 w7"
    assert whole.tokens == 2 + 3
    assert not whole.correct, "grading is the task's"
    (cut,) = engine.measure([replace(request, max_tokens=1)])
    assert (cut.text, cut.tokens) == ("w5", 3)
    (stopped,) = engine.measure([replace(request, stop=("7", "5 w"))])
    assert (stopped.text, stopped.tokens) == ("w", 2 + 2), "the text ends before the first stop string"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "empty prompt"),
        ({"answer_ids": ()}, "empty answer"),
        ({"prompt_ids": (4,) * 80}, "context has room for 64"),
        ({"mode": "generate", "max_tokens": 60}, "context has room for 64"),
        ({"mode": "generate", "max_tokens": 0}, "max_tokens"),
        ({"prompt_ids": (400,)}, "outside 0..39"),
        ({"ablation": Ablation.of([Head(3, 0)])}, "L3H0 is out of range"),
        ({"ablation": Ablation.of(neurons=[Neuron(0, 24)])}, "L0N24 is out of range"),
    ],
)
def test_request_that_does_not_fit_the_model_is_a_usage_error(
    change: dict[str, object], message: str, engine: HFEngine
) -> None:
    with pytest.raises(UsageError, match=message):
        engine.measure([tiny_request(0), replace(tiny_request(1), **change)])  # type: ignore[arg-type]  # any field
    assert len(engine.measure([tiny_request(0)])) == 1


def test_layer_that_bypasses_its_projection_is_a_measurement_error(llama: Path) -> None:
    engine = HFEngine(llama)
    mlp = engine.model.get_submodule("model.layers.1.mlp")
    weight = mlp.get_parameter("down_proj.weight")
    mlp.forward = lambda x: torch.nn.functional.linear(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), weight)
    with pytest.raises(MeasurementError, match=r"layers\.1\.mlp\.down_proj was called 0 times"):
        engine.measure([tiny_request(0)])
    with pytest.raises(MeasurementError, match="called 0 times"):
        engine.measure([tiny_request(0, mode="generate")])


def test_layer_that_runs_its_projection_twice_is_a_measurement_error(llama: Path) -> None:
    engine = HFEngine(llama)
    layer = engine.model.get_submodule("model.layers.2.self_attn")
    layer.register_forward_hook(lambda module, _inputs, output: (module.o_proj(torch.zeros(1, 1, 48)), output[1]))
    with pytest.raises(MeasurementError, match=r"layers\.2\.self_attn\.o_proj was called 2 times"):
        engine.measure([tiny_request(0)])


def test_model_without_the_expected_geometry_is_refused_with_the_name_of_the_module(engine: HFEngine) -> None:
    shape = engine.shape
    with pytest.raises(MeasurementError, match=r"layers\.0\.self_attn\.o_proj \(Linear\) takes 48 inputs, expected 60"):
        AblationHooks(engine.model, replace(shape, heads=5, kv_heads=5))
    with pytest.raises(MeasurementError, match=r"layers\.0\.mlp\.down_proj \(Linear\) takes 24 inputs, expected 32"):
        AblationHooks(engine.model, replace(shape, ffn=32))
    with pytest.raises(MeasurementError, match=r"none in layers \[3\]"):
        AblationHooks(engine.model, replace(shape, layers=4))
    with pytest.raises(MeasurementError, match="has 3 layers instead of 2"):
        AblationHooks(engine.model, replace(shape, layers=2))
    with pytest.raises(MeasurementError, match="none in layers"):
        AblationHooks(torch.nn.Sequential(torch.nn.Linear(2, 2)), ModelShape(1, 1, 1, 2, 2))


def test_attention_that_counts_its_heads_otherwise_is_refused(llama: Path) -> None:
    engine = HFEngine(llama)
    attention = engine.model.get_submodule("model.layers.1.self_attn")
    for name, value, told in (("head_dim", 6, "8 heads, 4 KV"), ("num_key_value_groups", 1, "4 heads, 4 KV")):
        kept = getattr(attention, name)
        setattr(attention, name, value)
        with pytest.raises(MeasurementError, match=rf"layers\.1\.self_attn has {told} heads .*says 4, 2 and 12"):
            AblationHooks(engine.model, engine.shape)
        delattr(attention, name)
        with pytest.raises(MeasurementError, match=r"layers\.1\.self_attn \(LlamaAttention\) is not recognised"):
            AblationHooks(engine.model, engine.shape)
        setattr(attention, name, kept)


def test_attention_whose_output_is_not_that_of_its_heads_is_refused_on_load(
    monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    forward = LlamaAttention.forward

    def gated(self: LlamaAttention, *args: object, **options: object) -> tuple[torch.Tensor, object]:
        output, weights = forward(self, *args, **options)
        return output * 0.9, weights

    monkeypatch.setattr(LlamaAttention, "forward", gated)
    with pytest.raises(MeasurementError, match=r"the heads of model\.layers\.0\.self_attn do not add up"):
        HFEngine(llama)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GPT2Config(vocab_size=40, n_embd=48, n_layer=3, n_head=4, n_inner=24), "GPT2LMHeadModel"),
        (GPTNeoXConfig(**GEOMETRY, num_attention_heads=4), "GPTNeoXForCausalLM"),
        (MixtralConfig(**GEOMETRY, num_attention_heads=4, num_key_value_heads=2, head_dim=12), "MixtralForCausalLM"),
    ],
    ids=["gpt2", "gpt_neox", "mixtral"],
)
def test_model_without_such_projections_is_refused_by_name(config: PreTrainedConfig, name: str) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(MeasurementError, match=rf"expected one \w+ in each of 3 decoder layers of {name}: none in"):
        AblationHooks(model, ModelShape(3, 4, 2, 12, 24))


def test_ablations_end_with_their_block_even_if_the_forward_pass_fails(engine: HFEngine) -> None:
    (before,) = scores(engine, [tiny_request(0)])
    with pytest.raises(RuntimeError, match="stop"), engine.hooks.applied([Ablation.of(engine.shape.all_heads())]):
        raise RuntimeError("stop")
    assert scores(engine, [tiny_request(0)]) == [before]
    with (
        engine.hooks.applied([Ablation()]),
        pytest.raises(MeasurementError, match="one block at a time"),
        engine.hooks.applied([Ablation()]),
    ):
        pass


def test_batch_of_another_size_than_its_ablations_is_a_measurement_error(engine: HFEngine) -> None:
    ids = torch.tensor([tiny_request(0).prompt_ids] * 3)
    with engine.hooks.applied([Ablation()] * 2), pytest.raises(MeasurementError, match="expected \\[2 rows"):
        engine.model(ids)


def test_engine_has_the_fingerprint_of_its_spec(llama: Path, engine: HFEngine) -> None:
    spec = EngineSpec("hf", str(llama), fingerprint(llama), read_shape(llama), resources={"threads": 1})
    loaded = load_engine(spec)
    assert loaded.fingerprint == spec.fingerprint == engine.fingerprint
    assert HFEngine(llama, dtype="bfloat16").fingerprint != engine.fingerprint


def test_dtype_auto_is_the_models_own(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, dtype=torch.bfloat16)
    assert HFEngine(directory).model.dtype == torch.bfloat16
    assert HFEngine(directory, dtype="float32").model.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "planted"}, "spec of engine 'planted'"),
        ({"settings": {"attention": "flash"}}, "attention 'flash'"),
        ({"settings": {"device": "cuda:99"}}, "cuda:99|cannot load the model"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"resources": {"batch_size": 0}}, "batch_size"),
    ],
)
def test_spec_that_makes_no_sense_is_a_usage_error(change: dict[str, object], message: str, llama: Path) -> None:
    spec = EngineSpec("hf", str(llama), "", read_shape(llama))
    with pytest.raises(UsageError, match=message):
        HFEngine.from_spec(replace(spec, **change))  # type: ignore[arg-type]  # any field


def test_options_that_the_engine_lacks_are_refused_by_name(llama: Path) -> None:
    check_refused_specs(EngineSpec("hf", str(llama), "", read_shape(llama)))


def test_model_that_is_not_the_one_described_is_a_measurement_error(llama: Path) -> None:
    spec = EngineSpec("hf", str(llama), "", replace(read_shape(llama), layers=4))
    with pytest.raises(MeasurementError, match="the spec says"):
        HFEngine.from_spec(spec)


def test_model_directory_without_weights_is_a_usage_error(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    spec = EngineSpec("hf", str(tmp_path), "", read_shape(tmp_path))
    with pytest.raises(UsageError, match="cannot load the model in"):
        HFEngine.from_spec(spec)
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(UsageError, match="cannot load a tokenizer"):
        HFEngine.from_spec(spec).measure([tiny_request(0, mode="generate")])


def test_evidence_counts_every_hook_of_every_forward_pass(llama: Path) -> None:
    engine = HFEngine(llama, batch_size=2)
    engine.measure([tiny_request(seed) for seed in range(5)])
    assert engine.evidence() == {"forwards": 3, "hook_calls": 3 * 2 * 3, "scored": 5, "generated": 0}
