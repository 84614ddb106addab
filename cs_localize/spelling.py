"""Heads as a user types them: ``L4H2``, the KV group ``L4G1``, the layer ``L4``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape, Neuron

_GROUP = re.compile(r"L(\d{1,9})G(\d{1,9})")
_LAYER = re.compile(r"L(\d{1,9})")


def check_spelling(text: str) -> None:
    """Refuses what no model could make sense of, before one is loaded.

    Raises:
        UsageError: on a malformed entry, or a head or neuron given twice.
    """
    entries, narrow = _entries(text), []
    if not entries:
        raise UsageError("name at least one head, such as L4H2, L4G1 for a KV group or L4 for a layer")
    for entry in entries:
        name, sign, factor = entry.partition("=")
        if _GROUP.fullmatch(name) or _LAYER.fullmatch(name):
            _check_factor(entry, f"{sign}{factor}")
        else:
            narrow.append(entry)
    Ablation.decode(",".join(narrow))


def asks_for_means(text: str) -> bool:
    """Whether a head, KV group or layer is replaced by its mean, as in ``L4H2=mean``."""
    return any(entry.partition("=")[2] == "mean" for entry in _entries(text))


def spell_out(text: str, shape: ModelShape) -> str:
    """The same with every KV group and layer written as its heads, factors kept: what ``Ablation.decode`` reads.

    Raises:
        UsageError: if the model has no such KV group or layer.
    """
    written = []
    for entry in _entries(text):
        name, sign, factor = entry.partition("=")
        written += [f"{unit}{sign}{factor}" for unit in _units(name, shape)]
    return ",".join(written)


def read_ablation(entries: object, shape: ModelShape) -> Ablation:
    """The ablation of a list such as ``["L4H2", "L7H0=0.5", "L3H1=mean"]``; an empty list is none.

    Raises:
        UsageError: on an entry that is malformed, given twice, or that the model lacks.
    """
    texts = []
    for entry in check_list(entries):
        if not isinstance(entry, str | Head | Neuron) or not _entries(str(entry)):
            raise UsageError(f"{entry!r} is not a head; write an ablation as ['L4H2', 'L7H0=0.5']")
        texts.append(str(entry))
    ablation = Ablation.decode(spell_out(",".join(texts), shape))
    ablation.check(shape)
    return ablation


def check_list(entries: object) -> Sequence[object]:
    """The same, of entries that have an order and can be read again.

    Raises:
        UsageError: of a text, a dictionary, a set, a generator, or what is no collection at all.
    """
    if isinstance(entries, str | bytes) or not isinstance(entries, Sequence):
        raise UsageError(f"{entries!r} is no list; write an ablation as ['L4H2', 'L7H0=0.5']")
    return entries


def read_heads(text: str, shape: ModelShape) -> tuple[Head, ...]:
    """The heads in the order they are given; KV groups and layers become their heads.

    Raises:
        UsageError: on anything else than heads, KV groups and layers without factors, on one the model lacks, and on
            one given twice.
    """
    heads = [Head.parse(unit) for unit in spell_out(text, shape).split(",")]
    for head in heads:
        shape.check_head(head)
        if heads.count(head) > 1:
            raise UsageError(f"{head} is given twice")
    return tuple(heads)


def group_name(head: Head, shape: ModelShape) -> str:
    """The KV group of a head, such as ``L4G1``."""
    return f"L{head.layer}G{head.head // (shape.heads // shape.kv_heads)}"


def _entries(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _check_factor(entry: str, factor: str) -> None:
    """Refuses a factor that no head could have, in the name of what it was given to."""
    stand_in = f"L0H0{factor}"
    try:
        Ablation.decode(stand_in)
    except UsageError as error:
        raise UsageError(str(error).replace(stand_in, entry)) from None


def _units(name: str, shape: ModelShape) -> list[str]:
    group, layer = _GROUP.fullmatch(name), _LAYER.fullmatch(name)
    if group is not None:
        width = shape.heads // shape.kv_heads
        if int(group[2]) >= shape.kv_heads:
            raise UsageError(f"{name} is out of range: this model has KV groups 0..{shape.kv_heads - 1} in a layer")
        return [str(head) for head in shape.kv_group(Head(int(group[1]), int(group[2]) * width))]
    if layer is not None:
        shape.check_head(Head(int(layer[1]), 0))
        return [f"{name}H{head}" for head in range(shape.heads)]
    return [name]
