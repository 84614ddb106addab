"""A grid of ablations: which heads are scaled together, and by what."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cs_localize.confirm import random_heads
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.seeds import stream
from cs_localize.spelling import check_spelling, group_name, read_heads

_LOG = logging.getLogger("cs_localize")

KINDS = ("together", "single", "cumulative", "leave-one-out", "kv-groups", "layers")
"""The ways to make head sets of a list of heads; random controls are drawn besides."""

_MOST_DRAWS = 10_000  # as of a confirmation
Scale = float | Literal["mean"]
_Part = tuple[str, tuple[Head, ...]]


@dataclass(frozen=True)
class Condition:
    """One ablation of the grid.

    Attributes:
        heads_of: name of the list of heads it was made of.
        kind: how: one of ``KINDS``, or ``random``.
        part: which of that kind: a head, a KV group, a layer, a number of heads or of a draw; empty for together.
        heads: the heads, in the order of the list.
        scale: what their outputs are multiplied by, 0 knocks them out; or ``mean``, which is put in their place.
    """

    heads_of: str
    kind: str
    part: str
    heads: tuple[Head, ...]
    scale: Scale

    @property
    def ablation(self) -> Ablation:
        """What is changed in the forward pass."""
        return Ablation.to_mean(self.heads) if self.scale == "mean" else Ablation.of(self.heads, scale=self.scale)


@dataclass(frozen=True)
class AblationGrid:
    """Head sets x scales. Which tasks they are measured on is said when it runs.

    Attributes:
        heads: lists of heads by name, each as text such as ``L4H2,L7H0``; ``L4G1`` is a KV group, ``L4`` a layer. The
            order counts for cumulative sets.
        kinds: which head sets to make of each list: ``together`` all its heads; ``single`` each head; ``cumulative``
            the first 1, 2, …; ``leave-one-out`` all but one; ``kv-groups`` and ``layers`` each whole KV group or layer
            that holds one of them.
        scales: what the heads' outputs are multiplied by; ``mean`` puts each head's mean in its place.
        draws: random controls of each list: as many heads of the same layers, none of the list; fewer, with a
            warning, where a layer has no more.
        seed: seed of the draws.
    """

    heads: Mapping[str, str]
    kinds: Sequence[str] = ("together",)
    scales: Sequence[Scale] = (0.0,)
    draws: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.heads:
            raise UsageError("a grid of ablations needs at least one list of heads")
        for text in self.heads.values():
            check_spelling(text)
            if "=" in text or "N" in text:
                raise UsageError(f"'{text}': a grid takes heads without factors; what they are scaled by is its scales")
        for kind in self.kinds:
            if kind not in KINDS:
                raise UsageError(f"there are no '{kind}' head sets; there are {', '.join(KINDS)}")
        if len(set(self.kinds)) < len(self.kinds) or len(set(self.scales)) < len(self.scales):
            raise UsageError("a kind of head sets or a scale is given twice")
        if not self.scales:
            raise UsageError("a grid of ablations needs at least one scale, such as 0")
        for scale in self.scales:
            if scale != "mean" and (not math.isfinite(scale) or scale == 1):
                raise UsageError(f"a scale of {scale:g} is no ablation; give finite numbers other than 1, or mean")
        if not self.kinds and not self.draws:
            raise UsageError(f"a grid of ablations needs at least one kind of head sets: {', '.join(KINDS)}")
        if self.draws < 0 or self.seed < 0:
            raise UsageError("random draws and their seed must not be negative")
        if self.draws > _MOST_DRAWS:
            raise UsageError(f"{self.draws} random draws of each list are too many; ask for at most {_MOST_DRAWS}")

    def conditions(self, shape: ModelShape) -> list[Condition]:
        """Every condition, list by list; the scales of one head set come together.

        Raises:
            UsageError: if the model lacks one of the heads, or nothing is left to ablate.
        """
        found = [
            Condition(name, kind, part, heads, scale if scale == "mean" else float(scale))
            for name, text in self.heads.items()
            for kind, (part, heads) in self._sets(name, read_heads(text, shape), shape)
            for scale in self.scales
        ]
        if not found:
            raise UsageError("these head sets are empty; leave-one-out needs lists of at least two heads")
        return found

    def _sets(self, name: str, heads: tuple[Head, ...], shape: ModelShape) -> Iterator[tuple[str, _Part]]:
        for kind in self.kinds:
            yield from ((kind, part) for part in _parts(kind, heads, shape))
        for draw in range(self.draws):
            drawn = random_heads(heads, shape, stream(self.seed, "ablation", name, str(draw)))
            if not drawn:
                raise UsageError(f"'{name}' takes whole layers, which leave no other heads to draw at random")
            if draw == 0 and len(drawn) < len(heads):
                _LOG.warning(
                    "%s: too few other heads: a random draw has %d for %d given ones", name, len(drawn), len(heads)
                )
            yield "random", (str(draw), drawn)


def _parts(kind: str, heads: tuple[Head, ...], shape: ModelShape) -> list[_Part]:
    """The head sets of one kind, each with its name."""
    if kind == "together":
        return [("", heads)]
    if kind == "single":
        return [(str(head), (head,)) for head in heads]
    if kind == "cumulative":
        return [(str(k), heads[:k]) for k in range(1, len(heads) + 1)]
    if kind == "leave-one-out":
        rest = [(str(left), tuple(head for head in heads if head != left)) for left in heads]
        return [part for part in rest if part[1]]
    if kind == "kv-groups":
        return list({group_name(head, shape): shape.kv_group(head) for head in heads}.items())
    layers = dict.fromkeys(head.layer for head in heads)
    return [(f"L{layer}", tuple(Head(layer, h) for h in range(shape.heads))) for layer in layers]
