"""The intervention table and the op that applies it.

Shapes use L layers, S head slots, P neuron slots besides the empty one, H query heads, D head_dim, F FFN width, T
tokens of a step. What it takes on the device, in bytes: docs/engine.md.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import direct_register_custom_op

from cs_localize.errors import MeasurementError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.geometry import Share
from cs_localize.measure.vllm.means import HeadMeans

IntArray = NDArray[np.int64]


class SlotPool:
    """Which slot of a table holds which content. Slot 0 is the empty content and is never reassigned.

    With as many slots as a step can hold different contents, plus slot 0, assigning cannot fail.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = list(range(slots - 1, 0, -1))
        self._slot_of: OrderedDict[str, int] = OrderedDict()

    def assign(self, keys: Sequence[str]) -> tuple[dict[str, int], list[str]]:
        """Gives every key of one step a slot, evicting the least recently used of earlier steps.

        Returns:
            The slot of every key, and the keys whose content must be written.

        Raises:
            MeasurementError: if the step holds more different keys than there are slots.
        """
        wanted = dict.fromkeys(key for key in keys if key)
        if len(wanted) >= self._slots:  # before anything changes, so that no slot is taken and left unwritten
            raise MeasurementError(f"one step holds {len(wanted)} different ablations, room is for {self._slots - 1}")
        for key in wanted:
            if key in self._slot_of:
                self._slot_of.move_to_end(key)
        fresh = [key for key in wanted if key not in self._slot_of]
        for key in fresh:
            if self._free:
                slot = self._free.pop()
            else:
                _, slot = self._slot_of.popitem(last=False)
            self._slot_of[key] = slot
        return {"": 0} | {key: self._slot_of[key] for key in wanted}, fresh

    def forget(self, keys: Sequence[str]) -> None:
        """Takes back the slots of keys whose content was not written."""
        self._free += [self._slot_of.pop(key) for key in keys]


class InterventionTable:
    """Factors of every head and neuron for every slot, and the slot of every token of the current step.

    The tensors keep their addresses for the life of the worker; only their contents change.

    Args:
        shape: the model's geometry.
        slots: S.
        neuron_slots: P, without the slot of the empty content.
        max_tokens: most tokens of a step.
        dtype: of the model.
        device: of the model.
        means: whether heads will be replaced by their means; without, nothing is spent on them.
        share: the heads and neurons that this rank of a tensor-parallel engine holds; all of them by default.
    """

    def __init__(
        self,
        shape: ModelShape,
        slots: int,
        neuron_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        means: bool = False,
        share: Share | None = None,
    ) -> None:
        self.shape = shape
        self.share = share or Share.of(shape)
        heads, neurons = len(self.share.heads), len(self.share.neurons)
        self.means = HeadMeans(shape, self.share.heads, slots, max_tokens, dtype, device) if means else None
        self.head_factors = torch.ones(shape.layers, slots, heads, dtype=dtype, device=device)
        self.neuron_factors = torch.ones(shape.layers, neuron_slots + 1, neurons, dtype=dtype, device=device)
        self.head_slot = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.neuron_slot = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        # Ablated token rows each hook has scaled, counted on the device: a Python counter would count graph captures.
        self.scaled_heads = torch.zeros(shape.layers, dtype=torch.int64, device=device)
        self.scaled_neurons = torch.zeros(shape.layers, dtype=torch.int64, device=device)
        self.expected_heads = 0
        self.expected_neurons = 0
        self.most_ablations_in_a_step = 0
        self.steps = 0
        self._head_pool = SlotPool(slots)
        self._neuron_pool = SlotPool(neuron_slots + 1)
        self._parsed: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def begin_step(self, ablations: Sequence[str], tokens: IntArray) -> None:
        """Prepares the step about to run, afresh: nothing is carried over from the step before.

        Args:
            ablations: encoded ablation of every request, in batch order.
            tokens: tokens of every request in this step, in the same order.

        Raises:
            MeasurementError: if the step holds more different ablations than there are slots.
            UsageError: if an ablation names what the model lacks.
        """
        parts = [self._split(text) for text in ablations]
        heads = self._fill(self._head_pool, [head for head, _ in parts], self._write_heads)
        neurons = self._fill(self._neuron_pool, [neuron for _, neuron in parts], self._write_neurons)
        head_rows, neuron_rows = np.repeat(heads, tokens), np.repeat(neurons, tokens)
        for slots, rows in ((self.head_slot, head_rows), (self.neuron_slot, neuron_rows)):
            slots[: len(rows)].copy_(torch.from_numpy(rows))
            slots[len(rows) :].zero_()  # rows that pad the batch
        if self.means is not None:
            self.means.begin_step(heads, len(head_rows))
        self.expected_heads += int(np.count_nonzero(head_rows))
        self.expected_neurons += int(np.count_nonzero(neuron_rows))
        self.most_ablations_in_a_step = max(self.most_ablations_in_a_step, len(set(ablations)))
        self.steps += 1

    def verify(self) -> None:
        """Raises MeasurementError unless every hook scaled exactly the token rows it should have, in every layer."""
        for what, scaled, expected in (
            ("o_proj", self.scaled_heads, self.expected_heads),
            ("down_proj", self.scaled_neurons, self.expected_neurons),
        ):
            wrong = [layer for layer, count in enumerate(scaled.tolist()) if count != expected]
            if wrong:
                raise MeasurementError(
                    f"the hook on {what} of layer {wrong[0]} scaled {int(scaled[wrong[0]])} token rows, expected "
                    f"{expected} ({len(wrong)} of {self.shape.layers} layers are off): outcomes are not proven ablated"
                )

    def scale_heads(self, x: torch.Tensor, layer: int) -> None:
        """Scales the heads of ``x`` ``[…, T, H*D]``, the input of ``o_proj``, in place."""
        rows = x.view(-1, x.shape[-1])  # vLLM's Transformers backend puts a dimension before
        slots = self.head_slot[: rows.shape[0]]
        factors = self.head_factors[layer].index_select(0, slots)
        heads = rows.view(rows.shape[0], len(self.share.heads), self.shape.head_dim)
        if self.means is not None:
            self.means.add_up(rows, layer)
        heads.mul_(factors.unsqueeze(-1))
        if self.means is not None:
            self.means.put_in(heads, slots, layer)
        self.scaled_heads[layer].add_(slots.count_nonzero())

    def scale_neurons(self, x: torch.Tensor, layer: int) -> None:
        """Scales the neurons of ``x`` ``[…, T, F]``, the input of ``down_proj``, in place."""
        rows = x.view(-1, x.shape[-1])
        slots = self.neuron_slot[: rows.shape[0]]
        if x.device.type == "cpu":
            # On a CPU the op always runs as Python, so the rows can be chosen; a CUDA graph needs fixed shapes.
            ablated = slots.nonzero().squeeze(1)
            if ablated.numel():
                rows[ablated] *= self.neuron_factors[layer].index_select(0, slots[ablated])
        else:
            rows.mul_(self.neuron_factors[layer].index_select(0, slots))
        self.scaled_neurons[layer].add_(slots.count_nonzero())

    def _split(self, text: str) -> tuple[str, str]:
        """The head part and the neuron part of an encoded ablation, each canonical."""
        if text not in self._parsed:
            ablation = Ablation.decode(text)
            ablation.check(self.shape)
            if ablation.mean_heads and not (self.means and self.means.measured):
                raise MeasurementError(f"'{text}' replaces heads by their means, which were not measured")
            self._parsed[text] = (ablation.head_part.encode(), ablation.neuron_part.encode())
            while len(self._parsed) > 4 * self.head_factors.shape[1]:
                self._parsed.popitem(last=False)
        else:
            self._parsed.move_to_end(text)
        return self._parsed[text]

    def _fill(
        self, pool: SlotPool, keys: Sequence[str], write: Callable[[list[int], list[Ablation]], None]
    ) -> IntArray:
        slot_of, fresh = pool.assign(keys)
        if fresh:
            try:
                write([slot_of[key] for key in fresh], [Ablation.decode(key) for key in fresh])
            except BaseException:  # an interrupt as well: a later step would take the slots for written
                pool.forget(fresh)
                raise
        return np.array([slot_of[key] for key in keys], dtype=np.int64)

    def _write_heads(self, slots: list[int], ablations: list[Ablation]) -> None:
        factors = np.ones((self.shape.layers, len(slots), self.shape.heads), dtype=np.float32)
        for row, ablation in enumerate(ablations):
            for head, factor in ablation.heads:
                factors[head.layer, row, head.head] = factor
            for head in ablation.mean_heads:
                factors[head.layer, row, head.head] = 0.0
        _copy(self.head_factors, slots, factors[:, :, self.share.heads.start : self.share.heads.stop])
        if self.means is not None:
            self.means.write(slots, ablations)

    def _write_neurons(self, slots: list[int], ablations: list[Ablation]) -> None:
        factors = np.ones((self.shape.layers, len(slots), self.shape.ffn), dtype=np.float32)
        for row, ablation in enumerate(ablations):
            for neuron, factor in ablation.neurons:
                factors[neuron.layer, row, neuron.neuron] = factor
        _copy(self.neuron_factors, slots, factors[:, :, self.share.neurons.start : self.share.neurons.stop])


def _copy(target: torch.Tensor, slots: list[int], content: NDArray[np.float32]) -> None:
    index = torch.tensor(slots, device=target.device)
    target.index_copy_(1, index, torch.from_numpy(content).to(target))


# The op below runs inside vLLM's compiled graph, which cannot hold a reference to the table: one table a process.
_table: InterventionTable | None = None


def install(table: InterventionTable) -> None:
    """Makes this the table of the process."""
    global _table
    _table = table


def active() -> InterventionTable:
    """The table of the process.

    Raises:
        MeasurementError: if none was installed.
    """
    if _table is None:
        raise MeasurementError("an intervention op ran before its table was installed")
    return _table


def _scale_heads(x: torch.Tensor, layer: int) -> None:
    active().scale_heads(x, layer)


def _scale_neurons(x: torch.Tensor, layer: int) -> None:
    active().scale_neurons(x, layer)


def _fake(x: torch.Tensor, layer: int) -> None:
    return None


_library = torch.library.Library("cs_localize", "FRAGMENT")  # type: ignore[no-untyped-call]  # not annotated there
direct_register_custom_op("scale_heads", _scale_heads, mutates_args=["x"], fake_impl=_fake, target_lib=_library)
direct_register_custom_op("scale_neurons", _scale_neurons, mutates_args=["x"], fake_impl=_fake, target_lib=_library)

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("table.py", "means.py", "worker.py"))
SOURCE_HASH = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:16]
"""Goes into vLLM's ``additional_config``, and so into the name of its compiled graph on disk.

That name leaves out the worker class: without this, a graph compiled by plain vLLM, which has no such op, would serve.
"""
