"""The same quantities the slow way: one whole forward pass for every value of one layer's hidden vector."""

from __future__ import annotations

import torch

from cs_localize.measure.hf import HFEngine
from cs_localize.measure.protocol import Request


def hidden_vector(engine: HFEngine, request: Request, layer: int, position: int) -> torch.Tensor:
    """The input of ``down_proj`` at a position, ``[ffn]``."""
    seen: list[torch.Tensor] = []
    module = engine.model.get_submodule(f"model.layers.{layer}.mlp.down_proj")
    handle = module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0][0, position]))
    with torch.no_grad(), engine.hooks.applied([request.ablation]):
        engine.model(torch.tensor([request.prompt_ids + request.answer_ids[:-1]]))
    handle.remove()
    return seen[0]


def log_probability(
    engine: HFEngine, request: Request, layer: int, position: int, vector: torch.Tensor
) -> torch.Tensor:
    """Log-probability of the answer token after ``position`` with the hidden vector there replaced."""

    def replace(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        rows = inputs[0].clone()
        rows[0, position] = vector
        return (rows,)

    module = engine.model.get_submodule(f"model.layers.{layer}.mlp.down_proj")
    handle = module.register_forward_pre_hook(replace)
    ids = request.prompt_ids + request.answer_ids
    with engine.hooks.applied([request.ablation]):
        logits = engine.model(torch.tensor([ids[:-1]])).logits[0, position]
    handle.remove()
    return logits.float().log_softmax(-1)[ids[position + 1]]


def attribution(engine: HFEngine, request: Request, steps: int, log: bool = False) -> torch.Tensor:
    """CNL by its formula, ``[layers, ffn]``, mean over the answer tokens."""
    rows = []
    for layer in range(engine.shape.layers):
        total = torch.zeros(engine.shape.ffn)
        for offset in range(len(request.answer_ids)):
            position = len(request.prompt_ids) - 1 + offset
            hidden = hidden_vector(engine, request, layer, position)
            for k in range(steps + 1):
                vector = (hidden * (k / steps)).requires_grad_()
                value = log_probability(engine, request, layer, position, vector)
                value = value if log else value.exp()
                total += hidden * torch.autograd.grad(value, vector)[0] / (steps + 1)
        rows.append(total / len(request.answer_ids))
    return torch.stack(rows)
