"""Heads, neurons and ablations: immutable values that name parts of a model and what is done to them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from cs_localize.errors import UsageError

_HEAD = re.compile(r"L(\d{1,9})H(\d{1,9})")
_MOST_SCALE = 3.4028234663852886e38  # of float32
_NEURON = re.compile(r"L(\d{1,9})N(\d{1,9})")
_MEAN = "mean"


@dataclass(frozen=True, order=True, slots=True)
class Head:
    """A query head, printed and parsed as ``L16H21``. Layers and heads count from 0."""

    layer: int
    head: int

    @classmethod
    def parse(cls, text: str) -> Head:
        """Reads ``L16H21``.

        Raises:
            UsageError: if the text is not of that form.
        """
        match = _HEAD.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"'{text}' is not a head; write heads as L<layer>H<head>, for example L16H21")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True, order=True, slots=True)
class Neuron:
    """An FFN neuron: one entry of the input of ``down_proj``, printed and parsed as ``L3N120``."""

    layer: int
    neuron: int

    @classmethod
    def parse(cls, text: str) -> Neuron:
        """Reads ``L3N120``.

        Raises:
            UsageError: if the text is not of that form.
        """
        match = _NEURON.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"'{text}' is not a neuron; write neurons as L<layer>N<neuron>, for example L3N120")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"L{self.layer}N{self.neuron}"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The geometry an ablation refers to, read from the model's own config.

    Attributes:
        layers: decoder layers.
        heads: query heads a layer.
        kv_heads: key/value heads a layer; query heads ``[g * heads / kv_heads, ...)`` share KV head ``g``.
        head_dim: width of one head, which need not be hidden size / heads.
        ffn: width of the FFN hidden vector, the input of ``down_proj``.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.kv_heads, self.head_dim, self.ffn) < 1:
            raise UsageError(f"a model needs at least one of everything: {self}")
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")

    @property
    def n_heads(self) -> int:
        """All query heads of the model: layers x heads."""
        return self.layers * self.heads

    @property
    def n_neurons(self) -> int:
        """All FFN neurons of the model: layers x ffn."""
        return self.layers * self.ffn

    @property
    def groups(self) -> ModelShape:
        """The geometry with a KV group for a head."""
        return replace(self, heads=self.kv_heads)

    def index(self, head: Head) -> int:
        """Position of a head in every array over heads: layer by layer.

        Raises:
            UsageError: if the model has no such head.
        """
        self.check_head(head)
        return head.layer * self.heads + head.head

    def head(self, index: int) -> Head:
        """The head at a position of an array over heads; the inverse of ``index``."""
        if not 0 <= index < self.n_heads:
            raise UsageError(f"head index {index} is outside 0..{self.n_heads - 1}")
        return Head(*divmod(int(index), self.heads))

    def all_heads(self) -> Iterator[Head]:
        """Every head, in array order."""
        return (self.head(i) for i in range(self.n_heads))

    def kv_group(self, head: Head) -> tuple[Head, ...]:
        """The query heads that read the same KV head, the given one included."""
        self.check_head(head)
        width = self.heads // self.kv_heads
        first = head.head // width * width
        return tuple(Head(head.layer, h) for h in range(first, first + width))

    def check_head(self, head: Head) -> None:
        """Raises UsageError if the model has no such head."""
        if not (0 <= head.layer < self.layers and 0 <= head.head < self.heads):
            raise UsageError(
                f"{head} is out of range: this model has layers 0..{self.layers - 1} and heads 0..{self.heads - 1}"
            )

    def check_neuron(self, neuron: Neuron) -> None:
        """Raises UsageError if the model has no such neuron."""
        if not (0 <= neuron.layer < self.layers and 0 <= neuron.neuron < self.ffn):
            raise UsageError(
                f"{neuron} is out of range: this model has layers 0..{self.layers - 1} and neurons 0..{self.ffn - 1}"
            )


@dataclass(frozen=True)
class Ablation:
    """What is changed in one forward pass; the empty ablation is the baseline.

    Build with ``Ablation.of``; the constructor expects sorted, duplicate-free tuples.

    Attributes:
        heads: pairs of a head and the factor its output is scaled by; 0 knocks it out.
        neurons: pairs of a neuron and the factor its activation is scaled by.
        mean_heads: heads whose output is replaced by their mean over the prompts an engine was given for it. None of
            them is among ``heads``.
    """

    heads: tuple[tuple[Head, float], ...] = ()
    neurons: tuple[tuple[Neuron, float], ...] = ()
    mean_heads: tuple[Head, ...] = ()

    @classmethod
    def of(cls, heads: Iterable[Head] = (), neurons: Iterable[Neuron] = (), scale: float = 0.0) -> Ablation:
        """Scales the given heads and neurons by one factor, by default to 0.

        A factor of 1 changes nothing and leaves them out, so that equal interventions have equal keys.
        """
        if scale == 1.0:
            return cls()
        return cls(
            heads=tuple((h, float(scale)) for h in sorted(set(heads))),
            neurons=tuple((n, float(scale)) for n in sorted(set(neurons))),
        )

    @classmethod
    def to_mean(cls, heads: Iterable[Head]) -> Ablation:
        """Replaces the given heads by their means."""
        return cls(mean_heads=tuple(sorted(set(heads))))

    @classmethod
    def decode(cls, text: str) -> Ablation:
        """Reads what ``encode`` wrote, and what a user types: ``L4H2,L7H0=0.5,L9H1=mean,L3N10``; no factor means 0.

        Raises:
            UsageError: on a malformed entry or one given twice.
        """
        heads: dict[Head, float] = {}
        neurons: dict[Neuron, float] = {}
        means: set[Head] = set()
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, _, factor = entry.partition("=")
            if _NEURON.fullmatch(name):
                if factor == _MEAN:
                    raise UsageError(f"'{entry}': a neuron can only be scaled; only heads are replaced by their mean")
                neuron = Neuron.parse(name)
                duplicate = neuron in neurons
                neurons[neuron] = _scale(entry, factor)
            else:
                scale = 0.0 if factor == _MEAN else _scale(entry, factor)
                head = Head.parse(name)
                duplicate = head in heads or head in means
                if factor == _MEAN:
                    means.add(head)
                else:
                    heads[head] = scale
            if duplicate:
                raise UsageError(f"{name} is given twice")
        return cls(
            heads=tuple(sorted((h, s) for h, s in heads.items() if s != 1.0)),
            neurons=tuple(sorted((n, s) for n, s in neurons.items() if s != 1.0)),
            mean_heads=tuple(sorted(means)),
        )

    def encode(self) -> str:
        """Canonical text: equal ablations, and only those, have equal text. Empty for the baseline."""
        heads = [(head, _suffix(scale)) for head, scale in self.heads]
        heads += [(head, f"={_MEAN}") for head in self.mean_heads]
        neurons = [(neuron, _suffix(scale)) for neuron, scale in self.neurons]
        return ",".join(f"{unit}{suffix}" for unit, suffix in [*sorted(heads), *neurons])

    @property
    def head_part(self) -> Ablation:
        """The same without the neurons."""
        return Ablation(heads=self.heads, mean_heads=self.mean_heads)

    @property
    def neuron_part(self) -> Ablation:
        """The same without the heads."""
        return Ablation(neurons=self.neurons)

    @cached_property
    def key(self) -> str:
        """Content hash (32 hex digits), the same in every process and version."""
        return hashlib.sha256(self.encode().encode()).hexdigest()[:32]

    @property
    def empty(self) -> bool:
        """Whether this is the baseline."""
        return not (self.heads or self.neurons or self.mean_heads)

    def check(self, shape: ModelShape) -> None:
        """Raises UsageError if the model lacks one of the heads or neurons, one is there twice, or a factor is none."""
        heads = [*(head for head, _ in self.heads), *self.mean_heads]
        neurons = [neuron for neuron, _ in self.neurons]
        for head in heads:
            shape.check_head(head)
        for neuron in neurons:
            shape.check_neuron(neuron)
        units: list[Head | Neuron] = [*heads, *neurons]
        if len(set(units)) < len(units):
            raise UsageError(f"an ablation has {max(units, key=units.count)} twice")
        for unit, scale in (*self.heads, *self.neurons):
            if not abs(scale) <= _MOST_SCALE:
                raise UsageError(f"{unit} cannot be scaled by {scale}: the factor must be finite in float32")

    def __str__(self) -> str:
        return self.encode() or "none"


def _suffix(scale: float) -> str:
    return "" if scale == 0.0 else f"={float(scale)!r}"  # a scalar of numpy's writes its type


def _scale(entry: str, factor: str) -> float:
    """The factor of an entry; none means 0."""
    try:
        scale = float(factor) if factor else 0.0
    except ValueError:
        raise UsageError(f"'{entry}': the factor after '=' must be a number, or 'mean'") from None
    if not abs(scale) <= _MOST_SCALE:
        raise UsageError(f"'{entry}': the factor after '=' must be finite in float32")
    return scale
