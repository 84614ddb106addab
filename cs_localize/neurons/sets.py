"""Neuron sets from attribution scores: which to keep, how far two sets agree, what random ones are. NumPy only.

The rule is that of Commonality Neuron Localization (CNL) as read here (Huang et al., arXiv 2502.20992; see
``neurons.reading``): keep neurons whose mean attribution exceeds the mean by a number of standard deviations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError
from cs_localize.findings import OverlapMeasure
from cs_localize.heads import ModelShape, Neuron
from cs_localize.neurons.reading import Statistics

FEWEST = 10
"""Where fewer neurons pass the threshold, a fixed share is reported instead."""
SHARE = 0.0015
"""That share: what the method's authors locate at six standard deviations."""


@dataclass(frozen=True)
class Located:
    """Neurons kept, and by which rule.

    Attributes:
        neurons: highest attribution first.
        rule: the rule in words, fit for a report.
    """

    neurons: tuple[Neuron, ...]
    rule: str


def rank(scores: NDArray[np.floating[Any]]) -> list[Neuron]:
    """All neurons, highest score first; ties in model order.

    Args:
        scores: ``[layers, ffn]``.
    """
    order = np.argsort(-scores, axis=None, kind="stable")
    return [Neuron(*divmod(int(i), scores.shape[1])) for i in order]


def locate(
    scores: NDArray[np.floating[Any]],
    sigma: float = 6.0,
    statistics: Statistics = "model",
    fewest: int = FEWEST,
    share: float = SHARE,
) -> Located:
    """Keeps the neurons with ``A > mean(A) + sigma * std(A)``.

    Where fewer than ``fewest`` pass, the ``share`` of all neurons with the highest attribution is kept instead (or as
    many as passed, if that is more), and the rule says so.

    Args:
        scores: mean attribution A, ``[layers, ffn]``.
        sigma: standard deviations above the mean.
        statistics: mean and deviation over all neurons of the model, or of each layer by itself.
        fewest: see above.
        share: see above.

    Raises:
        UsageError: if the scores are not a finite table.
    """
    if scores.ndim != 2 or scores.size == 0 or not np.isfinite(scores).all():
        raise UsageError(f"attribution scores must be a finite table of layers x neurons, got shape {scores.shape}")
    values = scores.astype(np.float64)
    axis = None if statistics == "model" else 1
    threshold = values.mean(axis=axis, keepdims=True) + sigma * values.std(axis=axis, keepdims=True)
    passed = values > threshold
    count = int(passed.sum())
    scope = "all neurons of the model" if statistics == "model" else "the neurons of its layer"
    rule = f"attribution above mean + {sigma:g} standard deviations over {scope}"
    ranked = rank(values)
    if count >= fewest:
        return Located(tuple(n for n in ranked if passed[n.layer, n.neuron]), rule)
    kept = max(count, int(np.ceil(share * values.size)))
    return Located(tuple(ranked[:kept]), f"top {share:.2%} by attribution, since only {count} have {rule}")


def knowledge_neurons(scores: NDArray[np.floating[Any]], threshold: float = 0.2) -> list[frozenset[Neuron]]:
    """The knowledge neurons of single items: attribution above a share of the item's highest (Dai et al., 2104.08696).

    Args:
        scores: ``[items, layers, ffn]``.
        threshold: the share.

    Returns:
        One set an item; empty where no neuron has positive attribution.
    """
    sets = []
    for item in scores:
        layers, neurons = np.nonzero(item > max(threshold * float(item.max()), 0.0))
        sets.append(frozenset(Neuron(int(layer), int(n)) for layer, n in zip(layers, neurons, strict=True)))
    return sets


def overlap(a: Collection[Neuron], b: Collection[Neuron], n_neurons: int) -> OverlapMeasure:
    """Agreement of two neuron sets: shared neurons over the larger set, the smaller one, and the union.

    ``chance`` is what two random sets of these sizes would share, over the larger set. An empty set agrees with none.

    Args:
        a: one set.
        b: the other.
        n_neurons: all neurons of the model.

    Raises:
        UsageError: if a set is larger than the model.
    """
    left, right = set(a), set(b)
    if max(len(left), len(right)) > n_neurons:
        raise UsageError(f"a set of {max(len(left), len(right))} neurons cannot come from a model of {n_neurons}")
    if not left or not right:
        return OverlapMeasure(max=0.0, min=0.0, iou=0.0, chance=0.0)
    shared = len(left & right)
    large, small = max(len(left), len(right)), min(len(left), len(right))
    return OverlapMeasure(
        max=shared / large, min=shared / small, iou=shared / len(left | right), chance=small / n_neurons
    )


def pairwise_overlap(sets: Sequence[Collection[Neuron]], n_neurons: int) -> OverlapMeasure:
    """Mean of every measure over all pairs of sets.

    Raises:
        UsageError: if there are fewer than two sets.
    """
    if len(sets) < 2:
        raise UsageError(f"overlap needs at least two sets of neurons, got {len(sets)}")
    pairs = [overlap(a, b, n_neurons) for a, b in combinations(sets, 2)]
    return OverlapMeasure(
        **{name: float(np.mean([getattr(pair, name) for pair in pairs])) for name in OverlapMeasure.model_fields}
    )


def split_half(
    scores: NDArray[np.floating[Any]],
    rng: np.random.Generator,
    sigma: float = 6.0,
    statistics: Statistics = "model",
) -> OverlapMeasure:
    """Agreement of the sets located on two random disjoint halves of the items.

    Args:
        scores: ``[items, layers, ffn]``; with an odd number of items one half has one more.
        rng: draws the halves.
        sigma: passed to ``locate``.
        statistics: passed to ``locate``.

    Raises:
        UsageError: if there are fewer than two items.
    """
    items = len(scores)
    if items < 2:
        raise UsageError(f"two halves need at least two items, got {items}")
    order = rng.permutation(items)
    first, second = (locate(scores[half].mean(0), sigma, statistics) for half in np.array_split(order, 2))
    return overlap(first.neurons, second.neurons, scores[0].size)


def random_neurons(neurons: Iterable[Neuron], shape: ModelShape, rng: np.random.Generator) -> tuple[Neuron, ...]:
    """Random neurons: as many in every layer as the given ones, and none of them. Sorted.

    Raises:
        UsageError: if a layer has too few others, or a neuron is not of this model.
    """
    located = set(neurons)
    for neuron in located:
        shape.check_neuron(neuron)
    drawn: list[Neuron] = []
    for layer, count in sorted(Counter(n.layer for n in located).items()):
        taken = [n.neuron for n in located if n.layer == layer]
        others = np.setdiff1d(np.arange(shape.ffn), taken)
        if len(others) < count:
            raise UsageError(f"layer {layer} has {len(others)} other neurons, too few for a random draw of {count}")
        drawn += [Neuron(layer, int(n)) for n in np.sort(rng.choice(others, count, replace=False))]
    return tuple(drawn)
