"""Small models with random weights, for tests and examples: real architectures, no download, no training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.models.extras import need
from cs_localize.models.shape import read_shape
from cs_localize.models.vocabularies import byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_NARROW = {"gemma3_text", "mistral", "qwen3"}


def random_model(
    directory: Path,
    architecture: str,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int | None = None,
    ffn: int = 96,
    seed: int = 0,
) -> Path:
    """Writes a model with random weights (float32) and a tokenizer of bytes, and returns its directory.

    The weights are large enough for every head to change the output. The default head width is the smallest that
    vLLM's attention on a CPU takes.

    Args:
        directory: where to write; made if need be.
        architecture: a decoder's ``model_type`` in transformers: ``llama``, ``qwen2``, ``qwen3``, ``mistral``,
            ``gemma3_text``, ``phi3``, ``olmo2``, ``smollm3`` or another.
        layers: decoder layers.
        heads: query heads a layer.
        kv_heads: key/value heads a layer.
        head_dim: width of a head.
        hidden: hidden size; by default heads x head_dim, and half of that where an architecture's published models
            have another hidden size than that.
        ffn: width of the FFN hidden vector.
        seed: of the weights.

    Raises:
        UsageError: if transformers does not know the architecture, or it cannot have this geometry.
    """
    need("a random model", "torch", "transformers")
    from transformers import AutoConfig

    shape = ModelShape(layers, heads, kv_heads, head_dim, ffn)
    hidden = hidden or heads * head_dim // (2 if architecture in _NARROW else 1)
    # vLLM's Qwen2 derives the width of a head and ignores what the config says.
    if architecture == "qwen2" and hidden != heads * head_dim:
        raise UsageError(f"qwen2 needs hidden = heads x head_dim = {heads * head_dim}, not {hidden}")
    tokenizer = byte_tokenizer()
    fields = config_fields(shape, hidden, tokenizer)
    try:
        config = AutoConfig.for_model(architecture, **fields, initializer_range=hidden**-0.5)
    except ValueError:
        raise UsageError(f"transformers has no architecture '{architecture}'; try llama, qwen2 or qwen3") from None
    directory.mkdir(parents=True, exist_ok=True)
    model_from_config(config, seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if read_shape(directory) != shape:
        raise UsageError(f"architecture '{architecture}' cannot have the geometry {shape}")
    return directory


def config_fields(shape: ModelShape, hidden: int, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """What the config of a small decoder of this geometry says, whatever its architecture."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def model_from_config(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model with weights drawn from the seed; torch's global generator is left as it was."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make = AutoModelForCausalLM.from_config
        model: PreTrainedModel = make(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # not annotated there
    return model
