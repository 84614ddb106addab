"""Whether a loaded model has the geometry that ablations refer to: what an engine checks before its first request.

None of the checks is enough alone. The attention of every layer must count as many heads, KV heads and entries a head
as the shape says: 6 heads of 8 entries fill the same projection as 8 heads of 6. An ablation of all heads but one must
leave the entries of that one: heads that are swapped add up as well. And what single heads put through the projection
must add up to what the layer's attention puts out: else they are not all there is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cs_localize.errors import MeasurementError
from cs_localize.heads import Ablation, Head, ModelShape

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LEAST_TOLERANCE = 1e-4
_ROUNDINGS = 8  # of the dtype; sums of heads round more often than the product they are compared with


@dataclass(frozen=True)
class Share:
    """What one rank of a tensor-parallel engine holds of every layer; everything where there is one rank.

    Attributes:
        heads: its query heads.
        neurons: its FFN neurons.
    """

    heads: range
    neurons: range

    @classmethod
    def of(cls, shape: ModelShape, rank: int = 0, ranks: int = 1) -> Share:
        """The share of a rank: vLLM gives each a run of heads and of neurons, in the order of the ranks.

        Raises:
            MeasurementError: if the heads or neurons do not divide evenly.
        """
        if shape.heads % ranks or shape.ffn % ranks:
            raise MeasurementError(
                f"{shape.heads} heads and {shape.ffn} neurons a layer do not divide by {ranks} ranks"
            )
        heads, neurons = shape.heads // ranks, shape.ffn // ranks
        return cls(range(rank * heads, (rank + 1) * heads), range(rank * neurons, (rank + 1) * neurons))


def layer_of(path: str) -> int | None:
    """The number of the decoder layer that a module's path lies in; None outside of the layers."""
    found = _LAYER.search(path)
    return int(found[1]) if found else None


def check_counts(where: str, heads: int, kv_heads: int, head_dim: int, shape: ModelShape) -> None:
    """Compares an attention layer's own counts with the shape.

    Args:
        where: the layer, for the message.
        heads: query heads, as the loaded layer counts them.
        kv_heads: its KV heads.
        head_dim: its entries a head.
        shape: what they must be.

    Raises:
        MeasurementError: if one of them is another.
    """
    if (heads, kv_heads, head_dim) != (shape.heads, shape.kv_heads, shape.head_dim):
        raise MeasurementError(
            f"{where} has {heads} heads, {kv_heads} KV heads and a head_dim of {head_dim}, config.json says "
            f"{shape.heads}, {shape.kv_heads} and {shape.head_dim}; the model cannot be ablated by head"
        )


def single_heads(shape: ModelShape) -> list[Ablation]:
    """What ``check_contributions`` wants measured: in every layer nothing but head 0, 1, … and last no head at all."""
    kept = [{Head(layer, head) for layer in range(shape.layers)} for head in range(shape.heads)]
    return [Ablation.of(set(shape.all_heads()) - heads) for heads in [*kept, set()]]


def alone(x: torch.Tensor, shape: ModelShape, heads: range) -> torch.Tensor:
    """The inputs of a projection that ``single_heads`` should leave of its input, made without any ablation.

    Args:
        x: ``[T, len(heads) * D]``.
        shape: the model's geometry.
        heads: the heads that ``x`` holds; with tensor parallelism each rank has some of them.

    Returns:
        ``[H + 1, T, len(heads) * D]``.
    """
    kept = x.new_zeros(shape.heads + 1, *x.shape)
    for position, head in enumerate(heads):
        span = slice(position * shape.head_dim, (position + 1) * shape.head_dim)
        kept[head, :, span] = x[:, span]
    return kept


def check_contributions(where: str, parts: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> None:
    """Checks that single heads act where they should, and add up to the output of the layer's attention.

    A projection with a bias adds it to every part, so the part without any head, which is the bias, is taken off each.
    A part may be off by rounding of its own size, not of the layer's: a quiet head must act alone too.

    Args:
        where: the layer, for the message.
        parts: ``[H + 1, …]``, the outputs of the projection under ``single_heads``.
        expected: likewise, its outputs for the inputs that ``alone`` makes.
        whole: ``[…]``, the output of the attention without an ablation, in the dtype of the model.

    Raises:
        MeasurementError: if a head acts elsewhere, or they do not add up, rounding of the dtype aside.
    """
    import torch

    bias = parts[-1].double()
    own = parts[:-1].double() - bias
    rounding = max(_LEAST_TOLERANCE, _ROUNDINGS * torch.finfo(whole.dtype).eps)
    for head, (part, other) in enumerate(zip(parts.double(), expected.double(), strict=True)):
        if not float((part - other).norm()) <= rounding * float(part.norm() + other.norm()):
            what = f"head {head} of {where} does" if head < len(own) else f"all heads of {where} together do"
            raise MeasurementError(f"{what} not act on its own entries alone; the model cannot be ablated by head")
    size = float(own.norm() + whole.double().norm())
    if not float((own.sum(0) + bias - whole.double()).norm()) <= rounding * size:
        raise MeasurementError(
            f"the heads of {where} do not add up to its attention's output; the model cannot be ablated by head"
        )
