from __future__ import annotations

import pytest
import torch

from cs_localize.errors import MeasurementError
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.geometry import Share, alone, check_contributions, check_counts, single_heads

pytestmark = pytest.mark.model

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=6, ffn=8)
ALL = range(SHAPE.heads)


def outputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """What a projection with a bias makes of each head of a random input alone, of no head, and of all of it."""
    generator = torch.Generator().manual_seed(0)
    projection = torch.nn.Linear(24, 5).to(dtype)
    torch.nn.init.normal_(projection.weight, generator=generator)
    torch.nn.init.normal_(projection.bias, generator=generator)
    x = torch.randn(3, 24, generator=generator).to(dtype)
    with torch.no_grad():
        return projection(alone(x, SHAPE, ALL)), projection(x)


@pytest.mark.parametrize("counts", [(3, 2, 6), (4, 4, 6), (4, 2, 12), (6, 2, 4)])
def test_a_layer_that_counts_otherwise_is_refused_with_its_name(counts: tuple[int, int, int]) -> None:
    check_counts("layer 1", 4, 2, 6, SHAPE)
    with pytest.raises(MeasurementError, match=r"^layer 1 has \d heads, .* config\.json says 4, 2 and 6"):
        check_counts("layer 1", *counts, SHAPE)


def test_single_heads_are_all_but_one_in_every_layer_and_then_all() -> None:
    *kept, nothing = single_heads(SHAPE)
    assert nothing == Ablation.of(SHAPE.all_heads())
    for head, ablation in enumerate(kept):
        left = set(SHAPE.all_heads()) - {scaled for scaled, _ in ablation.heads}
        assert left == {Head(0, head), Head(1, head)}


def test_of_a_rank_only_its_own_heads_are_left() -> None:
    kept = alone(torch.ones(1, 12), SHAPE, Share.of(SHAPE, rank=1, ranks=2).heads)
    assert kept.sum((1, 2)).tolist() == [0, 0, 6, 6, 0]
    assert bool((kept[2, 0, :6] == 1).all())


def test_shares_of_all_ranks_are_everything_once() -> None:
    shares = [Share.of(SHAPE, rank, 2) for rank in range(2)]
    assert [head for share in shares for head in share.heads] == list(ALL)
    assert [neuron for share in shares for neuron in share.neurons] == list(range(8))
    with pytest.raises(MeasurementError, match="4 heads and 8 neurons a layer do not divide by 3 ranks"):
        Share.of(SHAPE, 0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_act_alone_and_add_up_pass_and_a_bias_is_counted_once(dtype: torch.dtype) -> None:
    parts, whole = outputs(dtype)
    check_contributions("layer 0", parts, parts, whole)


def test_a_layer_whose_heads_are_all_removed_passes() -> None:
    check_contributions("layer 0", torch.zeros(5, 2, 3), torch.zeros(5, 2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_heads_add_up_and_are_refused_all_the_same(dtype: torch.dtype) -> None:
    parts, whole = outputs(dtype)
    with pytest.raises(MeasurementError, match="head 1 of layer 0 does not act on its own entries alone"):
        check_contributions("layer 0", parts[[0, 2, 1, 3, 4]], parts, whole)


def test_a_quiet_head_that_is_swapped_is_refused_beside_loud_ones() -> None:
    parts, whole = outputs(torch.bfloat16)
    bias = parts[-1:].clone()
    parts = torch.cat([parts[:2], (parts[2:4] - bias) / 256, bias - bias])
    whole = parts.sum(0)
    check_contributions("layer 0", parts, parts, whole)
    with pytest.raises(MeasurementError, match="head 2 of layer 0 does not act on its own entries alone"):
        check_contributions("layer 0", parts[[0, 1, 3, 2, 4]], parts, whole)


def test_a_bias_that_is_not_the_same_without_any_head_is_refused() -> None:
    parts, whole = outputs()
    with pytest.raises(MeasurementError, match="all heads of layer 0 together do not act"):
        check_contributions("layer 0", torch.cat([parts[:-1], parts[-1:] + 1]), parts, whole)


def test_heads_that_are_not_all_of_the_output_are_refused() -> None:
    parts, whole = outputs()
    with pytest.raises(MeasurementError, match="the heads of layer 0 do not add up to its attention's output"):
        check_contributions("layer 0", parts, parts, whole + 0.1)


def test_outputs_that_are_not_numbers_are_refused() -> None:
    parts, whole = outputs()
    with pytest.raises(MeasurementError, match="layer 0"):
        check_contributions("layer 0", parts, parts, whole * torch.nan)
