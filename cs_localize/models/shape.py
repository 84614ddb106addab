"""A model's geometry from its ``config.json`` alone; nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape

_SOFTMAX_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def read_config(path: Path) -> dict[str, Any]:
    """The content of a ``config.json``, given as the file or as the directory that holds it.

    Raises:
        UsageError: if there is no such file or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no config.json at {path}; a model directory needs one") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} must hold a JSON object")
    return config


def read_shape(path: Path) -> ModelShape:
    """Reads the geometry of a decoder from its ``config.json``.

    A multimodal config is read at its ``text_config``. Without ``num_key_value_heads`` every query head has its own
    KV head; without ``head_dim`` a head is hidden size / heads wide.

    Args:
        path: a ``config.json``, or the directory that holds it.

    Raises:
        UsageError: if a field is missing, is not one positive whole number, or if the model is of a kind that heads
            and neurons do not describe: a mixture of experts, latent attention, layers without softmax attention.
    """
    config = read_config(path)
    model_type = str(config.get("model_type", "unknown"))
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise UsageError(f"model_type '{model_type}': text_config must be an object")
    _refuse_other_kinds(text, model_type)
    layers = _count(text, "num_hidden_layers", model_type)
    heads = _count(text, "num_attention_heads", model_type)
    kv_heads = _count(text, "num_key_value_heads", model_type, default=heads)
    ffn = _count(text, "intermediate_size", model_type)
    return ModelShape(layers, heads, kv_heads, _head_dim(text, heads, model_type), ffn)


def _head_dim(text: Mapping[str, Any], heads: int, model_type: str) -> int:
    if text.get("head_dim") is not None:
        return _count(text, "head_dim", model_type)
    hidden = _count(text, "hidden_size", model_type)
    if hidden % heads:
        raise UsageError(
            f"model_type '{model_type}': config.json has no head_dim, and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden // heads


def _count(text: Mapping[str, Any], field: str, model_type: str, default: int | None = None) -> int:
    """A positive whole number of the config; null counts as absent, as it does in transformers."""
    value = text.get(field)
    if value is None:
        if default is None:
            raise UsageError(
                f"config.json has no '{field}' (model_type '{model_type}'); only decoders described by "
                "num_hidden_layers, num_attention_heads and intermediate_size can be studied"
            )
        return default
    if type(value) is not int or value < 1:
        raise UsageError(f"model_type '{model_type}': '{field}' must be one positive whole number, not {value!r}")
    return value


def _refuse_other_kinds(text: Mapping[str, Any], model_type: str) -> None:
    """Some configs carry all the fields although 'layers x heads' or 'FFN width' would be untrue of the model."""
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (text.get(field) or 0) > 1:
            raise UsageError(f"model_type '{model_type}' is a mixture of experts ({field}), which is not supported")
    if text.get("kv_lora_rank"):
        raise UsageError(f"model_type '{model_type}' has latent attention (kv_lora_rank), which is not supported")
    other = sorted(set(map(str, text.get("layer_types") or ())) - _SOFTMAX_LAYERS)
    if other:
        raise UsageError(f"model_type '{model_type}' has layers without softmax attention heads: {', '.join(other)}")
