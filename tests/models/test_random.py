from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.models import random_model, resolve
from cs_localize.models.shape import read_config

pytestmark = pytest.mark.model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_random_model_resolves_and_loads_with_the_geometry_asked_for(tmp_path: Path, architecture: str) -> None:
    model = resolve(str(random_model(tmp_path, architecture, layers=3, heads=6, kv_heads=3, head_dim=8, ffn=20)))
    assert model.shape == ModelShape(layers=3, heads=6, kv_heads=3, head_dim=8, ffn=20)
    loaded = AutoModelForCausalLM.from_pretrained(model.path)
    projections = [layer.self_attn.o_proj.in_features for layer in loaded.model.layers]
    assert projections == [6 * 8] * 3
    assert loaded.model.layers[0].mlp.down_proj.in_features == 20


def test_a_random_qwen3_has_query_norms_and_heads_wider_than_its_share_of_the_hidden_size(tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(random_model(tmp_path, "qwen3"))
    assert loaded.model.layers[0].self_attn.q_norm.weight.shape == (32,)
    assert loaded.config.hidden_size == 64
    assert loaded.config.num_attention_heads * loaded.config.head_dim == 128


def test_equal_seeds_give_equal_models_and_leave_the_global_generator_alone(tmp_path: Path) -> None:

    state = torch.random.get_rng_state()
    prints = [
        resolve(str(random_model(tmp_path / str(i), "llama", seed=seed))).fingerprint
        for i, seed in enumerate((1, 1, 2))
    ]
    assert prints[0] == prints[1] != prints[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_every_head_of_a_random_model_changes_its_output(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model(tmp_path, "llama"))
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for layer in model.model.layers:
            weight = layer.self_attn.o_proj.weight
            for head in range(4):
                kept = weight[:, head * 32 : (head + 1) * 32].clone()
                weight[:, head * 32 : (head + 1) * 32] = 0
                assert (model(input_ids=ids).logits - before).abs().max() > 0.1
                weight[:, head * 32 : (head + 1) * 32] = kept


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_its_tokenizer_gives_any_text_back_and_an_answer_follows_its_prompt(tmp_path: Path, architecture: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_model(tmp_path, architecture))
    text = "hot -> cold\n  naïve 東京 7+8=15"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert len(tokenizer) == read_config(tmp_path)["vocab_size"]
    assert tokenizer("hot ->")["input_ids"] == ids[:6]


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("no_such", {}, "no architecture 'no_such'"),
        ("gpt2", {}, "'num_hidden_layers'"),
        ("qwen2", {"hidden": 64}, "qwen2 needs hidden = heads x head_dim = 128, not 64"),
        ("llama", {"heads": 3}, "3 query heads cannot share 2 KV heads"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(
    tmp_path: Path, architecture: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        random_model(tmp_path / "model", architecture, **options)
