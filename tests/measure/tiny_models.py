"""Random decoders of a few thousand weights, saved as model directories, and requests for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item

WORDS = 40
EOS = 2
NEWLINE = 1

KINDS = {
    "gemma3_text": transformers.Gemma3TextConfig,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "phi3": transformers.Phi3Config,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "olmo2": transformers.Olmo2Config,
    "smollm3": transformers.SmolLM3Config,
}


def save_tiny_model(
    directory: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **overrides: object
) -> Path:
    """A random decoder with grouped queries whose head_dim is not hidden size / heads, and its tokenizer.

    Weights are large enough that every head and neuron moves the output.
    """
    options = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    config = KINDS[kind](**(options | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(directory)
    words = {"[UNK]": 0, "\n": NEWLINE, "<end>": EOS} | {f"w{i}": i for i in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<end>")
    wrapped.save_pretrained(directory)
    return directory


def tiny_request(
    seed: int, ablation: Ablation | None = None, mode: Mode = "score", prompt: int = 6, answer: int = 2
) -> Request:
    """A request of random tokens; equal arguments give equal requests."""
    ids = tuple(int(i) for i in np.random.default_rng(seed).integers(3, WORDS, prompt + answer))
    text = [f"w{i}" for i in ids]
    item = Item("random", f"{seed}-{prompt}-{answer}", " ".join(text[:prompt]), " " + " ".join(text[prompt:]))
    return Request(item, ids[:prompt], ids[prompt:], ablation or Ablation(), mode, max_tokens=8)
