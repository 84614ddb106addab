"""How an answer's score changes with a factor on every head. Needs torch; to be imported where the model is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from cs_localize.errors import MeasurementError
from cs_localize.measure.hf import HFEngine
from cs_localize.measure.protocol import Request


def head_slopes(engine: HFEngine, requests: Sequence[Request]) -> NDArray[np.float64]:
    """The derivative of every request's score by a factor on each head's output, where the factor is 1.

    Args:
        engine: the model; load it in float32 (gradients of bfloat16 are coarse).
        requests: under the empty ablation; their mode is ignored.

    Returns:
        ``[requests, n_heads]`` in nats.

    Raises:
        UsageError: if a request does not fit the model.
        MeasurementError: if a derivative is not finite, or the hooks of a layer did not run exactly once.
    """
    shape = engine.shape
    slopes = np.empty((len(requests), shape.n_heads))
    for row, request in enumerate(requests):
        engine.check(replace(request, mode="score"))
        factors = torch.ones(1, shape.layers, shape.heads, device=engine.model.device, requires_grad=True)
        with torch.enable_grad(), engine.hooks.scaled(factors):
            (logits,) = engine.answer_logits([request])
            answer = torch.tensor(request.answer_ids, device=logits.device)
            score = logits.log_softmax(-1).gather(1, answer[:, None]).sum()
            (slope,) = torch.autograd.grad(score, factors)
        slopes[row] = slope.flatten().double().cpu().numpy()
        if not np.isfinite(slopes[row]).all():
            raise MeasurementError(
                f"the score of item '{request.item.id}' of task '{request.item.task}' has no finite derivative"
            )
    return slopes
