"""Attribution patching towards zero: every head's effect at once, to first order, from one backward pass an item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Measurer, Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.units import request_tokens
from cs_localize.methods.method import Items, Localization, Relatives, by_specificity, check_items

Slopes = Callable[[Sequence[Request]], NDArray[np.float64]]
"""Gives ``[requests, n_heads]``, what ``head_slopes`` computes, wherever the model is."""

PASSES = 3
"""Requests that one item counts as: a backward pass takes twice the arithmetic of the forward pass it follows."""


def no_slopes(requests: Sequence[Request]) -> NDArray[np.float64]:
    """Stands where nothing computes gradients.

    Raises:
        UsageError: always.
    """
    raise UsageError("the method attribution needs a model's gradients, and there is none here")


@dataclass(frozen=True)
class Attribution:
    r"""The damage of zeroing a head, from the slope of the score at the unmodified model.

    With s the log-probability of an item's reference answer and :math:`f_h` a factor on the output of head h, 1 in the
    unmodified model, zeroing the head takes about :math:`\partial s / \partial f_h` from s: the first term of the
    Taylor series. That is attribution patching (Syed et al., arXiv 2310.10348; Kramár et al., arXiv 2403.00745) with
    zeros for the corrupted activations; effects are means over the items. Where the score saturates, or another head
    takes over, the slope misleads.

    The slopes are computed in float32 with transformers and do not go through the measurer: they are in no ledger, and
    a study that is continued computes them again. An item counts as three requests, ``PASSES``.

    Attributes:
        slopes: computes them; a study gives it.
    """

    slopes: Slopes = no_slopes

    def check_options(self) -> None:
        """Nothing to check: there are no options."""

    def localize(self, measurer: Measurer, shape: ModelShape, items: Items, relatives: Relatives) -> Localization:
        """Differentiates every item once and ranks by specificity; see ``Method``.

        Raises:
            UsageError: also for a multiple-choice question, whose score is no log-probability of one answer.
        """
        check_items(items)
        requests = [measurer.request(item, Ablation()) for asked in items.values() for item in asked]
        for request in requests:
            if request.choices:
                raise UsageError(
                    f"the method attribution needs one reference answer, and task '{request.item.task}' is multiple "
                    "choice; name another method"
                )
        counts = [len(asked) for asked in items.values()]
        starts = np.cumsum([0, *counts[:-1]])
        effects = np.add.reduceat(self.slopes(requests), starts, axis=0) / np.array(counts)[:, None]
        tokens = dict.fromkeys(items, 0)
        for request in requests:
            tokens[request.item.task] += PASSES * request_tokens(request)
        return Localization(
            ranking=by_specificity(effects, shape, tuple(items), relatives),
            effects=effects,
            requests={task: PASSES * len(asked) for task, asked in items.items()},
            baseline=dict.fromkeys(items, ()),
            tokens=tokens,
        )


def head_slopes_from_spec(spec: EngineSpec, requests: Sequence[Request]) -> NDArray[np.float64]:
    """``head_slopes`` with an engine of its own, for a process elsewhere; torch is loaded there only.

    Args:
        spec: an ``hf`` engine, in float32.
        requests: under the empty ablation.

    Raises:
        UsageError: if the spec is not that of an ``hf`` engine; see also ``head_slopes``.
        MeasurementError: see ``head_slopes``.
    """
    from cs_localize.measure.hf import HFEngine
    from cs_localize.methods.slopes import head_slopes

    engine = HFEngine.from_spec(spec)
    try:
        return head_slopes(engine, requests)
    finally:
        engine.close()
