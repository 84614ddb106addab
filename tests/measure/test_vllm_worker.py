from __future__ import annotations

import pytest
import torch

from cs_localize.errors import MeasurementError
from cs_localize.heads import ModelShape
from cs_localize.measure.vllm.worker import hook_projections

pytestmark = pytest.mark.vllm

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=5)


class Projection(torch.nn.Module):
    """As wide as it says; vLLM's projections carry their width under this name."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.input_size = input_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def decoder(layers: int = 2, heads_in: str = "o_proj", ffn_in: str = "down_proj", width: int = 12) -> torch.nn.Module:
    """A module tree with the names of a decoder."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for _ in range(layers):
        layer = torch.nn.Module()
        layer.attention = torch.nn.Module()
        layer.attention.add_module(heads_in, Projection(width))
        layer.mlp = torch.nn.Module()
        layer.mlp.add_module(ffn_in, Projection(5))
        model.layers.append(layer)
    return model


def hooks_of(model: torch.nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if module._forward_pre_hooks]


def test_every_projection_of_every_layer_gets_one_hook() -> None:
    model = decoder()
    hook_projections(model, SHAPE, "SomeForCausalLM")
    assert sorted(hooks_of(model)) == [
        "layers.0.attention.o_proj",
        "layers.0.mlp.down_proj",
        "layers.1.attention.o_proj",
        "layers.1.mlp.down_proj",
    ]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (decoder(heads_in="c_proj"), "0 of 2 layers have a module named o_proj"),
        (decoder(ffn_in="dense_4h_to_h"), "0 of 2 layers have a module named down_proj"),
        (decoder(layers=1), "1 of 2 layers"),
        (decoder(layers=3), "layers.2.attention.o_proj"),
        (decoder(width=16), "input width 16; expected one o_proj of width 12 in each of 2 layers"),
    ],
    ids=["other attention", "other FFN", "too few layers", "too many layers", "other width"],
)
def test_a_model_that_is_not_recognised_is_refused_by_name(model: torch.nn.Module, reason: str) -> None:
    with pytest.raises(MeasurementError, match=f"SomeForCausalLM is not recognised: .*{reason}"):
        hook_projections(model, SHAPE, "SomeForCausalLM")


def test_two_projections_of_one_name_in_a_layer_are_refused() -> None:
    model = decoder()
    model.layers[1].add_module("cross", decoder().layers[0].attention)
    with pytest.raises(MeasurementError, match=r"layers\.1\.cross\.o_proj"):
        hook_projections(model, SHAPE, "SomeForCausalLM")
