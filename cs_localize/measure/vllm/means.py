"""Means of heads: measured over the token rows of some steps, then put in the place of heads.

Shapes as in ``table``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cs_localize.errors import MeasurementError
from cs_localize.heads import Ablation, ModelShape


class HeadMeans:
    """The mean output of every head of a rank's share, and which slots of the table replace which heads by it.

    The tensors keep their addresses; only their contents change. On a CPU, where the op always runs as Python, steps
    that neither measure nor replace anything cost nothing; a CUDA graph holds the same work for every step.
    """

    def __init__(
        self, shape: ModelShape, heads: range, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.measured = False
        self._shape = shape
        self._heads = heads
        self._means = torch.zeros(shape.layers, len(heads), shape.head_dim, dtype=dtype, device=device)
        self._flags = torch.zeros(shape.layers, slots, len(heads), dtype=dtype, device=device)
        self._sums = torch.zeros(shape.layers, len(heads) * shape.head_dim, dtype=torch.float32, device=device)
        self._counted = torch.zeros(shape.layers, dtype=torch.int64, device=device)
        self._counts = torch.zeros(max_tokens, dtype=torch.float32, device=device)  # 1 for rows that are measured
        self._expected = 0
        self._measuring = False
        self._replacing = np.zeros(slots, dtype=np.bool_)
        self._always = device.type != "cpu"
        self._replaces_now = False

    def start(self) -> None:
        """Counts every token row from the next step on."""
        self._measuring = True

    def finish(self) -> None:
        """Ends the measuring and keeps the means.

        Raises:
            MeasurementError: if the hook of a layer did not add up exactly the token rows of the steps in between.
        """
        self._measuring = False
        self._counts.zero_()
        wrong = [layer for layer, count in enumerate(self._counted.tolist()) if count != self._expected]
        if wrong or not self._expected:
            counted = int(self._counted[wrong[0]]) if wrong else 0
            raise MeasurementError(
                f"the means of heads were to be measured over {self._expected} token rows, and "
                f"{f'layer {wrong[0]}' if wrong else 'every layer'} saw {counted}"
            )
        self._means.copy_((self._sums / self._expected).view_as(self._means))
        self.measured = True

    def begin_step(self, slots: NDArray[np.int64], rows: int) -> None:
        """Prepares the step about to run.

        Args:
            slots: head slots of its requests.
            rows: its token rows.
        """
        self._replaces_now = bool(self._replacing[slots].any())
        if self._measuring:
            self._counts[:rows].fill_(1)
            self._counts[rows:].zero_()
            self._expected += rows

    def write(self, slots: Sequence[int], ablations: Sequence[Ablation]) -> None:
        """Notes which heads the slots replace by their means."""
        flags = np.zeros((self._shape.layers, len(slots), self._shape.heads), dtype=np.float32)
        for row, ablation in enumerate(ablations):
            for head in ablation.mean_heads:
                flags[head.layer, row, head.head] = 1
        index = torch.tensor(slots, device=self._flags.device)
        own = flags[:, :, self._heads.start : self._heads.stop]
        self._flags.index_copy_(1, index, torch.from_numpy(own).to(self._flags))
        self._replacing[list(slots)] = [bool(ablation.mean_heads) for ablation in ablations]

    def add_up(self, x: torch.Tensor, layer: int) -> None:
        """Adds the rows of ``x`` ``[T, H*D]`` that are measured."""
        if self._measuring or self._always:
            counts = self._counts[: x.shape[0]]
            self._sums[layer].add_(counts @ x.float())
            self._counted[layer].add_(counts.count_nonzero())

    def put_in(self, heads: torch.Tensor, slots: torch.Tensor, layer: int) -> None:
        """Adds the means to the heads of ``heads`` ``[T, H, D]`` that are replaced and so were scaled to 0."""
        if self._replaces_now or self._always:
            flags = self._flags[layer].index_select(0, slots).unsqueeze(-1)
            heads.addcmul_(flags, self._means[layer])
