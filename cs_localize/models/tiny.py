"""tiny-qwen2 and tiny-qwen3: models trained here in about a minute, small enough for the truth about their heads.

Both learn copying, sorting and sums modulo 13 (``cs_localize.tasks.tiny``). A penalty on every head's columns of
``o_proj``, taken as one group, keeps only heads that are of use: a few matter much and the others not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cs_localize.errors import CsLocalizeError
from cs_localize.heads import ModelShape
from cs_localize.models.cache import build_once, model_directory
from cs_localize.models.extras import need
from cs_localize.models.random import config_fields, model_from_config
from cs_localize.models.vocabularies import byte_tokenizer
from cs_localize.tasks.tiny import TINY_COPY, TINY_MODSUM, TINY_SORT, TINY_VOCABULARY, tiny_training_text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LOG = logging.getLogger("cs_localize")
_TRAINING = 1  # to be raised whenever train() gives another model for the same recipe
_IGNORED = -100  # the label that torch's cross entropy leaves out
_LEAST_ACCURACY = {TINY_COPY: 0.95, TINY_SORT: 0.9, TINY_MODSUM: 0.9}


@dataclass(frozen=True)
class TinyRecipe:
    """All that a tiny model depends on.

    Attributes:
        architecture: ``qwen2`` or ``qwen3``.
        shape: the geometry.
        hidden: hidden size.
        lines: training lines drawn in all.
        batch: lines a step.
        steps: optimizer steps.
        learning_rate: of AdamW, at its peak.
        weight_decay: of AdamW.
        head_penalty: weight, in the loss, of the summed norms of the heads' columns of ``o_proj``.
        seed: of weights, lines and batches.
    """

    architecture: str
    shape: ModelShape
    hidden: int
    lines: int = 60_000
    batch: int = 128
    steps: int = 600
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    head_penalty: float = 0.01
    seed: int = 0

    def text(self) -> str:
        """What a cached model is found by: the recipe, the language and a sample of the training lines."""
        sample = tiny_training_text(np.random.default_rng(self.seed), lines=200)
        parts = [_TRAINING, asdict(self), TINY_VOCABULARY, hashlib.sha256(sample.encode()).hexdigest()]
        return json.dumps(parts, sort_keys=True)


RECIPES = {
    "tiny-qwen2": TinyRecipe("qwen2", ModelShape(layers=3, heads=6, kv_heads=2, head_dim=32, ffn=256), hidden=192),
    "tiny-qwen3": TinyRecipe("qwen3", ModelShape(layers=3, heads=8, kv_heads=2, head_dim=32, ffn=192), hidden=96),
}
"""By name. The head width is the smallest that vLLM's attention on a CPU takes."""


def describe(name: str) -> str:
    """One line for listings."""
    recipe = RECIPES[name]
    size = f"{recipe.shape.layers} x {recipe.shape.heads} heads"
    return f"{recipe.architecture} with {size}, trained here in about a minute: copying, sorting, sums modulo 13"


def directory(name: str) -> Path:
    """Where the trained model is kept."""
    return model_directory(name, RECIPES[name].text())


def build(name: str) -> Path:
    """Trains the model unless that was done before, and returns its directory."""

    def fill(target: Path) -> None:
        _LOG.info("training %s, once", name)
        train(RECIPES[name], target)

    return build_once(directory(name), fill)


def train(recipe: TinyRecipe, target: Path) -> None:
    """Trains a model by a recipe and writes it (float32) with its tokenizer.

    Raises:
        CsLocalizeError: if it does not reach the least accuracy on the questions of the three tasks.
        UsageError: if torch or transformers is not installed.
    """
    need("training a tiny model", "torch", "transformers")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = byte_tokenizer(TINY_VOCABULARY)
    fields = config_fields(recipe.shape, recipe.hidden, tokenizer)
    model = model_from_config(AutoConfig.for_model(recipe.architecture, **fields), recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe.steps))
    for step, (ids, labels) in enumerate(_batches(recipe, tokenizer), start=1):
        loss = _loss(model, ids, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss + recipe.head_penalty * _head_norms(model, recipe.shape))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            _LOG.info("step %d of %d: %.3f nats a token", step, recipe.steps, loss.item())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # As others will load it: transformers may make another tokenizer of the same files.
    _check(accuracies(AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)))


def _rate(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: a linear start over 100 steps under a cosine that ends at 5%."""
    return min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _batches(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels, both ``[batch, longest line]``, of random lines; only answer and newline have labels."""
    rng = np.random.default_rng(recipe.seed)
    lines = tiny_training_text(rng, recipe.lines).splitlines(keepends=True)
    pairs = [(prompt + "=", answer) for prompt, answer in (line.split("=") for line in lines)]
    ids, labels = _padded(pairs, tokenizer)
    for _ in range(recipe.steps):
        rows = rng.integers(len(lines), size=recipe.batch)
        yield ids[rows], labels[rows]


def _padded(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of prompts with their answers, and the same ids where the answer is, ``[pairs, longest]`` each."""
    import torch

    prompts, answers = (tokenizer(list(side))["input_ids"] for side in zip(*pairs, strict=True))
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), longest), _IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _loss(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean negative log-probability of the labelled tokens, in nats."""
    import torch

    logits = model(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)


def _head_norms(model: PreTrainedModel, shape: ModelShape) -> torch.Tensor:
    """Sum over all heads of the Euclidean norm of the head's columns of ``o_proj``; a group lasso over heads."""
    import torch

    weights = tuple(weight for name, weight in model.named_parameters() if name.endswith("o_proj.weight"))
    heads = torch.stack(weights).reshape(shape.layers, -1, shape.heads, shape.head_dim)
    return heads.square().sum(dim=(1, 3)).add(1e-8).sqrt().sum()  # the small term keeps the gradient finite at 0


def accuracies(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Share of the questions of each tiny task whose every answer token the model ranks first."""
    import torch

    shares = {}
    for task in _LEAST_ACCURACY:
        items = [task.item(question) for question in task.questions]
        ids, labels = _padded([(item.prompt, item.answer) for item in items], tokenizer)
        with torch.no_grad():
            best = model(input_ids=ids).logits[:, :-1].argmax(dim=-1)
        right = (best == labels[:, 1:]) | (labels[:, 1:] == _IGNORED)
        shares[task.name] = right.all(dim=1).float().mean().item()
    return shares


def _check(shares: dict[str, float]) -> None:
    _LOG.info("accuracy: %s", ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
    low = [task.name for task, least in _LEAST_ACCURACY.items() if shares[task.name] < least]
    if low:
        raise CsLocalizeError(f"the tiny model did not learn {', '.join(low)} on this machine; please report this")
