"""The neurons of a capability: located, their stability measured, and what zeroing heads does to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import CrosscheckConfig
from cs_localize.errors import MeasurementError, UsageError
from cs_localize.findings import NeuronSet
from cs_localize.heads import Ablation, Head, Neuron
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.neurons.reading import Reading
from cs_localize.neurons.sets import knowledge_neurons, locate, pairwise_overlap, split_half

if TYPE_CHECKING:
    from cs_localize.measure.hf import HFEngine
    from cs_localize.neurons.attribution import Attribution

Progress = Callable[[int, int], None]
READING = Reading()
"""The reading used by default."""


def locate_neurons(
    engine: HFEngine,
    requests: Sequence[Request],
    config: CrosscheckConfig,
    named: Sequence[Head],
    random_heads: Sequence[Head],
    *,
    reading: Reading = READING,
    seed: int = 0,
    zeroed_items: int | None = None,
    progress: Progress | None = None,
) -> tuple[NeuronSet, NDArray[np.float32]]:
    """Locates the neurons of a task and measures how far they can be trusted.

    Args:
        engine: the model, in float32.
        requests: search items of the task under the empty ablation; the first ``config.items`` are used.
        config: steps, sigma and number of items.
        named: the heads named for the task.
        random_heads: as many random heads of the same layers.
        reading: the choices that the method leaves open.
        seed: draws the two halves of the items.
        zeroed_items: items attributed again with heads zeroed, at most those used; all of them by default.
        progress: called with attributed items and items to attribute, those with heads zeroed included.

    Returns:
        The finding, and the mean attribution of every neuron, ``[layers, ffn]``.

    Raises:
        UsageError: if there are fewer than two items or a request is ablated already.
        MeasurementError: if the model cannot be attributed, or no neuron affects the answers.
    """
    from cs_localize.neurons.attribution import attribute

    used = list(requests[: config.items])
    _check(used, zeroed_items)
    again = used[:zeroed_items]
    total = len(used) + len(again) * sum(bool(heads) for heads in (named, random_heads))
    done = 0

    def attributed(asked: Sequence[Request]) -> Attribution:
        nonlocal done
        before = done

        def report(items: int, _of: int) -> None:
            if progress is not None:
                progress(before + items, total)

        done += len(asked)
        return attribute(
            engine, asked, steps=config.steps, target=reading.target, answer=reading.answer, progress=report
        )

    base = attributed(used)
    mean = base.scores.mean(0)
    located = locate(mean, config.sigma, reading.statistics)
    shares = []
    for heads in (named, random_heads):
        zeroed = attributed([replace(r, ablation=Ablation.of(heads=heads)) for r in again]) if heads else base
        shares.append(_share(zeroed.scores[: len(again)], base.scores[: len(again)], located.neurons))
    finding = NeuronSet(
        count=len(located.neurons),
        ratio=len(located.neurons) / mean.size,
        rule=located.rule,
        neurons=[str(neuron) for neuron in located.neurons],
        items=len(used),
        completeness=base.completeness,
        overlap=split_half(base.scores, np.random.default_rng(seed), config.sigma, reading.statistics),
        knowledge_neurons=pairwise_overlap(knowledge_neurons(base.scores), mean.size),
        attribution_with_heads_zeroed=shares[0],
        random_attribution_with_heads_zeroed=shares[1],
    )
    return finding, mean


def locate_neurons_from_spec(
    spec: EngineSpec,
    requests: Sequence[Request],
    config: CrosscheckConfig,
    named: Sequence[Head],
    random_heads: Sequence[Head],
    *,
    reading: Reading = READING,
    seed: int = 0,
    zeroed_items: int | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> tuple[NeuronSet, NDArray[np.float32]]:
    """``locate_neurons`` with an engine of its own, for a process elsewhere; torch is loaded there only.

    Args:
        spec: an ``hf`` engine.
        requests: search items of the task under the empty ablation.
        config: steps, sigma and number of items.
        named: the heads named for the task.
        random_heads: as many random heads of the same layers.
        reading: the choices that the method leaves open.
        seed: draws the two halves of the items.
        zeroed_items: items attributed again with heads zeroed; all by default.
        dtype: number format of the attribution, in place of the spec's.
        progress: called with attributed items and items to attribute.

    Returns:
        What ``locate_neurons`` returns.

    Raises:
        UsageError: if the spec is not that of an ``hf`` engine; see also ``locate_neurons``.
        MeasurementError: see ``locate_neurons``.
    """
    from cs_localize.measure.hf import HFEngine

    engine = HFEngine.from_spec(replace(spec, dtype=dtype))
    try:
        return locate_neurons(
            engine,
            requests,
            config,
            named,
            random_heads,
            reading=reading,
            seed=seed,
            zeroed_items=zeroed_items,
            progress=progress,
        )
    finally:
        engine.close()


def _check(requests: Sequence[Request], zeroed_items: int | None) -> None:
    if len(requests) < 2:
        raise UsageError(f"neurons are located on at least two items, got {len(requests)}")
    if zeroed_items is not None and zeroed_items < 1:
        raise UsageError(f"zeroed_items must be at least 1, got {zeroed_items}")
    ablated = next((request for request in requests if not request.ablation.empty), None)
    if ablated is not None:
        raise UsageError(f"neurons are located on the unmodified model, but a request is under '{ablated.ablation}'")


def _share(zeroed: NDArray[np.float32], base: NDArray[np.float32], neurons: Sequence[Neuron]) -> float:
    """Summed attribution of some neurons in ``zeroed`` as a share of ``base``, both ``[items, layers, ffn]``."""
    layers, columns = [n.layer for n in neurons], [n.neuron for n in neurons]
    whole = float(base[:, layers, columns].sum())
    if whole <= 0.0:
        raise MeasurementError("the located neurons have no positive attribution to take a share of")
    return float(zeroed[:, layers, columns].sum()) / whole
