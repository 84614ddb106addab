"""The engine outside a study: a model in this process, asked under ablations, with the same proofs and without Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal

from cs_localize.config import EngineConfig
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape, Neuron
from cs_localize.measure.cluster import worker_environment
from cs_localize.measure.measurer import item_request
from cs_localize.measure.protocol import Mode
from cs_localize.measure.spec import load_engine
from cs_localize.measure.units import UnitQueue
from cs_localize.measure.worker import EngineWorker
from cs_localize.outcomes import Item, Outcome
from cs_localize.session import engine_spec, on_gpu
from cs_localize.spelling import check_list, read_ablation

Heads = Sequence[str | Head | Neuron]
"""One ablation: heads, neurons, KV groups and layers, each with its factor, such as ``["L4H2", "L7H0=0.5"]``."""

Ablations = Ablation | Heads | Sequence[Ablation | Heads]
"""One ablation for all items, or a sequence of as many as there are items."""


class Engine:
    """A model that answers under ablations, in this process.

    An outcome is returned only with the proof that a study asks for: it was measured under its ablation, or there is an
    error. For the time that the engine is open, this process has the cores and the environment of a study's worker.

        with Engine("smollm2-135m-instruct") as engine:
            item = Item("capitals", "France", "The capital of France is", " Paris")
            intact, ablated = engine.score([item, item], [[], ["L4H2", "L7H0=0.5"]])

    Args:
        model: a directory, a hub id or a built-in model name.
        engine: ``vllm`` or ``hf``, or all options of one.
        mean_items: items on whose prompts the means of heads are measured, for ablations such as ``["L3H1=mean"]``.

    Attributes:
        shape: the model's geometry.

    Raises:
        UsageError: if the model, the engine's packages or its cores are not to be had, another engine is open, or the
            options ask for several workers.
        MeasurementError: if the engine cannot prove that its ablations take effect.
    """

    _open: Engine | None = None

    def __init__(
        self, model: str, *, engine: Literal["vllm", "hf"] | EngineConfig = "vllm", mean_items: Sequence[Item] = ()
    ) -> None:
        if Engine._open is not None:
            raise UsageError("an engine is open in this process already; close it before another is opened")
        self._answering = threading.Lock()
        self._config = _config(engine)
        self._spec, self._encoder = engine_spec(model, self._config, (), mean_items)
        self.shape: ModelShape = self._spec.shape
        threads = self._config.threads or (1 if on_gpu(self._config) else len(os.sched_getaffinity(0)))
        self._environment = dict(os.environ)
        self._worker = EngineWorker(self._spec, threads, load_engine)
        Engine._open = self
        try:
            os.environ.update(worker_environment(self._spec, threads))
            self._worker.load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, items: Sequence[Item], ablations: Ablations = ()) -> list[Outcome]:
        """Teacher-forces the reference answer of every item and returns its log-probability.

        Args:
            items: the questions; the same may occur more than once.
            ablations: one for all items, or one for each.

        Returns:
            An outcome for every item, in their order.

        Raises:
            UsageError: if an ablation is malformed, names what the model lacks or needs means that are not measured; if
                there are fewer or more ablations than items; or if an item cannot be asked.
            MeasurementError: if an outcome cannot be shown to have been measured under its ablation.
        """
        return self._answer(items, ablations, "score")

    def generate(
        self, items: Sequence[Item], ablations: Ablations = (), *, max_tokens: int | None = None
    ) -> list[Outcome]:
        """Decodes greedily after every item's prompt, up to its first stop string.

        Args:
            items: the questions; the same may occur more than once.
            ablations: one for all items, or one for each.
            max_tokens: most tokens to generate. Default: what the item says.

        Returns:
            An outcome for every item, in their order; ``text`` is what the model wrote. It is not graded: ``correct``
            is False.

        Raises:
            UsageError: as for ``score``, if ``max_tokens`` is below 1, or if an item says that nothing is generated.
            MeasurementError: as for ``score``.
        """
        if max_tokens is not None:
            if max_tokens < 1:
                raise UsageError(f"max_tokens {max_tokens}: at least 1 is needed")
            items = [replace(item, max_tokens=max_tokens) for item in items]
        for item in items:
            if item.max_tokens == 0:
                raise UsageError(f"{item.task}/{item.id} says that nothing is generated; give max_tokens, or use score")
        return self._answer(items, ablations, "generate")

    def evidence(self) -> dict[str, float]:
        """What the engine can show about its own work since it was opened; see ``measure.protocol.Engine``."""
        self._check_open()
        return self._worker.evidence()

    def close(self) -> None:
        """Releases the model, the cores and the environment; nothing can be asked afterwards.

        Some of vLLM's memory returns when the process ends; the next engine takes it over.
        """
        if Engine._open is not self:
            return
        Engine._open = None
        try:
            self._worker.close()
        finally:
            os.environ.clear()
            os.environ.update(self._environment)

    def _answer(self, items: Sequence[Item], ablations: Ablations, mode: Mode) -> list[Outcome]:
        self._check_open()
        for item in items:
            if item.choices:
                raise UsageError(
                    f"{item.task}/{item.id} is multiple-choice; its task grades it: use cs-localize ablate"
                )
        pairs = zip(items, _each(ablations, len(items), self.shape), strict=True)
        requests = [item_request(self._encoder, self._spec, item, ablation, mode) for item, ablation in pairs]
        outcomes: dict[int, Outcome] = {}
        units = UnitQueue(requests, self._config.unit_tokens, workers=1)
        with self._answering:  # vLLM is not made for calls from several threads
            while (unit := units.take()) is not None:
                outcomes.update(zip(unit.positions, self._worker.measure(unit.requests), strict=True))
        return [outcomes[position] for position in range(len(requests))]

    def _check_open(self) -> None:
        if Engine._open is not self:
            raise UsageError("this engine is closed; open another")


def _config(engine: str | EngineConfig) -> EngineConfig:
    if isinstance(engine, EngineConfig):
        if engine.workers not in (None, 1):
            raise UsageError(f"engine.workers {engine.workers}: outside a study there is one engine; leave it out")
        return engine
    if engine not in ("vllm", "hf"):
        raise UsageError(f"there is no engine '{engine}'; there are vllm and hf")
    return EngineConfig(name=engine)


def _each(ablations: Ablations, items: int, shape: ModelShape) -> list[Ablation]:
    """An ablation for every item."""
    if isinstance(ablations, Ablation):
        return [ablations] * items
    check_list(ablations)  # a generator would be empty the second time, and nothing ablated
    heads = [entry for entry in ablations if isinstance(entry, str | Head | Neuron)]
    whole = [entry for entry in ablations if not isinstance(entry, str | Head | Neuron)]
    if not whole:
        return [read_ablation(heads, shape)] * items
    if heads:
        raise UsageError(f"'{heads[0]}' stands among whole ablations; write it as ['{heads[0]}'] if it is one")
    if len(whole) != items:
        raise UsageError(f"{len(whole)} ablations for {items} items; give one for each item, or one for all")
    return [each if isinstance(each, Ablation) else read_ablation(each, shape) for each in whole]
