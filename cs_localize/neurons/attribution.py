"""Attribution of FFN neurons by integrated gradients: CNL, literal, one layer's hidden vector at a time.

    a[l,i](x,y,t) = w[l,t,i] * (1/(S+1)) * sum_{k=0..S} d p(y_t | w[l,t] := (k/S) w[l,t]) / d w[l,t,i]

``w[l,t]`` is the input of ``down_proj`` of layer ``l`` at the position that predicts answer token ``y_t``. This is our
reading of Huang et al. (arXiv 2502.20992), an extension of Knowledge Neurons (Dai et al., arXiv 2104.08696) from one
fact to a data set; the authors' full formulas are not public. Only the one position is changed, so the keys and values
before it stay valid and nothing is approximated beyond the S + 1 points of the integral.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.measure.hf import HFEngine
from cs_localize.measure.protocol import Request
from cs_localize.neurons.decoder import Decoder, Recording
from cs_localize.neurons.reading import Answer, Target

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Attribution:
    """Attribution of every neuron for every item.

    Attributes:
        scores: ``[items, layers, ffn]`` float32, mean over the answer tokens of the item, in probability (or nats).
        sums: ``[answer tokens x layers]``, attribution summed over a layer's neurons.
        gains: ``[answer tokens x layers]``, p(w) - p(0), which the sums approach as S grows.
    """

    scores: NDArray[np.float32]
    sums: NDArray[np.float64]
    gains: NDArray[np.float64]

    @property
    def completeness(self) -> float:
        """Correlation of ``sums`` and ``gains``.

        Raises:
            MeasurementError: if either is constant, so that there is no correlation.
        """
        if min(self.sums.std(), self.gains.std()) == 0.0:
            raise MeasurementError("no neuron affects any answer: it is as likely with every FFN switched off")
        return float(np.corrcoef(self.sums, self.gains)[0, 1])


def attribute(
    engine: HFEngine,
    requests: Sequence[Request],
    *,
    steps: int = 19,
    target: Target = "probability",
    answer: Answer = "gold",
    rows: int = 320,
    progress: Progress | None = None,
) -> Attribution:
    """Attributes the answers of some items to the FFN neurons.

    Args:
        engine: the model; load it in float32 (gradients of bfloat16 are coarse).
        requests: one an item; the heads of its ablation are scaled throughout, its mode is ignored.
        steps: S, at least 1; S + 1 points are evaluated.
        target: what is integrated: the probability of the answer token, or its logarithm.
        answer: attribute the reference answer, or what the model itself answers under the ablation, up to its
            stop string or end of sequence; these count only where nothing stands before them.
        rows: most variants carried through the layers at once; bounds memory and changes nothing else.
        progress: called with items done and items in all, after every item.

    Raises:
        UsageError: if there is nothing to attribute, or an ablation scales neurons.
        MeasurementError: if the model's structure is not recognised, or a continued run does not end where the recorded
            run ended.
    """
    _check(requests, steps, rows)
    asked = requests if answer == "gold" else _with_own_answers(engine, requests)
    for request in asked:
        engine.check(replace(request, mode="score"))
    decoder = Decoder(engine)
    scores = np.empty((len(asked), engine.shape.layers, engine.shape.ffn), dtype=np.float32)
    pairs: list[torch.Tensor] = []
    for number, request in enumerate(asked):
        with engine.hooks.applied([request.ablation]):
            item = _Item(decoder, request, steps, target, rows)
            scores[number] = item.scores().float().cpu().numpy()
        pairs += item.pairs
        if progress is not None:
            progress(number + 1, len(asked))
    sums, gains = torch.cat(pairs, 1).double().cpu().numpy()
    return Attribution(scores, sums, gains)


class _Item:
    """One item: its recorded run, and the integral at every answer token."""

    def __init__(self, decoder: Decoder, request: Request, steps: int, target: Target, rows: int) -> None:
        self._decoder, self._request, self._target = decoder, request, target
        self._first = len(request.prompt_ids) - 1
        self._recording: Recording = decoder.record(request.prompt_ids + request.answer_ids[:-1], self._first)
        device = self._recording.logits.device
        self._fractions = torch.arange(steps + 1, device=device, dtype=self._recording.hidden[0].dtype) / steps
        self._layers_at_once = max(1, rows // (steps + 1))
        self.pairs: list[torch.Tensor] = []

    def scores(self) -> torch.Tensor:
        """Mean over the answer tokens, ``[layers, ffn]``; leaves ``pairs`` behind."""
        total: torch.Tensor | None = None
        for offset, token in enumerate(self._request.answer_ids):
            layers = range(self._decoder.layers)
            groups = [layers[i : i + self._layers_at_once] for i in layers[:: self._layers_at_once]]
            scores = torch.cat([self._attribute(offset, token, group) for group in groups])
            total = scores if total is None else total + scores
        assert total is not None
        return total / len(self._request.answer_ids)

    def _attribute(self, offset: int, token: int, starts: range) -> torch.Tensor:
        """Attribution at one answer token for some layers, ``[layers, ffn]``."""
        position = self._first + offset
        hidden = torch.stack([self._recording.hidden[layer][position] for layer in starts])
        variants = (self._fractions[None, :, None] * hidden[:, None]).requires_grad_()
        with torch.enable_grad():
            logp = self._decoder.vary(self._recording, position, starts, variants)[:, token]
            value = logp.exp() if self._target == "probability" else logp
            (gradient,) = torch.autograd.grad(value.sum(), variants)
        value = value.detach().view(len(starts), -1)
        self._check_end(offset, token, logp.detach().view(len(starts), -1)[:, -1])
        scores = hidden * gradient.mean(1)
        self.pairs.append(torch.stack([scores.sum(1).float(), value[:, -1] - value[:, 0]]))
        return scores

    def _check_end(self, offset: int, token: int, ends: torch.Tensor) -> None:
        """The variant at full strength is the unmodified model: its answer must be the recorded one."""
        recorded = self._recording.logits[offset].float().log_softmax(-1)[token]
        tolerance = 5e-3 if self._recording.hidden[0].dtype in (torch.float32, torch.float64) else 0.5
        worst = float((ends - recorded).abs().max())
        if not worst <= tolerance:
            raise MeasurementError(
                f"continuing item '{self._request.item.id}' from a recorded run moved the answer's log-probability by "
                f"{worst:.3g} (at most {tolerance:g}); this model's layers cannot be continued one by one"
            )


def _check(requests: Sequence[Request], steps: int, rows: int) -> None:
    if not requests:
        raise UsageError("no items to attribute")
    if steps < 1 or rows < 1:
        raise UsageError(f"steps and rows must be at least 1, got {steps} and {rows}")
    for request in requests:
        if request.ablation.neurons:
            raise UsageError(f"neurons cannot be attributed while neurons are scaled ({request.ablation})")


def _with_own_answers(engine: HFEngine, requests: Sequence[Request]) -> list[Request]:
    """The requests with the model's own greedy answers for reference."""
    result = []
    for request, ids in zip(requests, engine.generate_ids(requests), strict=True):
        text = engine.decode(ids)
        ended = ids[-1] in engine.stop_ids or any(stop in text for stop in request.stop)
        result.append(replace(request, answer_ids=(ids[:-1] if ended else ids) or ids))
    return result
