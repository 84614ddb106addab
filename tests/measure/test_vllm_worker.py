from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cs_localize.errors import MeasurementError
from cs_localize.heads import ModelShape
from cs_localize.measure.geometry import Share
from cs_localize.measure.vllm.table import InterventionTable
from cs_localize.measure.vllm.worker import (
    KnockoutWorker,
    check_attention,
    check_projections,
    hook_projections,
)

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


@pytest.mark.parametrize(
    ("part", "option", "value", "message"),
    [
        ("worker", "use_v2_model_runner", True, "V2 model runner"),
        ("parallel", "world_size", 4, "pipeline_parallel_size"),
        ("parallel", "use_ubatching", True, "split in two"),
        ("config", "speculative_config", {}, "speculative decoding"),
        ("config", "kv_transfer_config", {}, "keys and values from elsewhere"),
        ("cache", "enable_prefix_caching", True, "share a prefix cache"),
    ],
)
def test_a_worker_refuses_what_would_lead_around_its_table(part: str, option: str, value: object, message: str) -> None:
    told = {"knockout_shape": {}, "knockout_salted": False}
    parallel = SimpleNamespace(world_size=2, tensor_parallel_size=2, use_ubatching=False)
    config = SimpleNamespace(speculative_config=None, kv_transfer_config=None, additional_config=told)
    cache = SimpleNamespace(enable_prefix_caching=False)
    worker = SimpleNamespace(
        use_v2_model_runner=False, parallel_config=parallel, vllm_config=config, cache_config=cache
    )
    setattr({"worker": worker, "parallel": parallel, "config": config, "cache": cache}[part], option, value)
    with pytest.raises(MeasurementError, match=message):
        KnockoutWorker.init_device(cast(Any, worker))


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


def test_a_rank_that_holds_other_inputs_than_its_share_is_refused() -> None:
    with pytest.raises(MeasurementError, match=r"a rank holds 12 of the 12 inputs of .*o_proj, expected 6"):
        hook_projections(decoder(), SHAPE, "SomeForCausalLM", Share.of(ModelShape(2, 4, 2, 3, 6), 0, 2))


def attention(heads: int = 4, kv_heads: int = 2, head_size: int = 3, layers: int = 2) -> dict[str, object]:
    """What vLLM keeps of the attention of every layer, as far as it is looked at."""
    counts = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_size=head_size)
    return {f"model.layers.{layer}.self_attn.attn": counts for layer in range(layers)}


def test_attention_that_counts_as_the_shape_says_passes_whole_and_by_rank() -> None:
    check_attention(attention(), SHAPE, "SomeForCausalLM")
    check_attention(attention(heads=2, kv_heads=1), SHAPE, "SomeForCausalLM", ranks=2)
    check_attention(attention(heads=1, kv_heads=1), SHAPE, "SomeForCausalLM", ranks=4)  # each KV head on two ranks


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (attention(heads=6, head_size=2), r"layers\.0\.self_attn\.attn has 6 heads, 2 KV heads and a head_dim of 2"),
        (attention(kv_heads=4), "has 4 heads, 4 KV heads"),
        (attention(layers=1), "1 of 2 layers have an attention"),
        ({}, "0 of 2 layers have an attention"),
        (attention(layers=2) | {"model.layers.1.cross_attn.attn": object()}, r"cross_attn\.attn is a object"),
        ({"model.layers.0.mixer": SimpleNamespace(state_size=4)}, r"layers\.0\.mixer is a SimpleNamespace"),
    ],
    ids=["width of a head", "KV heads", "one layer short", "none", "two in a layer", "no heads"],
)
def test_attention_that_counts_otherwise_is_refused_by_name(found: dict[str, object], message: str) -> None:
    with pytest.raises(MeasurementError, match=f"SomeForCausalLM.*{message}"):
        check_attention(found, SHAPE, "SomeForCausalLM")


class Linear(Projection):
    """A projection with weights and, as in some of vLLM's, a bias that it adds itself."""

    def __init__(self) -> None:
        super().__init__(12)
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(7, 12, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + 3


def make(**sizes: int) -> InterventionTable:
    return InterventionTable(SHAPE, dtype=torch.float32, device=torch.device("cpu"), **sizes)


def hooked(change: Callable[[torch.nn.Module], None] = lambda _: None) -> list[torch.nn.Module]:
    model = decoder()
    for layer in model.layers:
        layer.attention.o_proj = Linear()
    projections = hook_projections(model, SHAPE, "SomeForCausalLM")
    change(projections[1])
    return projections


def test_hooks_that_leave_each_head_alone_pass_on_weights_with_a_bias() -> None:
    check_projections(hooked(), SHAPE, make)


def swap(table: InterventionTable, x: torch.Tensor, layer: int) -> None:
    """Scales heads as those before them should be."""
    table.head_factors.copy_(table.head_factors.roll(1, 2))
    InterventionTable.scale_heads(table, x, layer)


def test_a_hook_that_does_not_fire_is_refused_before_anything_is_measured() -> None:
    projections = hooked(lambda projection: projection._forward_pre_hooks.clear())
    with pytest.raises(MeasurementError, match="head 0 of layer 1 does not act on its own entries alone"):
        check_projections(projections, SHAPE, make)


def test_a_hook_that_scales_other_heads_than_it_should_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(**sizes: int) -> InterventionTable:
        table = make(**sizes)
        monkeypatch.setattr(table, "scale_heads", partial(swap, table))
        return table

    with pytest.raises(MeasurementError, match="head 0 of layer 0 does not act on its own entries alone"):
        check_projections(hooked(), SHAPE, swapped)
