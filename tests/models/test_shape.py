from __future__ import annotations

from pathlib import Path

import pytest

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.models import read_shape
from tests.models.builders import LLAMA, write_config


def test_a_llama_config_is_read_from_its_directory_or_its_file(tmp_path: Path) -> None:
    write_config(tmp_path, **LLAMA)
    expected = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
    assert read_shape(tmp_path) == expected
    assert read_shape(tmp_path / "config.json") == expected


def test_qwen3_states_a_head_width_that_is_not_hidden_size_over_heads(tmp_path: Path) -> None:
    write_config(tmp_path, **{**LLAMA, "model_type": "qwen3", "head_dim": 20})
    assert read_shape(tmp_path).head_dim == 20


def test_without_kv_heads_every_query_head_has_its_own(tmp_path: Path) -> None:
    write_config(tmp_path, **{**LLAMA, "num_key_value_heads": None})
    assert read_shape(tmp_path).kv_heads == 4


def test_a_null_head_width_counts_as_absent(tmp_path: Path) -> None:
    text = '{"model_type": "qwen2", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": null, '
    (tmp_path / "config.json").write_text(text + '"hidden_size": 10, "intermediate_size": 7}')
    assert read_shape(tmp_path) == ModelShape(layers=1, heads=2, kv_heads=2, head_dim=5, ffn=7)


def test_a_multimodal_config_is_read_at_its_text_config(tmp_path: Path) -> None:
    text = {
        **LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {"num_hidden_layers": 9, "num_attention_heads": 9}
    write_config(tmp_path, model_type="gemma3", text_config=text, vision_config=vision)
    assert read_shape(tmp_path) == ModelShape(layers=2, heads=4, kv_heads=2, head_dim=16, ffn=48)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "intermediate_size"])
def test_a_missing_field_is_named_together_with_the_model_type(tmp_path: Path, field: str) -> None:
    write_config(tmp_path, **{**LLAMA, "model_type": "gpt_other", field: None})
    with pytest.raises(UsageError, match=rf"'{field}'.*'gpt_other'"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"intermediate_size": [48, 64]}, "'intermediate_size' must be one positive whole number"),
        ({"num_attention_heads": True}, "'num_attention_heads' must be one positive whole number"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be one positive whole number"),
        ({"hidden_size": 33}, "hidden_size 33 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "without softmax attention heads: linear_attention"),
        ({"text_config": "none"}, "text_config must be an object"),
    ],
)
def test_a_config_that_heads_and_neurons_do_not_describe_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    write_config(tmp_path, **{**LLAMA, **fields})
    with pytest.raises(UsageError, match=message):
        read_shape(tmp_path)


@pytest.mark.parametrize("content", ["{not json", "[]", ""])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_shape(tmp_path)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_shape(tmp_path)
